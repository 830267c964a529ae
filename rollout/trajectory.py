"""Everything that rollouts hand on: prompts, trajectories and their groups. Frozen; nothing is changed after hand-over."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """The model emitted its end-of-sequence token."""
    LENGTH = "length"
    """Cut at max_tokens or at the context length."""
    ABORT = "abort"
    """The engine gave the request up; the trajectory is not trained."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, as the task gives it."""

    prompt_id: str
    """Unique in a run: data source, epoch and position, e.g. "train/0/17"."""
    text: str
    """What the user turn says; the chat template is applied to it."""
    token_ids: tuple[int, ...]
    """After the chat template, with the generation prompt."""
    answer: str
    """What the reward function is given to compare with."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The task's own entry (reasoning-gym scorers need it)."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) that weights of one version sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The K most likely tokens at each of T positions, row after row; compact, because a trajectory may have K times 10,000 of them."""

    k: int
    ids: array[int]
    """[T * K] 32-bit token ids, the most likely first."""
    logprobs: array[float]
    """[T * K] float32: their logprobs, under the sampling temperature."""

    @classmethod
    def of(cls, k: int, rows: Iterable[Iterable[tuple[float, int]]]) -> TopLogprobs:
        """From (logprob, token id) pairs, row by row."""
        pairs = [pair for row in rows for pair in row]
        return cls(k, array("i", (token for _, token in pairs)), array("f", (logprob for logprob, _ in pairs)))

    @property
    def positions(self) -> int:
        """T."""
        return len(self.ids) // self.k


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts that each of T tokens was sent to when the model read it, in each layer."""

    layers: int
    k: int
    ids: array[int]
    """[T * layers * k] expert numbers, of 8 bits for up to 256 experts and of 16 for more."""

    @property
    def positions(self) -> int:
        """T."""
        return len(self.ids) // (self.layers * self.k)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled answer."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Sampled tokens, the end-of-sequence token included when there is one."""
    behavior_logprobs: tuple[float, ...]
    """Natural log of mu for each response token, under the sampling temperature."""
    version_spans: tuple[VersionSpan, ...]
    """In order, without gaps, over all response tokens."""
    finish_reason: FinishReason
    top_logprobs: TopLogprobs | None = None
    """The behaviour policy's most likely tokens at each response token, where the correction needs them."""
    routed_experts: RoutedExperts | None = None
    """Of every token of prompt and response but the last, which the model didn't read; where the learner replays them. The positions of
    a trajectory that a weight update found under way were read anew then: these are the routes of the last reading."""
    text: str = ""
    """The response, decoded without special tokens: what the reward function saw."""
    reward: float | None = None
    """None before scoring, and for a failed trajectory."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, if the function returns them; their sum trains."""
    error: str | None = None
    """Why the trajectory failed (reward raised or timed out, engine aborted); None when it is valid."""

    @property
    def is_valid(self) -> bool:
        """Scored and complete: takes part in baseline and loss."""
        return self.error is None and self.reward is not None and len(self.response_ids) > 0

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.version_spans)

    @property
    def is_mixed(self) -> bool:
        """True when a weight update fell into the middle of it."""
        return len({span.version for span in self.version_spans}) > 1


@dataclass(frozen=True, slots=True)
class Group:
    """The G trajectories of one prompt: the unit of admission, advantage estimation and submission."""

    group_id: int
    """Running number of admission; unique in a run."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    admitted_version: int
    """Learner's version when the group was admitted; no token is older."""
    generate_s: float = 0.0
    """From the first request to the last answer."""
    reward_s: float = 0.0

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.is_valid)

    @property
    def is_uniform(self) -> bool:
        """All valid rewards alike: no gradient."""
        return len({t.reward for t in self.valid}) <= 1
