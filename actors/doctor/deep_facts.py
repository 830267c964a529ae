"""Results of the doctor's live layer. live.py measures them; tests make them up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveFact:
    """One kind of the learner's groups, measured in its slowest group."""

    group: str
    """data_parallel, tensor_parallel, pipeline_parallel or expert_parallel."""
    operation: str
    """all_reduce, or send."""
    ranks: int
    bytes: int
    seconds: float
    """Time of one call."""
    is_right: bool
    """The result was correct."""
    is_inside_a_node: bool = True

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes over each rank's link by second: an all_reduce passes 2 (n - 1) / n of its tensor there, as nccl-tests counts."""
        passed = 2 * (self.ranks - 1) / self.ranks if self.operation == "all_reduce" else 1.0
        return passed * self.bytes / max(self.seconds, 1e-9)


ENGINE_AND_LEARNER = "the engine and the learner"
COLLECTIVES = "collectives of the learner"


@dataclass(frozen=True, slots=True)
class AgreementFact:
    """Logprobs of the same tokens at the same weights, from two sides."""

    sides: str
    """Such as "learner and reference"."""
    largest: float
    """Difference at any token, nats."""
    median: float
    gradient: float | None = None
    """Relative difference of the gradients' norms; None: one of the two computes no gradient."""


@dataclass(frozen=True, slots=True)
class UpdateFact:
    """A weight update of the two-layer model, while the engine answered requests."""

    bytes: int
    export_s: float
    """Time of the learner's export, seconds."""
    take_s: float
    """From the call of the engine to its receipt, seconds."""
    pause_s: float
    """Part of these seconds in which the engine sampled nothing."""


@dataclass(frozen=True, slots=True)
class BroadcastFact:
    """A broadcast of the two-layer model's weights from the learner's rank 0 to an engine, in one weight group."""

    backend: str
    """gloo or nccl."""
    ranks: int
    """Ranks of the engine; the learner's rank 0 is a further member."""
    bytes: int = 0
    join_s: float = 0.0
    """Seconds until all had joined."""
    send_s: float = 0.0
    """Seconds from the learner's first tensor to the last receipt, while the engine answered requests."""
    pause_s: float = 0.0
    """Part of these seconds in which the engine sampled nothing."""
    error: str = ""
    """Why the broadcast failed; empty: it didn't."""


@dataclass(frozen=True, slots=True)
class DeepFacts:
    """All that the checks of `doctor --deep` measured."""

    dtype: str
    """Type of the weights, the learner's and the engine's."""
    version_bytes: int
    """Bytes of the whole model's weights."""
    on_gpus: bool = False
    """The ranks compute on GPUs."""
    collectives: tuple[CollectiveFact, ...] = ()
    agreements: tuple[AgreementFact, ...] = ()
    update: UpdateFact | None = None
    """By way of the object store."""
    broadcast: BroadcastFact | None = None
    """None: the run doesn't broadcast weights."""
    repeats: bool = True
    """Sampling twice with the same seeds gave the same tokens."""
    broken: tuple[tuple[str, str], ...] = ()
    """What could not be measured, with the reason."""
