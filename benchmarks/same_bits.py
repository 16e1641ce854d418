"""The same bits at every worker count: python -m benchmarks.same_bits [--steps 100] [--only cnn]

Every kind of training in bits_script.py at -n 1…5 with 12 slots and -n 1, 2, 4 with 8, with 0 and 2 loader
processes where the kind has them. One hash a row, or it says which worker count differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
KINDS = ["lenet", "cnn", "lstm", "transformer", "gan", "tail"]
WITH_LOADERS = {"lenet", "cnn", "gan", "tail"}
DEALS = [(12, n, "shm") for n in (1, 2, 3, 4, 5)] + [(12, 3, "gloo")] + [(8, n, "shm") for n in (1, 2, 4)]


def weights(kind: str, slots: int, workers: int, transport: str, loaders: int, steps: int) -> str:
    with tempfile.TemporaryDirectory() as runs:
        flags = ["-n", str(workers), "--slots", str(slots), "--transport", transport, "--steps", str(steps)]
        command = [sys.executable, "-m", "paceline", "run", *flags, "--runs", runs, "--name", "it", "--show", "none",
                   "benchmarks/bits_script.py", kind, "--num-workers", str(loaders)]  # fmt: skip
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{kind} -n {workers} --slots {slots}: {done.stderr[-2000:]}")
        summary = json.loads((Path(runs) / "it" / "summary.json").read_text())
        assert summary["steps"] == steps, summary
        return str(summary["weights_sha256"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    bad = 0
    for kind in KINDS:
        if options.only not in kind:
            continue
        for slots in (12, 8):
            hashes: dict[str, str] = {}
            for deal_slots, workers, transport in DEALS:
                for loaders in (0, 2) if kind in WITH_LOADERS and workers in (1, 3, 4) else (0,):
                    if deal_slots == slots:
                        name = f"-n {workers} {transport} loaders {loaders}"
                        hashes[name] = weights(kind, slots, workers, transport, loaders, options.steps)
            first = next(iter(hashes.values()))
            odd = [name for name, value in hashes.items() if value != first]
            bad += len(odd)
            verdict = f"DIFFERENT: {', '.join(odd)}" if odd else "one hash"
            print(f"{kind:12} {slots:3} slots, {len(hashes)} runs: {verdict} {first[:16]}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
