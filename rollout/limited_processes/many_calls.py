"""Many calls at a time in one process with limits, by an event loop there: asynchronous code of the user's, which awaits what takes time.

A call that awaits for too long is cancelled in its process, and no other notices. One that doesn't await (a loop, a C function), or ends
its process, takes all calls of that process along; it isn't known which of them did it. So whoever calls repeats each in a process of its
own, where it can harm no other (`was_called`). The child's side is answer_calls.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from evenkeel.rollout.limited_processes.parent import CallError, LimitedProcess
from evenkeel.rollout.trajectory import FailureKind

# Seconds by which an answer may be later than the deadline that its process keeps.
_LATER_S = 5.0


class CallLost(Exception):
    """The process of a call is gone; the message says why."""

    def __init__(self, message: str, *, was_called: bool, kind: FailureKind = FailureKind.REWARD) -> None:
        """Args: was_called: this call was under way then, and may be why."""
        super().__init__(message)
        self.was_called, self.kind = was_called, kind


class ManyCalls:
    """A process, and the calls under way in it. It has several lives, one after the other."""

    def __init__(
        self, module: str, spec: dict[str, Any], parse: Callable[[bytes], dict[str, Any]], what: str, *, name: str, section: str
    ) -> None:
        """Args: spec: has deadline_s. parse: of an answer, which has its call's number. what: a call is. See LimitedProcess."""
        self.life = 0
        self.users = 0
        """Whoever has something of its own in this process, or waits for an answer: for the choice of the least used one."""
        self._deadline_s: float = spec["deadline_s"]
        self._parse, self._what, self._name, self._section = parse, what, name, section
        self._process = LimitedProcess(module, spec, name=name, section=section)
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ready(self) -> None:
        """Raises: SettingError, CallError."""
        async with self._starting:
            await self._process.ready()
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(self.life))

    async def call(self, request: dict[str, Any], life: int) -> dict[str, Any]:
        """The answer to a request. Args: life: in which it has to be answered. Raises: CallLost."""
        if life != self.life:
            raise CallLost("its process is gone", was_called=False)
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._process.send({"call": number, **request})
        try:
            async with asyncio.timeout(self._deadline_s + _LATER_S):
                found = await answer
        except TimeoutError:
            late = f"{self._name}'s process took more than {self._deadline_s:g} s ({self._section}.deadline_s) and awaited nothing"
            if life == self.life:
                self._end(late)
            raise CallLost(f"{late}; it was killed", was_called=True, kind=FailureKind.REWARD_TIMEOUT) from None
        finally:
            del self._calls[number]
        return found

    def tell(self, request: dict[str, Any]) -> None:
        """Send what nobody awaits the answer of, if the process is up."""
        if self._reading is not None and not self._reading.done():
            self._process.send({"call": -1, **request})

    def close(self) -> None:
        self._end("it was closed")

    async def _read(self, life: int) -> None:
        try:
            while True:
                answer = await self._process.reply(self._parse, self._what)
                if (call := self._calls.get(answer["call"])) is not None and not call.done():
                    call.set_result(answer)
        except CallError as error:
            if life == self.life:
                self._end(str(error), is_dead=True)

    def _end(self, why: str, *, is_dead: bool = False) -> None:
        """Begin another life. Args: is_dead: the process is gone, and another one starts."""
        self.life += 1
        for call in self._calls.values():
            if not call.done():
                call.set_exception(CallLost(why, was_called=True))
        if not is_dead:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None  # it is done only later, and nothing may be sent to a process that is killed
            self._process.kill()
