"""Waiting for work on the run folder's disk in a run's event loop. disk.py has the same for where there is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.processes.disk import ON_DISK, DiskLate
from evenkeel.actors.processes.supervision import wait_for

T = TypeVar("T")
ByDisk = Callable[..., Awaitable[Any]]
"""Type of `by_disk` with a run's settings filled in: takes the work, its name, and `counts_from`."""
_HANGS = "When that disk answers again, a resume goes on from the last checkpoint. The deadline follows from deadlines.bytes_per_s"


async def wait_for_disk(
    work: Awaitable[T],
    what: str,
    *,
    deadline_s: float,
    notice: Callable[[WaitNotice], None],
    counts_from: Callable[[], float] | None = None,
) -> T:
    """The result of work on the run folder's disk, as of wait_for. Raises: as the work; DiskLate."""
    named = f"{what} -> {ON_DISK}"
    return await wait_for(work, named, deadline_s=deadline_s, notice=notice, counts_from=counts_from, raises=DiskLate)


async def by_disk(
    work: Awaitable[T],
    what: str,
    *,
    deadlines: DeadlinesConfig,
    notice: Callable[[WaitNotice], None],
    counts_from: Callable[[], float] | None = None,
) -> T:
    """Wait for work on the run folder's disk, with a name and an end. A thread that has begun it can't be stopped.

    Args:
        notice, counts_from: as wait_for.
    Raises: as the work; DiskLate after `disk_s`, with what to do.
    """
    try:
        return await wait_for_disk(work, what, deadline_s=deadlines.disk_s, notice=notice, counts_from=counts_from)
    except DiskLate as error:
        error.remedy = _HANGS
        raise
