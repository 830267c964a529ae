"""The guardian of a scoring process: nothing that a scorer starts outlives it, its worker, or the limits of the whole tree.

It is the scorer's parent and the reaper of all that the scorer leaves behind: the kernel hands it every descendant whose own parent has
ended, those that began a session of their own (setsid) and daemons too. It holds one end of a pipe, the leash; the worker holds the other.
When the worker lets go, or dies by kill -9, the guardian ends the tree and itself. It computes nothing else, so that no scorer deep in a C
function can keep it from that. If the guardian itself is killed the kernel ends the scorer, and the worker what that had started; if both
are killed at one moment, the next worker on that machine does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollout.reward_cgroup import ControlGroup

MEMORY, PROCESSES = 97, 98
"""Exit codes of a guardian that ended its scorer because the tree used more memory, or had more processes, than allowed."""
WORKER = "EVENKEEL_REWARD_WORKER"
"""Environment variable of a guardian and of all processes below it. Names the worker that they belong to (`mark_of`)."""
MOST_PROCESSES = 128
"""Most processes of a scorer: itself and all that it started."""
_MOST_FILES = 4096
_LARGEST_FILE_BYTES = 4 << 30
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1
_WAIT_S = 1.0
"""Seconds between looks where the kernel keeps the limits."""
_END_S = 5.0
_CLEAR_S = 3.0
"""Longest wait for the ends of killed processes. A guardian hears of them at its next look, a second later at most."""
_GRACE_S = 10.0
"""How long guardians whose worker has ended may take to end their trees: twice what one needs."""


def limit_process(memory_bytes: int | None) -> None:
    """Limit this process, and each process that it starts separately: private writable memory (what a library merely reserves or maps
    doesn't count; the guardian watches shared memory), open files, and the size of a file. There are no core dumps."""
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
    """Have descendants whose parents end become children of this process (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def guard(scorer: int, leash: int, parent: int, memory_bytes: int | None, group: ControlGroup | None) -> int:
    """Wait until the scorer or the worker ends or a limit is passed; then kill the whole tree. Returns: the scorer's exit code if it ended,
    MEMORY or PROCESSES if a limit was passed, else 0.

    Args:
        scorer: process id of a child.
        leash: file descriptor that becomes readable when the worker lets go.
        parent: process id of the worker.
        group: keeps the limits once it holds the scorer. Until then, and without a group, this function checks them.
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
    """Exit code of the scorer, or minus the signal that killed it; None while it runs. Also reaps other children that have ended."""
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
    """Whether private and shared memory of these processes together exceed the limit. A single process that shares none has a limit of its
    own (`limit_process`)."""
    sizes = [_resident_bytes(pid) for pid in tree]
    private, mapped = sum(own for own, _ in sizes), sum(shared for _, shared in sizes)
    if private + mapped <= memory_bytes or (len(tree) == 1 and not mapped):
        return False
    # A page that several processes have mapped was counted for each. To count it once the kernel walks through all pages, so only now.
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
    """Called by the worker when a guardian was killed: kill the processes that it guarded, and remove its control group."""
    group = ControlGroup.of(guardian)
    # Look twice: a process that is just being handed to a living guardian is seen below nobody, but only once.
    for pid in _end(lambda: (_orphans() & _orphans()) | group.members(), group.kill) - _orphans():
        _signal(pid, signal.SIGCONT)  # it was no orphan: it is below a living guardian by now
    group.remove()


def _orphans() -> set[int]:
    """Ids of processes that were started below guardians of this process and have no living guardian above them (Linux)."""
    mark, own = f"{WORKER}={mark_of(os.getpid())}".encode(), os.getpid()
    parents, marked = dict[int, int | None](), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        parents[pid] = _parent(pid)
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    # Found by parent ids, which every kernel has; some kernels have no lists of children, and a living guardian would pass for an orphan.
    living = {pid for pid in marked if parents[pid] == own}
    while below := {pid for pid, parent in parents.items() if parent in living} - living:
        living |= below
    return {pid for pid in marked - living if parents[pid] is not None}


@functools.cache
def mark_of(worker: int) -> str:
    """The value of WORKER below a worker: its process id, its start time, and the namespaces of both; the id alone if the others can't be
    read.

    The id alone isn't enough: the system uses ids again, and in another container it is another process.
    Args: worker: this process's id.
    """
    with contextlib.suppress(OSError):
        return f"{worker} {_began(worker)} {_counting()}"
    return str(worker)


def end_strays(grace_s: float = _GRACE_S) -> None:
    """Called by a worker at its start: kill processes left by dead workers whose guardians were killed at the same moment (Linux).

    They are found by their mark in the environment, if they are this user's and in this container. A process that has emptied its
    environment isn't found.
    Args: grace_s: how long to wait for living guardians that are about to do the same.
    """
    if sys.platform != "linux" or WORKER in os.environ:  # below a scorer: this process, or what it needs, may itself be a stray
        return
    dead, until = set(_strays().values()), time.monotonic() + grace_s
    while dead & set(_strays().values()) and time.monotonic() < until:
        time.sleep(_WAIT_S)
    _end(lambda: {pid for pid, mark in _strays().items() if mark in dead}, lambda: None, _signal_stray)


def _strays() -> dict[int, str]:
    """Process ids of strays -> marks of their dead workers."""
    found = {pid: _mark_of_dead(pid) for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))}
    return {pid: mark for pid, mark in found.items() if mark}


def _mark_of_dead(pid: int) -> str:
    """A process's mark if its worker is surely dead; empty otherwise."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, ValueError, OverflowError):
        if folder.stat().st_uid == os.geteuid():
            variables = (one.partition(b"=") for one in (folder / "environ").read_bytes().split(b"\0"))
            mark = next((value for name, _, value in variables if name == WORKER.encode()), b"").decode()
            return mark if _is_dead(mark) else ""
    return ""


def _is_dead(mark: str) -> bool:
    """Whether the worker of a mark has ended. Raises: OSError, ValueError or OverflowError if that can't be found out here."""
    worker, began, counting = mark.split(" ", 2)
    if counting != _counting():
        return False
    try:
        os.kill(int(worker), 0)
    except ProcessLookupError:
        return True
    return _began(int(worker)) != began  # another process, under an id that is used again


def _began(pid: int) -> str:
    """Start time of a process, in the kernel's ticks since the machine's start. Raises: OSError; ValueError."""
    *_, began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
    return str(int(began))


def _counting() -> str:
    """The namespaces of process ids and times. Raises: OSError if /proc shows those of another one."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise ProcessLookupError("/proc is another container's")
    return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))


def _signal_stray(pid: int, number: int) -> None:
    """Send a signal to a stray, and not to another process that gets its id a moment later."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _mark_of_dead(pid):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _end(find: Callable[[], set[int]], kill: Callable[[], object], send: Callable[[int, int], None] | None = None) -> set[int]:
    """Kill the processes that `find` returns until it returns none, for at most _END_S. They are stopped first, so that they start no
    others.

    Args:
        kill: called before these processes are killed, for other ways of killing them.
        send: takes a process id and a signal; None: sends it to whoever has that id.
    Returns: ids of all processes that were stopped.
    """
    until = time.monotonic() + _END_S
    stopped: set[int] = set()
    send = send or _signal
    while (found := find()) and time.monotonic() < until:
        new = found - stopped
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
        if not new:
            kill()
            for pid in found:
                send(pid, signal.SIGKILL)
            time.sleep(0.005)
    return stopped


def clear_leftovers() -> None:
    """Called after a scorer failed: kill the processes that it started, if they are so many that the next completion could start too
    few. A killed process counts in a control group until its parent has heard of its end: wait for that, too."""
    tree = descendants(os.getppid()) - {os.getpid()}
    if len(tree) <= MOST_PROCESSES // 2:
        return
    for pid in tree:
        _signal(pid, signal.SIGKILL)
    until = time.monotonic() + _CLEAR_S
    while tree and time.monotonic() < until:
        for pid in tree:
            with contextlib.suppress(ChildProcessError):  # the guardian's, when its own parent has ended
                os.waitpid(pid, os.WNOHANG)
        if tree := {pid for pid in tree if Path("/proc", str(pid)).exists()}:
            time.sleep(_LOOK_S)


def descendants(pid: int) -> set[int]:
    """Ids of all processes below a process, as the kernel lists them (Linux), zombies left out."""
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
    """Id of a process's parent; None if the process has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _resident_bytes(pid: int) -> tuple[int, int]:
    """Bytes of private memory, and of shared memory without a file (mmap, shm_open)."""
    sizes = _sizes(Path(f"/proc/{pid}/status"), "RssAnon", "RssShmem")
    return sizes["RssAnon"], sizes["RssShmem"]


def _share_of_shared_bytes(pid: int) -> int:
    """Bytes of shared memory without a file, each page divided by the number of processes that have mapped it."""
    return _sizes(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Shmem")["Pss_Shmem"]


def _sizes(path: Path, *names: str) -> dict[str, int]:
    """Bytes by name, from lines such as `RssAnon:  12 kB`; 0 for names that are missing, or if the process has ended."""
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
