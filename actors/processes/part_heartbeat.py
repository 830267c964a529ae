"""Whether the parts of a run still move: their processes are asked every half a minute or so, and one that stands still is ended.

Ray reports a death, and nothing of a process that is stopped, or hangs in C. The answer comes from a thread of its own (a concurrency
group of Ray), so that one that is busy isn't taken for one that stands: it says that Python moves in that process. It brings along what
the part has to report: its own log is a file on its node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from actors.processes.event_level import Notify
from actors.processes.supervision import HALF_OVER, first_error, kill, wait_for
from correction.errors import ActorLost, DeadlineExceeded, EvenkeelError

GROUPS = {"heartbeat": 1}
"""Concurrency groups of a part's actor."""
OUT_OF_TURN = "out_of_turn"
"""Another group, of a part whose calls run one after the other: its calls don't wait for those, and run one after the other as well."""
_MISSES = 4
"""Questions in a row without an answer, each a quarter of the limit."""
_UNREACHED_S = 1.0
_MOST_NOTICES = 1000


class SequentialHeartbeatActor:
    """A part whose calls run one after the other, in one thread that isn't the main one: a learner's rank.

    To be made with `sequential_actor`.
    """

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, heard: int) -> list[tuple[int, str]]:
        """Returns: no notices; a rank has none to report."""
        return []


def sequential_actor(actor: type[SequentialHeartbeatActor]) -> Any:
    """Like ray.remote, with calls out of order: in order, a heartbeat would wait behind a call whose arguments are still on their way."""
    return ray.remote(concurrency_groups={**GROUPS, OUT_OF_TURN: 1}, allow_out_of_order_execution=True)(actor)  # type: ignore[call-overload]


class HeartbeatActor:
    """An actor (async) that is a part of the run."""

    def __init__(self) -> None:
        self._notices: deque[tuple[int, str]] = deque(maxlen=_MOST_NOTICES)
        self._number = 0

    def report(self, text: str) -> None:
        """Send a sentence to the run's events, with the next heartbeat."""
        self._number += 1
        self._notices.append((self._number, text))

    @ray.method(concurrency_group="heartbeat")
    async def heartbeat(self, heard: int) -> list[tuple[int, str]]:
        """What it has reported since, each with its number; of what nobody takes the newest are kept. Args: heard: number of the last."""
        while self._notices and self._notices[0][0] <= heard:
            self._notices.popleft()
        return list(self._notices)


async def raise_when_silent(parts: Mapping[str, Any], limit_s: float, notify: Notify) -> None:
    """Never returns. Raises: ActorLost naming the first of these actors, by name, that has given no sign for so long; it is killed.

    Args: notify: takes level and sentence: what they report.
    """
    await first_error(_follow(name, actor, limit_s, notify) for name, actor in parts.items())


async def _follow(name: str, actor: Any, limit_s: float, notify: Notify) -> None:
    heard = missed = 0
    while missed < _MISSES:
        try:
            notices = await wait_for(_reached(actor, heard), f"heartbeat <- {name}", deadline_s=limit_s / _MISSES, notice_s=limit_s)
        except DeadlineExceeded:  # a question, not the time: that this process stood still is not the part's fault
            missed += 1
            if missed == _MISSES // 2:
                notify("warning", f"{name}: no heartbeat for {limit_s / 2:.0f} s; it is ended after {limit_s:.0f} s")
                if (half_over := HALF_OVER.get()) is not None:
                    half_over(f"heartbeat <- {name}")
            continue
        except (EvenkeelError, RayError) as error:
            raise ActorLost(f"{name}: {error}") from error
        missed = 0
        for number, text in notices:
            heard = number
            notify("warning", f"{name}: {text}")
        await asyncio.sleep(limit_s / _MISSES)
    kill(actor)
    raise ActorLost(f"{name}: it gave no sign for {limit_s:.0f} s (deadlines.part_heartbeat_s), and its process was ended")


async def _reached(actor: Any, heard: int) -> list[tuple[int, str]]:
    while True:
        try:
            notices: list[tuple[int, str]] = await actor.heartbeat.remote(heard)
        except ActorUnavailableError:
            await asyncio.sleep(_UNREACHED_S)
        else:
            return notices
