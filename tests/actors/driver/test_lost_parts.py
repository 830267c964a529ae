"""Who of the actors that hold a run's state is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
)

from evenkeel.actors.driver.recovery import Lost, lost_among, raise_when_lost
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EngineError


class Part:
    """Says of itself what the next of these is: alive (None), or what Ray raises; the last one again and again.

    "silent": no answer; "busy": a late one.
    """

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.__ray_ready__ = SimpleNamespace(remote=self._ready)
        self.heartbeat = SimpleNamespace(remote=self._beat)

    async def _beat(self, acknowledged: int) -> list[str]:
        return []

    async def _ready(self) -> None:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer in ("silent", "busy"):
            await asyncio.sleep(60.0 if answer == "silent" else 0.6)
        if isinstance(answer, Exception):
            raise answer


ALIVE = None
GONE = RayActorError()
UNREACHABLE = ActorUnavailableError("for now", None)


@pytest.fixture(autouse=True)
def without_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.actors.driver.recovery._ANSWER_S", 1.5)
    monkeypatch.setattr("evenkeel.actors.driver.recovery._LOOK_S", 0.01)


@pytest.mark.parametrize(
    ("parts", "error", "expected"),
    [
        ({"service": Part(ALIVE), "rank": Part(GONE)}, EngineError("step"), Lost(("rank",))),
        ({"service": Part(ALIVE), "rank": Part(ALIVE)}, EngineError("a bit differs"), Lost()),
        ({"service": Part(UNREACHABLE, UNREACHABLE, GONE), "rank": Part("silent")}, EngineError("places"), Lost(("service",))),
        ({"service": Part(UNREACHABLE, ALIVE), "rank": Part(ALIVE)}, EngineError("places"), Lost()),
        ({"service": Part(ALIVE), "rank": Part("silent")}, DeadlineExceeded("step"), Lost(("rank",))),
        ({"service": Part(ALIVE), "rank": Part(OutOfMemoryError("killed"))}, ActorLost("step"), Lost(("rank",))),
        ({"service": Part(ALIVE), "rank": Part(ALIVE)}, ActorUnavailable("step"), Lost(answer="step")),
        ({"service": Part(ALIVE), "rank": Part("silent")}, EngineError("of another kind, while a step is under way"), Lost()),
        ({"correction service": Part("silent"), "learner rank 0": Part("silent")}, DeadlineExceeded("pull"), Lost(("correction service",))),
    ],
    ids=["dead", "none", "unreachable, then dead", "unreachable a moment", "hangs", "out of memory", "answer lost", "busy", "rank is busy"],
)
def test_a_part_is_lost_if_it_is_dead_or_hangs(parts: dict[str, Any], error: Exception, expected: Lost) -> None:
    assert asyncio.run(lost_among(parts, error)) == expected


def test_the_watch_names_who_dies_and_outlives_a_bad_network() -> None:
    parts = {"learner rank 0": Part(ALIVE), "learner rank 1": Part(ALIVE, UNREACHABLE, ALIVE, GONE)}
    with pytest.raises(ActorLost, match=r"^learner rank 1: its process is gone$"):
        asyncio.run(asyncio.wait_for(raise_when_lost(parts, 60.0, lambda *_: None), 20.0))
