"""Who blocks an event loop is named, and so is a garbage collection that falls into it."""

from __future__ import annotations

import asyncio
import gc
import threading

from benchmarks.late_loop import LateLoop


def test_what_blocks_the_loop_is_named() -> None:
    """A wait that holds the loop until it was seen twice, which no tick can do before it ends; and one collection of everything."""

    async def scenario() -> str:
        late = LateLoop()
        await asyncio.sleep(0.03)

        def blocks_until_seen() -> None:
            for _ in range(1000):
                if sum(late._stacks.values()) >= 2:
                    return
                threading.Event().wait(0.01)

        blocks_until_seen()
        gc.collect()
        await asyncio.sleep(0.03)
        return late.end()

    before = list(gc.callbacks)
    told = asyncio.run(scenario())
    assert "blocks_until_seen" in told
    assert "full garbage collections: none" not in told
    assert gc.callbacks == before
