"""Returns free memory of the C library's heap to the system.

A forward pass or a weight update frees its buffers, but allocations that stay, such as kernels compiled meanwhile, lie between them. The C
library keeps these holes: they were two thirds of the memory of an engine on a CPU after twenty minutes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from functools import cache

_PERIOD_S = 30.0
"""Returning a few hundred megabytes, and allocating them anew later, takes a tenth of a second."""
_next_s = 0.0
_at_work = threading.Lock()
"""Held while a thread is giving memory back."""


def give_back_now_and_then() -> None:
    """Give memory back, at most every 30 s in a process; in between return at once. Does nothing without glibc."""
    if _is_due():
        give_back()


def give_back_in_thread() -> None:
    """As `give_back_now_and_then`, for callers that must not block: return at once, and let a thread do the work, one at a time.

    Other Python threads run meanwhile. They wait only if they allocate from the part of the heap that is being trimmed.
    """
    if not _is_due() or not _at_work.acquire(blocking=False):
        return

    def work() -> None:
        try:
            give_back()
        finally:
            _at_work.release()

    try:
        threading.Thread(target=work, name="give-back-memory", daemon=True).start()
    except RuntimeError:  # the machine has no thread left; a later call tries again
        _at_work.release()


def _is_due() -> bool:
    global _next_s
    if (now := time.monotonic()) < _next_s:
        return False
    _next_s = now + _PERIOD_S
    return True


def give_back() -> None:
    """Return every free page of the heap to the system."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    trim: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
