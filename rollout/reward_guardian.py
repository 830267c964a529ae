"""The guardian of a scoring process: nothing that a scorer starts outlives it, its worker, or the limits of the whole tree.

It is the scorer's parent and the reaper of all that the scorer leaves behind: the kernel hands it every descendant whose own parent has
ended, those that began a session of their own (setsid) and daemons too. It holds one end of a pipe, the leash; the worker holds the other.
When the worker lets go, or dies by kill -9, the guardian ends the tree and itself. It computes nothing else, so that no scorer deep in a C
function can keep it from that. If the guardian itself is killed the kernel ends the scorer, and the worker what that had started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollout.reward_cgroup import ControlGroup

MEMORY, PROCESSES = 97, 98
"""Exit codes of a guardian that ended its scorer: the tree took more memory, or had more processes than it may."""
WORKER = "EVENKEEL_REWARD_WORKER"
"""Variable of the environment with the worker's process id: of a guardian, and of all that is started below it."""
MOST_PROCESSES = 128
"""Processes of a scorer, itself and all that it started."""
_MOST_FILES = 4096
_LARGEST_FILE_BYTES = 4 << 30
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1
_WAIT_S = 1.0
"""Seconds between looks where the kernel keeps the limits."""
_END_S = 5.0


def limit_process(memory_bytes: int | None) -> None:
    """Of this process and, each for itself, of all that it starts: private writable memory (what a library merely reserves or maps doesn't
    count; shared memory is looked after by the guardian), open files, the size of a file, no core dumps."""
    import resource

    def lower(kind: int, limit: int) -> None:
        _, hard = resource.getrlimit(kind)
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))

    if memory_bytes is not None:
        lower(resource.RLIMIT_DATA, memory_bytes)
    lower(resource.RLIMIT_NOFILE, _MOST_FILES)
    lower(resource.RLIMIT_FSIZE, _LARGEST_FILE_BYTES)
    lower(resource.RLIMIT_CORE, 0)


def become_reaper() -> None:
    """Descendants whose parents end become children of this process (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def guard(scorer: int, leash: int, parent: int, memory_bytes: int | None, group: ControlGroup | None) -> int:
    """Wait for the scorer's end, the worker's, or a limit; no process is left. Returns: the exit code, that of the scorer if it ended.

    Args:
        scorer: process id of a child.
        leash: file descriptor that becomes readable when the worker lets go.
        parent: process id of the worker.
        group: keeps the limits once it holds the scorer. Until then, and without one, they are looked after here.
    """
    code = None
    with contextlib.suppress(OSError):
        watched = [leash, os.pidfd_open(scorer)]
        while code is None and os.getppid() == parent:
            is_kept = group is not None and group.holds(scorer)
            readable, _, _ = select.select(watched, [], [], _WAIT_S if is_kept else _LOOK_S)
            if leash in readable:
                break
            code = _ended(scorer)
            if group is not None and group.ran_out_of_memory():
                code = MEMORY
            elif code is None and not is_kept:
                code = _beyond_limits(memory_bytes)
    end_tree(group)
    return 0 if code is None else code


def _ended(scorer: int) -> int | None:
    """Exit code of the scorer, minus the signal if one killed it; None while it runs. Others that have ended are reaped."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == scorer:
                found = os.waitstatus_to_exitcode(status)
    return found


def _beyond_limits(memory_bytes: int | None) -> int | None:
    tree = descendants(os.getpid())
    if len(tree) > MOST_PROCESSES:
        return PROCESSES
    return MEMORY if memory_bytes is not None and _takes_more(tree, memory_bytes) else None


def _takes_more(tree: set[int], memory_bytes: int) -> bool:
    """Private and shared memory of these processes is more than that. For one that is alone and shares none, its own limit is enough."""
    sizes = [_resident_bytes(pid) for pid in tree]
    private, mapped = sum(own for own, _ in sizes), sum(shared for _, shared in sizes)
    if private + mapped <= memory_bytes or (len(tree) == 1 and not mapped):
        return False
    # A page that several have mapped was counted for each. To count it once the kernel walks through all pages: hence not at every look.
    return private + sum(map(_share_of_shared_bytes, tree)) > memory_bytes


def end_tree(group: ControlGroup | None = None) -> None:
    """Kill all descendants of this process, and whoever is in the group."""

    def left() -> set[int]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return descendants(os.getpid()) | (group.members() if group else set())

    _end(left, group.kill if group else lambda: None)
    if group is not None:
        group.remove()


def end_orphans(guardian: int) -> None:
    """For the worker, when this guardian has been killed: kill what that was to guard, and remove its control group."""
    group = ControlGroup.of(guardian)
    # Looked at twice: who gets a living guardian for a parent just then is seen below nobody, once.
    for pid in _end(lambda: (_orphans() & _orphans()) | group.members(), group.kill) - _orphans():
        _signal(pid, signal.SIGCONT)  # it was none: below a living guardian by now
    group.remove()


def _orphans() -> set[int]:
    """What was started below guardians of this process, but for living guardians and all below them (Linux)."""
    mark, own = f"{WORKER}={os.getpid()}".encode(), os.getpid()
    parents, marked = dict[int, int | None](), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        parents[pid] = _parent(pid)
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    # By parents, which every kernel tells; without the list of its children a living guardian would pass for an orphan.
    living = {pid for pid in marked if parents[pid] == own}
    while below := {pid for pid, parent in parents.items() if parent in living} - living:
        living |= below
    return {pid for pid in marked - living if parents[pid] is not None}


def _end(find: Callable[[], set[int]], kill: Callable[[], object]) -> set[int]:
    """Kill what `find` finds until that is nothing. They are stopped first: what is stopped starts no other.

    Args: kill: kills more.
    Returns: all that were stopped.
    """
    until = time.monotonic() + _END_S
    stopped: set[int] = set()
    while (found := find()) and time.monotonic() < until:
        new = found - stopped
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
        if not new:
            kill()
            for pid in found:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.005)
    return stopped


def clear_leftovers() -> None:
    """For a scorer that has failed: kill what it has started, if that is so much that it would keep the next completion from its own."""
    tree = descendants(os.getppid()) - {os.getpid()}
    if len(tree) > MOST_PROCESSES // 2:
        for pid in tree:
            _signal(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """Process ids of all below a process, as the kernel lists them (Linux); those that have ended and wait for their parent don't count."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return {one for one in found if not _is_zombie(one)}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _is_zombie(pid: int) -> bool:
    return _parent(pid) is None


def _parent(pid: int) -> int | None:
    """Process id; None of one that has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _resident_bytes(pid: int) -> tuple[int, int]:
    """Private memory, and shared memory that is no file's (mmap, shm_open)."""
    sizes = _sizes(Path(f"/proc/{pid}/status"), "RssAnon", "RssShmem")
    return sizes["RssAnon"], sizes["RssShmem"]


def _share_of_shared_bytes(pid: int) -> int:
    """Shared memory that is no file's, each page divided by the number of processes that have mapped it."""
    return _sizes(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Shmem")["Pss_Shmem"]


def _sizes(path: Path, *names: str) -> dict[str, int]:
    """Bytes by name, of lines such as `RssAnon:  12 kB`; 0 for those that aren't there, and of a process that has ended."""
    found = dict.fromkeys(names, 0)
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, size = line.partition(":")
            if name in found:
                found[name] = int(size.split()[0]) * 1024
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
