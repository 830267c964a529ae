"""The processes below this one: found, adopted when their parent dies, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_PR_SET_CHILD_SUBREAPER = 36
"""Option of Linux's prctl: orphans among the descendants become children of this process, instead of init's."""
_ENDED_S = 5.0
"""Longest wait for a killed process to be gone."""


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """All processes below a process, or below this one."""
    import psutil

    try:
        return (process or psutil.Process()).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    """A process's command line; empty if the process is gone."""
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Within the block a descendant whose parent dies stays a descendant (on Linux), so that `end_new` finds it.

    Ray's daemon starts two agents that outlive it by a minute. If it is killed while it starts them, they could not be found otherwise.
    """
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def _set_subreaper(is_on: bool) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def end(processes: list[psutil.Process], *, grace_s: float = 0.0) -> None:
    """Kill those that are there after `grace_s` seconds, and wait a little for them to be gone."""
    import psutil

    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_ENDED_S)


def end_new(before: Collection[psutil.Process] = ()) -> None:
    """Kill all descendants but those of `before`, and those that they started while they were being killed."""
    until = time.monotonic() + _ENDED_S
    while (left := [process for process in descendants() if process not in before]) and time.monotonic() < until:
        end(left)
