"""Steps whose batch had no token left to train on: each is reported, and too many in a row end the run.

Such a step is a skipped one: the weights stay, the version grows, its groups count as trained. A batch whose answers are all right or all
wrong is another matter: it has no gradient either, but the next one may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.carriers import PreparedBatch
from actors.processes.event_level import Notify
from correction.errors import DataError
from rollout.trajectory import FinishReason

if TYPE_CHECKING:  # torch and Megatron: not in the driver
    from learner.results import StepResult


_BEYOND_STALENESS = 3
"""Number of skipped steps in a row that are allowed beyond max_staleness."""


class EmptySteps:
    """Counts the steps in a row from which nothing was learned."""

    def __init__(self, max_staleness: int, notify: Notify) -> None:
        """Args: notify: takes an event's level and text."""
        # A skipped step leaves the weights as they are. After max_staleness of them all tokens are of the present weights: rejection will
        # repeat.
        self._most, self._notify = max_staleness + _BEYOND_STALENESS, notify
        self._in_a_row = 0

    def note(self, step: int, batch: PreparedBatch, result: StepResult) -> None:
        """Count a step. Raises: DataError if too many in a row had nothing to train on."""
        reason = _why_nothing_was_left(batch, result)
        self._in_a_row = self._in_a_row + 1 if reason else 0
        if not reason:
            return
        if self._in_a_row >= self._most:
            raise DataError(f"nothing was learned in {self._most} steps in a row, up to step {step}: {reason}")
        self._notify("warning", f"step {step} is skipped ({self._in_a_row} of {self._most} in a row end the run): {reason}")


def _why_nothing_was_left(batch: PreparedBatch, result: StepResult) -> str:
    """The reason in a sentence; empty if there was a token to train on."""
    if result.trained_tokens == 0:
        answers = [answer for group in batch.groups for answer in group.valid]
        cut = sum(answer.finish_reason is FinishReason.LENGTH for answer in answers)
        return (
            f"{cut} of its {len(answers)} answers were cut at rollout.sampling.max_tokens, and the others are empty; rollout.overlong "
            "leaves cut ones out. Raise max_tokens, or set rollout.overlong.kind to train or penalise"
        )
    if result.kept_tokens == 0:
        return (
            f"the correction rejected all {result.trained_tokens} tokens of its batch: the bounds of correction.rejection or "
            "correction.veto are narrower than the difference of sampled and trained logprobs. Widen them, or see in the report how large "
            "it is"
        )
    return ""
