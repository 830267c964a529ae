"""Python stacks of other processes, even of one that is blocked in C: at a signal a process writes its stacks into a file in memory.

The file is found by its name among the process's open files. Only a process that has such a file gets the signal, which would end any
other. The name contains the Ray job, if there is one; children inherit it. That tells apart the processes of several runs on one node. A
stopped process writes nothing; its state is then read from the kernel.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_NAME = "evenkeel-stacks"
# Environment variable in which Ray gives a process the id of its job.
_JOB = "RAY_JOB_ID"
_SIGNAL = signal.SIGUSR2  # neither Ray nor SGLang nor torch use it in a process of ours
_WRITTEN_S, _POLL_S = 2.0, 0.05


@cache
def register_stack_dump() -> None:
    """Have this process answer `stacks_of` from now on. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        file = os.fdopen(os.memfd_create(f"{_NAME}-{own_job()}"), "ab", buffering=0)
        faulthandler.register(_SIGNAL, file, all_threads=True)
        register_stack_dump.__dict__["file"] = file  # faulthandler keeps the number alone


def own_job() -> str:
    """The Ray job that this process was started for; empty: none."""
    return os.environ.get(_JOB, "")


def stacks_of(pids: Iterable[int], *, job: str = "") -> dict[int, str]:
    """Stacks of each of these processes of this node, innermost function first; the state of one that doesn't answer.

    Processes without `register_stack_dump` are left out.
    Args: job: a Ray job; processes of other jobs are left out, too. Empty: those of all jobs are asked.
    """
    asked: dict[int, tuple[Path, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            if (file := _file_of(pid, job)) is not None:
                asked[pid] = file, file.stat().st_size
                os.kill(pid, _SIGNAL)
    found: dict[int, str] = {}
    until = time.monotonic() + _WRITTEN_S
    while (missing := asked.keys() - found.keys()) and time.monotonic() < until:
        time.sleep(_POLL_S)
        for pid in missing:
            with contextlib.suppress(OSError):
                file, size = asked[pid]
                if file.stat().st_size > size:
                    time.sleep(_POLL_S)  # it is being written
                    found[pid] = file.read_bytes()[size:].decode(errors="replace")
    return found | {pid: f"says nothing; state {_state(pid)}\n" for pid in asked.keys() - found.keys()}


def _file_of(pid: int, job: str) -> Path | None:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            if os.readlink(link).startswith(f"/memfd:{_NAME}-{job}"):
                return link
    return None


def _state(pid: int) -> str:
    """State of a process as the kernel names it: "T (stopped)", for instance."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
