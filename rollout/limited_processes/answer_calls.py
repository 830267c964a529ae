"""The child's side of many_calls.py: an event loop that answers requests side by side, each within its deadline."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from evenkeel.rollout.limited_processes.child import LENGTH, error_text, pack_answer

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Answers a request. What it raises is the user's."""


def answer_calls(connection: socket.socket, answer: Answer, spec: dict[str, Any], *, name: str, section: str) -> None:
    """Answer requests side by side until the socket is closed: with their number, and what was returned or {"error": why}.

    Args: spec: has deadline_s, of each. name, section: as of ManyCalls, for messages; a request may name what it wants, in `do`.
    """
    asyncio.run(_serve(connection, answer, spec["deadline_s"], name, section))


async def _serve(connection: socket.socket, answer: Answer, deadline_s: float, name: str, section: str) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task[None]] = set()

    async def reply(request: dict[str, Any]) -> None:
        number, of_what = request.pop("call"), f" in {request['do']}" if "do" in request else ""
        timeout = asyncio.timeout(deadline_s)
        try:
            async with timeout:
                found = await answer(request)
        except MemoryError:
            found = {"error": f"{name} ran out of memory ({section}.memory_gib)"}
        except SystemExit:
            found = {"error": f"{name} called sys.exit{of_what}"}
        except (Exception, asyncio.CancelledError) as error:  # the second: of a task that the user's code had cancelled itself
            found = {"error": f"{name} raised {error_text(error)}{of_what}"}
            if timeout.expired():
                late = f"{name} took more than {deadline_s:g} s{of_what.replace(' in ', ' for ')} ({section}.deadline_s)"
                found = {"error": late, "is_late": True}
        writer.write(pack_answer({"call": number, **found}))

    while True:
        try:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            request = pickle.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(reply(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
