"""Files mapped into memory without a descriptor that stays open: what holds a mapping is memory, not a handle."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> tuple[memoryview, os.stat_result]:
    """Map a file, read-only; return its bytes and its status as it was mapped.

    The mapping lasts as long as anything refers to the bytes. `mmap.mmap` would hold a copy of the descriptor as long.
    To read what has been cut off the file since kills the process (SIGBUS): compare its length before.

    Raises:
        OSError: it can't be opened or mapped (ENOMEM: the process has too many mappings, or too little address space).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        size = status.st_size
        if not size:
            return memoryview(b""), status
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        number = ctypes.get_errno()
    finally:
        os.close(descriptor)
    if address is None or address == _FAILED:
        raise OSError(number, os.strerror(number), str(path))
    content = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit: a thread may still be reading.
    weakref.finalize(content, _libc.munmap, address, size).atexit = False
    return memoryview(content).cast("B").toreadonly(), status
