"""Memory of a process that others of its machine may read where it lies.

A body that lies in it goes through a `sharing.SharedChannel` without a copy: the other side is told where it is, and
reads it there, until it says that it is done with it. Only the owner can write to it (`F_SEAL_FUTURE_WRITE`), and nobody
can shrink it, which would be a SIGBUS at the other side. It outlives its owner: what was lent by one who is then
killed is still there, whole.

Stretches are cut from blocks, a descriptor each: a server that holds a thousand fragments must not need as many.
A block goes when nothing of it is used any more.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import threading
import weakref
from bisect import bisect_right
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from paceline.errors import ResourceError
from paceline.tensors.channel import BadMessage, TornMessage
from paceline.tensors.ring import map_memory, seals_of, unmap_memory
from paceline.tensors.segment import aligned
from paceline.wires import wire

SMALLEST = 256 << 10
"""Bytes of a body for which it is worth it: a smaller one is copied in less time than it takes to say where it is."""
_BLOCK = 64 << 20
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which `fcntl` does not name
_REFERENCE = struct.Struct("<IIQ")
"""A block's number; that of one that is no more, or 0; where in the block a body begins."""
_STABLE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Block:
    """So many bytes of our own that others can map."""

    _numbers = count(1)

    def __init__(self, size: int) -> None:
        self.number, self.size, self.used, self.stretches = next(self._numbers), size, 0, 0
        self.fd = os.memfd_create("paceline-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self.start = map_memory(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _STABLE | _FUTURE_WRITE)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        unmap_memory(self.start, self.size)
        os.close(self.fd)


class Spot(NamedTuple):
    block: Block
    offset: int


class _Blocks:
    """Those of this process, by where they begin."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a stretch may go at any moment, also in here
        self._starts: list[int] = []
        self._blocks: list[Block] = []
        self._open: Block | None = None
        """Where the next stretch comes from."""

    def take(self, nbytes: int) -> memoryview:
        with self._lock:
            if self._open is None or self._open.size - self._open.used < nbytes:
                self._open = self._another(max(_BLOCK, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
            block, offset = self._open, self._open.used
            # Before anything that may collect garbage, and with it the block's last stretch: then the block would go too.
            block.stretches += 1
            block.used += aligned(nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(block.start + offset)
        weakref.finalize(memory, self._give_back, block).atexit = False
        return memoryview(memory).cast("B")

    def _another(self, size: int) -> Block:
        block = Block(size)
        at = bisect_right(self._starts, block.start)
        self._starts.insert(at, block.start)
        self._blocks.insert(at, block)
        return block

    def _give_back(self, block: Block) -> None:
        with self._lock:
            block.stretches -= 1
            if block.stretches:
                return
            if block is self._open:
                self._open = None
            at = self._blocks.index(block)
            del self._starts[at], self._blocks[at]
            block.close()

    def place_of(self, address: int, nbytes: int) -> Spot | None:
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            if at < 0 or address + nbytes > self._starts[at] + self._blocks[at].size:
                return None
            return Spot(self._blocks[at], address - self._starts[at])

    def numbers(self) -> set[int]:
        with self._lock:
            return {block.number for block in self._blocks}


_blocks = _Blocks()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As `torch.empty`: in such memory if it is large enough, and if the system has any."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes >= SMALLEST:
        try:
            return torch.frombuffer(_blocks.take(nbytes), dtype=dtype).view(shape)
        except (OSError, ResourceError):  # no descriptor, no such seal: then its bodies are copied
            pass
    return torch.empty(shape, dtype=dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return empty(shape, dtype).zero_()


def place_of(body: memoryview) -> Spot | None:
    """Where a body can be read by others; None: nowhere."""
    if body.nbytes < SMALLEST:
        return None
    return _blocks.place_of(np.frombuffer(body, dtype=np.uint8).ctypes.data, body.nbytes)


def borrow(fd: int) -> memoryview:
    """Somebody else's block, to be read only: writing to it is a SIGSEGV. It stays the caller's to close, and is unmapped
    when the last view of it is gone. A ValueError: it could change its size."""
    size = os.fstat(fd).st_size
    if not size or seals_of(fd) & _STABLE != _STABLE:
        raise ValueError("what is lent must be sealed memory")
    start = map_memory(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd)
    memory = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(memory, unmap_memory, start, size).atexit = False
    return memoryview(memory).cast("B")


# what is said of it over a Unix socket


class Lender:
    """What one other side knows of our blocks."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def send(self, sock: socket.socket, words: bytes, spot: Spot) -> None:
        """The words, then where their body lies; with its block, the first time."""
        gone = next(iter(self._told - _blocks.numbers()), 0)
        self._told.discard(gone)
        reference = _REFERENCE.pack(spot.block.number, gone, spot.offset)
        if spot.block.number in self._told:
            sock.sendall(words + reference)
            return
        sock.sendall(words)
        socket.send_fds(sock, [reference], [spot.block.fd])
        self._told.add(spot.block.number)


class Borrower:
    """The other side's blocks, as far as it has told of them."""

    def __init__(self) -> None:
        self._blocks: dict[int, memoryview] = {}

    def receive(self, sock: socket.socket, nbytes: int) -> memoryview:
        """A body of so many bytes where it lies, once it is said where that is."""
        raw, fds = b"", list[int]()
        try:
            while len(raw) < _REFERENCE.size:
                more, came, _, _ = socket.recv_fds(sock, _REFERENCE.size - len(raw), 1, socket.MSG_CMSG_CLOEXEC)
                fds += came
                if not more:
                    raise TornMessage("the other side ended the channel in the middle of a message")
                raw += more
            number, gone, offset = _REFERENCE.unpack(raw)
            self._blocks.pop(gone, None)
            if fds:
                self._blocks[number] = borrow(fds[0])
        except ValueError as error:
            raise BadMessage(str(error)) from None
        finally:
            wire.close_all(fds)
        block = self._blocks.get(number)
        if block is None or offset + nbytes > block.nbytes:
            raise BadMessage("a body was lent that lies nowhere")
        return block[offset : offset + nbytes]
