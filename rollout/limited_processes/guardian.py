"""The guardian of a process with limits: nothing that its child starts outlives it, its worker, or the limits of the whole tree.

It is the child's parent and the reaper of all that the child leaves behind: the kernel hands it every descendant whose own parent has
ended, those that began a session of their own (setsid) and daemons too. It holds one end of a pipe, the leash; the worker holds the other.
When the worker lets go, or dies by kill -9, the guardian ends the tree and itself. It computes nothing else, so that no child deep in a C
function can keep it from that. If the guardian itself is killed the kernel ends the child, and the worker the rest of its process group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

MEMORY, PROCESSES = 97, 98
"""Exit codes of a guardian that ended its child because the tree had more memory or processes than allowed."""
MOST_PROCESSES = 128
"""Most processes of a child: itself and all that it started. One that has many rollouts may have more."""
LARGEST_FILE_BYTES = 4 << 30
"""Largest file that a process may write."""
_MOST_FILES = 4096
_LOOK_S = 0.1
_END_S = 5.0


def limit_process(memory_bytes: int | None) -> None:
    """Limit this process, and each process that it starts separately: private writable memory (what a library merely reserves or maps
    doesn't count; the guardian watches shared memory and files in memory, and what all of them have together), open files, and the size of
    a file. There are no core dumps."""
    import resource

    def lower(kind: int, limit: int) -> None:
        _, hard = resource.getrlimit(kind)
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))

    if memory_bytes is not None:
        lower(resource.RLIMIT_DATA, memory_bytes)
    lower(resource.RLIMIT_NOFILE, _MOST_FILES)
    lower(resource.RLIMIT_FSIZE, LARGEST_FILE_BYTES)
    lower(resource.RLIMIT_CORE, 0)


def guard(child: int, leash: int, parent: int, memory_bytes: int | None, most_processes: int) -> int:
    """Wait until the child or the worker ends or a limit is passed; then kill the whole tree. Returns: the child's exit code if it ended,
    MEMORY or PROCESSES if a limit was passed, else 0.

    Args:
        child: its process id.
        leash: file descriptor that becomes readable when the worker lets go.
        parent: process id of the worker.
    """
    code = None
    with contextlib.suppress(OSError):
        poll = select.poll()  # select takes no descriptor above 1,023, and a worker with many processes has those
        for watched in (leash, os.pidfd_open(child)):
            poll.register(watched, select.POLLIN | select.POLLHUP)
        while code is None and os.getppid() == parent:
            if leash in dict(poll.poll(_LOOK_S * 1000)):
                break
            code = _ended(child)
            if code is None:
                tree = descendant_pids(os.getpid())
                if len(tree) > most_processes:
                    code = PROCESSES
                elif memory_bytes is not None and beyond_memory(tree, memory_bytes):
                    code = MEMORY
    end_tree()
    return 0 if code is None else code


def limit_passed(code: int, memory_gib: float | None, most_processes: int, setting: str) -> str | None:
    """Which limit an exit code of `guard` speaks of; None: of none. Args: setting: the section of memory_gib."""
    return {
        MEMORY: f"all that it started took more than {memory_gib or 0:g} GiB together, {setting}.memory_gib",
        PROCESSES: f"it had started more than {most_processes} processes",
    }.get(code)


def _ended(child: int) -> int | None:
    """Exit code of the child, or minus the signal that killed it; None while it runs. Also reaps other children that have ended."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = os.waitstatus_to_exitcode(status)
    return found


def end_tree() -> None:
    """Kill all descendants of this process, for at most _END_S. They are stopped first, so that they start no others."""
    until = time.monotonic() + _END_S
    stopped: set[int] = set()
    while (found := descendant_pids(os.getpid())) and time.monotonic() < until:
        if new := found - stopped:
            _send(new, signal.SIGSTOP)
            stopped |= new
        else:
            _send(found, signal.SIGKILL)
            time.sleep(0.005)
        _reap()
    _reap()  # those that have ended since the last look


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


# --- what the tree has, as /proc says it (Linux) ---------------------------------------------------------------------


def descendant_pids(pid: int) -> set[int]:
    """Ids of all processes below a process, zombies left out."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = set(_children(waiting.pop())) - found
        found |= children
        waiting += children
    return {one for one in found if not _is_zombie(one)}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
    return True


def beyond_memory(tree: set[int], memory_bytes: int) -> bool:
    """Whether private and shared memory of these processes, and their open files in memory, exceed the limit together. A process alone that
    has neither of the latter has a limit of its own (`limit_process`). What is mapped of an open file in memory counts twice."""
    private = shared = 0
    for pid in tree:
        sizes = _sizes(f"/proc/{pid}/status", "RssAnon", "RssShmem")
        private += sizes["RssAnon"]
        shared += sizes["RssShmem"]
    in_files = _bytes_of_memory_files(tree)
    if private + shared + in_files <= memory_bytes or (len(tree) == 1 and not shared and not in_files):
        return False
    # A page that several processes have mapped was counted for each. To count it once the kernel walks through all pages, so only now.
    mapped = sum(_sizes(f"/proc/{pid}/smaps_rollup", "Pss_Shmem")["Pss_Shmem"] for pid in tree)
    return private + mapped + in_files > memory_bytes


def _bytes_of_memory_files(tree: set[int]) -> int:
    """What the files take that these processes have made with memfd_create: pages of those that nobody has mapped are in no count of a
    process's."""
    found: dict[int, int] = {}
    for pid in tree:
        with contextlib.suppress(OSError):
            for file in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith("/memfd:"):
                        of_file = os.stat(file)
                        found[of_file.st_ino] = of_file.st_blocks << 9
    return sum(found.values())


def _sizes(path: str, *names: str) -> dict[str, int]:
    """Bytes by name, from lines such as `RssAnon:  12 kB`; 0 for names that are missing, or if the process has ended."""
    found = dict.fromkeys(names, 0)
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            name, _, size = line.partition(":")
            if name in found:
                found[name] = int(size.split()[0]) * 1024
    return found
