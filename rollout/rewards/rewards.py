"""Scoring of completions in processes that can be killed, awaited from an event loop.

A scorer may hang in the middle of a C function (sympy on 5^5^5^5), crash, or eat memory, and the run has to go on. So each scoring
process has a socket of its own and is ended (with all that it started: reward_guardian.py) when a call passes its deadline; the
next call on it meets a fresh one, and calls on other processes never notice.

No library has this. Pebble's process pool (5.2.3) ends a worker at a deadline, too, but that worker alone: what it has started goes on,
also when the parent is killed; nothing limits the memory and processes of a worker's tree; results are unpickled. Like
concurrent.futures it shares pipes and locks among the workers, which one that dies hard may take with it, and with "spawn" it imports the
parent's `__main__` in each (here: ray, torch).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import psutil

from evenkeel.correction.errors import ConfigError, signal_name
from evenkeel.rollout.config import FunctionReward, ReasoningGymReward, ReasoningGymTask, RewardConfig, TaskConfig
from evenkeel.rollout.continuation import unanswered
from evenkeel.rollout.module_path import checkout
from evenkeel.rollout.rewards.reward_guardian import limit_passed
from evenkeel.rollout.rewards.reward_process import LENGTH, SINGLE, are_parts, pack_message, shortened
from evenkeel.rollout.rewards.reward_trial import in_its_form
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory

_MAX_REPLY_BYTES = 1 << 24
# Characters that are kept of a scorer's error.
_LONGEST_ERROR = 2000
_END_S = 10.0


class RewardCallError(Exception):
    """A call that gave no reward; the message says why."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.REWARD, *, is_none: bool = False) -> None:
        """Args: is_none: the reward returned None."""
        super().__init__(message)
        self.kind, self.is_none = kind, is_none


class _SettingError(RewardCallError):
    """The scorer can't be set up from its settings; the message begins with the setting's key."""


class RewardError(ConfigError):
    """The reward gave no score when it was tried. At a first start that is a mistake in it, until somebody says otherwise; a run that has
    had scores knows that what the reward needs (a judge, a key, a disk, a process) is away for the moment."""

    def __init__(self, *message: object, remedy: str = "", is_set_up: bool = False) -> None:
        """Args: is_set_up: its settings could be honoured; it is the sample that got no score."""
        super().__init__(*message, remedy=remedy)
        self.is_set_up = is_set_up


class RewardPool:
    """`processes` scoring processes for the groups of one rollout worker. Use it from one event loop.

    A process is started, ready after it has answered its specification, and lent to one call at a time. A call that
    doesn't end in an answer kills it, and it is started again at once: importing overlaps with the calls on the others.
    """

    def __init__(self, config: RewardConfig, task: TaskConfig | None = None) -> None:
        """
        Args:
            task: the task that makes the questions; a reasoning_gym reward takes its data set from there.
        Raises: ConfigError if a reasoning_gym reward has no such task.
        """
        self._config = config
        spec = reward_specification(config, task) | {"python_path": os.environ.get("PYTHONPATH")}
        self._processes = [_ScoringProcess(spec, config.start_deadline_s) for _ in range(config.processes)]
        self._idle: asyncio.Queue[_ScoringProcess] = asyncio.Queue()  # first in, first out: a fresh process gets time to import
        for process in self._processes:
            self._idle.put_nowait(process)

    async def check(self, sample: Prompt | None = None, also: Sequence[str] = ()) -> list[float | str]:
        """Start all processes and score the sample's own reference answer, so that a mistake shows now and not at step 300.

        Args: also: further answers to the sample. They need a score, too, but the reward may fail on them.
        Returns: for the reference answer and each of `also` its reward, or why it has none; nothing without a sample.
        Raises: RewardError if the scorer can't be set up, fails on the reference answer, or returns None for any.
        """
        on = ""
        try:
            for process in self._processes:
                process.start()
            for process in self._processes:
                await process.ready()
            if sample is None:
                return []
            own = in_its_form(self._config.extraction, sample.answer)
            outcomes = await self._call(_request(sample), [own, *also])
            for number, (tried, outcome) in enumerate(zip([own, *also], outcomes, strict=True)):
                if isinstance(outcome, RewardCallError) and (number == 0 or outcome.is_none):
                    on = f" (tried on {sample.prompt_id} with {'its own answer' if number == 0 else 'the answer'} {tried!r:.60})"
                    raise outcome
            return [str(one) if isinstance(one, RewardCallError) else sum(one.values()) for one in outcomes]
        except _SettingError as error:
            await self.close()
            raise RewardError(str(error)) from error
        except RewardCallError as error:
            await self.close()
            place = self._config.path if isinstance(self._config, FunctionReward) else self._config.kind
            raise RewardError(f"rollout.reward ({place}): {error}{on}", is_set_up=True) from error

    async def score(self, trajectories: tuple[Trajectory, ...], prompt: Prompt) -> tuple[Trajectory, ...]:
        """The same trajectories with reward and components, or with an error where there is none; in the same order.

        Those that have failed already or were given up by the engine are not scored. The others are divided among the processes beforehand:
        one that hangs delays those of the same process.
        """
        results = [_given_up(trajectory) for trajectory in trajectories]
        places = [place for place, trajectory in enumerate(results) if trajectory.error is None]
        shares = [places[first :: len(self._processes)] for first in range(min(len(self._processes), len(places)))]
        request = _request(prompt)
        outcomes = await asyncio.gather(*(self._call(request, [results[place].text for place in share]) for share in shares))
        for share, found in zip(shares, outcomes, strict=True):
            for place, outcome in zip(share, found, strict=True):
                results[place] = _scored(results[place], outcome)
        return tuple(results)

    async def close(self) -> None:
        """Kill all scoring processes. A later call starts them again."""
        for process in self._processes:
            process.kill()

    async def _call(self, request: dict[str, Any], completions: list[str]) -> list[dict[str, float] | RewardCallError]:
        """Parts of the reward of each completion, or why it has none.

        One message holds them all: for a fast scorer, a message and its answer take longer than the score. A process that had to be killed
        takes along the completion that it was at, and goes on with the next one when it is up again.
        """
        process = await self._idle.get()
        outcomes: list[dict[str, float] | RewardCallError] = []
        try:
            while len(outcomes) < len(completions):
                try:
                    await process.ready()
                    rest = {**request, "completions": completions[len(outcomes) :]}
                    async for reply in process.replies(rest, self._config.deadline_s):
                        why = RewardCallError(reply["error"], is_none="is_none" in reply) if "error" in reply else None
                        outcomes.append(why or reply["components"])
                except RewardCallError as error:
                    outcomes.append(error)
        finally:
            self._idle.put_nowait(process)
        return outcomes


def _given_up(trajectory: Trajectory) -> Trajectory:
    """The trajectory, with an error if the engine did not finish it."""
    if trajectory.error is None and (trajectory.finish_reason is FinishReason.ABORT or not trajectory.response_ids):
        return unanswered(trajectory, "the engine gave the request up: no complete answer")
    return trajectory


def _scored(trajectory: Trajectory, outcome: dict[str, float] | RewardCallError) -> Trajectory:
    if isinstance(outcome, RewardCallError):
        return replace(trajectory, reward=None, reward_components={}, error=str(outcome), failure=outcome.kind)
    return replace(trajectory, reward=sum(outcome.values()), reward_components={} if set(outcome) == {SINGLE} else outcome)


def reward_specification(config: RewardConfig, task: TaskConfig | None) -> dict[str, Any]:
    """What a scoring process has to know.

    Raises: ConfigError if a reasoning_gym reward has no reasoning_gym task.
    """
    spec = config.model_dump()
    if isinstance(config, ReasoningGymReward):
        if isinstance(task, ReasoningGymTask):
            spec |= {"dataset": task.dataset, "options": task.options}
        elif config.dataset is None:
            raise ConfigError("rollout.reward.kind = reasoning_gym needs rollout.task.kind = reasoning_gym: it scores only what it made")
        spec["is_of_rows"] = not isinstance(task, ReasoningGymTask)
    return spec


def _request(prompt: Prompt) -> dict[str, Any]:
    """What all completions of a question share."""
    answer = prompt.answer if isinstance(prompt.answer, str) else list(prompt.answer)
    return {"prompt": prompt.text, "answer": answer, "metadata": prompt.metadata}


class _ScoringProcess:
    """One child process with its socket: down -> started -> ready -> (killed: down)."""

    def __init__(self, spec: dict[str, Any], start_deadline_s: float) -> None:
        self._spec = spec
        self._start_deadline_s = start_deadline_s
        # The guardian of the scoring process.
        self._child: subprocess.Popen[bytes] | None = None
        # While it is open, the guardian lets the child live.
        self._leash = -1
        self._socket: socket.socket | None = None
        # Streams over the socket, from the first wait for the child to be ready.
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        # Open as long as the streams are; readable when the guardian has ended (Linux).
        self._pidfd = -1
        self._is_ready = False

    def start(self) -> None:
        """Start the child and send it its specification, without waiting for its imports.

        Raises: RewardCallError if the machine has no process, memory or descriptor left for it; the next call tries again.
        """
        if self._child is not None:
            return
        try:
            self._start()
        except OSError as error:
            self.kill()
            raise _refused(error) from error

    def _start(self) -> None:
        """Raises: OSError; nothing stays open, but what `kill` closes."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*checkout(), *filter(None, sys.path)]),  # what is found here is found there
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with contextlib.ExitStack() as of_child, contextlib.ExitStack() as unless_started:
            ours, theirs = socket.socketpair()
            of_child.enter_context(theirs)
            unless_started.enter_context(ours)
            leash, held = os.pipe()
            of_child.callback(os.close, leash)
            unless_started.callback(os.close, held)
            passed = [theirs.fileno(), leash]
            command = [sys.executable, "-P", "-m", "evenkeel.rollout.rewards.reward_process", *map(str, passed), str(os.getpid())]
            # A session of its own: Ctrl-C is for the run.
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed, env=environment, start_new_session=True)
            self._socket, self._leash = ours, held
            unless_started.pop_all()
        ours.sendall(pack_message(self._spec))

    async def ready(self) -> None:
        """Wait until the child has imported what it needs.

        Raises: RewardCallError.
        """
        if self._is_ready:
            return
        self.start()
        try:
            self._streams = await asyncio.open_connection(sock=self._socket)
            self._watch()
        except OSError as error:
            self.kill()
            raise _refused(error) from error
        except BaseException:  # cancelled: the socket is closed then
            self.kill()
            raise
        reply = await self._reply("ready", self._start_deadline_s, "its imports", "rollout.reward.start_deadline_s")
        if "error" in reply:
            self.kill()
            raise _SettingError(reply["error"])
        self._is_ready = True

    def _watch(self) -> None:
        """Have the guardian's death end the socket, whose other end a fork of the scorer's may hold. What has come can still be read.

        Raises: OSError.
        """
        if self._child is not None and self._socket is not None and sys.platform == "linux":
            self._pidfd = os.pidfd_open(self._child.pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._note_death, self._socket)

    def _note_death(self, ours: socket.socket) -> None:
        self._unwatch()
        with contextlib.suppress(OSError):  # closed by the other side
            ours.shutdown(socket.SHUT_RD)

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    async def replies(self, request: dict[str, Any], deadline_s: float) -> AsyncIterator[dict[str, Any]]:
        """One reply to each completion of a request. Anything else kills the child and starts another.

        Args:
            deadline_s: for each of them.
        Raises: RewardCallError.
        """
        assert self._streams is not None
        self._streams[1].write(pack_message(request))
        for _ in request["completions"]:
            yield await self._reply("components", deadline_s, "one completion", "rollout.reward.deadline_s")

    def kill(self) -> None:
        """End the child and everything that it started; nobody waits for that."""
        if self._child is not None:
            os.close(self._leash)
            with contextlib.suppress(RuntimeError):  # no thread is left for it: without its leash the guardian ends by itself
                threading.Thread(target=_see_to_its_end, args=(self._child,), daemon=True).start()
        self._unwatch()
        if self._streams is not None:
            self._streams[1].transport.abort()  # closes the socket, too
        elif self._socket is not None:
            self._socket.close()
        self._child = self._socket = self._streams = None
        self._is_ready = False

    async def _reply(self, wanted: Literal["ready", "components"], deadline_s: float, what: str, setting: str) -> dict[str, Any]:
        assert self._streams is not None
        reader = self._streams[0]
        try:
            async with asyncio.timeout(deadline_s):
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size > _MAX_REPLY_BYTES:
                    raise ValueError(f"{size} bytes")
                return _as_reply(await reader.readexactly(size), wanted)
        except TimeoutError:
            self._restart()
            late = f"the reward took more than {deadline_s:g} s for {what} ({setting}); its process was killed"
            raise RewardCallError(late, FailureKind.REWARD_TIMEOUT) from None
        except (ValueError, RecursionError) as error:  # a scorer has written to the socket itself; the latter: a thousand brackets
            self._restart()
            raise RewardCallError(f"the scoring process sent no reply at {what}, but something else ({error}); it was killed") from None
        except (ConnectionError, EOFError):
            if self._child is None:
                raise RewardCallError("the scoring processes were closed") from None
            child = self._child
            try:
                exit_code = await asyncio.to_thread(self._exit_code, child)
            except RuntimeError as error:  # no thread is left to wait for it
                exit_code = str(error)
            finally:
                if self._child is child:
                    self._restart()
            raise RewardCallError(f"the scoring process died at {what} ({exit_code})") from None
        except BaseException:  # cancelled: the answer to this request must not be taken for the next one's
            self.kill()
            raise

    def _restart(self) -> None:
        self.kill()
        with contextlib.suppress(RewardCallError):  # tried again, and reported, by the next call
            self.start()

    def _exit_code(self, child: subprocess.Popen[bytes]) -> str:
        """How the child ended, in words. It has closed its socket, so it ends as soon as it has ended what it started."""
        try:
            code = child.wait(timeout=_END_S / 2)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if reason := limit_passed(code, self._spec["memory_gib"]):
            return reason
        return f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"


def _refused(error: OSError) -> RewardCallError:
    return RewardCallError(f"the machine lets no scoring process start ({error})")


def _see_to_its_end(guardian: subprocess.Popen[bytes]) -> None:
    """Wait until the guardian has ended its tree and itself. If it can't, kill the tree from here; if it was killed, its process group:
    a scorer's processes in sessions of their own go on then."""
    try:
        guardian.wait(_END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(guardian.pid).children(recursive=True):
                process.kill()
        guardian.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the middle of a read from a disk that is gone, nothing ends it
            guardian.wait(_END_S)
    if guardian.returncode is None or guardian.returncode < 0:
        with contextlib.suppress(OSError):
            os.killpg(guardian.pid, signal.SIGKILL)


def _as_reply(payload: bytes, wanted: Literal["ready", "components"]) -> dict[str, Any]:
    """The answer of a scoring process. Half a surrogate pair in an error, which can't be written as UTF-8, stands there as its escape.

    Args: wanted: "ready" or "components"; an error comes in the place of either.
    Raises: ValueError or RecursionError if it has none of the forms that one may have.
    """
    reply = json.loads(payload)
    match reply:
        case {"error": str() as error}:
            text = shortened(error, _LONGEST_ERROR).encode(errors="backslashreplace").decode()
            return {"error": text} | ({"is_none": True} if reply.get("is_none") is True else {})
        case {"ready": True} if wanted == "ready":
            return dict(reply)
        case {"components": dict() as parts} if wanted == "components" and are_parts(parts):
            return dict(reply)
    raise ValueError(repr(payload[:60]))
