"""What rollouts hand on: prompts, worked examples, trajectories, their groups, and receipts for weights. Nothing is changed after it was
handed over."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from evenkeel.correction.errors import EngineError
    from evenkeel.engines.agreement import Processor


class FinishReason(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """The model emitted a token that ends an answer (rollout/tasks/chat.py)."""
    LENGTH = "length"
    """Cut at max_tokens, at the context length, or at a limit of an environment."""
    ABORT = "abort"
    """The engine gave the request up; the trajectory is not trained."""


class FailureKind(StrEnum):
    """What kept a trajectory from being scored."""

    ENGINE = "engine"
    """The engine gave no complete answer."""
    REWARD = "reward"
    """The reward function or the environment raised, or its process died."""
    REWARD_TIMEOUT = "reward_timeout"
    """The reward function or the environment passed its deadline."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, as the task gives it."""

    prompt_id: str
    """Unique in a run: a task gives its PromptPlace, e.g. "train/0/17"."""
    text: str
    """What the user turn says; the chat template is applied to it."""
    token_ids: tuple[int, ...]
    """Tokens after the chat template, with the generation prompt."""
    answer: str | tuple[str, ...]
    """What the reward function is given to compare with; several: any of them is right."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The task's own entry (reasoning-gym scorers need it)."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A worked example for the supervised warm-up."""

    question: str
    """The question's own text."""
    prompt: str | Sequence[Mapping[str, Any]]
    """What the chat template is given: what a prompt of the run is made of."""
    answer: str
    """What the model shall say."""

    @property
    def prompt_text(self) -> str:
        """All that the prompt says, for a tokenizer to learn from."""
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(turn.get("content") or "" for turn in self.prompt)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) that weights of one version sampled."""

    version: int
    """That of the weights."""
    start: int
    """First token, counted from the start of the response."""
    end: int
    """One past the last token."""


def ids_of(tokens: Iterable[int]) -> array[int]:
    """Token ids as a compact array of 32-bit integers, the form in which trajectories hold them."""
    return array("i", tokens)


def logprobs_of(values: Iterable[float]) -> array[float]:
    """Logprobs as a compact array of float32, the form in which trajectories hold them."""
    return array("f", values)


@dataclass(frozen=True, slots=True)
class LaterReading:
    """What the model was given to read between two of its turns: a tool's output, or what a user says next."""

    after: int
    """Response tokens that it had sampled by then, at least 1."""
    ids: array[int]
    """Token ids, 32 bits each, at least one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a trajectory that lie together and were all read, or all sampled in one turn."""

    ids: array[int]
    """32-bit token ids."""
    turn: int
    """Number of the turn that sampled them, or that came after they were read; from 0."""
    sampled: slice | None
    """Which of the response tokens they are; None: they were read."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The K most likely tokens at each of T positions, row after row; compact, because a trajectory may have K times 10,000 of them."""

    k: int
    """K."""
    ids: array[int]
    """[T * K] 32-bit token ids, the most likely first."""
    logprobs: array[float]
    """[T * K] float32: their logprobs, under the sampling temperature."""

    @classmethod
    def of(cls, k: int, rows: Iterable[Iterable[tuple[Any, ...]]]) -> TopLogprobs:
        """Made from k entries (logprob, token id, ...) for each token."""
        entries = [entry for row in rows for entry in row]
        return cls(k, ids_of([entry[1] for entry in entries]), logprobs_of([entry[0] for entry in entries]))


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The kept set of each of T tokens: those from which top-p, top-k and min-p let it be drawn."""

    counts: array[int]
    """[T] 32-bit sizes; 0: the whole vocabulary."""
    ids: array[int]
    """[sum of counts] 32-bit token ids, one token's set after the other's, the likeliest first."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> KeptTokens:
        """Made from the ids of each token's set."""
        found = cls(array("i"), array("i"))
        for row in rows:
            found.counts.append(len(row))
            found.ids.extend(row)
        return found

    def first(self, tokens: int) -> KeptTokens:
        """The sets of the first tokens."""
        return KeptTokens(self.counts[:tokens], self.ids[: sum(self.counts[:tokens])])

    def __add__(self, other: KeptTokens) -> KeptTokens:
        return KeptTokens(self.counts + other.counts, self.ids + other.ids)


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts that each of T tokens was sent to when the model read it, in each layer."""

    layers: int
    """Layers of the model that have experts."""
    k: int
    """Experts that a token is sent to in a layer."""
    ids: array[int]
    """[T * layers * k] expert numbers, of 8 bits for up to 256 experts and of 16 for more."""


class _Answer:
    """Properties of an answer that don't need its tokens."""

    __slots__ = ()
    if TYPE_CHECKING:
        version_spans: tuple[VersionSpan, ...]
        reward: float | None
        turn_rewards: tuple[float, ...]
        error: str | None
        failure: FailureKind | None

        @property
        def response_tokens(self) -> int: ...

    @property
    def is_valid(self) -> bool:
        """Whether it is scored and complete, so that it takes part in baseline and loss."""
        return self.error is None and self.reward is not None and self.response_tokens > 0

    @property
    def is_mixed(self) -> bool:
        """True if the weights were updated while it was sampled."""
        return len({span.version for span in self.version_spans}) > 1


@dataclass(frozen=True, slots=True)
class AnswerFacts(_Answer):
    """A Trajectory without its tokens: sent by value, while the tokens are sent by reference."""

    response_tokens: int
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    reward: float | None
    reward_components: dict[str, float]
    error: str | None
    failure: FailureKind | None = None
    read_again_tokens: int = 0
    turns: int = 1
    later_tokens: int = 0
    kept_ids: int = 0
    tool_s: float = 0.0
    sequence_count: int = 1
    turn_rewards: tuple[float, ...] = ()
    tool_calls: int = 0
    tool_errors: int = 0


# Values of the fields of AnswerFacts, in their order, of an answer of either kind.
_facts_of = attrgetter(*(one.name for one in fields(AnswerFacts)))


@dataclass(frozen=True, slots=True)
class Trajectory(_Answer):
    """One rollout: what the model was given, and what it sampled.

    It is a sequence of segments: the prompt, a turn of the model, and then, as often as the model was given more to read, that and another
    turn. A single answer has one turn. All that was sampled lies end to end in the response's fields, whichever the turn, beside its
    logprobs, versions and wide fields; `later` says what stands between.

    A rollout may have several sequences: sub-agents, a history that was compacted, another way from an earlier turn. Together they are a
    tree, whose leaves they are. This is the one in which the model spoke last, and `branches` has the others; fields are of this one, and
    so are tokens and segments; numbers are of all.
    """

    prompt_id: str
    """Id of its Prompt; empty for tokens that no task asked (comparisons, benchmarks)."""
    prompt_ids: array[int]
    """Token ids of the prompt, 32 bits each."""
    response_ids: array[int]
    """Ids of the sampled tokens of all turns, 32 bits each; the token that ended a turn included when there is one."""
    behavior_logprobs: array[float]
    """Natural log of mu for each response token: its log_softmax(logits / temperature), float32, over the tokens that it was drawn from."""
    version_spans: tuple[VersionSpan, ...]
    """Spans in order, without gaps, over all response tokens."""
    finish_reason: FinishReason
    """Why it ends where it does."""
    later: tuple[LaterReading, ...] = ()
    """What was read after the prompt, in order."""
    branches: tuple[Trajectory, ...] = ()
    """The rollout's other sequences, in the order in which they began; they have no branches. The prompt of each is all that the model read
    or said before the sequence's first own token: what was sampled once is in the response of one sequence alone, and trained there.
    Reward, text and error of the rollout stand in none of them."""
    tool_s: float = 0.0
    """Seconds that its environment took, its turns' steps and its beginning; or its agent, outside of the model's turns."""
    tool_calls: int = 0
    """Calls of its environment's tools."""
    tool_errors: int = 0
    """Those of them that gave the model an error to read."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    retractions: int = 0
    """Times that its KV cache was dropped and computed again: by weight updates, or for want of memory."""
    top_logprobs: TopLogprobs | None = None
    """The behaviour policy's most likely tokens at each response token, where the correction needs them."""
    kept_tokens: KeptTokens | None = None
    """The kept set of each response token; None: all were drawn from the whole vocabulary, or nothing is trained on them."""
    routed_experts: RoutedExperts | None = None
    """Experts of every token of token_ids but the last, which the model didn't read; set if the learner replays routes. After a
    weight update the model reads the tokens of an unfinished trajectory anew; these are the routes of the last reading."""
    route_keys: array[int] | None = None
    """A key for the routed experts of each token of the prompt, if the routes are sent as an object of their own
    (rollout/wide_fields.py)."""
    text: str = ""
    """All that follows the prompt, decoded without the token that ended it: what the reward function saw."""
    reward: float | None = None
    """None before scoring, and for a failed trajectory."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, if the function returns them; their sum trains."""
    turn_rewards: tuple[float, ...] = ()
    """What each of the rollout's turns was worth, in order, whichever sequence it is of; empty: known of the whole alone."""
    error: str | None = None
    """Why the trajectory failed, for people; None when it is valid."""
    failure: FailureKind | None = None
    """The kind of that error; None when it is valid, or if it comes from an old checkpoint, which has no kinds."""

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """All of the rollout's, this one last."""
        return (*self.branches, self)

    @property
    def sequence_count(self) -> int:
        """Number of the rollout's sequences."""
        return 1 + len(self.branches)

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(one.response_ids) for one in self.sequences)

    @property
    def turns(self) -> int:
        """Number of turns of the model, one under way included."""
        return sum(1 + len(one.later) for one in self.sequences)

    @property
    def later_tokens(self) -> int:
        """Number of tokens read after the prompts."""
        return sum(len(reading.ids) for one in self.sequences for reading in one.later)

    @property
    def segments(self) -> Iterator[Segment]:
        """Its tokens in order; a turn of which nothing is sampled yet is left out."""
        yield Segment(self.prompt_ids, 0, None)
        starts = [0, *(one.after for one in self.later)]
        ends = [*starts[1:], len(self.response_ids)]
        for turn, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if turn:
                yield Segment(self.later[turn - 1].ids, turn, None)
            if end > start:
                yield Segment(self.response_ids[start:end], turn, slice(start, end))

    @property
    def token_ids(self) -> array[int]:
        """Ids of all tokens in order, prompt included: what an engine reads to go on from."""
        return self.prompt_ids + self.answer_ids

    @property
    def answer_ids(self) -> array[int]:
        """Ids of all that follows the prompt, in order."""
        if not self.later:
            return self.response_ids
        _, *rest = self.segments
        return ids_of(token for segment in rest for token in segment.ids)

    @property
    def kept_ids(self) -> int:
        """Tokens in its kept sets together."""
        return sum(len(one.kept_tokens.ids) for one in self.sequences if one.kept_tokens is not None)

    @property
    def facts(self) -> AnswerFacts:
        facts = AnswerFacts(*_facts_of(self))
        return replace(facts, version_spans=_joined_spans(self.sequences)) if self.branches else facts

    @property
    def read_again_tokens(self) -> int:
        """Tokens that the model read again after weight updates, before it went on. A prompt that a group shares counts for each of its
        answers. 0 if updates keep the KV cache (in_place)."""
        read_again = [(one, span) for one in self.sequences if one.retractions for span in one.version_spans[1:]]
        return sum(one.tokens_before(span.start) for one, span in read_again)

    def tokens_before(self, place: int) -> int:
        """Tokens of all kinds before a response token. Args: place: its number among them."""
        return len(self.prompt_ids) + place + sum(len(one.ids) for one in self.later if one.after <= place)


def _joined_spans(sequences: Iterable[Trajectory]) -> tuple[VersionSpan, ...]:
    """Those of all response tokens of several sequences, end to end."""
    found, before = list[VersionSpan](), 0
    for one in sequences:
        found += [VersionSpan(span.version, before + span.start, before + span.end) for span in one.version_spans]
        before += len(one.response_ids)
    return tuple(found)


A = TypeVar("A", bound=_Answer)
LEAST_VALID = 2
"""Fewest valid trajectories with which a group can be its own baseline."""


class _Answers(Generic[A]):
    """Properties of a group that don't need its tokens."""

    __slots__ = ()
    trajectories: tuple[A, ...]

    @property
    def valid(self) -> tuple[A, ...]:
        return tuple(t for t in self.trajectories if t.is_valid)

    @property
    def example(self) -> A:
        """The trajectory that is shown as an example: the first with tokens. An answer that the engine aborted may have none."""
        return next((t for t in self.trajectories if t.response_tokens), self.trajectories[0])

    @property
    def response_tokens(self) -> int:
        """Response tokens of all its trajectories together."""
        return sum(t.response_tokens for t in self.trajectories)

    @property
    def failures(self) -> tuple[tuple[FailureKind, str], ...]:
        """Kind and message of each trajectory without a reward."""
        return tuple((t.failure or FailureKind.REWARD, t.error) for t in self.trajectories if t.error)

    @property
    def is_trainable(self) -> bool:
        """Whether it can be its own baseline."""
        return len(self.valid) >= LEAST_VALID

    def is_uniform(self, *, by_turn: bool) -> bool:
        """All valid rewards alike, those of all turns with advantages by turn: no gradient."""
        if not by_turn:
            return have_one_reward(self.valid)
        return len({reward for one in self.valid for reward in one.turn_rewards or (one.reward,)}) <= 1


def have_one_reward(answers: Sequence[_Answer]) -> bool:
    """Whether all rewards are alike, so that each is its own baseline."""
    return len({t.reward for t in answers}) <= 1


@dataclass(frozen=True, slots=True)
class GroupFacts(_Answers[AnswerFacts]):
    """A Group without its tokens, as AnswerFacts."""

    group_id: int
    prompt_id: str
    trajectories: tuple[AnswerFacts, ...]
    """[G], in the order of their seeds."""
    admitted_version: int
    generate_s: float = 0.0
    reward_s: float = 0.0
    wide_bytes: int = 0
    """Bytes of its wide fields, if these are sent as an object of their own; otherwise 0."""
    lost_tokens: int = 0

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle as plain tuples: facts cross three processes, and each dataclass in them would be pickled by slow Python code."""
        answers = [
            (tokens, [(span.version, span.start, span.end) for span in spans], *others)
            for tokens, spans, *others in map(_facts_of, self.trajectories)
        ]
        rest = self.admitted_version, self.generate_s, self.reward_s, self.wide_bytes, self.lost_tokens
        return _group_facts, (self.group_id, self.prompt_id, answers, *rest)


def _group_facts(group_id: int, prompt_id: str, answers: list[tuple[Any, ...]], *rest: Any) -> GroupFacts:
    """The GroupFacts of what its __reduce__ returned."""
    of_answers = (AnswerFacts(tokens, tuple([VersionSpan(*span) for span in spans]), *others) for tokens, spans, *others in answers)
    return GroupFacts(group_id, prompt_id, tuple(of_answers), *rest)


@dataclass(frozen=True, slots=True)
class Group(_Answers[Trajectory]):
    """The G trajectories of one prompt: the unit of admission, advantage estimation and submission."""

    group_id: int
    """Running number of admission; unique in a run."""
    prompt: Prompt
    """What all of them answer."""
    trajectories: tuple[Trajectory, ...]
    """[G], in the order of their seeds."""
    admitted_version: int
    """Version of the published weights when the group was admitted; no token is older."""
    generate_s: float = 0.0
    """Seconds from the first request to the last answer."""
    reward_s: float = 0.0
    """Seconds from the last answer to the last reward."""
    lost_tokens: int = 0
    """Tokens that engines have given for it, and that are in none of its answers: rollouts that were begun again."""

    @property
    def prompt_id(self) -> str:
        """Id of its Prompt."""
        return self.prompt.prompt_id

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """Those of all its trajectories, in order."""
        return tuple(sequence for one in self.trajectories for sequence in one.sequences)

    def with_sequences(self, changed: Iterable[Trajectory]) -> Group:
        """A copy with others in the place of its sequences. Args: changed: in the order of `sequences`."""
        others = iter(changed)
        pairs = ([next(others) for _ in one.sequences] for one in self.trajectories)
        return replace(self, trajectories=tuple(replace(own, branches=tuple(branches)) for *branches, own in pairs))

    @property
    def facts(self) -> GroupFacts:
        answers = tuple(one.facts for one in self.trajectories)
        times = self.generate_s, self.reward_s
        return GroupFacts(self.group_id, self.prompt_id, answers, self.admitted_version, *times, lost_tokens=self.lost_tokens)


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Which answer of a list of groups, and which sequence of it."""

    group: int
    """Number of its group in the list, from 0."""
    answer: int
    """Its number in the group, from 0."""
    sequence: int = 0
    """Number among the answer's `sequences`, from 0."""


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """What a worker has of a group that is not whole: handed back as it leaves, told after a turn, or left by an engine that failed."""

    group_id: int
    """That of its ticket."""
    answers: tuple[Trajectory, ...]
    """Answers in the order of their seeds: whole ones, and those that another engine goes on with (rollout/continuation.py)."""
    generate_s: float = 0.0
    """Spent on them so far."""
    failed: EngineError | None = None
    """What the engine failed with, if that is why they are unfinished."""
    lost_tokens: int = 0
    """As of Group."""

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(one.response_tokens for one in self.answers)

    @property
    def read_tokens(self) -> int:
        """Read so far, prompts included."""
        sequences = [one for answer in self.answers for one in answer.sequences]
        return sum(len(one.prompt_ids) + sum(len(reading.ids) for reading in one.later) for one in sequences)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Running totals of one worker, and its present state."""

    busy_s: float
    """Seconds with at least one request in the engine, weight updates included."""
    up_s: float
    """Seconds since its engine was up."""
    generated_tokens: int
    """Response tokens sampled since its start."""
    requests_in_flight: int
    """Requests that its engine is working on."""
    silent_s: float = 0.0
    """Seconds of heartbeat_s that its engine has used up without a sign of life."""
    late_s: float = field(default=0.0, compare=False)
    """99th percentile of the delays of its event loop since its last answer."""
    lost_of: str = ""
    """Why its engine has no weights, if it takes the place of one that was lost."""
    told: Any = field(default=None, compare=False, repr=False)
    """What the worker has done since its last answer, for the run's timeline; whoever keeps a load hands it on once."""

    def since(self, before: WorkerLoad | None) -> WorkerLoad:
        """What has been added to the totals since `before`; None: since its start."""
        if before is None:
            return self
        added = self.generated_tokens - before.generated_tokens
        return WorkerLoad(self.busy_s - before.busy_s, self.up_s - before.up_s, added, self.requests_in_flight)


def workers_wait(parts: Collection[WorkerLoad]) -> float:
    """Share of their time in which engines had no request. Args: parts: as WorkerLoad.since returns; one of them has been up at least."""
    return max(0.0, 1.0 - sum(part.busy_s for part in parts) / sum(part.up_s for part in parts))


@dataclass(frozen=True, slots=True)
class SyncReceipt:
    """An engine's confirmation that it holds the weights of a version. The engine fills in the first fields, its worker the others."""

    version: int
    """That of the weights."""
    bytes: int
    """Bytes of the weights that it has taken."""
    pause_s: float
    """Seconds from the engine's answer that it has stopped until it was told to go on. No token was sampled meanwhile."""
    seconds: float = 0.0
    """How long the worker took, checksums included. If the weights came from the object store the driver replaces this by its own wait,
    which includes the call and its answer on their way."""
    digest: str = ""
    """Digest of the checksums of all tensors in the engine (engines.weights.digest_of), which were compared; empty: not asked for."""
    processor: Processor | None = None
    """Processor and kernels of the engine; only for true on-policy, and only together with the digest."""
    generation: int = 0
    """Generation of the run: after it has gone back to a checkpoint, version numbers come again with other weights."""
    load: WorkerLoad | None = None
    """The worker's load when it answered, which saves a call to ask for it."""
