"""Adding in the tree's order in one pass over memory, past the cache.

Torch adds two tensors at a time and copies one. So a sum of four that goes to four workers passes
through the cache eight times, and each line of a result is read from memory before it is overwritten.
Python has no say in either. So the loop is ours, in machine code, as oneDNN inside torch makes its own:
a line of each source is loaded, added up in registers and written to each out by stores that do not
read what was there. It takes 3.1 to 4.5 ms where `TreeSum` takes 8.5 to 9.3 (measured: four workers on two
cores, four sources and four outs of 23 MB).

The loop for s0 + s1 in fp32, with one out; a line is two registers, only the first one is shown:

    next:  mov      rax, [rdi + 8]           where s1 lies
           vmovups  ymm14, [rax + rcx]
           mov      rax, [rdi + 0]           s0
           vaddps   ymm0, ymm14, [rax + rcx]
           vmulps   ymm0, ymm0, ymm15        or vdivps
           mov      rax, [rdi + 16]          the out
           vmovntps [rax + rcx], ymm0
           add      rcx, 64
           cmp      rcx, rsi
           jb       next

Sums, products and quotients of vectors are rounded as torch's are: the bits are those of `TreeSum`.
With one source and no scale the same loop is a copy (`copy_past_cache`), whatever the bytes stand for; `Copying` makes many.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.sums import is_power_of_two, scratch_rows
from paceline.tensors.tree import Step

_libc = ctypes.CDLL(None, use_errno=True)
_LINE, _HALF = 64, 32
_ROWS, _OPERAND, _SCALE = 7, 14, 15
"""The registers: two for each row of sums in the making, one for an operand from memory, one for the scale."""
_MOST_SOURCES = 24
"""From more than these at once the processor no longer fetches ahead, and `TreeSum` is faster (measured)."""

_LOAD, _STREAM, _ADD, _MULTIPLY, _DIVIDE = 0x10, 0x2B, 0x58, 0x59, 0x5E
_BROADCAST = {torch.float32: 0x18, torch.float64: 0x19}
_PACKED = {torch.float32: 0, torch.float64: 1}


class OnePass:
    """As `TreeSum`, for sources and outs on the host."""

    def __init__(self, sources: Sequence[torch.Tensor], steps: Sequence[Step], outs: Sequence[torch.Tensor]) -> None:
        self._tensors = [*sources, *outs]
        self._addresses = (ctypes.c_void_p * len(self._tensors))(*(tensor.data_ptr() for tensor in self._tensors))
        self._nbytes, dtype = outs[0].nbytes, outs[0].dtype
        self._shape = (tuple(steps), len(sources), len(outs), dtype)
        self._scale = ctypes.c_float if dtype == torch.float32 else ctypes.c_double

    @staticmethod
    def can(sources: Sequence[torch.Tensor], steps: Sequence[Step], outs: Sequence[torch.Tensor]) -> bool:
        """Whole lines of a kind of number it knows, not too many sources, and a machine that lets it."""
        dtype, nbytes = outs[0].dtype, outs[0].nbytes
        return (
            dtype in _PACKED
            and nbytes > 0
            and nbytes % _LINE == 0
            and all(
                tensor.device.type == "cpu"
                and tensor.is_contiguous()
                and (tensor.dtype, tensor.nbytes, tensor.data_ptr() % _LINE) == (dtype, nbytes, 0)
                for tensor in (*sources, *outs)
            )
            and len(sources) <= _MOST_SOURCES
            and max(scratch_rows(steps), default=0) < _ROWS
            and _supported()
        )

    def add(self, divisor: float = 1.0) -> None:
        """Each of the outs = the sum / divisor."""
        exact = is_power_of_two(divisor)
        kernel = _kernel(*self._shape, _MULTIPLY if exact else _DIVIDE)
        kernel.run(self._addresses, self._nbytes, ctypes.byref(self._scale(1.0 / divisor if exact else divisor)))


class Copying:
    """Bytes of this process that go elsewhere in it, any number of stretches by one call that leaves the interpreter to others: from
    where, to where and how many, by address. Where they go past the cache, what the training has in it stays there. `held`: whose
    memory it is, until then."""

    def __init__(self, stretches: Sequence[tuple[int, int, int]], held: object = None) -> None:
        self._held = held
        self._stretches = stretches = [stretch for stretch in stretches if stretch[2]]
        self._jobs = (ctypes.c_uint64 * (3 * len(stretches)))(*chain.from_iterable(stretches))
        past_cache = stretches and all(into % _LINE == 0 for _, into, _ in stretches) and _supported()
        self._code = _copies() if past_cache else None

    def make(self) -> None:
        if self._code is not None:
            self._code.run(self._jobs, ctypes.addressof(self._jobs) + ctypes.sizeof(self._jobs), None)
            return
        for out_of, into, nbytes in self._stretches:
            ctypes.memmove(into, out_of, nbytes)


def copy_past_cache(into: NDArray[np.uint8], out_of: NDArray[np.uint8]) -> bool:
    """Bytes as they are, if they are whole lines: two thirds to three quarters of libc's time (measured), since what is
    overwritten is not read before. False: nothing was copied."""
    addresses = (ctypes.c_void_p * 2)(out_of.ctypes.data, into.ctypes.data)
    if into.nbytes % _LINE or any(address is None or address % _LINE for address in addresses) or not _supported():
        return False
    kernel = _kernel((), 1, 1, torch.float32, None)  # held: of two that are made at once, one is in no cache
    kernel.run(addresses, into.nbytes, None)
    return True


class _Kernel:
    """Machine code that can be called while this object lives. Its memory is never writable and executable at once."""

    def __init__(self, code: bytes) -> None:
        self._memory = mmap.mmap(-1, len(code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.write(code)
        address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(code)), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "no executable memory")
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(address)


@lru_cache(maxsize=256)
def _kernel(steps: tuple[Step, ...], sources: int, outs: int, dtype: torch.dtype, scaling: int | None) -> _Kernel:
    return _Kernel(machine_code(steps, sources, outs, dtype, scaling))


@cache
def _copies() -> _Kernel:
    return _Kernel(COPIES)


@cache
def _supported() -> bool:
    """The processor has the instructions, and the system lets us run what we wrote; a hardened one may not."""
    if os.uname().machine != "x86_64" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    try:
        _kernel((), 1, 1, torch.float32, _MULTIPLY)
    except OSError:
        return False
    return True


COPIES = bytes.fromhex(
    "49 89 fb"  # mov r11, rdi: stretches of three words each (from, to, bytes)
    "48 89 f2"  # mov rdx, rsi: where they end
    "49 8b 33"  # stretch: mov rsi, [r11]
    "49 8b 7b 08"  # mov rdi, [r11 + 8]
    "4d 8b 53 10"  # mov r10, [r11 + 16]
    "4d 89 d1"  # mov r9, r10
    "49 83 e1 c0"  # and r9, -64: whole lines
    "31 c0"  # xor eax, eax
    "4d 85 c9"  # test r9, r9
    "74 1f"  # jz rest
    "c5 fc 10 04 06"  # line: vmovups ymm0, [rsi + rax]
    "c5 fc 10 4c 06 20"  # vmovups ymm1, [rsi + rax + 32]
    "c5 fc 2b 04 07"  # vmovntps [rdi + rax], ymm0
    "c5 fc 2b 4c 07 20"  # vmovntps [rdi + rax + 32], ymm1
    "48 83 c0 40"  # add rax, 64
    "4c 39 c8"  # cmp rax, r9
    "72 e1"  # jb line
    "4c 89 d1"  # rest: mov rcx, r10
    "4c 29 c9"  # sub rcx, r9
    "48 01 c6"  # add rsi, rax
    "48 01 c7"  # add rdi, rax
    "f3 a4"  # rep movsb
    "49 83 c3 18"  # add r11, 24
    "49 39 d3"  # cmp r11, rdx
    "72 b1"  # jb stretch
    "0f ae f8"  # sfence: whoever sees what we say next sees these stores
    "c5 f8 77"  # vzeroupper
    "c3"  # ret
)
"""What `Copying` runs: of each stretch whole lines by stores that do not read what was there, then the bytes that are left."""


def machine_code(steps: Sequence[Step], sources: int, outs: int, dtype: torch.dtype, scaling: int | None) -> bytes:
    """A function (rdi: the addresses of sources and outs, rsi: how many bytes each has, rdx: the scale, if there is one)."""
    packed = _PACKED[dtype]
    line = b"".join(_sum_of_half_a_line(steps, packed, scaling, half) for half in (0, 1))
    total = _total_row(steps)
    for out in range(sources, sources + outs):
        line += _address(out) + b"".join(_vector(_STREAM, packed, 2 * total + half, at=half) for half in (0, 1))
    line += bytes((0x48, 0x83, 0xC1, _LINE))  # add rcx, 64
    line += bytes((0x48, 0x39, 0xF1))  # cmp rcx, rsi
    jump = 6
    return b"".join(
        (
            bytes((0x31, 0xC9)),  # xor ecx, ecx
            b""
            if scaling is None
            else bytes((0xC4, 0x62, 0x7D, _BROADCAST[dtype], 0x3A)),  # vbroadcastss/sd ymm15, [rdx]
            line,
            bytes((0x0F, 0x82)) + (-len(line) - jump).to_bytes(4, "little", signed=True),  # jb, to the next line
            bytes((0x0F, 0xAE, 0xF8)),  # sfence: whoever sees what we say next sees these stores
            bytes((0xC5, 0xF8, 0x77)),  # vzeroupper
            bytes((0xC3,)),  # ret
        )
    )


def _total_row(steps: Sequence[Step]) -> int:
    return scratch_rows(steps)[-1] if steps else 0


def _sum_of_half_a_line(steps: Sequence[Step], packed: int, scaling: int | None, half: int) -> bytes:
    register: dict[int, int] = {}
    code = b"" if steps else _address(0) + _vector(_LOAD, packed, half, at=half)
    for (left, right, result), row in zip(steps, scratch_rows(steps), strict=True):
        # The right operand first, as torch does: if both are NaN, the sum is the first one's.
        if right not in register:
            code += _address(right) + _vector(_LOAD, packed, _OPERAND, at=half)
        first, to = register.get(right, _OPERAND), 2 * row + half
        if left in register:
            code += _vector(_ADD, packed, to, first, other=register[left])
        else:
            code += _address(left) + _vector(_ADD, packed, to, first, at=half)
        register[result] = to
    if scaling is None:
        return code
    total = 2 * _total_row(steps) + half
    return code + _vector(scaling, packed, total, total, other=_SCALE)


def _address(number: int) -> bytes:
    """mov rax, [rdi + 8·number]"""
    return bytes((0x48, 0x8B, 0x87)) + (8 * number).to_bytes(4, "little")


def _vector(opcode: int, packed: int, register: int, first: int = 0, other: int | None = None, at: int = 0) -> bytes:
    """An AVX instruction on 32 bytes with `register`, `first`, and `other`: a register, or half `at` of the line at rax + rcx.

    A load and a store have no `first`. The prefix has it, and what makes a register one above 7, inverted.
    """
    high = (0 if register > 7 else 0x80) | 0x40 | (0 if other is not None and other > 7 else 0x20)
    prefix = bytes((0xC4, high | 0x01, (first ^ 15) << 3 | 0x04 | packed, opcode))
    if other is not None:
        return prefix + bytes((0xC0 | (register & 7) << 3 | other & 7,))
    return prefix + bytes((0x44 | (register & 7) << 3, 0x08, at * _HALF))
