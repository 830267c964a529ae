"""The result of a simulated run: how busy both sides were, what they waited for, and how old the trained tokens were."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

FULL_ENGINES, UNDER_WAY, HANDOVER, PUBLISH = "full engines", "answers under way", "hand-over", "publish"
"""What a learner waits for. FULL_ENGINES: requests wait for a place in an engine. UNDER_WAY: all requests have a place, and no further
prompt may start. HANDOVER: a batch is on its way to the learner. PUBLISH: the learner publishes its weights."""
ADMISSION, WEIGHTS = "admission", "weights"
"""What an engine waits for. ADMISSION: max_staleness lets no new group start, or new ones are on their way. WEIGHTS: new weights."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One training step."""

    version: int
    """Version of the weights that it started from."""
    group_ids: tuple[int, ...]
    tokens_by_staleness: dict[int, int]
    seconds: float
    """Since the step before ended."""


@dataclass(slots=True)
class Outcome:
    """Sums over the counted steps, and what is computed from them."""

    workers: int
    max_staleness: int
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Response tokens that were trained."""
    train_s: float = 0.0
    learner_waits_s: dict[str, float] = field(default_factory=dict)
    """By what it waited for."""
    working_s: float = 0.0
    """Seconds of all engines together with a request in them, and not stopped for new weights."""
    occupied_s: float = 0.0
    """Seconds of all engines together with a request in them."""
    request_s: float = 0.0
    """Integral of the requests in flight over time, of all engines together."""
    engine_waits_s: dict[str, float] = field(default_factory=dict)
    """Seconds of all engines together without a request, by what they waited for."""
    tokens_by_staleness: Counter[int] = field(default_factory=Counter)

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def learner_share(self) -> float:
        """Share of its time in which the learner trains."""
        return self.train_s / self.seconds

    @property
    def engine_share(self) -> float:
        """Share of their time in which engines sample."""
        return self.working_s / (self.seconds * self.workers)

    @property
    def mean_requests(self) -> float:
        """Requests in flight in one engine, mean over time."""
        return self.request_s / (self.seconds * self.workers)

    @property
    def mean_staleness(self) -> float:
        """Versions, mean over trained tokens."""
        return sum(age * tokens for age, tokens in self.tokens_by_staleness.items()) / max(1, self.tokens)

    def learner_wait_shares(self) -> dict[str, float]:
        return _shares(self.learner_waits_s, self.seconds)

    def engine_wait_shares(self) -> dict[str, float]:
        return _shares(self.engine_waits_s, self.seconds * self.workers)

    def since(self, before: Outcome) -> Outcome:
        """What has been added to the sums since `before`."""
        added = {field.name: _less(getattr(self, field.name), getattr(before, field.name)) for field in fields(self)}
        return replace(self, **added | {"workers": self.workers, "max_staleness": self.max_staleness})


def _less(now: Any, before: Any) -> Any:
    if isinstance(now, Counter):
        return now - before
    return {name: value - before.get(name, 0.0) for name, value in now.items()} if isinstance(now, dict) else now - before


def _shares(waits_s: dict[str, float], of_s: float) -> dict[str, float]:
    """Share of `of_s` that was waited, by cause, largest first."""
    return {cause: seconds / of_s for cause, seconds in sorted(waits_s.items(), key=lambda item: -item[1]) if seconds > 1e-9 * of_s}
