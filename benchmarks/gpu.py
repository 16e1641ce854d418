"""One GPU: step time beside the bare loop, Accelerate and Lightning Fabric; and whether the bits repeat.

    PYTHONPATH=.carry/site:. python -m benchmarks.gpu [--pairs 10] [--out FILE.json] [--device cuda|cpu] [--small]

A case is one process, in which the four sides take turns: each has a model, optimizer and loader of its
own, built once; a burst is a few epochs between two synchronisations; the first burst of each side is
dropped, and the order rotates. All compute in bf16 under autocast. Reported: the median step, and the
median of the paired ratios to the bare loop with its 95 % bounds.

The three LeNet cases differ in how a batch is fetched, because that is a large part of so small a step:

    tensors   a TensorDataset. Paceline takes its rows by one indexed copy, the others sample by sample:
              what a user sees, but not the cost of the step alone
    rows      a data set that gives a whole batch at once: the same fetch on every side, so what is left
              is the cost of the step
    items     a data set of the user's own, sample by sample on every side; Paceline seeds each sample
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bits import check_repeats, check_shares, train_lenet
from benchmarks.gpu_cases import CASES, Case
from benchmarks.gpu_sides import SIDES, Step
from benchmarks.statistics import median_ratio
from benchmarks.turns import HERE

_CASE_LIMIT_S = 400


# a case: the sides take turns


def burst(case: Case, step: Step) -> tuple[float, float]:
    """(seconds a step takes, the last loss)."""
    wait = torch.cuda.synchronize if case.device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(case.steps * case.epochs):
        loss = step()
    wait()
    took = (time.perf_counter() - start) / (case.steps * case.epochs)
    return took, loss.item()


def attempt(missing: dict[str, str], name: str, action: Callable[[], Any]) -> Any:
    """What the action gives; a side that cannot is noted, and the others go on."""
    try:
        return action()
    except ImportError as error:
        missing[name] = f"cannot be imported: {error}"
    except Exception as error:
        if name == "bare":
            raise
        traceback.print_exc()
        missing[name] = f"failed: {type(error).__name__}: {error}"
    return None


def measure(case: Case, pairs: int) -> dict[str, Any]:
    """Inside a case's process: every side's bursts, in turn."""
    missing: dict[str, str] = {}
    built = {name: attempt(missing, name, lambda make=make: make(case)) for name, make in SIDES.items()}
    names = [name for name in built if name not in missing]
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for turn in range(pairs + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in missing:
                continue
            gc.collect()  # so that nobody pays for what the side before left behind
            result = attempt(missing, name, lambda name=name: burst(case, built[name]))
            if result is not None and turn:
                times[name].append(result[0])
                losses[name] = result[1]
        if not turn:
            gc.freeze()  # what is there now stays: to look through it before each burst takes longer than the burst
    unit, amount = case.unit
    sides = {}
    for name in names:
        if name in missing:
            continue
        step = statistics.median(times[name])
        ratio, low, high = median_ratio(times[name], times["bare"])
        sides[name] = {
            "step_ms": step * 1e3,
            f"{unit}_per_s": amount / step,
            "ratio_to_bare": ratio,
            "low": low,
            "high": high,
            "last_loss": losses[name],
            "bursts_ms": [took * 1e3 for took in times[name]],
        }
    return {
        "batch": case.batch,
        "parameters": sum(param.numel() for param in case.model().parameters()),
        "steps_a_burst": case.steps * case.epochs,
        "pairs": pairs,
        "unit": unit,
        "sides": sides,
        "missing": missing,
        "threads": torch.get_num_threads(),
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if case.device == "cuda" else 0,
    }


# all of it


def report(name: str, result: dict[str, Any]) -> None:
    if "error" in result:
        print(f"\n{name}: {result['error']}", flush=True)
        return
    unit = result["unit"]
    millions = result["parameters"] / 1e6
    print(f"\n{name}: {millions:.2f} M parameters, batch {result['batch']}, {result['pairs']} bursts of "
          f"{result['steps_a_burst']} steps a side")  # fmt: skip
    for side, row in result["sides"].items():
        ratio = f"{row['ratio_to_bare']:.3f} [{row['low']:.3f}, {row['high']:.3f}] of bare"
        print(f"  {side:12} {row['step_ms']:9.3f} ms a step   {ratio}   {row[f'{unit}_per_s']:12,.0f} {unit}/s   "
              f"last loss {row['last_loss']:.4f}")  # fmt: skip
        if not math.isfinite(row["last_loss"]):
            print(f"  {side:12} ITS LOSS IS NOT FINITE")
    for side, why in result["missing"].items():
        print(f"  {side:12} missing: {why}")
    sys.stdout.flush()


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "case.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--case", name, "--device", options.device]
        command += ["--pairs", str(options.pairs), "--out", str(out), *(["--small"] if options.small else [])]
        command += ["--batch", str(options.batch)]
        command += ["--by-flag"] if options.by_flag else []
        env = {**os.environ, "PACELINE_RUNS": str(Path(folder) / "runs")}
        try:
            code = subprocess.run(command, cwd=HERE, env=env, check=False, timeout=_CASE_LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {_CASE_LIMIT_S} s"}
        return json.loads(out.read_text()) if out.exists() else {"error": f"exit code {code}"}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def everything(options: argparse.Namespace) -> int:
    cuda = options.device == "cuda"
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("accelerate", "lightning-fabric", "lightning", "numpy")},
        "cpus": os.cpu_count(),
        "small": options.small,
        "lenet batch": options.batch,
        "cases": {},
    }
    print(
        f"{result['gpu'] or 'CPU'}, torch {result['torch']}, Python {result['python']}, {result['versions']}",
        flush=True,
    )

    def keep() -> None:
        if options.out:
            Path(options.out).write_text(json.dumps(result, indent=1))

    for name in CASES:
        if options.only in name:
            result["cases"][name] = run_case(name, options)
            report(name, result["cases"][name])
            keep()
    if not options.only or options.only == "bits":
        result["repeat"] = check_repeats(options.device, options.small)
        keep()
        result["share"] = check_shares(options.device, 4, 256)
        keep()
        result["share_odd"] = check_shares(options.device, 3, 255)
        keep()
    failed = [name for name, case in result["cases"].items() if "error" in case]
    failed += [name for name in ("repeat", "share", "share_odd") if not result.get(name, {"same": True})["same"]]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall done")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--by-flag", action="store_true", help="precision by Paceline's setting, not by the script")
    parser.add_argument("--out", default="")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=1024, help="of the LeNet cases")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the code out")
    parser.add_argument("--only", default="", help="the cases whose name has this in it; `bits`: only the hashes")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_lenet(options.device, options.train, 64 if options.small else 1024, os.environ.get("WARN_ONLY") == "1")
        return 0
    if options.case:
        result = measure(Case(options.case, options.device, options.small, options.batch), options.pairs)
        Path(options.out).write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # the loops stand in the middle of an epoch: nothing to finish
    return everything(options)


if __name__ == "__main__":
    sys.exit(main())
