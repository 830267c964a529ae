"""Calls that begin together are made a few to a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from actors.processes.turns import SHARED_BY, Turns
from tests.actors.processes.turn_counter import TurnCounter


def test_a_turn_is_given_to_a_few_in_the_order_in_which_they_came() -> None:
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
        assert max(Counter(turn for turn, _ in came).values()) == SHARED_BY and len({turn for turn, _ in came}) == -(-49 // SHARED_BY)

    asyncio.run(scenario())
