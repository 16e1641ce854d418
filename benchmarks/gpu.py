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
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.models import images, lenet
from benchmarks.statistics import median_ratio
from benchmarks.turns import HERE

CASES = ("lenet-tensors", "lenet-rows", "lenet-items", "gpt")
_CASE_LIMIT_S, _CHECK_LIMIT_S = 400, 120
Step = Callable[[], torch.Tensor]


# what is trained


@dataclass(frozen=True)
class Shape:
    """A GPT's size; the default is GPT-2 small, 124 M parameters."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    block: int = 1024


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, block, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, block, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, block, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.block, shape.width)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.layers(self.tokens(ids) + self.places(places))))


class Rows(Dataset):
    """Tensors that give a whole batch in one call: the same fetch through anybody's DataLoader."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return [tensor[index] for tensor in self.tensors]

    def __getitems__(self, indices: list[int]) -> Any:
        rows = torch.tensor(indices)
        return [tensor.index_select(0, rows) for tensor in self.tensors]


class Items(Dataset):
    """The same data, sample by sample."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Case:
    """What all sides share; every call of a method builds afresh."""

    name: str
    device: str
    small: bool

    @property
    def batch(self) -> int:
        if self.name == "gpt":
            return 2 if self.small else 8
        return 32 if self.small else 1024

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return 4 if self.small else 20 if self.name == "gpt" else 58

    @property
    def epochs(self) -> int:
        """Epochs of a burst: it must outlast the clock's moods."""
        return 1 if self.small else 3 if self.name == "gpt" else 4

    @property
    def shape(self) -> Shape:
        return Shape(2, 32, 2, 128, 16) if self.small else Shape()

    @property
    def unit(self) -> tuple[str, int]:
        """What a step goes through, and how much of it."""
        return ("tokens", self.batch * self.shape.block) if self.name == "gpt" else ("samples", self.batch)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return (GPT(self.shape) if self.name == "gpt" else lenet()).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.name == "gpt":
            return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loader(self) -> DataLoader:
        count = self.batch * self.steps
        if self.name == "gpt":
            generator = torch.Generator().manual_seed(1)
            text = torch.randint(self.shape.vocabulary, (count, self.shape.block + 1), generator=generator)
            data: Any = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        else:
            data = images(count, flat=False)
        collate = None
        if self.name == "lenet-rows":
            data, collate = Rows(*data.tensors), as_it_is
        elif self.name == "lenet-items":
            data = Items(*data.tensors)
        pin = self.device == "cuda"
        return DataLoader(
            data, batch_size=self.batch, shuffle=True, drop_last=True, num_workers=0, pin_memory=pin, collate_fn=collate
        )


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


# the sides: each builds what it trains, and gives back one step


def bare(case: Case) -> Step:
    model, loader = case.model(), case.loader()
    optimizer = case.optimizer(model)

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                x, y = (tensor.to(case.device, non_blocking=True) for tensor in batch)
                with torch.autocast(case.device, torch.bfloat16):
                    loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_paceline(case: Case) -> Step:
    import paceline

    # The bare script with its own autocast and three lines changed; or none of its own, and the flag.
    by_flag = "--by-flag" in sys.argv
    precision = "bf16" if by_flag else "fp32"
    run = paceline.init(seed=0, precision=precision, device=case.device, threads=torch.get_num_threads())
    model, loader = case.model(), case.loader()
    optimizer = case.optimizer(model)
    run.prepare(model, optimizer, loader)

    def loop() -> Iterator[torch.Tensor]:
        for _ in run.epochs(1 << 30):
            for _batch in loader:
                for x, y in run.slots():
                    with torch.autocast(case.device, torch.bfloat16, enabled=not by_flag):
                        loss = loss_of(model(x), y)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_accelerate(case: Case) -> Step:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        mixed_precision="bf16",
        cpu=case.device == "cpu",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),  # as the other sides copy
    )
    model = case.model()
    model, optimizer, loader = accelerator.prepare(model, case.optimizer(model), case.loader())

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for x, y in loader:
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_fabric(case: Case) -> Step:
    try:
        from lightning_fabric import Fabric
    except ImportError:
        from lightning.fabric import Fabric

    fabric = Fabric(accelerator=case.device, devices=1, precision="bf16-mixed")
    model = case.model()
    model, optimizer = fabric.setup(model, case.optimizer(model))
    loader = fabric.setup_dataloaders(case.loader())

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for x, y in loader:
                loss = loss_of(model(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


SIDES = {"bare": bare, "paceline": with_paceline, "accelerate": with_accelerate, "fabric": with_fabric}


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


# the same bits


def train_lenet(device: str, steps: int, batch: int, warn_only: bool) -> None:
    """Inside a process of the repeatability check: a run of one, bf16."""
    import paceline
    from paceline.state.hash import weights_sha256

    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    run = paceline.init(seed=0, precision="bf16", device=device, steps=steps)
    model = lenet().to(run.device)
    print("first", weights_sha256(model.state_dict()), flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(images(batch * 20, flat=False), batch_size=batch, shuffle=True, drop_last=True)
    run.prepare(model, optimizer, loader)
    for _ in run.epochs(1 << 30):
        for _batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


SHARED = """
    import os
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    torch.use_deterministic_algorithms(True, warn_only=os.environ.get("WARN_ONLY") == "1")
    run = paceline.init(seed=0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 10),
    ).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 1, 28, 28, generator=draw)
    y = torch.randint(10, (2048,), generator=draw)
    loader = DataLoader(TensorDataset(x, y), batch_size=int(sys.argv[1]), shuffle=True, drop_last=True)
    run.prepare(model, optimizer, loader)
    for epoch in run.epochs(1000):
        for batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def start(arguments: list[str], folder: Path, warn_only: bool) -> dict[str, Any]:
    """Run a Python command that trains one run into the folder; its summary, and what it printed."""
    env = {
        **os.environ,
        "PACELINE_RUNS": str(folder),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "WARN_ONLY": "1" if warn_only else "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=HERE,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHECK_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done after {_CHECK_LIMIT_S} s", "printed": str(error.stderr)[-2000:]}
    printed = done.stdout + done.stderr
    summaries = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
    if done.returncode or len(summaries) != 1:
        return {"error": f"exit code {done.returncode}, {len(summaries)} summaries", "printed": printed[-3000:]}
    kept = ("weights_sha256", "steps", "exit", "workers", "slots", "precision", "device", "wall_s", "time_split")
    return {**{name: summaries[0][name] for name in kept}, "printed": printed[-3000:]}


def twice(name: str, commands: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Run each command in a process of its own; whether all end in the same weights."""
    for warn_only in (False, True):
        runs = {}
        for words, arguments in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[words] = start(arguments, Path(folder), warn_only)
        if not any("error" in run and "deterministic implementation" in run["printed"] for run in runs.values()):
            break
    first = [line.split()[1] for run in runs.values() for line in run["printed"].splitlines() if line[:6] == "first "]
    hashes = [run.get("weights_sha256") for run in runs.values()]
    same = None not in hashes and len(set(hashes)) == 1 and hashes[0] not in first
    same = same and all(run["steps"] == steps for run in runs.values())
    print(f"\n{name}: {'the same weights' if same else 'NOT THE SAME'}" + (" (warn_only)" if warn_only else ""))
    for words, run in runs.items():
        print(f"  {words:28} {run.get('weights_sha256', run.get('error'))}  {run.get('device', '')}", flush=True)
        if "error" in run:
            print(textwrap.indent(run["printed"], "    | "))
    return {"same": same, "warn_only": warn_only, "weights_before": first, "runs": runs}


def check_repeats(device: str, small: bool) -> dict[str, Any]:
    steps = 10 if small else 100
    command = ["-m", "benchmarks.gpu", "--train", str(steps), "--device", device, *(["--small"] if small else [])]
    name = f"LeNet, {steps} steps in bf16, a run of one, two processes"
    return twice(name, {"first process": command, "second process": command}, steps)


def check_shares(device: str, slots: int, batch: int) -> dict[str, Any]:
    """Two workers on one GPU against one. The mean divides by the slots: exact when they are a power of
    two; when not, host and GPU must round alike."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(textwrap.dedent(SHARED))
        flags = ["--device", device, "--slots", str(slots), "--steps", "30", "--show", "all", str(script), str(batch)]
        commands = {
            f"-n 2 --share-gpus --slots {slots}": ["-m", "paceline", "run", "-n", "2", "--share-gpus", *flags],
            f"-n 1 --slots {slots}": ["-m", "paceline", "run", "-n", "1", *flags],
        }
        name = f"LeNet with dropout, 30 steps in fp32, {slots} slots, two workers on one GPU"
        return twice(name, commands, 30)


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
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the code out")
    parser.add_argument("--only", default="", help="the cases whose name has this in it; `bits`: only the hashes")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_lenet(options.device, options.train, 64 if options.small else 1024, os.environ.get("WARN_ONLY") == "1")
        return 0
    if options.case:
        result = measure(Case(options.case, options.device, options.small), options.pairs)
        Path(options.out).write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # the loops stand in the middle of an epoch: nothing to finish
    return everything(options)


if __name__ == "__main__":
    sys.exit(main())
