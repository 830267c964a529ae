"""Functions of the user's that the model may call: their description for the chat template, and what it reads of their calls.

Calls of a turn run side by side. What goes wrong with one is the model's to read, and costs no rollout: it begins with "error:". Only where
the process has no memory or no thread left, which is not the model's doing, the rollout fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError, validate_call

from evenkeel.rollout.limited_processes.child import LoadError, error_text, shortened

MOST_CALLS = 32
"""Calls of a turn that are run."""
LONGEST_RESULT = 8000
"""Characters of a result that the model reads."""
MOST_THREADS = 64
"""Plain functions that a process runs at a time, of all of its rollouts; the others wait, in their own time."""


class NoThread(Exception):
    """The machine gives the process no other thread."""


class Tools:
    """The tools of an environment's class."""

    def __init__(self, owner: Any, setting: str, within_s: float) -> None:
        """Args: owner: the class. setting: that names it, with its value. within_s: a call has. Raises: LoadError."""
        from transformers.utils import chat_template_utils as templates  # a second

        # It would import torch, for a type that no call in JSON has.
        templates.is_torch_available = lambda: False  # type: ignore[attr-defined, assignment]
        threading.stack_size(1 << 20)  # eight times as much is usual, and counts as the process's memory
        self.schemas: list[dict[str, Any]] = []
        """In OpenAI's form."""
        self._within_s = within_s
        self._functions: dict[str, Callable[..., Any]] = {}
        self._methods: set[str] = set()  # of the environment's own
        self._threads = asyncio.Semaphore(MOST_THREADS)
        for function in owner.tools:
            try:
                schema = templates.get_json_schema(function)
                checked = validate_call(function)
            except Exception as error:
                raise LoadError(f"{setting}: its tool {function!r:.80} can't be described to the model: {error_text(error)}") from error
            name = schema["function"]["name"]
            if name in self._functions:
                raise LoadError(f"{setting}: two of its tools have the name {name}; rename one")
            self.schemas.append(schema)
            self._functions[name] = checked
            if inspect.getattr_static(owner, name, None) is function:
                self._methods.add(name)

    async def results(self, environment: Any, calls: Sequence[tuple[str, str, str]]) -> tuple[list[dict[str, Any]], int]:
        """Messages with what each call of a turn gave, in their order, and how many of them are errors.

        Args: environment: an instance, whose methods may be among the tools. calls: id, name, which is that of a tool, and arguments, JSON.
        Raises: MemoryError, NoThread.
        """
        found = await asyncio.gather(*(self._result(environment, *call) for _, *call in calls[:MOST_CALLS]))
        found += [(f"error: it was not run: a turn has {MOST_CALLS} calls at most", True)] * (len(calls) - MOST_CALLS)
        messages = [
            {"role": "tool", "tool_call_id": number, "name": name, "content": text}
            for (number, name, _), (text, _) in zip(calls, found, strict=True)
        ]
        return messages, sum(is_error for _, is_error in found)

    async def _result(self, environment: Any, name: str, arguments: str) -> tuple[str, bool]:
        """What the model reads, and whether it is an error."""
        own, timeout = [environment] if name in self._methods else [], asyncio.timeout(self._within_s)
        try:
            given = json.loads(arguments)
            if not isinstance(given, dict):
                raise TypeError("the arguments are no JSON object")
            function = self._functions[name]
            async with timeout:
                if inspect.iscoroutinefunction(function):
                    text = _as_text(await function(*own, **given))
                else:
                    text = await _in_thread(lambda: _as_text(function(*own, **given)), self._threads)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False, include_input=False))
            return _bounded(f"error: {'; '.join(wrong)}"), True
        except (MemoryError, NoThread):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the rollout's end; any other one is of a task that the user's code had cancelled itself
            return f"error: it took more than {self._within_s:g} s" if timeout.expired() else _bounded(f"error: {error_text(error)}"), True
        return text, False


def _as_text(returned: Any) -> str:
    return _bounded(returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str))


def _bounded(text: str) -> str:
    """As the model may read it: half of a surrogate pair is no text."""
    return shortened(text, LONGEST_RESULT).encode(errors="replace").decode()


async def _in_thread(work: Callable[[], str], places: asyncio.Semaphore) -> str:
    """Do work in a thread of its own; one that hangs is left, and ended where Python can. It has its place until then.

    Raises: NoThread; as work.
    """
    await places.acquire()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[str, BaseException | None]] = loop.create_future()

    def told(found: tuple[str, BaseException | None]) -> None:
        places.release()
        if not ended.done():
            ended.set_result(found)

    def run() -> None:
        try:
            found: tuple[str, BaseException | None] = work(), None
        except BaseException as error:
            found = "", error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(told, found)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        places.release()
        raise NoThread(str(error)) from error
    try:
        text, failure = await ended
    except asyncio.CancelledError:
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise
    if failure is not None:
        raise failure
    return text
