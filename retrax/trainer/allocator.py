"""Keeping the host memory that a step frees, for the next step.

On the CPU every compiled step asks the C library for its temporary memory and gives it
back at the end. glibc hands large pieces back to the system, so the next step meets
new pages, and the system fills every one of them with zeros first: a tenth to a
third of the step of a 6-layer language model (benchmarks/language_model.py).
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MAX_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory for this process.

    It holds for the whole process and from then on, so a program decides on it, not a
    library: `retrax train` does it. The process then keeps the memory of its largest
    step until it ends. Call it before the first step.

    Returns:
      Whether it is in force; only glibc (Linux) knows how.

    Example:
      >>> from retrax.trainer import allocator
      >>> allocator.keep_freed_memory() in (True, False)
      True
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena: the others are too small for large pieces, which then come by mmap.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _MAX_INT), (_M_ARENA_MAX, 1))
    return all([mallopt(name, value) == 1 for name, value in settings])
