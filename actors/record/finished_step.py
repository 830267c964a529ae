"""A step on its way from the loop, where it ends, to what shows and keeps it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenkeel.actors.carriers import PreparedBatch
from evenkeel.rollout.trajectory import GroupFacts, SyncReceipt, WorkerLoad

if TYPE_CHECKING:
    from evenkeel.learner.results import StepResult


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """What is known of a step at its end, and belongs to it."""

    number: int
    """From 1."""
    version: int
    """Version of the weights after it."""
    batch: PreparedBatch
    result: StepResult
    elapsed_s: float
    """Since the run began."""
    seconds: float
    """Since the step before ended."""
    phases: dict[str, float]
    """Seconds by phase of the loop."""
    loads: Awaitable[dict[str, WorkerLoad]]
    groups: Mapping[str, Sequence[GroupFacts]]
    """What each worker, by name, has finished since the step before."""
    versions: Mapping[str, int]
    """Weight version of each worker, as the step's training ended."""
    receipts: Sequence[SyncReceipt]
    differences: Sequence[float]
    """|engine - learner| of each probe token since the last step, nats."""
    noted: dict[str, float]
    """Further numbers, by name of the catalogue, and the totals."""
