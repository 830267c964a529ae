"""Reads the answers of a few groups when a run seems unable to learn, has the cause named (no_learning.py), and reports it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ray.exceptions import RayError

from actors.carriers import StoredGroup
from actors.config import RunConfig
from actors.driver.no_learning import NoLearning, Sample
from actors.metrics.held_out import Evaluation
from actors.processes.event_level import Notify
from actors.queue.payloads import fetched, tokens_fetch_s
from correction.errors import DataError, EvenkeelError, counted
from rollout.rewards.reward_process import build_extraction
from rollout.trajectory import FailureKind, Group

_KEPT = 8
"""Groups whose answers can be looked at: with half of the answers right, one in 2^64 times none of those of 8 groups of 8 is."""


class LearningWatch:
    """One event loop uses it, that of the driver."""

    def __init__(self, config: RunConfig, notify: Notify, on_shortage: Callable[[str], None]) -> None:
        """Args: on_shortage: called once with the reason if dynamic sampling leaves too few groups for a batch."""
        self._judge, self._notify, self._on_shortage = NoLearning(config), notify, on_shortage
        self._extract = build_extraction(config.rollout.reward.extraction.model_dump())
        self._bytes_per_s = config.deadlines.bytes_per_s
        self._recent: deque[StoredGroup] = deque(maxlen=_KEPT)
        self._looking: asyncio.Task[None] | None = None
        self._is_short = False

    def finished(self, group: StoredGroup) -> None:
        """A worker has sampled and scored it."""
        self._recent.append(replace(group, wide=None))  # which can be large, and says nothing
        if self._judge.finished(group.facts) and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())

    def trained(self) -> None:
        """A step is over."""
        self._judge.trained()

    @property
    def filters(self) -> bool:
        """Whether groups without a gradient are given up."""
        return self._judge.filters

    def goes_on_without_filter(self) -> None:
        """Groups without a gradient are trained on from here on."""
        self._judge.filters = False

    async def _look(self) -> None:
        recent = list(self._recent)
        try:
            groups, _ = await fetched(recent, deadline_s=tokens_fetch_s(recent, self._bytes_per_s))
        except (EvenkeelError, RayError):  # the counts say enough
            groups = []
        samples = [one for group in groups for one in self._samples(group)]
        if self._judge.is_short and not self._is_short:
            self._is_short = True
            self._on_shortage("; ".join(filter(None, (self._judge.shortage, self._judge.said(samples, again=True)))))
        elif told := self._judge.said(samples):
            self._notify("warning", told)

    def _samples(self, group: Group) -> list[Sample]:
        """All its answers. A pattern has gone through the same texts in a scoring process within its deadline; where that failed the text
        is left whole."""
        texts = {one.text for one in group.trajectories}
        return [
            Sample(
                group.prompt.text,
                group.prompt.answer,
                one.text,
                one.text if one.error else self._extract(one.text),
                one.reward,
                one.error,
                differs=len(texts) > 1,
            )
            for one in group.trajectories
        ]


def refuse_unscored(first: Evaluation | None) -> None:
    """A reward that raised on every held-out answer would do so in training, for half an hour. One that is late may be a judge's, which
    comes back: for that a run waits (pool/scoring.py).

    Args: first: evaluation of a run that has not begun to train.
    Raises: DataError.
    """
    if first is None or not first.trajectories or any(one.failure is not FailureKind.REWARD for one in first.trajectories):
        return
    raise DataError(
        f"rollout.reward: none of {counted(len(first.trajectories), 'held-out answer')} before training got a score, so nothing could be "
        f"learned. The first: {first.first_failure}, answer {first.trajectories[0].text!r:.200}",
        remedy="mend the reward; where an answer is wrong, let it return 0.0",
    )
