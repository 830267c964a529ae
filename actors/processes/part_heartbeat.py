"""Checks that the processes of a run's parts respond: each is called every half a minute or so, and one that doesn't answer is killed.

Ray reports a death, but not a process that is stopped or hangs in C. The answer comes from a thread of its own (a concurrency group of
Ray), so a busy part answers, too: the answer shows that Python runs in that process. It also brings the part's reports, because the part's
own log is a file on its node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from evenkeel.actors.carriers import EventLevel, PartReport, WaitNotice
from evenkeel.actors.processes.supervision import first_error, kill, until_silent
from evenkeel.correction.errors import ActorLost, EvenkeelError

CONCURRENCY_GROUPS = {"heartbeat": 1}
"""Concurrency groups of a part's actor."""
OUT_OF_TURN = "out_of_turn"
"""Concurrency group for calls that must not wait for a part's other calls, which run one after the other. Its own calls run one after the
other, too."""
# Heartbeats in a row without an answer after which a part is lost.
_MISSES = 4
_MOST_NOTICES = 1000
TakeReport = Callable[[EventLevel, str | WaitNotice], object]
"""Takes what a part reports: its level, and a sentence or the notice of a wait."""


class SequentialHeartbeatActor:
    """A part whose calls run one after the other, in one thread that isn't the main one: a learner's rank.

    To be made with `sequential_actor`.
    """

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, acknowledged: int) -> list[PartReport]:
        """Returns: no reports; a rank has none."""
        return []


def sequential_actor(actor: type[SequentialHeartbeatActor]) -> Any:
    """An actor as of ray.remote, but with calls out of order: in order, a heartbeat would wait for an earlier call whose arguments are
    still on their way."""
    groups = {**CONCURRENCY_GROUPS, OUT_OF_TURN: 1}
    return ray.remote(concurrency_groups=groups, allow_out_of_order_execution=True)(actor)  # type: ignore[call-overload]


class HeartbeatActor:
    """Base of async actors that are parts of the run: answers heartbeats."""

    def __init__(self) -> None:
        self._notices: deque[PartReport] = deque(maxlen=_MOST_NOTICES)
        self._number = 0

    def report(self, message: str | WaitNotice) -> None:
        """Send a sentence, or the notice of a wait, to the run's events, with the next heartbeat."""
        self._number += 1
        self._notices.append(PartReport(self._number, message))

    @ray.method(concurrency_group="heartbeat")
    async def heartbeat(self, acknowledged: int) -> list[PartReport]:
        """Reports after the last one received, at most the newest _MOST_NOTICES. Args: acknowledged: the number of that one."""
        while self._notices and self._notices[0].number <= acknowledged:
            self._notices.popleft()
        return list(self._notices)


async def raise_when_silent(parts: Mapping[str, Any], limit_s: float, notify: TakeReport) -> None:
    """Watch actors; never returns. Raises: ActorLost naming the first that has given no sign of life for `limit_s` seconds, and is killed.

    Args: parts: actors by name. notify: takes level and sentence of what they report.
    """
    await first_error(_follow(name, actor, limit_s, notify) for name, actor in parts.items())


async def _follow(name: str, actor: Any, limit_s: float, notify: TakeReport) -> None:
    newest = 0

    def pass_on(reports: list[PartReport]) -> float:
        nonlocal newest
        for report in reports:
            newest, message = report.number, report.message
            if isinstance(message, WaitNotice):
                notify("warning", replace(message, what=f"{name}: {message.what}"))
            else:
                notify("warning", f"{name}: {message}")
        return 0.0

    try:
        await until_silent(
            lambda: actor.heartbeat.remote(newest),
            f"heartbeat <- {name}",
            limit_s=limit_s,
            misses=_MISSES,
            on_answer=pass_on,
            pause=lambda: asyncio.sleep(limit_s / _MISSES),
            half_over=lambda: notify("warning", f"{name}: no heartbeat for {limit_s / 2:.0f} s; it is ended after {limit_s:.0f} s"),
        )
    except (EvenkeelError, RayError) as error:
        raise ActorLost(f"{name}: {error}") from error
    kill(actor)
    raise ActorLost(f"{name}: it gave no sign for {limit_s:.0f} s (deadlines.part_heartbeat_s), and its process was ended")
