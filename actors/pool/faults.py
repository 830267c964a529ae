"""Counts of lost workers and failed groups, and what follows from them. Without Ray; callers pass the time.

* Engine lost (its process ended, or it missed its heartbeat): other workers sample its groups. A replacement starts, after a pause that
  doubles with each loss while no group is finished in between; and, whatever is finished, with each loss within an hour beyond 10 (or 3
  times the pool's size): an engine that comes up and dies again and again costs the others little. Nodes that lost two engines are avoided.
  A worker with agents' programs under way starts another engine by itself, once for each group that is finished in between; it counts as
  dirty until that one has weights.
* Start failed: as an engine lost in vain. The pause doubles also with each start that fails in the same place, whatever others finish.
* Request failed (refused, malformed or late answer; an error that nobody has foreseen): another worker samples the group; after two
  failures it is discarded with the reason.
* Data failed (no worker could sample the prompt): the group is discarded with the reason.
* Reward failed: the trajectory is invalid; a group with fewer than two valid ones is discarded (GroupBook.draw). When most groups
  come so, work is handed out one group at a time, after pauses that double; after half an hour of pauses the run ends (Scoring). So
  it does when a worker that starts gets no score for its sample, in a run that has had scores: that is no engine lost.
* Reward late: the run waits and says so; nothing is killed.
* Infrastructure (an actor can't be reached at present): the call is repeated (supervision.call_with_retries), and the heartbeat decides
  whether the actor is lost. A group is discarded after MAX_UNREACHED such calls.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from evenkeel.actors.carriers import Notify
from evenkeel.actors.processes.pacing import doubled_pause_s
from evenkeel.actors.settings.deadlines import REPLACEMENT_PAUSE_S
from evenkeel.correction.errors import EngineError, RequestError, counted
from evenkeel.rollout.config import FunctionReward, TaskEntry
from evenkeel.rollout.trajectory import LEAST_VALID, FailureKind, GroupFacts

WINDOW_S = 3600.0
"""Seconds after which a loss no longer counts."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0
_LEAST_BUDGET = 10
_LOSSES_OF_A_NODE = 2
# Seconds within which engines of one node are lost with it.
_TOGETHER_S = 15.0
ATTEMPTS = 2
"""Failed requests of one group after which it is discarded."""
MAX_UNREACHED = 5
"""Calls for one group that could not reach a worker for half a minute, though it answered its heartbeat, before the group is discarded."""
_OUTCOMES = 64
FEWEST_FAILED = 16
FAILING_AFTER = 4
"""Failed requests of one worker in a row, for different groups, after which all weights are sent to it again."""


class WorkerLosses:
    """Lost workers: when, on which nodes, and how many since a group was last finished."""

    def __init__(self) -> None:
        self._losses: deque[tuple[float, str]] = deque()
        # Times of the losses since a group was last finished.
        self._in_vain: deque[float] = deque()
        # Times and nodes of the losses of engines that had been up; those of one node within _TOGETHER_S are one.
        self._after_start: deque[tuple[float, str]] = deque()

    def lost(self, now: float, node: str = "", *, is_in_vain: bool = True, was_up: bool = True) -> None:
        """
        Args:
            now: seconds.
            node: its id; empty: not known.
            is_in_vain: until a group is finished, it counts against the budget.
            was_up: its start had not failed; starts that fail have a pause of their own, which ends with the first that succeeds.
        """
        self._losses.append((now, node))
        if is_in_vain:
            self._in_vain.append(now)
        if was_up and not any(at > now - _TOGETHER_S and node and where == node for at, where in self._after_start):
            self._after_start.append((now, node))
        self._forget(now)

    def worked(self) -> None:
        """A group was finished."""
        self._in_vain.clear()

    @property
    def in_vain(self) -> int:
        """Losses since a group was last finished, within WINDOW_S before the last of them."""
        return len(self._in_vain)

    def pause_s(self, size: int, failed_starts: int = 0, *, is_alone: bool = False) -> float:
        """Seconds to wait before the next replacement starts: 0 while `in_vain` is at most the pool's size, then 2, 4, 8 ... up to 300.

        Losses of engines that had been up, within WINDOW_S, do so up to REPLACEMENT_PAUSE_S beyond the budget (see `check`), also if groups
        are finished: those are of use while they live.
        Args:
            size: workers that the pool is to have.
            failed_starts: in the place of this one, in a row; from the second on they count as losses beyond the pool's size do.
            is_alone: no worker is up, and the run waits for this one: losses of engines that had been up add no pause, unless in vain.
        """
        return max(self._pauses_s(size, failed_starts, is_alone=is_alone).values())

    def why_pause(self, size: int, failed_starts: int = 0, *, is_alone: bool = False) -> str:
        """What makes the pause as long as it is, in words. Args: as `pause_s`."""
        pauses_s = self._pauses_s(size, failed_starts, is_alone=is_alone)
        return max(pauses_s, key=lambda why: pauses_s[why])

    def _pauses_s(self, size: int, failed_starts: int, *, is_alone: bool) -> dict[str, float]:
        """Pauses in seconds, by what is counted."""
        window = f"{len(self._after_start)} losses of rollout workers within {WINDOW_S / 60:.0f} minutes"
        return {
            f"{counted(failed_starts, 'start')} in a row failed": doubled_pause_s(failed_starts - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            "workers are lost one after the other": doubled_pause_s(self.in_vain - size, _FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            window: doubled_pause_s(0 if is_alone else len(self._after_start) - _budget(size), _FIRST_PAUSE_S, REPLACEMENT_PAUSE_S),
        }

    def check(self, size: int, last: str) -> None:
        """Raises: EngineError after more than 10 losses (or 3 times the pool's size, if that is more) within WINDOW_S without one finished
        group. Rarer losses never end a run; deadlines.no_workers_s may.

        Args:
            size: workers that the pool is to have.
            last: why the last one was lost, in words.
        """
        if self.in_vain > _budget(size):
            raise EngineError(
                f"{self.in_vain} rollout workers were lost one after the other, all within {WINDOW_S / 60:.0f} minutes, and not one group "
                f"was finished in between, so a new worker would most likely be lost as well. The last loss: {last}"
            )

    def avoided(self, now: float) -> list[str]:
        """Ids of nodes that lost two workers or more within WINDOW_S."""
        self._forget(now)
        counts = Counter(node for _, node in self._losses if node)
        return sorted(node for node, losses in counts.items() if losses >= _LOSSES_OF_A_NODE)

    def _forget(self, now: float) -> None:
        while self._losses and now - self._losses[0][0] > WINDOW_S:
            self._losses.popleft()
        while self._in_vain and now - self._in_vain[0] > WINDOW_S:
            self._in_vain.popleft()
        while self._after_start and now - self._after_start[0][0] > WINDOW_S:
            self._after_start.popleft()


def _budget(size: int) -> int:
    """Losses within WINDOW_S that a pool of so many workers may have. Spot nodes come and go; not each engine more than three times."""
    return max(_LEAST_BUDGET, 3 * size)


class LatestGroups:
    """The latest 64 groups, none older than `window_s` seconds: how many of them went well."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_OUTCOMES)

    def add(self, now: float, *, is_good: bool) -> None:
        """Args: now: seconds."""
        self._outcomes.append((now, is_good))
        while now - self._outcomes[0][0] > self._window_s:
            self._outcomes.popleft()

    def clear(self) -> None:
        self._outcomes.clear()

    @property
    def _bad(self) -> int:
        return sum(not is_good for _, is_good in self._outcomes)

    @property
    def are_mostly_bad(self) -> bool:
        """Whether most of the latest groups went wrong: 16 or more, and over half."""
        return self._bad >= FEWEST_FAILED and 2 * self._bad > len(self._outcomes)

    def __str__(self) -> str:
        return f"{self._bad} of the last {len(self._outcomes)} groups"


# Whether the reward can score what the workers sample. While it can't, work is held back: prompts would be used up without training.
#
# A judge that other machines serve, a key that has run out, a full disk below a scorer: then all rewards fail at once, on every worker, and
# the groups are discarded. Once that is so for most of the latest groups, one group at a time is handed out, after a pause that doubles
# with each failure. The first group that can be scored ends that. Answers that were cut, and groups whose rewards are all alike, were
# scored.

_LONGEST_REWARD_PAUSE_S = 60.0
PATIENCE_S = 1800.0
"""Most seconds of pauses in a row. A judge that restarts or moves to another node is back by then; a reward function with a bug isn't."""


def unscored(group: GroupFacts) -> str:
    """The last error of a group's reward, if that alone left it with too few valid answers; else empty."""
    errors = [error for kind, error in group.failures if kind is not FailureKind.ENGINE]
    return errors[-1] if not group.is_trainable and len(group.valid) + len(errors) >= LEAST_VALID else ""


class UnscoredStarts:
    """Starts of workers that failed by their reward alone, in a run that has had scores: waited for as groups that can't be scored are."""

    def __init__(self) -> None:
        # Event-loop time (s) of the first one since a worker was last up.
        self._since: float | None = None

    def pause_s(self, error: BaseException | None, starts: int, now: float, *, is_alone: bool) -> float:
        """Seconds to wait before the next start: 2, 4, 8 ... up to 60.

        Args:
            error: what the reward says.
            starts: such starts in the place of this worker, in a row; 1 or more.
            now: seconds.
            is_alone: no worker is up, so that nobody else learns when rewards work again, or that they never will.
        Raises: RequestError once that has been so for PATIENCE_S.
        """
        self._since = (now if self._since is None else self._since) if is_alone else None
        if self._since is not None and now - self._since >= PATIENCE_S:
            raise RequestError(
                f"{error}. For {PATIENCE_S / 60:.0f} minutes no rollout worker could start because of it. Repair it and resume the run, "
                "which goes on from its last checkpoint"
            )
        return doubled_pause_s(starts, _FIRST_PAUSE_S, _LONGEST_REWARD_PAUSE_S)

    def ended(self) -> None:
        """A worker is up."""
        self._since = None


class Scoring:
    """Counts groups that can't be scored, and says how many may be handed out."""

    def __init__(self, tasks: Sequence[TaskEntry], window_s: float, *, notify: Notify) -> None:
        """
        Args:
            tasks: of the run.
            window_s: seconds after which a group no longer counts.
            notify: takes level and sentence.
        """
        rewards = [entry.reward for entry in tasks]
        self._reward = ", ".join(one.path if isinstance(one, FunctionReward) else one.kind for one in rewards)
        self._notify = notify
        self._latest = LatestGroups(window_s)
        # Number of pauses, and their seconds, since a group was last scored.
        self._pauses, self._paused_s = 0, 0.0
        self.is_pausing = False

    def finished(self, group: GroupFacts, now: float) -> float:
        """A worker has sampled it.

        Args: now: seconds.
        Returns: seconds of a pause that begins now, to be ended by `pause_is_over`; 0: none does.
        Raises: RequestError once PATIENCE_S of pauses have passed without one group that could be scored.
        """
        if not (why := unscored(group)):
            if group.is_trainable:
                self._scored(now)
            return 0.0
        self._latest.add(now, is_good=False)
        if self.is_pausing or not (self._pauses or self._latest.are_mostly_bad):
            return 0.0
        if self._paused_s >= PATIENCE_S:
            raise RequestError(
                f"reward {self._reward}: {self._latest} could not be scored, and no group since, in {counted(self._pauses, 'pause')} "
                f"of {self._paused_s / 60:.0f} minutes in all. Repair it and resume the run, which goes on from its last checkpoint. "
                f"The last error: {why}"
            )
        self._pauses += 1
        pause_s = doubled_pause_s(self._pauses, _FIRST_PAUSE_S, _LONGEST_REWARD_PAUSE_S)
        self._paused_s += pause_s
        self._notify("warning", f"rewards: {self._latest} could not be scored; the next group in {pause_s:.0f} s: {why}")
        self.is_pausing = True
        return pause_s

    def _scored(self, now: float) -> None:
        if self._pauses:
            self._notify("info", f"rewards: a group was scored, after {counted(self._pauses, 'pause')}: all groups are handed out again")
            self._latest.clear()
        self._latest.add(now, is_good=True)
        self._pauses, self._paused_s = 0, 0.0

    def pause_is_over(self) -> None:
        self.is_pausing = False

    @property
    def is_failing(self) -> bool:
        """Whether work is held back, because nobody's groups are scored."""
        return self._pauses > 0

    def places(self, *, is_idle: bool) -> int | None:
        """How many groups may be handed out; None: all that wait. Args: is_idle: no worker has a group."""
        if not self._pauses:
            return None
        return int(is_idle and not self.is_pausing)
