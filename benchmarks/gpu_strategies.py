"""Every strategy with two workers on one GPU: whether it ends, repeats its weights, and learns what it learns on the CPU.

    PYTHONPATH=.carry/site:. python -m benchmarks.gpu_strategies [--device cuda|cpu] [--at-once 6] [--only TEXT] [--out FILE.json]

Each is run twice with two workers, where it promises the same bits at any number of workers once more with one, and once on the
CPU. *loss* is of all samples, after training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.turns import HERE

_LIMIT_S = 90
_SLOTS = ["--slots", "4"]
_SERVERS = ["--servers", "2"]


class Promise(NamedTuple):
    flags: list[str]
    repeats: bool = True
    """The same weights in a second run."""
    any_count: bool = True
    """And with another number of workers."""
    same_as: str = ""
    """And those of another strategy."""


STRATEGIES = {
    "allreduce": Promise(_SLOTS),
    **{f"allreduce+{codec}": Promise(_SLOTS) for codec in ("int8", "fp8", "topk:0.01", "powersgd:2", "onebit")},
    "ps": Promise([*_SLOTS, *_SERVERS], same_as="allreduce"),
    "ps+backup:1": Promise([*_SLOTS, *_SERVERS], same_as="allreduce"),
    "async": Promise([*_SLOTS, *_SERVERS], repeats=False, any_count=False),
    "ssp:2": Promise([*_SLOTS, *_SERVERS], repeats=False, any_count=False),
    **{name: Promise([], any_count=False) for name in ("local:3", "diloco:4", "diloco:4+int8", "streaming:4,2")},
    "federated:rounds=3,clients=8": Promise(_SERVERS),
}


def launch(strategy: str, workers: int, device: str) -> dict[str, Any]:
    flags = ["-n", str(workers), "--share-gpus", "--device", device, "--strategy", strategy, "--threads", "1"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "run", "--runs", folder, *flags, *STRATEGIES[strategy].flags]
        env = {
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        }
        start = time.monotonic()
        try:
            done = subprocess.run(
                [*command, "benchmarks/gpu_script.py"], cwd=HERE, env=env, capture_output=True, text=True,
                check=False, timeout=_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {_LIMIT_S} s"}
        found = list(Path(folder).glob("*/summary.json"))
        if done.returncode or not found:
            return {"error": f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"}
        summary = json.loads(found[0].read_text())
        kept = {name: summary[name] for name in ("weights_sha256", "steps", "device", "workers")}
        return {**kept, "loss": summary["metrics"]["loss"], "took_s": round(time.monotonic() - start, 1)}


def verdict(name: str, results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """What does not hold."""
    promise, runs = STRATEGIES[name], results[name]
    failed = [f"{words}: {run['error']}" for words, run in runs.items() if "error" in run]
    if failed:
        return failed
    hashes = {words: run["weights_sha256"] for words, run in runs.items()}
    odd = []
    if promise.repeats and hashes["first"] != hashes["second"]:
        odd.append("the second run has other weights")
    if promise.any_count and hashes["first"] != hashes["one worker"]:
        odd.append("one worker has other weights")
    like = results.get(promise.same_as, {}).get("first", {})
    if like and hashes["first"] != like.get("weights_sha256"):
        odd.append(f"{promise.same_as} has other weights")
    return odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--only", default="", help="the strategies whose name has this in it")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    names = [name for name in STRATEGIES if options.only in name]
    plan = [(name, words, 2, options.device) for words in ("first", "second") for name in names]
    plan += [(name, "one worker", 1, options.device) for name in names if STRATEGIES[name].any_count]
    plan += [(name, "on the CPU", 2, "cpu") for name in names if options.device != "cpu"]
    results: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names}
    with ThreadPoolExecutor(options.at_once) as pool:
        futures = [(name, words, pool.submit(launch, name, workers, device)) for name, words, workers, device in plan]
        for name, words, future in futures:
            results[name][words] = future.result()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; two workers on one device, {options.at_once} runs at once")
    bad = 0
    for name in names:
        odd, first = verdict(name, results), results[name]["first"]
        bad += bool(odd)
        here, cpu = (
            f"{results[name].get(words, {}).get('loss', float('nan')):.4f}" for words in ("first", "on the CPU")
        )
        took = f"{first.get('steps', 0)} steps, {first.get('took_s', 0)} s"
        print(
            f"{name:30} {first.get('weights_sha256', '')[:12]:12}  loss {here}, CPU {cpu}  {took}  {'; '.join(odd) or 'as promised'}"
        )
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))
    print("all as promised" if not bad else f"{bad} not as promised")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
