"""The one caller of the learner's ranks, with ranks that are played: what becomes of a call that may not have come to all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.learner_group import LearnerGroup
from correction.errors import ActorLost, ActorUnavailable


class Rank:
    """Takes down the numbers of its calls; the next one can't reach it if `is_away`."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.is_away = False

    def __getattr__(self, method: str) -> Any:
        return Method(self)


class Method:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def options(self, **_: Any) -> Method:
        return self

    async def remote(self, *arguments: Any) -> Any:
        if self._rank.is_away:
            self._rank.is_away = False
            raise ActorUnavailable("the actor can't be reached")
        self._rank.numbers += arguments[:1]
        return True


def test_after_a_call_that_may_not_have_come_no_other_one_does_until_a_restore() -> None:
    """The ranks would refuse the next number, which looks like a fault of the code and ended the run; a loss takes it back."""
    ranks = [Rank(), Rank()]
    group = LearnerGroup(ranks, version=0, step_s=5.0)

    async def scenario() -> None:
        await group.load_reference(Path("model"))
        ranks[1].is_away = True
        with pytest.raises(ActorUnavailable):
            await group.load_reference(Path("model"))
        with pytest.raises(ActorLost, match=r"can't be reached.*after a restore"):
            await group.load_reference(Path("model"))
        await group.restore(Path("checkpoint"), 0, deadline_s=5.0)
        await group.load_reference(Path("model"))

    asyncio.run(scenario())
    assert [rank.numbers[-2:] for rank in ranks] == [[3, 4], [3, 4]]


def test_a_question_that_is_no_collective_call_may_miss_a_rank() -> None:
    ranks = [Rank(), Rank()]
    group = LearnerGroup(ranks, version=0, step_s=5.0)

    async def scenario() -> None:
        ranks[0].is_away = True
        with pytest.raises(ActorUnavailable):
            await group.checkpoint_bytes(deadline_s=5.0)
        await group.load_reference(Path("model"))

    asyncio.run(scenario())
    assert [rank.numbers for rank in ranks] == [[1], [1]]
