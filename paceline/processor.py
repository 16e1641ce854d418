"""What of the processor is part of a run's bits. No torch in here."""

from __future__ import annotations

from functools import cache


@cache
def mkl_branch() -> str:
    """The newest of MKL's fixed code paths that this processor has. AVX2 where there is AVX-512 costs a matrix product up to
    1.8 times its time (measured, Xeon; 1.2 on an EPYC)."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        flags = ""
    return "AVX512" if "avx512f" in flags.split() else "AVX2"
