"""The parts that hold a run's state in processes of their own: learner and correction service. They begin at a starting point.

Rollout workers hold none of it, and outlive these: see recovery.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenkeel.actors.carriers import ActorInfo, WorkerSettings
from evenkeel.actors.checkpoints.state import AnswerLengths, Replacement, TrainingState
from evenkeel.actors.cluster.cluster import lower_priority, on_drivers_node
from evenkeel.actors.cluster.placement import RankPlaces, fetch_where_ranks_are
from evenkeel.actors.config import RunConfig, absolute
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import Checkpoint
from evenkeel.actors.service.correction_service import CorrectionService
from evenkeel.actors.settings.deadlines import bucket_s, weights_fetch_s
from evenkeel.actors.settings.environment import OF_SERVICE, worker_environment
from evenkeel.actors.weights.weight_sync import SyncCallbacks, WeightSync
from evenkeel.correction.settings.schedule import needs_topk
from evenkeel.rollout.trajectory import Prompt, SyncReceipt

SERVICE = "correction service"
"""The part that can be replaced, as the driver knows all that it holds. The others are the learner's ranks."""


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The state that a run's parts start from: its own beginning, or a checkpoint."""

    model: Path
    """The model that the run began with, also its reference policy: a folder, or a name of the hub at a commit."""
    checkpoint: Checkpoint | None = None
    state: TrainingState | None = None

    @property
    def weights(self) -> Path:
        """The weights that it begins with: the checkpoint's folder, or the model that the run began with."""
        return self.checkpoint.hf.absolute() if self.checkpoint else absolute(self.model)

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0

    @property
    def version(self) -> int:
        return self.state.weight_version if self.state else 0

    @property
    def elapsed_s(self) -> float:
        return self.state.elapsed_s if self.state else 0.0

    @property
    def totals(self) -> dict[str, float]:
        return self.state.totals if self.state else {}

    @property
    def replacement(self) -> Replacement | None:
        return self.state.replacement if self.state else None

    @property
    def lengths(self) -> AnswerLengths:
        return self.state.lengths if self.state else AnswerLengths()

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}" if self.checkpoint else "its beginning (it has no checkpoint)"


async def start_learner(
    config: RunConfig,
    point: StartingPoint,
    places: RankPlaces,
    parts: dict[str, Any],
    kept: LearnerGroup | None = None,
) -> tuple[LearnerGroup, list[ActorInfo]]:
    """Start the learner's ranks with the starting point's weights, and with the optimizer's state if it is a checkpoint.

    Args:
        parts: the ranks are added to it, by name, when they begin to start.
        kept: ranks that are up and idle. They load the checkpoint; without a checkpoint they are killed and new ones start.
    Returns: the group, and the ranks that were started.
    """
    deadlines = config.deadlines
    if kept is not None and point.checkpoint is not None:
        await kept.restore((point.checkpoint.state / "learner").absolute(), point.version, deadline_s=deadlines.checkpoint_s)
        return kept, []
    if kept is not None:
        kept.kill()
    took: Callable[[LearnerGroup], None] = lambda learner: parts.update(learner.ranks)  # noqa: E731
    limits = {"start_s": deadlines.start_s, "step_s": deadlines.step_s}
    await fetch_where_ranks_are(absolute(point.model) if config.needs_reference else point.weights, places, deadlines)
    learner, infos = await LearnerGroup.start(places, point.weights, version=point.version, bind=config.metrics.bind, made=took, **limits)
    if point.checkpoint is not None:
        await learner.restore((point.checkpoint.state / "learner").absolute(), point.version, deadline_s=deadlines.checkpoint_s)
    if config.needs_reference:
        await learner.load_reference(absolute(point.model))
    return learner, infos


def worker_settings(config: RunConfig, model: Path, samples: Sequence[Prompt]) -> WorkerSettings:
    """What all rollout workers of the run are given. Args: model, samples: see the fields."""
    return WorkerSettings(
        rollout=config.rollout,
        model=model,
        samples=tuple(samples),
        bind=config.metrics.bind,
        resource=config.ray.rollout_resource,
        seed=config.seed,
        topk=needs_topk(config.correction),
        environment=worker_environment(config),
        weights_fetch_s=weights_fetch_s(config),
    )


def make_sync(
    config: RunConfig,
    learner: LearnerGroup,
    probe_ids: Sequence[int],
    recorder: Recorder,
    pool: RolloutPool,
    *,
    generation: int,
    on_receipt: Callable[[SyncReceipt], None],
) -> WeightSync:
    """Make the weight sync from the learner to the pool's engines. It reports failures to the recorder, and engines to replace to the
    pool."""
    return WeightSync(
        config.weight_sync,
        config.rollout.engine,
        learner,
        SyncCallbacks(on_receipt, recorder.probed, recorder.dirty, failure=pool.report_unsyncable, loss=pool.weights_lost),
        probe_ids=probe_ids,
        sync_s=config.deadlines.sync_s,
        bucket_s=bucket_s(config),
        generation=generation,
    )


def start_service(config: RunConfig, monitor: Mapping[str, Any] | None) -> Any:
    """Start the correction service. Args: monitor: what the early warning knew after the last batch before; None: a new run."""
    service = on_drivers_node(CorrectionService, max_concurrency=64, environment=OF_SERVICE).remote(config, monitor)
    lower_priority(service)
    return service
