"""One sequence of a rollout under way: its exact tokens, and turn after turn that an engine adds to them.

A session's tokens grow at their end alone. Each turn goes on from the very ids that were read and sampled before, which the engine finds in
its prefix cache, or reads again if new weights came meanwhile; logprobs and versions of tokens that were sampled before stay as they are.
Between two turns the engine has nothing of it under way. What it has so far is a Trajectory at any time: another engine can go on from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from evenkeel.rollout.continuation import is_begun, with_more_to_read
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths
from evenkeel.rollout.trajectory import FinishReason, Segment, Trajectory

GoOn = Callable[[Trajectory, int], Awaitable[Trajectory]]
"""Has an engine end the turn that a trajectory stops in. The number: most tokens after the prompt, those that are there included."""
OpenSession = Callable[[Trajectory, int], Awaitable["Session"]]
"""Opens a session that goes on from what there is of a sequence. The number: of the sequence among the rollout's, from 0."""


class Session:
    """One sequence, which most rollouts are; one turn at a time."""

    def __init__(self, begun: Trajectory, go_on: GoOn, *, max_tokens: int, lengths: RequestLengths) -> None:
        """
        Args:
            begun: what there is of it: a prompt without an answer (continuation.unsampled), or what another engine has begun.
            max_tokens: of all that follows the prompt.
            lengths: of the engine.
        """
        self.trajectory = begun
        """What there is of it, a turn at a time: its finish_reason is that of the last turn."""
        self._go_on, self._lengths = go_on, lengths
        self._longest = min(max_tokens, lengths.together - len(begun.prompt_ids))
        self._is_sampling = False
        self.sampled_tokens = 0
        """That the engine has given it."""

    async def sample(self, suffix_ids: Sequence[int] = (), *, max_tokens: int | None = None) -> Segment | None:
        """Have the model read more, and sample the next turn; or go on with a turn that was begun.

        Args:
            suffix_ids: what follows the turn before; none for the first turn, and for one that was begun.
            max_tokens: of this turn.
        Returns: the turn, also if a limit cut it (`trajectory.finish_reason`: length) or the engine gave it up (abort); None if it has no
            token. Without room for the suffix nothing is read, and the trajectory counts as cut after the turn before.
        Raises: RuntimeError while a turn is sampled; ValueError for a suffix where none can stand, or none where one must; as
            RolloutEngine.generate.
        """
        if self._is_sampling:
            raise RuntimeError(f"{self.trajectory.prompt_id}: a turn is being sampled; the next one comes after it")
        begun = self.trajectory
        if suffix_ids:
            begun = with_more_to_read(begun, suffix_ids)
        elif not is_begun(begun):
            raise ValueError(f"{begun.prompt_id}: its last turn is whole; give the model something to read before the next one")
        there = len(begun.answer_ids)
        of_turn = len(begun.response_ids) - (begun.later[-1].after if begun.later else 0)  # what there is of one that was begun
        if suffix_ids and (there >= self._longest or len(begun.prompt_ids) + there > self._lengths.prompt):
            self.trajectory = replace(self.trajectory, finish_reason=FinishReason.LENGTH)
            return None
        self._is_sampling = True
        longest = self._longest if max_tokens is None else min(self._longest, there + max(1, max_tokens - of_turn))
        try:
            self.trajectory = await self._go_on(begun, longest)
            self.sampled_tokens += len(self.trajectory.response_ids) - len(begun.response_ids)
        finally:
            self._is_sampling = False
        *_, last = self.trajectory.segments
        return last if last.sampled is not None else None
