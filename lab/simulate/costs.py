"""The inputs of a simulated run: how long answers are, and how long everything takes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from evenkeel.correction.errors import ConfigError

# The 99th percentile of a standard normal.
_Z99 = 2.3263478740408408
_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True)
class RunShape:
    """The settings of a recipe that decide how work flows."""

    workers: int
    groups_per_step: int
    max_staleness: int
    samples_per_group: int
    slots: int
    """Groups that a worker has under way at most."""
    max_running_requests: int
    retracts: bool = True
    """weight_update_mode: requests in flight are read again after a weight update."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Tokens that an engine samples per second, by the number of requests that it decodes together.

    Between two points the time of one decoding step is interpolated, which is nearly linear in the number of requests, and the line goes on
    beyond the last. Below the first the step takes as long as there. With one point alone, half of its step is taken to be independent of
    the number of requests.
    """

    points: tuple[tuple[int, float], ...]
    """(requests, tokens per second of all of them together), by growing number of requests."""

    def __post_init__(self) -> None:
        numbers = [requests for requests, _ in self.points]
        if not self.points or numbers != sorted(set(numbers)) or numbers[0] < 1 or not all(0 < r < math.inf for _, r in self.points):
            raise ConfigError(f"decode speed {self}: give REQUESTS:TOKENS_PER_S with both above 0, each number of requests once")

    def __str__(self) -> str:
        return ",".join(f"{requests}:{rate:.4g}" for requests, rate in self.points)

    def step_s(self, requests: int) -> float:
        """Seconds of one decoding step, which gives each of so many requests a token."""
        steps = [(number, number / rate) for number, rate in self.points]
        if len(steps) == 1:
            number, seconds = steps[0]
            return seconds * 0.5 * (1 + requests / number)
        if requests <= steps[0][0]:
            return steps[0][1]
        place = min(bisect.bisect_left(steps, (requests, 0.0)), len(steps) - 1)
        (low, low_s), (high, high_s) = steps[place - 1], steps[place]
        return max(low_s, low_s + (high_s - low_s) * (requests - low) / (high - low))


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Speeds and times, seconds."""

    decode: DecodeSpeed
    learner_token_s: float
    """Seconds of a training step for each prompt and response token."""
    prompt_token_s: float = 0.0
    """Engine time to read a token: of a group's prompt, once, and of all requests in flight after a weight update, prompts and answers."""
    handover_s: float = 0.0
    """From the arrival of a batch's last group, or from the learner's asking, until the learner begins: correction, transport."""
    publish_s: float = 0.0
    """Seconds in which the learner publishes its weights and does nothing else."""
    sync_s: float = 0.0
    """Seconds from then until an engine holds them; it takes no new work meanwhile."""
    pause_s: float = 0.0
    """The last seconds of sync_s, in which the engine samples nothing."""


@dataclass(slots=True)
class AnswerLengths:
    """Lengths of answers in tokens, drawn at random, one by one."""

    description: str
    recorded: Sequence[int] = ()
    """Lengths that are drawn, in random order; empty: they are lognormal."""
    p50: float = 0.0
    p99: float = 0.0
    max_tokens: int = 1 << 30
    """Longer ones are cut."""
    seed: int = 0
    _ready: list[int] = field(default_factory=list)
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    @classmethod
    def lognormal(cls, p50: float, p99: float, *, max_tokens: int = 1 << 30, seed: int = 0) -> AnswerLengths:
        """Raises: ConfigError for a median below one token, or above the 99th percentile."""
        if not 1 <= p50 <= p99 < math.inf:
            raise ConfigError(f"lengths of p50 {p50:g} and p99 {p99:g} tokens: the median has to be 1 or more, and not above p99")
        return cls(f"lognormal, p50 {p50:g}, p99 {p99:g}", p50=p50, p99=p99, max_tokens=max_tokens, seed=seed)

    @classmethod
    def like(cls, recorded: Sequence[int], description: str, *, max_tokens: int = 1 << 30, seed: int = 0) -> AnswerLengths:
        """Raises: ConfigError for none."""
        if not recorded or min(recorded) < 1:
            raise ConfigError(f"lengths of {description}: there is no answer of at least one token to draw from")
        return cls(description, recorded=list(recorded), max_tokens=max_tokens, seed=seed)

    def afresh(self, seed: int | None = None) -> AnswerLengths:
        """These lengths again from the start, so that two runs can have the same answers; with another seed, others of the same kind."""
        return AnswerLengths(self.description, self.recorded, self.p50, self.p99, self.max_tokens, self.seed if seed is None else seed)

    def next(self) -> int:
        if not self._ready:
            self._ready = self._draw()
        return self._ready.pop()

    def _draw(self) -> list[int]:
        if self.recorded:
            found = self._random.choice(np.asarray(self.recorded), _CHUNK)
        else:
            sigma = math.log(self.p99 / self.p50) / _Z99
            found = np.rint(self._random.lognormal(math.log(self.p50), sigma, _CHUNK)).astype(np.int64)
        drawn: list[int] = np.clip(found, 1, self.max_tokens).tolist()
        return drawn
