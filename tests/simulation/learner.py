"""What plays Megatron: weights are a name, and know all that they were trained on.

The rank is the product's own actor, with its numbering of collective calls and its versions; this stands in place of what it drives. The
history of the weights is saved with a checkpoint and comes back with it, so that "trained twice" means what it says: by these weights.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from evenkeel.actors.carriers import ActorInfo, ExportPlan, WeightSnapshot
from evenkeel.actors.ranks.collective_calls import as_rank_failure, collective, names_failures
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.correction.errors import DataError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.results import Proximal, SkipReason, StepResult, StepValues
from evenkeel.learner.training.step import Abort
from tests.simulation.engine import checksums_of_weights, pieces_of, probe_of
from tests.simulation.processes import HERE

WEIGHTS = "weights.json"
_SECONDS = {"start": (1.0, 6.0), "step": (0.5, 6.0), "export": (0.05, 1.0), "begin_save": (0.05, 0.6), "restore": (0.1, 1.0)}
_QUICK = (0.005, 0.05)


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one moment of training."""

    name: int
    version: int
    trained: tuple[int, ...] = ()
    """Groups, in the order of their steps."""
    ancestors: tuple[int, ...] = ()
    """Names of the weights before, oldest first."""

    def after(self, groups: Sequence[int], learner: int) -> Weights:
        """Args: learner: number of the one that trains; another one would make other weights of the same groups."""
        name = zlib.crc32(f"{self.name}/{sorted(groups)}/{learner}".encode()) >> 1  # a token id has 31 bits
        return Weights(name, self.version + 1, (*self.trained, *groups), (*self.ancestors, self.name))

    def after_none_of(self, groups: Sequence[int]) -> Weights:
        """The same, as another version: all tokens of these groups were rejected."""
        return Weights(self.name, self.version + 1, (*self.trained, *groups), (*self.ancestors, self.name))

    def save(self, folder: Path) -> None:
        (folder / WEIGHTS).write_text(json.dumps([self.name, self.version, self.trained, self.ancestors]))

    @classmethod
    def load(cls, folder: Path) -> Weights:
        name, version, trained, ancestors = json.loads((folder / WEIGHTS).read_text())
        return cls(name, version, tuple(trained), tuple(ancestors))


class SimulatedAbort(Abort):
    """Of a rank that is alone, in the one thread: held and not yet released it goes on, as if it were past its last micro-batch."""

    def before_microbatch(self) -> None:
        if self.is_undecided:
            self.too_late()
        super().before_microbatch()


class SimulatedLearner:
    def __init__(self, world: Any, weights: Weights) -> None:
        self.abort = SimulatedAbort()
        self._world, self.weights = world, weights
        self._number = world.books.new_learner(weights)
        self._saving: tuple[float, Path, Path, Weights] | None = None
        self._failure = ""

    def go_on_from(self, weights: Weights) -> None:
        """From here it makes other weights of the same groups than before: they are sampled anew."""
        self._world.faults.raise_if_failing("restore")
        self._world.books.restored(weights)
        self.weights, self._number = weights, self._world.books.new_learner(weights)

    def step(self, corrected: Any, correction: Any, *, step: int, rate_scale: float = 1.0) -> StepResult:
        self._world.faults.raise_if_failing("step")
        self.abort.before_microbatch()
        self.abort.too_late()
        batch = corrected.batch
        self._world.books.trains(self.weights, batch)
        groups, is_rejected = batch.group_ids.unique().tolist(), self._world.rejects_batch()
        self.weights = self.weights.after_none_of(groups) if is_rejected else self.weights.after(groups, self._number)
        self._world.books.trained(self.weights)
        decided: Any = SimpleNamespace(before_update=None)
        return StepResult(
            step=step,
            loss=0.5,
            metrics={},
            values=StepValues(batch.behavior_logprobs, decided, batch.behavior_logprobs),
            entropy=None,
            grad_norms=(1.0,),
            group_norms={},
            learning_rate=1e-3,
            tokens=len(batch.token_ids),
            trained_tokens=int(batch.loss_mask.sum()),
            kept_tokens=0 if is_rejected else int(batch.loss_mask.sum()),
            broken_tokens=0,
            optimizer_steps=int(not is_rejected),
            skipped=(SkipReason.NO_GRADIENT,) * is_rejected,
            loss_scale=None,
            microbatches=1,
            routing_agreement=None,
        )

    def proximal(self, batch: Any) -> Proximal:
        self._world.faults.raise_if_failing("proximal")
        self.abort.before_microbatch()
        return Proximal(torch.full_like(batch.behavior_logprobs, -1.0), None, None)

    def begin_save(self, folder: Path, hf_folder: Path) -> None:
        self._world.faults.raise_if_failing("begin_save")
        process = HERE.get()
        assert process is not None
        ready = asyncio.get_running_loop().time() + process.cluster.delay("checkpoint", 0.2, 15.0)
        self._saving, self._failure = (ready, folder, hf_folder, self.weights), ""

    def is_saved(self) -> bool:
        self._world.faults.raise_if_failing("is_saved")
        if self._saving is not None:
            ready, folder, hf_folder, weights = self._saving
            if asyncio.get_running_loop().time() < ready:
                return False
            self._saving = None
            try:
                folder.mkdir(parents=True, exist_ok=True)
                weights.save(folder)
                weights.save(hf_folder)
                (hf_folder / "config.json").write_text("{}")
            except OSError as error:
                self._failure = f"{folder} could not be written: {error}"
        if self._failure:
            raise DataError(self._failure)
        return True

    def checkpoint_bytes(self) -> int:
        return 1000


class SimulatedRank(LearnerRankActor):
    """The real actor, whose methods take their time and come one after the other."""

    overlaps = False
    world: Any = None
    """Set by the world that plays."""

    def takes_s(self, method: str) -> float:
        process = HERE.get()
        assert process is not None
        return process.cluster.delay(f"{process.name} {method}", *_SECONDS.get(method, _QUICK)) * self.world.learner_slowness

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def start(self, world_size: int, master: tuple[str, int], model: Path, version: int) -> ActorInfo:
        self._learner: Any = SimulatedLearner(self.world, self.world.weights_of(model))
        self._version = version
        self._endpoint: Any = SimpleNamespace(set=lambda *_: None)
        return ActorInfo("learner", str(self._rank), 1, "127.0.0.1:1")

    @names_failures
    def fetch(self, *_: Any, **__: Any) -> dict[int, str]:
        """Its groups have no wide fields; a test may say that they had (CorrectionService._fetch_s)."""
        self.world.faults.raise_if_failing("fetch")
        return {}

    @collective
    def restore(self, number: int, folder: Path, version: int) -> None:
        self._go_on_from(number)
        self._learner.go_on_from(Weights.load(folder))
        self._version = version

    async def export(self, number: int, version: int, plan: ExportPlan) -> WeightSnapshot:  # type: ignore[override]
        if (number, "export") != (self._calls, self._last[0]):  # as `collective`, for a coroutine
            self._last = "export", Future()
            self._begin(number, "export of the weights", version)
            try:
                self._last[1].set_result(await self._exported(plan))
            except Exception as error:
                self._last[1].set_exception(as_rank_failure(error, self.name, "export"))
        snapshot: WeightSnapshot = self._last[1].result()
        return snapshot

    async def _exported(self, plan: ExportPlan) -> WeightSnapshot:
        self.world.faults.raise_if_failing("export")
        self.world.books.is_exported(self._version, may_be_copied=self.world.schedule.broadcasts)
        weights, error = self._learner.weights.name, ""
        if plan.broadcasts:
            error = await self.world.cluster.meetings.broadcast(self._broadcaster, weights)
        buckets = [ray.put(piece) for piece in pieces_of(weights)] if plan.stores else []
        checksums = checksums_of_weights(weights) if plan.checksums and plan.stores else None
        probe = probe_of(weights, len(plan.probe_ids)) if plan.probe_ids else []
        return WeightSnapshot(self._version, buckets, [["spec"]], probe, checksums, 0.1, None, error)  # type: ignore[list-item]

    def serve_broadcast(self, *_: Any) -> tuple[str, int]:
        return self.address()

    async def open_broadcast(  # type: ignore[override]
        self, host: str, port: int, world_size: int, name: str, join_s: float, bucket_s: float
    ) -> None:
        self._broadcaster = await self.world.cluster.meetings.rendezvous(name, world_size, join_s)

    def close_broadcast(self, name: str) -> None:
        self._broadcaster = None
        self.world.cluster.meetings.give_up(name)


def check_config(config: LearnerConfig) -> None:
    """One rank: what several do together is the product's tests with real ranks."""
    assert config.world_size == 1
