"""Calls that begin together are made one to a turn of the event loop."""

from __future__ import annotations

import asyncio

from actors.processes.turns import Turns
from tests.actors.processes.turn_counter import TurnCounter


def test_each_has_a_turn_of_its_own_in_the_order_in_which_they_came() -> None:
    async def scenario() -> None:
        turns, counter, came = Turns(), TurnCounter(), list[tuple[int, int]]()

        async def one(number: int) -> None:
            await turns.mine()
            came.append((counter.turn, number))

        dropped = [asyncio.create_task(one(number)) for number in range(50)]
        await asyncio.sleep(0)
        dropped[20].cancel()
        await asyncio.wait(dropped)
        assert [number for _, number in came] == [number for number in range(50) if number != 20]
        assert len({turn for turn, _ in came}) == 49

    asyncio.run(scenario())
