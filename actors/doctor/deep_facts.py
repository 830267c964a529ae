"""What the doctor's live layer has measured; live.py does, and tests make facts up."""

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
    """Of one call."""
    is_right: bool
    """The numbers that came out are those that had to."""
    is_inside_a_node: bool = True

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes over each rank's link by second: an all_reduce passes 2 (n - 1) / n of its tensor there, as nccl-tests counts."""
        passed = 2 * (self.ranks - 1) / self.ranks if self.operation == "all_reduce" else 1.0
        return passed * self.bytes / max(self.seconds, 1e-9)


ENGINE_AND_LEARNER = "the engine and the learner"


@dataclass(frozen=True, slots=True)
class AgreementFact:
    """Logprobs of the same tokens at the same weights, from two sides."""

    sides: str
    """Such as "learner and reference"."""
    largest: float
    """Difference at any token, nats."""
    median: float
    gradient: float | None = None
    """Relative difference of the gradient's norm; None: only one side has one."""


@dataclass(frozen=True, slots=True)
class UpdateFact:
    """A version of the weights of the model that was cut out, on its way to an engine that answered requests."""

    bytes: int
    export_s: float
    """The learner copied them out."""
    take_s: float
    """From the engine's call to its receipt."""
    pause_s: float
    """Of these, in which it sampled nothing."""


@dataclass(frozen=True, slots=True)
class BroadcastFact:
    """The learner's rank 0 and an engine in one weight group, and a version of the model that was cut out sent through it."""

    backend: str
    """gloo or nccl."""
    ranks: int
    """Of the engine; the learner's rank 0 is a member beside them."""
    bytes: int = 0
    join_s: float = 0.0
    """Until all were members."""
    send_s: float = 0.0
    """From the learner's first tensor to the last receipt, while the engine answered requests."""
    pause_s: float = 0.0
    """In which it sampled nothing."""
    error: str = ""
    """Why it did not work; empty: it did."""


@dataclass(frozen=True, slots=True)
class DeepFacts:
    """All of it."""

    dtype: str
    """Of learner and engine."""
    version_bytes: int
    """Of the whole model's weights."""
    on_gpus: bool = False
    """The ranks compute on GPUs."""
    collectives: tuple[CollectiveFact, ...] = ()
    agreements: tuple[AgreementFact, ...] = ()
    update: UpdateFact | None = None
    """By way of the object store."""
    broadcast: BroadcastFact | None = None
    """None: the run's weights don't go this way."""
    repeats: bool = True
    """The same seeds gave the same tokens."""
    broken: tuple[tuple[str, str], ...] = ()
    """What could not be measured, with the reason."""
