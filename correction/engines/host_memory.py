"""Free memory of the C library's heap goes back to the system.

What a pass or an update takes for a moment lies between what stays, such as kernels that were compiled meanwhile; the heap has holes then,
which the C library keeps. They were two thirds of what an engine on a CPU held after twenty minutes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from functools import cache

_PERIOD_S = 30.0
"""To give back, and to find anew, a few hundred megabytes takes a tenth of a second."""
_next_s = 0.0
_at_work = threading.Lock()
"""Held by the thread that gives back."""


def give_back_now_and_then() -> None:
    """At most every 30 s in a process; cheap in between. Without glibc: nothing happens."""
    if _is_due():
        give_back()


def give_back_in_thread() -> None:
    """As `give_back_now_and_then`, for who can't stand still: it returns at once, a thread does the work, and there are never two of them.

    Python goes on meanwhile, and waits only where it allocates in the part of the heap that is looked through just then.
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
    except RuntimeError:  # the machine has no thread left; it is tried again
        _at_work.release()


def _is_due() -> bool:
    global _next_s
    if (now := time.monotonic()) < _next_s:
        return False
    _next_s = now + _PERIOD_S
    return True


def give_back() -> None:
    """Return each free page of the heap."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    trim: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
