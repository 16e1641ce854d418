"""A ring of shared memory in which a stretch never breaks at the end: it is mapped twice, one behind the other.

memfd, never a named segment, and sealed: whoever has the descriptor can neither shrink it under the other
one, which would be a SIGBUS there, nor let it grow.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

from paceline.errors import ResourceError

_LARGEST = 1 << 30
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PROT_NONE, _MAP_FIXED = 0x0, 0x10
_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000)
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def make(size: int) -> int:
    """A descriptor of so many bytes, a multiple of a page."""
    fd = os.memfd_create("paceline-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Take the pages now: running out later would be a SIGBUS in the middle of a message.
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ResourceError(f"no shared memory: {size} bytes asked for, the kernel said {error.strerror}") from None
    return fd


class Ring:
    """Somebody's descriptor, mapped; it stays the caller's to close. A ValueError: it is not what `make` makes.

    It is unmapped when the last view of it is gone.
    """

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        if not 0 < self.size <= _LARGEST or self.size % mmap.PAGESIZE:
            raise ValueError(f"a ring cannot have {self.size} bytes")
        if seals_of(fd) & _SEALS != _SEALS:
            raise ValueError("the memory of a ring must be sealed")
        self._whole = _map_twice(fd, self.size)

    def view(self, position: int, count: int) -> memoryview:
        """So many bytes, the size of the ring at most, from a position that counts on and on."""
        at = position % self.size
        return self._whole[at : at + count]


def seals_of(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0  # not a memfd
        raise


def _map_twice(fd: int, size: int) -> memoryview:
    # The whole stretch first: nothing else can then lie where the second half belongs.
    start = map_memory(None, 2 * size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        for half in (start, start + size):
            flags = mmap.MAP_SHARED | _MAP_FIXED | _POPULATE
            map_memory(half, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    except BaseException:
        unmap_memory(start, 2 * size)
        raise
    memory = (ctypes.c_ubyte * (2 * size)).from_address(start)
    # Every view refers to this object. Not at exit: other threads may be inside.
    weakref.finalize(memory, unmap_memory, start, 2 * size).atexit = False
    return memoryview(memory).cast("B")


def map_memory(where: int | None, size: int, access: int, flags: int, fd: int) -> int:
    found = _libc.mmap(where, size, access, flags, fd, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise ResourceError(f"cannot map {size} bytes of shared memory: {os.strerror(code)}")
    return int(found)


def unmap_memory(start: int, size: int) -> None:
    _libc.munmap(start, size)
