"""Stacks of all processes of a run, written into its folder when a wait has used half of its deadline, or is long without one: they show
who waits for whom."""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenkeel.actors.carriers import Notify
from evenkeel.actors.processes.pacing import doubled_pause_s
from evenkeel.actors.processes.supervision import LongWait, wait_for
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.stack_summary import FOLDER, next_number
from evenkeel.correction.errors import EvenkeelError
from evenkeel.rollout.stacks import own_job, stacks_of

# Number of collections kept, the newest ones.
_KEPT = 20
# Pause after a collection until the next one for a wait of the same kind, seconds; it doubles each time. And its largest value.
_APART_S, _LONGEST_APART_S = 120.0, 3600.0
# Least seconds between any two collections: waits that are half over at the same time most likely have the same cause.
_LEAST_APART_S = 15.0
_NODE_S = 20.0


class StackCollector:
    """Writes down where all processes of a run stand; used in the driver's event loop."""

    def __init__(self, folder: RunFolder, notify: Notify) -> None:
        """Args: notify: takes level and sentence, in the event loop."""
        self._folder, self._notify = folder, notify
        self._number = next_number(folder.path) - 1
        self._last_s = -_LEAST_APART_S
        # Kind of wait (what is said of it, without numbers) -> when it may have the next collection, and how many it has had.
        self._next: dict[str, tuple[float, int]] = {}
        self._collecting: asyncio.Task[None] | None = None

    def half_over(self, wait: LongWait) -> None:
        """Called once in a long wait."""
        now, kind = time.monotonic(), re.sub(r"\d+", "", str(wait))
        next_s, before = self._next.get(kind, (now, 0))
        if now < next_s or now - self._last_s < _LEAST_APART_S:
            return
        self._next[kind] = now + doubled_pause_s(before + 1, _APART_S, _LONGEST_APART_S), before + 1
        self._number, self._last_s = self._number + 1, now
        self._collecting = asyncio.create_task(self._collect(self._number, wait))

    async def _collect(self, number: int, wait: LongWait) -> None:
        try:
            parts = await asyncio.to_thread(_own)
            parts += await self._of_all_nodes()
            text = "\n".join([str(wait), "", *parts])
            path = await asyncio.to_thread(self._folder.write_text, f"{FOLDER}/{number:02d}.txt", text)
            await asyncio.to_thread((path.parent / f"{number - _KEPT:02d}.txt").unlink, missing_ok=True)
        except (EvenkeelError, RayError, OSError) as error:
            self._notify("warning", f"no stacks of the run's processes: {error}")
        else:
            self._notify("info", f"{wait}: where every process stands is in {path}")

    async def _of_all_nodes(self) -> list[str]:
        """The cluster's head, which lists them, may be what hangs."""
        try:
            listed = await wait_for(asyncio.to_thread(ray.nodes), "list of nodes <- head of the Ray cluster", deadline_s=_NODE_S)
        except (EvenkeelError, RayError) as error:
            return [f"=== other processes: {error}\n"]
        found = await asyncio.gather(*(self._of_node(node["NodeID"]) for node in listed if node["Alive"]))
        return [part for of_one in found for part in of_one]

    async def _of_node(self, node: str) -> list[str]:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        ask: Any = ray.remote(num_cpus=0)(_of_this_node).options(scheduling_strategy=where)
        try:
            stacks: list[str] = await wait_for(ask.remote(), f"stacks <- node {node[:8]}", deadline_s=_NODE_S)
        except (EvenkeelError, RayError) as error:
            return [f"=== node {node[:8]}: {error}\n"]
        return stacks


def _own() -> list[str]:
    return _stacks([psutil.Process(os.getpid())])


def _of_this_node() -> list[str]:
    """Stacks of the processes of this job on a node, children included. Runs in one of Ray's worker processes there."""
    daemon = psutil.Process().parent()
    return _stacks(daemon.children(recursive=True), own_job()) if daemon is not None else []


def _stacks(processes: list[psutil.Process], job: str = "") -> list[str]:
    names = {}
    for process in processes:
        try:
            names[process.pid] = (process.cmdline() or [process.name()])[0]
        except psutil.Error:
            continue
    return [f"=== {names[pid]} (process {pid})\n{text}" for pid, text in sorted(stacks_of(names, job=job).items())]
