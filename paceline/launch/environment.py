"""The environment a worker starts with, and how it finds its run. No torch in here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.processor import mkl_branch

MARK = "PACELINE_TICKET"
NEWEST = "newest"
"""Instead of a checkpoint's name: whichever is the newest that can be read, if there is one."""


@dataclass(frozen=True)
class Ticket:
    """What the agent hands a worker: who it is, and where its agent listens."""

    worker: int
    address: str
    """Of whoever leads the run, without its fence."""
    fence: int
    """Of the agent that led when this ticket was written."""
    secret: str
    folder: str
    flags: dict[str, Any]
    dry_run: bool = False
    resume: str = ""
    """The checkpoint to go on from."""
    host: str = ""
    """Where workers of other machines reach this one; nothing, if there are none."""
    machine: int = 0
    """Which one this is."""
    server: int = -1
    """Which one this process is, if it is none of the workers but a server."""

    def encode(self) -> str:
        return json.dumps(self.__dict__)


def ticket() -> Ticket | None:
    """This process's ticket, if an agent started it."""
    raw = os.environ.get(MARK)
    return Ticket(**json.loads(raw)) if raw else None


def bit_environment(threads: int) -> dict[str, str]:
    """What must be set before torch is imported, or other worker counts give other bits (measured)."""
    return {
        # MKL picks code paths by alignment and count of threads unless told not to.
        "MKL_CBWR": os.environ.get("MKL_CBWR", mkl_branch()),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        # cuBLAS needs it for deterministic results.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Sets of strings are walked in the same order by every worker, replacements included.
        "PYTHONHASHSEED": "0",
        # Large gradients come from the heap, not from fresh pages at every step.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
        # Large blocks lie on huge pages: worth several percent of a step (measured).
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def nursery_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """The part that is the same for all workers: the base environment and the bits' needs.

    RANK, WORLD_SIZE and friends are taken out: scripts that look for them would start groups of
    their own.
    """
    env = {k: v for k, v in base.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return {**env, **bit_environment(threads), "PYTHONUNBUFFERED": "1"}


def own_environment(ticket: Ticket, place: int, gpus: Sequence[str]) -> dict[str, str]:
    """The part that is this worker's own: the ticket, and one visible GPU, by its place."""
    env = {MARK: ticket.encode()}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return env


def visible_gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES would name them, without starting CUDA."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [part.strip() for part in asked.split(",") if part.strip() not in ("", "-1")]
    try:
        names = os.listdir("/proc/driver/nvidia/gpus")
    except OSError:
        return []
    return [str(number) for number in range(len(names))]
