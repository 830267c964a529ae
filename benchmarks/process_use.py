"""Measures processor time and memory of processes and of the object store, and which threads or event-loop functions take the time."""

from __future__ import annotations

import asyncio
import cProfile
import io
import os
import pstats
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle

_EVERY_S = 0.1
_IDLE_S = 5.0
# Functions of a profile.
_SHOWN = 25
_SHOWN_THREADS = 6
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessUse:
    """Processor seconds of a process since `begin`, and by how much its anonymous memory has grown since it was met."""

    def __init__(self, pid: int) -> None:
        # Processor seconds of the measuring itself.
        self._process, self.unmeant_s = psutil.Process(pid), 0.0
        self._first = self.peak = self._anonymous()
        self.begin()

    def begin(self) -> None:
        self._cpu_s = self._now()
        self._threads = self._by_thread()

    def _now(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system) - self.unmeant_s

    def _anonymous(self) -> int:
        """Without what is mapped, such as the object store."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def look(self) -> None:
        self.peak = max(self.peak, self._anonymous())

    @property
    def cpu_s(self) -> float:
        return self._now() - self._cpu_s

    @property
    def grown(self) -> int:
        return self.peak - self._first

    def _by_thread(self) -> Counter[str]:
        """Processor seconds by name."""
        found: Counter[str] = Counter()
        for thread in Path(f"/proc/{self._process.pid}/task").glob("*"):
            with suppress(OSError):  # it has ended
                name = re.sub(r"[\d.]+$", "", (thread / "comm").read_text().strip())
                numbers = (thread / "stat").read_text().rpartition(")")[2].split()
                found[name] += (int(numbers[11]) + int(numbers[12])) / _TICKS
        return found

    @property
    def threads(self) -> str:
        """Processor seconds since `begin` of those that took most; Ray's own have names of their own."""
        most = (self._by_thread() - self._threads).most_common(_SHOWN_THREADS)
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in most)


class StoreUse:
    """Ray's object store on this node: what of its files was written to, which is never given back.

    Objects are written by the processes that make them: the store's own process (the raylet) has none of it in its memory.
    """

    def __init__(self) -> None:
        raylet = next(one for one in psutil.Process().children() if one.name() == "raylet")
        self._open = Path(f"/proc/{raylet.pid}/fd")
        self._first = self._written()

    @property
    def grown(self) -> int:
        return self._written() - self._first

    def _written(self) -> int:
        """Bytes."""
        by_file: dict[int, int] = {}
        for one in self._open.iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if "plasma" in os.readlink(one):
                    by_file[one.stat().st_ino] = 512 * one.stat().st_blocks
        return sum(by_file.values())


class Uses:
    """Of this process, the driver, and of actors, looked at ten times a second."""

    def __init__(self, actors: Mapping[str, Any], *, profile: str) -> None:
        """Args: profile: what `end` prints besides: "threads" or "functions"; empty: nothing."""
        self._actors, self._profile = actors, profile
        pids = {"driver": os.getpid()} | dict(zip(actors, _all(actors, _pid), strict=True))
        self._uses = {name: ProcessUse(pid) for name, pid in pids.items()}
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self.calls: dict[str, int] = {}
        """Of actors, by the process that made them, between `begin` and `end`."""

    async def idle_share(self) -> dict[str, float]:
        """By process: CPU seconds of a second in which nothing is asked of it (Ray's own threads, heartbeats)."""
        for use in self._uses.values():
            use.begin()
        await asyncio.sleep(_IDLE_S)
        return {name: use.cpu_s / _IDLE_S for name, use in self._uses.items()}

    def begin(self) -> None:
        """What follows counts."""
        for use in self._uses.values():
            use.begin()
        _count_calls(None)
        _all(self._actors, _count_calls)
        if self._profile == "functions":
            _begin_profile(None)
            _all(self._actors, _begin_profile)

    def end(self) -> dict[str, tuple[float, int]]:
        """CPU seconds since `begin` and bytes, by process; prints what was asked for."""
        used = {name: (use.cpu_s, use.grown) for name, use in self._uses.items()}
        made = _calls_made(None)  # before it asks the others
        self.calls = {"driver": made} | dict(zip(self._actors, _all(self._actors, _calls_made), strict=True))
        self._is_over.set()
        self._watcher.join()
        if self._profile == "threads":
            print("\n".join(f"  threads of {name}: {use.threads}" for name, use in self._uses.items()), flush=True)
        if self._profile == "functions":
            texts = [_end_profile(None), *_all(self._actors, _end_profile)]
            for name, text in zip(["driver", *self._actors], texts, strict=True):
                print(f"-- {name}\n{text}", flush=True)
        return used

    def _watch(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            for use in self._uses.values():
                use.look()
            self._uses["driver"].unmeant_s = time.thread_time()


def _all(actors: Mapping[str, Any], what: Any) -> list[Any]:
    return list(ray.get([actor.__ray_call__.remote(what) for actor in actors.values()]))


def _pid(_: Any) -> int:
    return os.getpid()


_calls = -1  # of this process; -1: they are not counted yet


def _count_calls(_: Any) -> None:
    """Calls of actors that this process makes from now on."""
    global _calls
    is_first, _calls = _calls < 0, 0
    if not is_first:
        return
    call = ActorHandle._actor_method_call

    def counted(handle: Any, *arguments: Any, **named: Any) -> Any:
        global _calls
        _calls += 1
        return call(handle, *arguments, **named)

    ActorHandle._actor_method_call = counted


def _calls_made(_: Any) -> int:
    return _calls


_profile: cProfile.Profile | None = None  # a process has one: of the thread that its event loop runs in


def _begin_profile(_: Any) -> None:
    global _profile
    _profile = cProfile.Profile()
    _profile.enable()


def _end_profile(_: Any) -> str:
    text = io.StringIO()
    if _profile is not None:
        _profile.disable()
        pstats.Stats(_profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(_SHOWN)
    return text.getvalue()
