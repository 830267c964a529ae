"""The guardian of a scoring process: nothing that a scorer starts outlives it, its worker, or the limits of the whole tree.

It is the scorer's parent and the reaper of all that the scorer leaves behind: the kernel hands it every descendant whose own parent has
ended, those that began a session of their own (setsid) and daemons too. It holds one end of a pipe, the leash; the worker holds the other.
When the worker lets go, or dies by kill -9, the guardian ends the tree and itself. It computes nothing else, so that no scorer deep in a C
function can keep it from that. If the guardian itself is killed the kernel ends the scorer, and the worker what that had started; if both
are killed at one moment, the next worker on that machine does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollout.rewards.reward_cgroup import ControlGroup
from rollout.rewards.reward_usage import WrittenBytes, opens_more, takes_more

WRITTEN, FILES, MEMORY, PROCESSES = 95, 96, 97, 98
"""Exit codes of a guardian that ended its scorer because the tree wrote more bytes, or had more open files, memory or processes, than
allowed."""
WORKER = "EVENKEEL_REWARD_WORKER"
"""Environment variable of a guardian and of all processes below it. Names the worker that they belong to (`mark_of`)."""
MOST_PROCESSES = 128
"""Most processes of a scorer: itself and all that it started."""
_MOST_FILES = 4096
MOST_FILES_TOGETHER = 4 * _MOST_FILES
"""Most open files of a scorer and all that it started, each counted once, however many of them have it open."""
_LARGEST_FILE_BYTES = 4 << 30
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
    doesn't count; the guardian watches shared memory), open files, and the size of a file; the guardian watches what all of them have and
    write together. There are no core dumps."""
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


def guard(
    scorer: int,
    leash: int,
    parent: int,
    memory_bytes: int | None,
    group: ControlGroup | None,
    *,
    begun: int | None = None,
    written_bytes: int | None = None,
) -> int:
    """Wait until the scorer or the worker ends or a limit is passed; then kill the whole tree. Returns: the scorer's exit code if it ended,
    WRITTEN, FILES, MEMORY or PROCESSES if a limit was passed, else 0.

    Args:
        scorer: process id of a child.
        leash: file descriptor that becomes readable when the worker lets go.
        parent: process id of the worker.
        group: keeps memory and processes once it holds the scorer. Until then, and without a group, this function checks them, too.
        begun: event counter (eventfd) that the scorer adds to as it begins a completion; None: it is at its first and only one.
        written_bytes: most for one completion; None: no limit.
    """
    code = None
    written = WrittenBytes(lambda: _everyone(os.getpid()), has_begun=begun is None)
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
            elif code is None:
                tree = descendant_pids(os.getpid())
                code = None if is_kept else _beyond_limits(tree, memory_bytes)
                if code is None and opens_more(tree, MOST_FILES_TOGETHER):
                    code = FILES
                if written_bytes is not None and written.bytes(has_begun=_has_begun(begun)) > written_bytes:
                    code = code or WRITTEN
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


def _beyond_limits(tree: set[int], memory_bytes: int | None) -> int | None:
    if len(tree) > MOST_PROCESSES:
        return PROCESSES
    return MEMORY if memory_bytes is not None and takes_more(tree, memory_bytes) else None


def limit_passed(code: int, memory_gib: float | None, written_gib: float | None) -> str | None:
    """Which limit an exit code of `guard` speaks of, and what helps; None: of none."""
    return {
        MEMORY: f"all that it started took more than {memory_gib or 0:g} GiB together, rollout.reward.memory_gib",
        PROCESSES: f"it had started more than {MOST_PROCESSES} processes",
        FILES: f"it and all that it started had more than {MOST_FILES_TOGETHER} open files together; have it close those that it has read",
        WRITTEN: (
            f"it and all that it started wrote more than {written_gib or 0:g} GiB of files for one answer, rollout.reward.written_gib; "
            "remove what it has left on the disk"
        ),
    }.get(code)


def _has_begun(begun: int | None) -> bool:
    """Whether the scorer has begun a completion since this was asked last."""
    with contextlib.suppress(BlockingIOError):
        return begun is not None and os.eventfd_read(begun) > 0
    return False


def end_tree(group: ControlGroup | None = None) -> None:
    """Kill all descendants of this process, and whoever is in the group."""

    def left() -> set[int]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return descendant_pids(os.getpid()) | (group.members() if group else set())

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
    tree = descendant_pids(os.getppid()) - {os.getpid()}
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


def descendant_pids(pid: int) -> set[int]:
    """Ids of all processes below a process, as the kernel lists them (Linux), zombies left out."""
    return {one for one in _everyone(pid)[1:] if not _is_zombie(one)}


def _everyone(pid: int) -> list[int]:
    """Ids of a process and all below it, zombies too, parents before their children."""
    found = {pid: None}
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
    return found


def _is_zombie(pid: int) -> bool:
    return _parent(pid) is None


def _parent(pid: int) -> int | None:
    """Id of a process's parent; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            state, parent, _ = file.read().rpartition(b")")[2].split(maxsplit=2)
    except OSError:
        return None
    return None if state in b"ZX" else int(parent)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
