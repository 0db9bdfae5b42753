"""Freed memory is kept for the next step, on the CPU under glibc.

By default glibc may give large freed blocks back to the system, and then the activations and
gradients of the next step take a page fault for every 4 kB again. Whether it does is chance: the
same three tensors of 16 MB, taken and freed over and over in a thread (as Ray runs us in one), took
12,000 faults and 40 ms in some processes, 3 faults and 6 ms in others. It is never worth having.
"""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

# The largest that glibc takes; larger blocks are always mapped apart.
_MMAP_THRESHOLD_BYTES = 32 << 20
_NEVER_TRIM_BYTES = 2**31 - 1
# The heap of a thread is made of parts of this size; with as much to spare none is given back.
_SPARE_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Tells this process's allocator to keep what is freed; can't be undone.

    The process then holds as much memory as it ever needed at once, in blocks of up to 32 MB.

    Returns:
        Whether there is such an allocator (glibc's).
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
        _ = libc.gnu_get_libc_version
    except (AttributeError, OSError, TypeError):
        return False
    settings = {
        _M_TRIM_THRESHOLD: _NEVER_TRIM_BYTES,
        _M_TOP_PAD: _SPARE_BYTES,
        _M_MMAP_THRESHOLD: _MMAP_THRESHOLD_BYTES,
    }
    return all(mallopt(name, value) for name, value in settings.items())
