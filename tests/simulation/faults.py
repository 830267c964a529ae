"""What befalls a simulated run: faults at their time, and calls that come late, twice, or lose their answer."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evenkeel.correction.errors import ConfigError, DataError, EngineError, RequestError
from evenkeel.rollout.rewards.rewards import RewardError
from tests.simulation.disk import Disk
from tests.simulation.engine import Health
from tests.simulation.node import Node
from tests.simulation.processes import HERE, Process, SimulatedRay
from tests.simulation.schedule import Fault

WORKER, SERVICE, RANK = "RolloutWorker", "CorrectionService", "LearnerRankActor"
DRIVER = "driver"
_KINDS = {"worker": WORKER, "service": SERVICE, "learner": RANK, "driver": DRIVER}


# In the order of the fields of Fate.
_OF_CALLS = ("late_call", "late_reply", "lost_reply", "repeated_call", "lost_call", "stuck_call")
# What torch raises in a rank whose device or collective has failed, by a fault's target.
_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
    (torch.AcceleratorError, "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"),
    (torch.distributed.DistBackendError, "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"),
    (RuntimeError, "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:43117"),
)
# What a spoilt prompt, or a bad start, raises in a worker.
_RAISES: dict[str, Callable[[], Exception]] = {
    "garbled": lambda: RequestError("one logprob is not finite"),
    "too_long": lambda: DataError("9000 prompt tokens"),
    "bug": lambda: KeyError("text"),
    "no_device": lambda: EngineError("CUDA error: no device"),
    "no_model": lambda: ConfigError("model: there is no such model"),
    "no_score": lambda: RewardError("rollout.reward (exact_match): it raised", is_set_up=True),
}
LEAVING = {"drain_node", "end_worker", "resize_pool"}
"""Workers leave in order, soon after one of them was given a group."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Of one call."""

    sent_late_s: float = 0.0
    late_s: float = 0.0
    """Of the answer."""
    is_lost: bool = False
    """It runs, and who called is told that the connection was lost."""
    is_repeated: bool = False
    is_swallowed: bool = False
    """It never comes, and who called is told the same as of a lost answer."""
    is_stuck: bool = False
    """What it is to work on is gone, and is looked for without end: it never begins, and nobody is told."""


_USUAL = Fate()


class Faults:
    """Plays a schedule's faults on the processes of the present driver."""

    def __init__(self, faults: tuple[Fault, ...], disk: Disk, tell: Callable[[str], None]) -> None:
        self._faults, self._disk, self._tell = list(faults), disk, tell
        self.played: list[Fault] = []
        self._cluster: SimulatedRay | None = None
        # Wait for the next call of their method.
        self._calls: list[Fault] = []
        # So late is the next answer with each group that was lost with a node.
        self._late_again = 0.0
        self._late_groups: set[int] = set()
        self._held_up_until = self._judge_back_at = 0.0
        # Until when, by process.
        self._unreachable: dict[str, float] = {}
        # (prompt's id, or empty for all; what befalls whoever samples it; how many times still, or -1: always)
        self._spoilt: list[tuple[str, str, int]] = []
        # What befalls the next workers that start.
        self._starts: list[str] = []
        # Wait for the learner's rank to come to their method.
        self._failing: list[Fault] = []
        self.learner_slowness = 1.0
        self.alarms = 0
        """The next so many diagnoses find the run in danger."""
        self.rejected = 0
        """So many of the learner's next batches are rejected to the last token."""
        self.has_scored = False
        """The present driver knows that the run's reward has scored: a worker has joined, or the run is resumed after a step."""
        self.crash: Fault | None = None
        """The driver ends with this step of the loop."""
        self.interrupt: Callable[[int], None] | None = None
        """The driver's handler of signals."""
        self.resize: Callable[[int], None] | None = None
        """Of the driver's pool."""

    def begin(self, cluster: SimulatedRay) -> None:
        """A driver has begun; what should have come while there was none comes now."""
        self._cluster, self.crash, self.interrupt, self.learner_slowness = cluster, None, None, 1.0
        self._disk.delay = cluster.delay
        self._late_groups.clear()
        for fault in self._faults:
            if fault not in self.played:
                cluster.loop.call_at(max(fault.at, cluster.loop.time()), self._play, fault)

    def end(self) -> None:
        """The driver has ended; what is still to come befalls the next one."""
        self._cluster = None

    @property
    def last_end(self) -> float:
        """From then on nothing befalls the run any more."""
        return max((fault.at + (fault.lasts if fault.kind not in _COUNTED else 0.0) for fault in self._faults), default=0.0)

    @property
    def may_freeze(self) -> set[str]:
        """Kinds of processes that stand still at some time."""
        return {_KINDS[noun] for verb, _, noun in (fault.kind.partition("_") for fault in self._faults) if verb == "freeze"}

    @property
    def drains(self) -> bool:
        """Nodes leave at some time."""
        return any(fault.kind == "drain_node" or fault.what == "drained" for fault in self._faults)

    def _play(self, fault: Fault) -> None:
        if fault in self.played or self._cluster is None:
            return
        self.played.append(fault)
        self._tell(f"fault: {fault}")
        verb, _, noun = fault.kind.partition("_")
        if fault.kind == "freeze_driver":
            if driver := self._cluster.driver:
                self._freeze(driver, fault.lasts)
        elif verb in ("kill", "freeze"):
            if process := self._target(_KINDS[noun], fault):
                process.kill() if verb == "kill" else self._freeze(process, fault.lasts)
        elif fault.kind in LEAVING:
            self._calls.append(replace(fault, what="generate_group"))
        elif fault.kind in (*_OF_CALLS, "damage_update"):
            self._calls.append(fault)
        else:
            getattr(self, f"_{fault.kind}")(fault)

    def _target(self, kind: str, fault: Fault) -> Process | None:
        assert self._cluster is not None
        there = self._cluster.alive(kind)
        return there[fault.target % len(there)] if there else None

    def _freeze(self, process: Process, seconds: float) -> None:
        process.freeze()
        process.cluster.loop.call_later(seconds, process.thaw)

    def _health(self, fault: Fault) -> Health | None:
        process = self._target(WORKER, fault)
        sampler = getattr(process.instance, "_sampler", None) if process is not None else None
        return sampler.engine.health if sampler is not None else None

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        assert self._cluster is not None
        self._cluster.loop.call_later(seconds, undo)

    def _lose_node(self, fault: Fault) -> None:
        """Of workers: as a group that one of them has finished is read, or some seconds after it was finished; it may have been drawn by
        then. The service may be lost, too, a little later; or what was lost comes late when it is sampled again.
        """
        if (process := self._target(WORKER, fault)) is None:
            return
        node, cluster = process.node, process.cluster

        def lose() -> None:
            _end_of(node, cluster, hangs=fault.what == "hangs")
            self._late_again = fault.lasts if fault.what == "late" else 0.0
            if fault.what in _KINDS:
                cluster.loop.call_later(fault.lasts, lambda: self._kill_one(_KINDS[fault.what], fault))

        if fault.target % 2:
            node.on_read = lose
        else:
            node.on_stored = lambda: cluster.loop.call_later(cluster.delay("loss of a node", 0.0, 15.0), lose)

    def _drain_node(self, process: Process, fault: Fault) -> None:
        """Of workers: Ray says so, and some time later it is gone."""
        if process.cluster.draining is None:
            return
        node, cluster = process.node, process.cluster
        node.is_leaving = True
        process.cluster.draining[node.name] = int(1000 * (time.time() + fault.lasts))
        cluster.loop.call_later(fault.lasts, _end_of, node, cluster)

    def _end_worker(self, process: Process, fault: Fault) -> None:
        """A SIGTERM, and some time later a SIGKILL."""
        if (notice := getattr(process.instance, "_end_notice", None)) is not None:
            notice.received.set()
            process.cluster.loop.call_later(fault.lasts, process.kill)

    def _resize_pool(self, _: Process, fault: Fault) -> None:
        """As a pool does that follows its load."""
        if self.resize is not None:
            self.resize(int(fault.lasts))

    def _kill_one(self, kind: str, fault: Fault) -> None:
        if self._cluster is not None and (process := self._target(kind, fault)):
            process.kill()

    def _slow_worker(self, fault: Fault) -> None:
        if health := self._health(fault):
            health.slowness = 8.0
            self._later(fault.lasts, lambda: setattr(health, "slowness", 1.0))

    def _lose_scheduler(self, fault: Fault) -> None:
        if health := self._health(fault):
            health.lost = "its scheduler is gone"
            health.changed()

    def _hang_engine(self, fault: Fault) -> None:
        if health := self._health(fault):
            health.is_hanging = True

            def wake() -> None:
                health.is_hanging = False
                health.changed()

            def miss() -> None:
                health.lost = "it missed its heartbeat"
                health.changed()

            missed_s = 1.5 * _HEARTBEAT_S  # the worker looks after its engine, and says so when it is asked
            self._later(*((fault.lasts, wake) if fault.lasts < missed_s else (missed_s, miss)))

    def _garbage(self, fault: Fault) -> None:
        if health := self._health(fault):
            health.garbage += int(fault.lasts)

    def _break_update(self, fault: Fault) -> None:
        assert self._cluster is not None
        everybody = range(len(self._cluster.alive(WORKER))) if fault.what == "everybody" else [fault.target]
        for target in everybody:  # what is read from one store breaks for all who read it
            if health := self._health(replace(fault, target=target)):
                health.breaks_updates += int(fault.lasts)

    def _nan_weights(self, fault: Fault) -> None:
        """Answers are none until new weights have come so many times."""
        if health := self._health(fault):
            health.spoilt_updates = int(fault.lasts)

    def _unreachable_worker(self, fault: Fault) -> None:
        if process := self._target(WORKER, fault):
            self._unreachable[process.name] = fault.at + fault.lasts

    def _spoilt_prompt(self, fault: Fault) -> None:
        """`what` is a word, and the prompt's id after it, or nothing for all prompts; it befalls so many calls, 0: each one."""
        deed, _, prompt_id = fault.what.partition(" ")
        self._spoilt.append((prompt_id, deed, int(fault.lasts) or -1))

    def _bad_start(self, fault: Fault) -> None:
        """Of the next so many workers."""
        self._starts += [fault.what] * int(fault.lasts)

    def _deed(self, prompt_id: str, *, unreached: bool) -> str:
        """What befalls a call for this prompt."""
        for i, (spoilt, deed, left) in enumerate(self._spoilt):
            if spoilt in ("", prompt_id) and (deed == "unreached") == unreached and left:
                self._spoilt[i] = spoilt, deed, left - 1 if left > 0 else left
                return deed
        return ""

    async def befalls_sampling(self, prompt_id: str) -> None:
        """Of the worker in which this runs. Raises: what spoils the prompt."""
        await self._befalls(self._deed(prompt_id, unreached=False))

    async def befalls_start(self) -> None:
        await self._befalls(self._starts.pop(0) if self._starts else "")

    async def _befalls(self, deed: str) -> None:
        process = HERE.get()
        assert process is not None
        if deed == "kills":
            await asyncio.sleep(1.0)
            process.kill()
            await asyncio.sleep(1.0)
        elif deed == "leaves":  # and is killed before it could do so in order
            process.instance._end_notice.received.set()
            await asyncio.sleep(1.0)
            process.kill()
            await asyncio.sleep(1.0)
        elif deed == "drained":
            self._drain_node(process, Fault(0.0, "drain_node", lasts=60.0))
            await asyncio.sleep(5.0)
        elif deed == "hangs":
            await asyncio.sleep(1e6)
        elif deed == "clings":
            while True:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    if process.is_dead:
                        raise
        elif deed:
            await asyncio.sleep(1.0)
            raise _RAISES[deed]()

    def _no_node(self, fault: Fault) -> None:
        self._held_up_until = fault.at + fault.lasts

    def _dead_judge(self, fault: Fault) -> None:
        self._judge_back_at = fault.at + fault.lasts

    def judge_is_down(self) -> bool:
        """No answer can be scored."""
        return self._cluster is not None and self._cluster.loop.time() < self._judge_back_at

    def _slow_learner(self, fault: Fault) -> None:
        self.learner_slowness = 5.0
        self._later(fault.lasts, lambda: setattr(self, "learner_slowness", 1.0))

    def _fail_rank(self, fault: Fault) -> None:
        self._failing.append(fault)

    def raise_if_failing(self, method: str) -> None:
        """Raises: what torch says, if the rank's device or a collective is to fail in this method."""
        for fault in self._failing:
            if fault.what == method:
                self._failing.remove(fault)
                kind, text = _FAILURES[fault.target % len(_FAILURES)]
                self._tell(f"the rank raises {kind.__name__} in {method}")
                raise kind(text)

    def _reject_batches(self, fault: Fault) -> None:
        self.rejected += int(fault.lasts)

    def _full_disk(self, fault: Fault) -> None:
        self._disk.fill()
        self._later(fault.lasts, self._disk.make_room)

    def _slow_disk(self, fault: Fault) -> None:
        self._disk.is_slow = True
        self._later(fault.lasts, lambda: setattr(self._disk, "is_slow", False))

    def _hung_disk(self, fault: Fault) -> None:
        self._disk.hangs_until = fault.at + fault.lasts

    def _alarm(self, _: Fault) -> None:
        self.alarms += 1

    def _crash_driver(self, fault: Fault) -> None:
        self.crash = fault

    def _stop_driver(self, fault: Fault) -> None:
        import signal

        if self.interrupt is not None:
            self.interrupt(getattr(signal, fault.what or "SIGTERM"))

    def are_lost(self, group_ids: Iterable[int]) -> None:
        """The driver has heard of it, and has these groups sampled again."""
        if self._late_again:
            self._late_groups.update(group_ids)

    # -- calls -------------------------------------------------------------------------------------------------------

    def start_is_held_up(self, process: Process) -> float:
        """Seconds that an actor's start waits for a node."""
        return max(0.0, self._held_up_until - process.cluster.loop.time()) if process.kind == WORKER else 0.0

    def fate_of(self, process: Process, method: str, args: tuple[Any, ...]) -> Fate:
        if method == "generate_group" and args[0].group_id in self._late_groups:
            self._late_groups.discard(args[0].group_id)
            return Fate(late_s=self._late_again)
        if process.cluster.loop.time() < self._unreachable.get(process.name, 0.0):
            return Fate(is_swallowed=True)
        if self._spoilt and method == "generate_group" and self._deed(args[0].prompt.prompt_id, unreached=True):
            return Fate(is_swallowed=True)
        for fault in self._calls:
            if fault.kind == "damage_update":
                if method == "update_weights" and args[2]:  # one that is verified; what damages others is beyond a checksum's reach
                    self._calls.remove(fault)
                    process.instance._sampler.engine.health.damages_updates += int(fault.lasts)
                    return _USUAL
            elif fault.what == method:
                self._calls.remove(fault)
                if fault.kind in LEAVING:
                    soon_s = process.cluster.delay("notice", 0.0, 4.0)
                    process.cluster.loop.call_later(soon_s, getattr(self, f"_{fault.kind}"), process, fault)
                    return _USUAL
                self._tell(f"{fault.kind}: {process.name}.{method}")
                sent_late_s, late_s = (fault.lasts * (fault.kind == kind) for kind in _OF_CALLS[:2])
                return Fate(sent_late_s, late_s, *(fault.kind == kind for kind in _OF_CALLS[2:]))
        return _USUAL


def _end_of(node: Node, cluster: SimulatedRay, *, hangs: bool = False) -> None:
    node.is_gone, node.hangs, node.gone_at = True, hangs, cluster.loop.time()
    if cluster.draining is not None:  # Ray drains no node that is gone
        cluster.draining.pop(node.name, None)
    for worker in cluster.alive(WORKER):
        if worker.node is node:
            worker.kill()


_HEARTBEAT_S = 30.0
_COUNTED = {"resize_pool", "garbage", "break_update", "damage_update", "reject_batches", "nan_weights", "spoilt_prompt", "bad_start"}


def damage(checkpoint: Path, how: str) -> None:
    """What a crash, or the disk, may leave of a checkpoint."""
    state = checkpoint / "state" / "controller.json"
    if how == "truncated":
        os.truncate(state, state.stat().st_size // 2)
    elif how == "missing file":
        (checkpoint / "state" / "learner" / "weights.json").unlink()
    elif how == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif how == "flipped bit":
        weights = checkpoint / "state" / "learner" / "weights.json"
        plain = json.loads(weights.read_text())
        weights.write_text(json.dumps([plain[0] ^ 1, *plain[1:]]))
