"""A control group of its own for what a scorer starts, where this process may make one: the kernel then keeps the limits, to the byte.

Two layouts: version 2, where a group offers its children the controllers in cgroup.subtree_control, and version 1, where each controller
has a tree of its own. Containers often offer neither; reward_guardian.py then looks after the limits itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "evenkeel-reward-"
"""Prefix of a group's folder name; the guardian's process id follows."""


class ControlGroup:
    """Limits the memory and the number of processes of all that join it and all that these start; no process leaves it."""

    def __init__(self, folders: list[Path], is_version_2: bool) -> None:
        """Use ControlGroup.make."""
        self._folders, self._is_version_2 = folders, is_version_2

    @classmethod
    def make(cls, memory_bytes: int | None, processes: int) -> ControlGroup | None:
        """Make a group for this process; None if the system offers none. Also removes groups whose guardians were killed with their
        workers."""
        name = _name(os.getpid())
        try:
            places = dict(_places())
            _sweep(places.values())
            if {"memory", "pids"} <= places.keys():
                limits = [("memory", "memory.limit_in_bytes", memory_bytes), ("pids", "pids.max", processes)]
                group = cls([places["memory"] / name, places["pids"] / name], False)
            elif "" in places and {"memory", "pids"} <= set((places[""] / "cgroup.subtree_control").read_text().split()):
                limits = [("", "memory.max", memory_bytes), ("", "pids.max", processes)]
                group = cls([places[""] / name], True)
            else:
                return None
        except OSError:
            return None
        try:
            for folder in group._folders:
                folder.mkdir()
            for place, file, limit in limits:
                if limit is not None:
                    (places[place] / name / file).write_text(str(limit))
            return group
        except OSError:
            group.remove()
            return None

    @classmethod
    def of(cls, guardian: int) -> ControlGroup:
        """The group that a guardian has made for itself; an empty one if there is none. Args: guardian: its process id."""
        with contextlib.suppress(OSError):
            folders = [folder for _, place in _places() if (folder := place / _name(guardian)).is_dir()]
            return cls(folders, any((folder / "cgroup.kill").exists() for folder in folders))
        return cls([], False)

    def join(self) -> None:
        """Put this process into the group. Raises: OSError."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def holds(self, pid: int) -> bool:
        """Whether a process is in the group, under all of its limits. Args: pid: its process id."""
        return all(pid in _members(folder) for folder in self._folders)

    def members(self) -> set[int]:
        """Ids of all processes in the group, whatever their parents are."""
        return set().union(*map(_members, self._folders))

    def kill(self) -> None:
        """SIGKILL to all."""
        with contextlib.suppress(OSError):
            if self._is_version_2:
                (self._folders[0] / "cgroup.kill").write_text("1")
        for pid in self.members():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed a member for want of memory."""
        with contextlib.suppress(OSError, ValueError, StopIteration):
            file = "memory.events" if self._is_version_2 else "memory.oom_control"
            lines = (self._folders[0] / file).read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill ")) > 0
        return False

    def remove(self) -> None:
        """Remove the groups, once all their processes have ended."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _name(guardian: int) -> str:
    return f"{_PREFIX}{guardian}"


def _sweep(places: Iterable[Path]) -> None:
    """Remove groups whose guardians have ended. The kernel keeps those that have a member: not every guardian may be seen from here."""
    for folder in (folder for place in places for folder in place.glob(f"{_PREFIX}*")):
        if not Path("/proc", folder.name.removeprefix(_PREFIX)).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _members(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    return set()


def _places() -> Iterator[tuple[str, Path]]:
    """(controller, folder of this process's group); "" is version 2's."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            root = _ROOT / controller if controller else (_ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "unified")
            # In a container the path may be the host's, of which only the end is mounted: then its root is ours.
            folder = root / path.lstrip("/")
            yield controller, folder if (folder / "cgroup.procs").exists() else root
