"""The thread in which a rollout worker does what a finished answer costs: reading it, decoding its text, taking wide fields apart.

One thread: most of that work holds Python's lock, so more of them finish it no sooner, and the event loop, which also serves SGLang's
requests and the heartbeat, gets its turn later. It isn't one of asyncio's own threads: weight updates wait for none of it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="answers")


async def in_answer_thread(work: Callable[[], T]) -> T:
    """Do work in the one thread that handles answers, in the order of the calls. Returns: its result. Raises: its error."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)
