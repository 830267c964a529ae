"""What became of work and workers, and what follows: plain books, without Ray and without a clock.

* Engine lost (its process or its engine ended, or missed its heartbeat): its groups go to others; a replacement comes, later and later
  while losses come and no group is finished; a node that lost two is avoided.
* Request failed (refused, garbage, too late): the group again, on another worker; after two it is discarded with the reason.
* Data failed (the prompt can be sampled by nobody): discarded with the reason.
* Reward failed: the trajectory is invalid; a group with fewer than two valid ones is discarded (correction service).
* Queue or reward late: waiting, said; nobody is killed.
* Infrastructure (an actor can't be reached just now): asked again (supervision.persistently), and a heartbeat says whether it is lost. A
  group whose calls reached no worker so often is discarded: nothing else is known of what becomes of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from correction.errors import EngineError, RequestError

WINDOW_S = 3600.0
"""Losses older than this say nothing about a node or a run."""
_LONGEST_PAUSE_S = 300.0
_LEAST_BUDGET = 10
_LOSSES_OF_A_NODE = 2
ATTEMPTS = 2
"""At a group whose request fails."""
STRIKES = 3
"""Engines that a group may be lost with before it is taken for the reason."""
_UNREACHED = 5
"""Times that a group's worker could not be reached for half a minute, though it answered its heartbeat, before the group is discarded."""
_OUTCOMES = 64
_FEWEST_FAILED = 16
SICK_AFTER = 4
"""Failed requests of a worker in a row, of different groups, after which its weights are sent again."""


class LossBook:
    """Lost workers, on which nodes, and how often since work was last done."""

    def __init__(self) -> None:
        self._losses: deque[tuple[float, str]] = deque()
        self._in_vain: deque[float] = deque()
        """Times of the losses since a group was last finished."""

    def lost(self, now: float, node: str = "") -> None:
        """Args: now: seconds. node: its id; empty: not known."""
        self._losses.append((now, node))
        self._in_vain.append(now)
        self._forget(now)

    def worked(self) -> None:
        """A group was finished."""
        self._in_vain.clear()

    @property
    def in_vain(self) -> int:
        """Losses of the last WINDOW_S before the last one, since a group was last finished."""
        return len(self._in_vain)

    def pause_s(self, size: int) -> float:
        """Seconds before the next replacement starts; none while no more were lost in a row than the pool has workers.

        Args: size: workers that the pool is to have.
        """
        repeated = self.in_vain - size
        return 0.0 if repeated <= 0 else min(_LONGEST_PAUSE_S, 2.0 ** min(repeated, 16))

    def check(self, size: int, last: str) -> None:
        """Raises: EngineError when so many were replaced within WINDOW_S without a single finished group. Rare losses end no run: if nobody
        can work meanwhile, that is for deadlines.no_workers_s."""
        budget = max(_LEAST_BUDGET, 3 * size)
        if self.in_vain > budget:
            raise EngineError(
                f"{self.in_vain} rollout workers were lost one after the other, all within {WINDOW_S / 60:.0f} minutes, and not one group "
                f"was finished in between: another would end like them. The last: {last}"
            )

    def avoided(self, now: float) -> list[str]:
        """Ids of nodes that lost several workers lately."""
        self._forget(now)
        counts = Counter(node for _, node in self._losses if node)
        return sorted(node for node, losses in counts.items() if losses >= _LOSSES_OF_A_NODE)

    def _forget(self, now: float) -> None:
        while self._losses and now - self._losses[0][0] > WINDOW_S:
            self._losses.popleft()
        while self._in_vain and now - self._in_vain[0] > WINDOW_S:
            self._in_vain.popleft()


class GroupBook:
    """Groups that failed or were lost, and how many of the latest could be used at all."""

    def __init__(self) -> None:
        self._failures: Counter[int] = Counter()
        self._strikes: Counter[int] = Counter()
        self._unreached: Counter[int] = Counter()
        self._in_a_row: dict[str, set[int]] = {}
        self._outcomes: deque[bool] = deque(maxlen=_OUTCOMES)

    def finished(self, group_id: int, worker: str) -> None:
        self._close(group_id, is_usable=True)
        self._in_a_row.pop(worker, None)

    def failed(self, group_id: int, worker: str) -> bool:
        """A request of it got no usable answer. Returns: it may be tried again."""
        self._failures[group_id] += 1
        self._in_a_row.setdefault(worker, set()).add(group_id)
        return self._failures[group_id] < ATTEMPTS

    def unreached(self, group_id: int) -> bool:
        """Nobody knows what has become of it. Returns: it may be tried again."""
        self._unreached[group_id] += 1
        return self._unreached[group_id] < _UNREACHED

    def is_sick(self, worker: str) -> bool:
        """Its last requests have all failed, of so many groups that the groups are hardly the reason; counted anew then."""
        is_sick = len(self._in_a_row.get(worker, ())) >= SICK_AFTER
        if is_sick:
            del self._in_a_row[worker]
        return is_sick

    def lost(self, group_ids: Sequence[int], worker: str) -> list[int]:
        """The engine that sampled them was lost. Returns: those that are taken for the reason, as they were suspects already."""
        self._in_a_row.pop(worker, None)
        self._strikes.update(group_ids)
        return [group_id for group_id in group_ids if self._strikes[group_id] >= STRIKES]

    def were_lost(self, group_ids: Sequence[int]) -> bool:
        """An engine was lost with one of them. Whether another one falls to it shows only with a worker that lived when it took it."""
        return any(self._strikes[group_id] > 0 for group_id in group_ids)

    def is_suspect(self, group_id: int) -> bool:
        """The next loss with it is laid at its door: only one such group may be with a worker."""
        return self._strikes[group_id] >= STRIKES - 1

    def discarded(self, group_id: int, reason: str) -> None:
        """Raises: RequestError when most of the latest groups had to be discarded: the run would use up its prompts for nothing."""
        self._close(group_id, is_usable=False)
        failed = self._outcomes.count(False)
        if failed >= _FEWEST_FAILED and 2 * failed > len(self._outcomes):
            raise RequestError(f"{failed} of the last {len(self._outcomes)} groups got no usable answer on any worker. The last: {reason}")

    def _close(self, group_id: int, *, is_usable: bool) -> None:
        self._failures.pop(group_id, None)
        self._strikes.pop(group_id, None)
        self._unreached.pop(group_id, None)
        self._outcomes.append(is_usable)
