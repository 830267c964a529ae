"""Whether the reward can score what the workers sample. While it can't, work is held back: prompts would be used up without training.

A judge that other machines serve, a key that has run out, a full disk below a scorer: then all rewards fail at once, on every worker, and
the groups are discarded. Once that is so for most of the latest groups, one group at a time is handed out, after a pause that doubles with
each failure. The first group that can be scored ends that. Answers that were cut, and groups whose rewards are all alike, were scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from evenkeel.actors.pool.faults import LatestGroups
from evenkeel.actors.processes.doubled_pause import doubled_pause_s
from evenkeel.actors.processes.event_level import Notify
from evenkeel.correction.errors import RequestError, counted
from evenkeel.rollout.config import FunctionReward, RewardConfig
from evenkeel.rollout.trajectory import LEAST_VALID, FailureKind, GroupFacts

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
PATIENCE_S = 1800.0
"""Most seconds of pauses in a row. A judge that restarts or moves to another node is back by then; a reward function with a bug isn't."""


def unscored(group: GroupFacts) -> str:
    """The last error of a group's reward, if that alone left it with too few valid answers; else empty."""
    errors = [error for kind, error in group.failures if kind is not FailureKind.ENGINE]
    return errors[-1] if not group.is_trainable and len(group.valid) + len(errors) >= LEAST_VALID else ""


class UnscoredStarts:
    """Starts of workers that failed by their reward alone, in a run that has had scores: waited for as groups that can't be scored are."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Event-loop time (s) of the first one since a worker was last up."""

    def pause_s(self, error: BaseException | None, starts: int, *, is_alone: bool) -> float:
        """Seconds to wait before the next start: 2, 4, 8 ... up to 60.

        Args:
            error: what the reward says.
            starts: such starts in the place of this worker, in a row; 1 or more.
            is_alone: no worker is up, so that nobody else learns when rewards work again, or that they never will.
        Raises: RequestError once that has been so for PATIENCE_S.
        """
        now = asyncio.get_running_loop().time()
        self._since = (now if self._since is None else self._since) if is_alone else None
        if self._since is not None and now - self._since >= PATIENCE_S:
            raise RequestError(
                f"{error}. For {PATIENCE_S / 60:.0f} minutes no rollout worker could start because of it. Repair it and resume the run, "
                "which goes on from its last checkpoint"
            )
        return doubled_pause_s(starts, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def ended(self) -> None:
        """A worker is up."""
        self._since = None


class Scoring:
    """Counts groups that can't be scored, and says how many may be handed out."""

    def __init__(
        self,
        reward: RewardConfig,
        window_s: float,
        *,
        notify: Notify,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_end: Callable[[], None],
    ) -> None:
        """
        Args:
            window_s: seconds after which a group no longer counts.
            notify: takes level and sentence.
            spawn: starts a task for a pause.
            on_end: called at the end of each pause.
        """
        self._reward = reward.path if isinstance(reward, FunctionReward) else reward.kind
        self._notify, self._spawn, self._on_end = notify, spawn, on_end
        self._latest = LatestGroups(window_s)
        self._pauses, self._paused_s = 0, 0.0
        """Number of pauses, and their seconds, since a group was last scored."""
        self.is_pausing = False

    def finished(self, group: GroupFacts) -> None:
        """A worker has sampled it. Raises: RequestError once PATIENCE_S of pauses have passed without one group that could be scored."""
        now = asyncio.get_running_loop().time()
        if not (why := unscored(group)):
            if group.is_trainable:
                self._scored(now)
            return
        self._latest.add(now, is_good=False)
        if self.is_pausing or not (self._pauses or self._latest.are_mostly_bad):
            return
        if self._paused_s >= PATIENCE_S:
            raise RequestError(
                f"reward {self._reward}: {self._latest} could not be scored, and no group since, in {counted(self._pauses, 'pause')} "
                f"of {self._paused_s / 60:.0f} minutes in all. Repair it and resume the run, which goes on from its last checkpoint. "
                f"The last error: {why}"
            )
        self._pauses += 1
        pause_s = doubled_pause_s(self._pauses, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._paused_s += pause_s
        self._notify("warning", f"rewards: {self._latest} could not be scored; the next group in {pause_s:.0f} s: {why}")
        self.is_pausing = True
        self._spawn(self._pause(pause_s))

    def _scored(self, now: float) -> None:
        if self._pauses:
            self._notify("info", f"rewards: a group was scored, after {counted(self._pauses, 'pause')}: all groups are handed out again")
            self._latest.clear()
        self._latest.add(now, is_good=True)
        self._pauses, self._paused_s = 0, 0.0

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.is_pausing = False
        self._on_end()

    @property
    def is_failing(self) -> bool:
        """Whether work is held back, because nobody's groups are scored."""
        return self._pauses > 0

    def places(self, *, is_idle: bool) -> int | None:
        """How many groups may be handed out; None: all that wait. Args: is_idle: no worker has a group."""
        if not self._pauses:
            return None
        return int(is_idle and not self.is_pausing)
