"""The processes below this one: found, adopted when their parent dies, and ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from evenkeel.rollout.parent_death import adopt_orphans

if TYPE_CHECKING:
    import psutil

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
    with contextlib.suppress(OSError, AttributeError):
        adopt_orphans(is_on=is_on)


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
