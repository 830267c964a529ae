"""A task with its questions, which may have to be fetched: from a disk that hangs, from a hub that is slow."""

from __future__ import annotations

from functools import partial

from evenkeel.actors.processes.disk_at_start import by_disk_at_start
from evenkeel.rollout.config import TaskConfig
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.tasks import Task, build_task

DISK_OR_HUB = "their disk, or the hub"
IF_SLOW = "If it is only slow, raise deadlines.start_s; what has been downloaded by now is kept"


def questions(task: TaskConfig, limit_s: float, encoder: ChatEncoder | None = None) -> Task:
    """The task; all questions of a file or a data set are in memory then. It is told every half minute what is waited for.

    Args: limit_s: deadline, seconds; some minutes at least.
    Raises: as build_task; DiskLate.
    """
    what = f"the questions of the task ({getattr(task, 'path', task.kind)})"
    make = partial(build_task, task, encoder)
    return by_disk_at_start(make, what, disk=DISK_OR_HUB, computes=True, remedy=IF_SLOW, limit_s=lambda: limit_s)
