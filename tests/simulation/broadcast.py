"""A torch.distributed group among simulated processes: all come, or it fails; all take part in a broadcast, or it fails."""

from __future__ import annotations

import asyncio
from typing import Any

from evenkeel.correction.errors import SyncError

# Of one broadcast; a member that is gone shows by it.
_TIMEOUT_S = 45.0


class Meeting:
    def __init__(self) -> None:
        self.came = 0
        self.world_size = 0
        self.decided = asyncio.Event()
        self.is_given_up = False
        self.waiting: list[asyncio.Future[int]] = []
        self.changed = asyncio.Event()


class Meetings:
    """By name."""

    def __init__(self) -> None:
        self._meetings: dict[str, Meeting] = {}

    async def rendezvous(self, name: str, world_size: int, timeout_s: float) -> Meeting:
        meeting = self._meetings.setdefault(name, Meeting())
        meeting.came, meeting.world_size = meeting.came + 1, world_size
        if meeting.came >= world_size:
            meeting.decided.set()
        try:
            await asyncio.wait_for(meeting.decided.wait(), timeout_s)
        except TimeoutError as error:
            raise SyncError(f"weight group {name}: {meeting.came} of {world_size} members came") from error
        if meeting.is_given_up:
            raise SyncError(f"weight group {name}: it was given up before all members had come")
        return meeting

    def give_up(self, name: str) -> None:
        """Whoever waits for members that don't come goes on. Of a group that is whole nothing changes."""
        meeting = self._meetings.setdefault(name, Meeting())
        if not meeting.decided.is_set():
            meeting.is_given_up = True
            meeting.decided.set()

    async def received(self, name: str, timeout_s: float) -> int:
        """What rank 0 sends next."""
        meeting = self._meetings[name]
        arriving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        meeting.waiting.append(arriving)
        meeting.changed.set()
        try:
            return await asyncio.wait_for(arriving, timeout_s)
        except TimeoutError as error:
            raise SyncError(f"weight group {name}: nothing was broadcast in {timeout_s:g} s") from error
        finally:
            if arriving in meeting.waiting:
                meeting.waiting.remove(arriving)

    async def broadcast(self, meeting: Any, weights: int) -> str:
        """Returns: why it failed; empty: it didn't."""
        if meeting is None:
            return "the learner is in no weight group"
        ends = asyncio.get_running_loop().time() + _TIMEOUT_S
        while len(meeting.waiting) < meeting.world_size - 1:
            meeting.changed.clear()
            try:
                await asyncio.wait_for(meeting.changed.wait(), ends - asyncio.get_running_loop().time())
            except TimeoutError:
                return f"{len(meeting.waiting)} of {meeting.world_size - 1} engines took part in {_TIMEOUT_S:g} s"
        for arriving in meeting.waiting:
            if not arriving.done():
                arriving.set_result(weights)
        meeting.waiting = []
        return ""
