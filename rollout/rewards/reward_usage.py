"""What the tree of a scorer uses, as /proc has it (Linux): memory, open files, and bytes written to disks.

The kernel limits each process by itself (`limit_process` in reward_guardian.py), and with a control group the memory and the
processes of a tree. Nothing in it limits the files and the bytes of a tree: its guardian adds them up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

Numbers = tuple[int, int, int]


def takes_more(tree: set[int], memory_bytes: int) -> bool:
    """Whether private and shared memory of these processes together exceed the limit. A single process that shares none has a limit of its
    own (`limit_process`)."""
    sizes = [_resident_bytes(pid) for pid in tree]
    private, mapped = sum(own for own, _ in sizes), sum(shared for _, shared in sizes)
    if private + mapped <= memory_bytes or (len(tree) == 1 and not mapped):
        return False
    # A page that several processes have mapped was counted for each. To count it once the kernel walks through all pages, so only now.
    return private + sum(map(_share_of_shared_bytes, tree)) > memory_bytes


def opens_more(tree: set[int], files: int) -> bool:
    """Whether these processes together have more files open; one that several have inherited, or opened each for itself, counts once."""
    # Their names are read only if there are so many that they may be too many.
    return sum(map(_open_files, tree)) > files and len(set().union(*map(_names_of_open_files, tree))) > files


class WrittenBytes:
    """Bytes that a tree has written for its latest completion.

    On a disk: the pages that it has changed, by write() or in a mapped file, less those that were gone again before they got there
    (write_bytes and cancelled_write_bytes of /proc/PID/io). wchar would count pipes, terminals and /dev/null as well, where an endless
    program that is being scored may write gigabytes a second. A temporary folder in memory (tmpfs) has no such pages: what write() took
    beyond them counts there, as far as that file system has become fuller meanwhile.

    Processes that have ended count: as zombies by themselves, then with the parent that waited for them, the guardian for those that have
    lost theirs. What is nobody's then, because the parent ignores SIGCHLD, counts as it was at the last look, less what others have
    written since then: by so much the sum has fallen.

    What can't be known: that, and what such a process wrote after that look, or in a life between two looks; what one wrote whose numbers
    this user may not read (setuid), until it has been waited for; bytes reserved and never written (fallocate); files in memory elsewhere
    than in the temporary folder, such as /dev/shm. Those that are mapped are shared memory, and a control group counts all of them as
    memory. And on a tmpfs that becomes fuller by others' files, what a program prints counts as far as these have grown.

    It begins anew with each completion: a scorer lives as long as its worker, and the numbers don't say which of its files on the disk it
    has deleted. So what is left behind by one completion after the other isn't added up, nor is what it writes before the first of them: it
    may fetch data there.
    """

    def __init__(self, find: Callable[[], list[int]], *, has_begun: bool = False) -> None:
        """Args:
        find: ids of the guardian and of all processes below it, parents before their children, zombies included.
        has_begun: there is no set-up: what comes now is a completion's.
        """
        self._find = find
        self._folder = folder if _is_in_memory(folder := os.environ.get("TMPDIR") or "/tmp") else None
        self._seen = self._gone = (0, 0, 0)
        self._last = self._state()
        self._first = self._last if has_begun else None

    def bytes(self, *, has_begun: bool) -> int:
        """Look once more. Args: has_begun: a completion has, since the last look; it may have written since then."""
        now = self._state()
        if has_begun:
            self._first = self._last
        self._last = now
        if self._first is None:
            return 0
        self._first = _each(min, self._first, now)  # what is deleted makes room for as much
        on_disk, elsewhere, fuller = _each(int.__sub__, now, self._first)
        return on_disk + min(elsewhere, fuller)

    def _state(self) -> Numbers:
        """Bytes on disks, bytes that write() took beyond those, and bytes that the temporary folder's file system has in memory."""
        for _ in range(3):
            now = _each_sum(map(_written_by, self._find()))
            if min(_each(int.__sub__, now, self._seen)) >= 0:
                break  # otherwise one was being waited for, and counted neither for itself nor with its parent: look again
        self._gone = _each(lambda gone, less: gone + max(0, less), self._gone, _each(int.__sub__, self._seen, now))
        self._seen = now
        pages, cancelled, taken = _each(int.__add__, now, self._gone)
        return pages - cancelled, taken - pages, _used_bytes(self._folder)


def _each(function: Callable[[int, int], int], left: Numbers, right: Numbers) -> Numbers:
    return function(left[0], right[0]), function(left[1], right[1]), function(left[2], right[2])


def _each_sum(values: Iterable[Numbers]) -> Numbers:
    total = (0, 0, 0)
    for value in values:
        total = _each(int.__add__, total, value)
    return total


def _written_by(pid: int) -> Numbers:
    """write_bytes, cancelled_write_bytes and wchar of a process and of all that it has waited for; 0 where they can't be read."""
    with contextlib.suppress(OSError, ValueError, KeyError), open(f"/proc/{pid}/io", "rb", buffering=0) as file:
        found = dict(line.split(b": ") for line in file.read().splitlines())
        return int(found[b"write_bytes"]), int(found[b"cancelled_write_bytes"]), int(found[b"wchar"])
    return 0, 0, 0


def _is_in_memory(folder: str) -> bool:
    """Whether a folder is on a tmpfs."""
    with contextlib.suppress(OSError, ValueError):
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.startswith("tmpfs ")
    return False


def _used_bytes(folder: str | None) -> int:
    """Bytes in use on the file system of a folder; 0: there is no folder."""
    with contextlib.suppress(OSError):
        if folder is not None:
            found = os.statvfs(folder)
            return (found.f_blocks - found.f_bfree) * found.f_frsize
    return 0


def _open_files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))  # Linux before 6.2 has no size of it
    return 0


def _names_of_open_files(pid: int) -> set[str]:
    found = set[str]()
    with contextlib.suppress(OSError):
        for number in os.listdir(folder := f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"{folder}/{number}"))
    return found


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
