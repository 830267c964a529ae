"""What actors and driver send each other: groups, batches and weights; what a part is made with, and what it says of itself. What crosses
packages, too, is in theirs: rollout/trajectory.py, learner/results.py, correction/batch.py, engines/.

Frozen: nothing is changed after it was handed over, and tensors are read-only by agreement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from evenkeel.correction.config import CorrectionConfig
    from evenkeel.correction.early_warning.monitor import Event, State
    from evenkeel.engines.agreement import Processor
    from evenkeel.engines.weights import WeightSpec
    from evenkeel.learner.results import StepResult
    from evenkeel.rollout.config import RolloutConfig
    from evenkeel.rollout.trajectory import AnswerFacts, AnswerPlace, GroupFacts, Prompt, UnfinishedGroup

EventLevel = Literal["info", "watch", "warning", "alarm", "error"]
"""How serious an event of a run is: the word that events.log has before the text. The early warning alone says watch and alarm."""
Notify = Callable[[EventLevel, str], object]
"""Takes level and text of an event."""


class DiscardReason(StrEnum):
    """Why a group was not trained on, as events and the ledger say it."""

    INVALID = "fewer than two valid trajectories"
    """Decided when the group is sampled, like the next one (actors/groups/book.py)."""
    UNIFORM = "rewards all alike"
    """Reason of dynamic sampling alone."""
    FAILED = "no usable answer"
    """Found by the rollout pool, like the next one."""
    LOST = "lost with several engines"


class PoolFailure(StrEnum):
    """What failed in the rollout pool; failures are counted by it. What follows from each says actors/pool/faults.py."""

    ENGINE_LOST = "engine_lost"
    START_FAILED = "start_failed"
    REQUEST_FAILED = "request_failed"
    UNREACHED = "unreached"
    """A worker could not be reached for half a minute, though it lives."""


class ScalingCause(StrEnum):
    """Why the pool changes its size; changes are counted by it."""

    LEARNER_WAITS = "learner_waits"
    WORKERS_WAIT = "workers_wait"
    NO_LONGER_NEEDED = "no_longer_needed"


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A new size."""

    target: int
    cause: ScalingCause
    reason: str
    """For people, with the numbers."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place: the right to sample one group."""

    group_id: int
    """Running number of admission; unique in a run."""
    prompt: Prompt
    """What the group is sampled for."""
    admitted_version: int
    """Version of the published weights when it was admitted."""


@dataclass(frozen=True, slots=True)
class BegunTicket(Ticket):
    """What a worker is asked for where there is something of the group already: it goes on from there."""

    begun: UnfinishedGroup
    """The answers so far."""


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """What became of the tokens of a group that leaves the book: sampled = trained + discarded + lost."""

    sampled: int = 0
    """That engines have given for it. (What a worker that is killed had not told yet is not known.)"""
    trained: int = 0
    """In the packed batch."""
    discarded: int = 0
    """In answers that aren't trained."""
    lost: int = 0
    """In no answer any more: its tokens could not be read, or a rollout was begun again."""
    read: int = 0
    """Read between turns, in its answers."""


@dataclass(frozen=True, slots=True)
class DiscardedGroup:
    """A group that was thrown away."""

    prompt_id: str
    """What it was sampled for."""
    reason: DiscardReason
    """Why it is not trained on."""
    tokens: GroupTokens = GroupTokens()


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A finished group as actors send it: its facts by value, its tokens by reference."""

    facts: GroupFacts
    """Everything but the tokens."""
    payload: Any
    """Reference to the Group in the object store of the node that sampled it; the Group itself if it comes from a checkpoint."""
    wide: Any = None
    """Reference to the WideFields of its trajectories; None: they are in the Group, if there are any."""
    source: str = ""
    """Who sampled it, and where, for messages; empty: it comes from a checkpoint."""
    reason: DiscardReason | None = None
    """Why it isn't worth training, as the driver decides when it is sampled; None: it is."""

    @property
    def group_id(self) -> int:
        return self.facts.group_id

    @property
    def prompt_id(self) -> str:
        return self.facts.prompt_id


@dataclass(frozen=True, slots=True)
class Example:
    """An answer for people to read."""

    prompt: Prompt
    """What was asked."""
    text: str
    """The response of the answer that its group calls `example`."""


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A worker could not sample a group. Its engine goes on."""

    group_id: int
    """That of its ticket."""
    reason: str
    """Why, for people."""
    is_final: bool
    """No other worker could sample it either, because of the prompt."""


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Groups packed for a forward of the learner."""

    batch: Any
    """Reference to a PackedBatch; None: they have no token that is trained."""
    fetch_s: float = 0.0
    """Seconds in which the ranks read its wide fields first; 0: there are none to read."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch on its way to the learner."""

    version: int
    """The learner's version from which the update starts."""
    correction: CorrectionConfig
    """The correction that was applied to it, with which it must be trained."""
    corrected: Any
    """Reference to a CorrectedBatch: [N] tokens of S sequences, packed."""
    tokens: int
    """N."""
    groups: tuple[GroupFacts, ...]
    """The groups of these tokens, in the order of the batch."""
    places: tuple[AnswerPlace, ...]
    """[S] which answer of `groups` each sequence is. What has no place is not trained."""
    proximal_s: float
    """Seconds that the learner took for proximal (and reference) logprobs."""
    correct_s: float
    """Seconds of the correction itself."""
    split_s: float = 0.0
    """Seconds that the learner took to split the gap of stale tokens; 0 for a batch that isn't split."""
    fetch_s: float = 0.0
    """Seconds in which the ranks read its wide fields before they train on it; 0: there are none to read."""
    examples: tuple[Example, ...] = ()
    """An answer of each of the first groups."""
    trained_tokens: tuple[int, ...] = ()
    """Sampled tokens of each group, counted in the packed batch."""

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self.groups]

    @property
    def prompt_ids(self) -> list[str]:
        return [group.prompt_id for group in self.groups]

    @property
    def group_tokens(self) -> list[GroupTokens]:
        """What becomes of the tokens of each group."""
        there = {(place.group, place.answer) for place in self.places}
        return [
            GroupTokens(
                sampled=group.response_tokens + group.lost_tokens,
                trained=trained,
                discarded=sum(one.response_tokens for answer, one in enumerate(group.trajectories) if (number, answer) not in there),
                lost=group.lost_tokens,
                read=sum(one.later_tokens for one in group.trajectories),
            )
            for number, (group, trained) in enumerate(zip(self.groups, self.trained_tokens, strict=True))
        ]

    @property
    def trained(self) -> list[AnswerFacts]:
        """[S] the answer of each sequence."""
        return [self.groups[place.group].trajectories[place.answer] for place in self.places]


@dataclass(frozen=True, slots=True)
class Observation:
    """Diagnostics of a trained batch, and what the monitor makes of them."""

    diagnostics: dict[str, float]
    """Numbers by their names in correction.diagnostics.quantities."""
    events: tuple[Event, ...]
    """Changes of a symptom's state, worst first."""
    state: State
    """The monitor's state after this batch."""
    seconds: float
    """Time that all this took, seconds."""
    clipped: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Tokens that the objective clipped most often in this batch, as (token id, how often), by "positive" and "negative" advantage."""
    late_s: float = 0.0
    """Seconds by which the service's event loop was late, 99th percentile since the last observation."""
    told: LaneReport | None = None
    """What the service has done since the last observation."""
    info: ActorInfo | None = None
    """Where the service's own numbers are."""
    monitor: dict[str, Any] = field(default_factory=dict)
    """What the monitor knows after this batch (Monitor.state_dict)."""
    tokens: TokenSample | None = None
    """Some of its trajectories, token by token; None: none are kept."""


@dataclass(frozen=True, slots=True)
class ScatterSample:
    """Tokens drawn at random from trained ones; every array is [n]."""

    behavior_logprobs: np.ndarray
    """float32, nats."""
    proximal_logprobs: np.ndarray
    """float32, nats."""
    staleness: np.ndarray
    """int32, versions between sampling and training."""
    step: np.ndarray
    """int32, training step of the token's batch."""

    def save(self, path: Path) -> None:
        """Write scatter.npz."""
        with path.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> ScatterSample:
        """Read scatter.npz. Raises: ValueError for arrays of other types or lengths; an error of numpy, zipfile or zlib for a damaged
        file."""
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in cls.__slots__}
        kinds, shapes = [array.dtype.kind for array in found.values()], {array.shape for array in found.values()}
        if kinds != ["f", "f", "i", "i"] or shapes != {(found["step"].size,)}:
            raise ValueError(f"its arrays have the types {kinds} and the shapes {shapes}")
        return cls(**found)


MOST_TOKENS = 16_384
"""Tokens of a step, or of an evaluation, that are kept, prompts included: 0.7 MB of a step before they are compressed."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """What people are told of an answer whose tokens are kept."""

    group: int
    """Id of its group; of held-out questions their number."""
    answer: int
    """Its number in the group, from 0."""
    prompt_id: str
    question: str
    expected: str
    """What the reward function compares with."""
    reward: float | None
    reward_components: dict[str, float]
    finish_reason: str
    error: str | None
    left_out_tokens: int = 0
    """Tokens at its end that are not kept, because it is very long."""
    sequence: int = 0
    """Number of the sequence among those of the answer, from 0."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Some trajectories of a batch or of an evaluation, token by token: n tokens of s sequences, end to end."""

    version: int
    """The learner's, from which the batch's update starts; of an evaluation, the newest that answered."""
    answers: tuple[ShownAnswer, ...]
    """[s]"""
    offsets: np.ndarray
    """[s + 1] int64."""
    columns: dict[str, np.ndarray]
    """[n] each, by name: token_ids, turns, versions (int32), sampled (bool); behavior, proximal, target logprobs (nats), entropy (nats),
    advantage, importance_weight, coefficient (float32, NaN where not known); kept, clipped, is_cut (bool), dropped_by (uint8), as
    correction/diagnostics/reasons.py says. An evaluation has the first five. Where a correction asks for them there are at_sampling
    logprobs, of the learner at the weights that sampled; where tokens are drawn from kept sets, the sizes of these as kept_set (int32, 0:
    the whole vocabulary)."""
    labels: tuple[str, ...] = ()
    """What dropped_by counts, from 1."""
    correction: Mapping[str, Any] | None = None
    """Settings that corrected the batch, as JSON has them: an alarm may have put others in the place of those of config.yaml. None: an
    evaluation, or not known."""

    def save(self, path: Path, groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write it as .npz. Args: groups: what is told of all groups of the batch, as JSON has it."""
        facts = {
            "version": self.version,
            "answers": [asdict(one) for one in self.answers],
            "labels": self.labels,
            "groups": groups,
            "correction": self.correction,
        }
        told = np.frombuffer(json.dumps(facts).encode(errors="backslashreplace"), dtype=np.uint8)
        with path.open("wb") as file:
            arrays: dict[str, Any] = {f"column/{name}": values for name, values in self.columns.items()}
            np.savez_compressed(file, facts=told, offsets=self.offsets, **arrays)

    @classmethod
    def load(cls, path: Path) -> tuple[TokenSample, list[dict[str, Any]]]:
        """Read what `save` wrote: the sample, and what it says of the groups. Raises: ValueError, KeyError or TypeError for other contents;
        an error of numpy, zipfile or zlib for a damaged file."""
        with np.load(path, allow_pickle=False) as file:
            facts = json.loads(file["facts"].tobytes())
            columns = {name.removeprefix("column/"): file[name] for name in file.files if name.startswith("column/")}
            offsets = file["offsets"]
        answers = tuple(ShownAnswer(**one) for one in facts["answers"])
        if {len(values) for values in columns.values()} != {int(offsets[-1])} or len(offsets) != len(answers) + 1:
            raise ValueError("its arrays have other lengths than its offsets say")
        sample = cls(int(facts["version"]), answers, offsets, columns, tuple(facts["labels"]), facts["correction"])
        return sample, list(facts["groups"])


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What one pass over the learner's weights does with them."""

    bucket_bytes: int
    """Size up to which tensors share a bucket; a larger one has one of its own."""
    stores: bool = True
    """Put them into the object store."""
    broadcasts: bool = False
    """Broadcast them to the engines of rank 0's weight group."""
    checksums: bool = False
    """Compute a checksum of each tensor that is stored."""
    probe_ids: tuple[int, ...] = ()
    """Token ids whose logprobs at these weights are wanted; empty: none."""
    float8: bool = False
    """Send projections in float8, with their scales; the learner's own weights stay as they are."""


@dataclass(frozen=True, slots=True)
class WeightChecksums:
    """Checksums of all tensors of one version. A large model has two megabytes of them, so they stay in the object store: workers
    fetch them from there to compare, and the driver passes on a reference alone."""

    by_name: Any
    """Reference to a dict: Hugging Face name -> checksum."""
    digest: str
    """Digest of all of them (engines.weights.digest_of)."""


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """The weights of one version, on their way to the engines."""

    version: int
    """Number of updates that made them."""
    buckets: list[Any]
    """References to WeightBuckets; empty when they were broadcast only."""
    specs: list[list[WeightSpec]]
    """Names, types and shapes, bucket by bucket, in the order in which they are broadcast."""
    probe_logprobs: list[float]
    """[tokens of the probe prompt - 1] nats: the learner's own, at these weights; empty when none was asked for."""
    checksums: WeightChecksums | None
    """None when not asked for."""
    seconds: float
    """Time of the export."""
    processor: Processor | None = None
    """Processor and kernels of the learner; for true on-policy only."""
    broadcast_error: str = ""
    """Why the broadcast did not reach all engines; empty: it did, or there was none."""


# What a part of a run is made with, and what it says of itself.


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that all rollout workers of a run share."""

    rollout: RolloutConfig
    """The run's section."""
    model: Path
    """Folder with config and tokenizer; the weights come from the learner."""
    samples: tuple[Prompt, ...]
    """A prompt of each task, on which its reward function is tried when a worker starts, so that its errors show then."""
    bind: str
    """metrics.bind."""
    resource: str
    """Ray resource of which a worker asks for one unit."""
    seed: int = 0
    """Seed of the run's samples."""
    topk: int = 0
    """Most likely tokens to keep with each sampled one, for corrections that look at them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the worker's process; the engine's processes inherit them."""
    weights_fetch_s: float = 60.0
    """Longest wait for the bytes of a version to come to the node."""

    @property
    def has_wide_fields(self) -> bool:
        """Whether groups have wide fields: many values a token (correction/wide.py)."""
        return self.topk > 0 or self.rollout.engine.return_routed_experts or self.rollout.sampling.is_partial


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Who an actor is and where its numbers are."""

    role: str
    """"rollout", "learner", ..."""
    name: str
    """Its name among the actors of that role."""
    pid: int
    """Process id of the actor."""
    target: str
    """host:port of its Prometheus endpoint."""
    detail: str = ""
    """Further facts for people."""
    node: str = ""
    """Id of its node; empty: not known."""
    host: str = ""
    """Address of its node, for people."""
    layers: str = ""
    """Layers that a learner rank's part of the model is made of (learner/model/layers.py)."""

    @property
    def key(self) -> str:
        return f"{self.role}-{self.name}"


@dataclass(frozen=True, slots=True)
class WaitNotice:
    """Something has not come yet."""

    what: str
    """Phase, both sides and version, as the wait has named them ("weight sync v12 -> worker 3")."""
    seconds: int
    """Seconds since the wait began."""
    detail: str = ""
    """What exactly is missing; empty: not known."""

    def __str__(self) -> str:
        return f"waiting {self.seconds} s for {self.what}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Span:
    """What a process did for a while."""

    what: str
    """In a word: docs/how_it_works.md lists them."""
    begin: float
    """Unix time, seconds, by the clock of its process."""
    end: float
    """The same."""
    version: int | None = None
    """Version of the weights that it was about, or started from; None: of no one version."""
    group: int | None = None
    """Id of the one group that it was about."""
    why: str | None = None
    """What was waited for, which of several kinds it was, or the class of the error that ended it."""


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What a process has done since its last report (actors/processes/lane.py)."""

    lane: str
    """"driver", "worker-0", "rank-0", "service"."""
    now: float
    """Unix time, seconds, by its own clock, as it made the report."""
    spans: tuple[Span, ...]
    """In the order in which they ended."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a rank says of a training step."""

    result: StepResult | None
    """Without per-token values; rank 0's alone."""
    told: LaneReport
    """What the rank has done since the last step."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """What a part has to tell; its next heartbeat brings it."""

    number: int
    """Running number among the part's reports, from 1; the next heartbeat acknowledges those up to the last one received."""
    message: str | WaitNotice
    """A sentence, or the notice of a wait."""
