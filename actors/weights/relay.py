"""In which order nodes fetch objects that one node has made: in waves, so that most of them fetch from each other.

Ray fetches an object from a node that has it, drawn at random from those that the object's owner knows as the fetch begins. Nobody can
choose which (`PullManager::PullFromRandomLocation` in Ray's sources). If all nodes ask at once, the first node alone has it, and sends it
to each. Here no more nodes fetch at a time than have it already: 1, 2, 4, 8 and so on. Where h nodes have it, the first is drawn with
probability 1/h, so it sends about once a wave: log2 of the number of nodes. That is a mean; by bad luck it is more often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from actors.processes.supervision import abandon


class Relay:
    """The turns of the nodes that fetch the same objects. One event loop uses it."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(1)
        """As many as nodes have had the objects, less those in use."""

    async def in_turn(self, fetch: Callable[[], Awaitable[Any]], patience_s: float) -> float:
        """Have one more node fetch the objects when it is its turn, first come, first served.

        Args:
            fetch: does it.
            patience_s: longest time that others wait for this turn, seconds: a node that is lost may be silent for long.
        Returns: seconds that the fetch took, without the wait for its turn.
        """
        await self._turns.acquire()
        began = asyncio.get_running_loop().time()
        fetching = asyncio.ensure_future(fetch())
        try:
            await asyncio.wait({fetching}, timeout=patience_s)
        except asyncio.CancelledError:
            abandon(fetching)
            raise
        finally:
            self._turns.release()
        await fetching
        self._turns.release()  # of the node that has them now
        return asyncio.get_running_loop().time() - began


def fetched(references: Sequence[Any]) -> None:
    """A Ray task: returns when these objects are in the store of its node, unread. A lost one counts as there: who reads it sees it."""
    ray.wait(list(references), num_returns=len(references), fetch_local=True)
