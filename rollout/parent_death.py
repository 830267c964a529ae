"""What Linux does when a parent dies: with the process itself, or with the orphans below it. Elsewhere these functions do nothing."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(number: int) -> None:
    """Have the kernel send this process a signal at the death of the thread that started it. If that is dead already, none comes."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans(*, is_on: bool = True) -> None:
    """Have descendants whose parents die become children of this process, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(is_on))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
