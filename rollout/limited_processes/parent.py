"""Processes for the user's code, awaited from an event loop. They can be killed, with all that they started (guardian.py).

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
from collections.abc import Callable
from typing import Any

import psutil

from evenkeel.correction.errors import signal_name
from evenkeel.rollout.limited_processes.child import LENGTH, pack_message, shortened
from evenkeel.rollout.limited_processes.guardian import MOST_PROCESSES, limit_passed
from evenkeel.rollout.limited_processes.variables import passed_on
from evenkeel.rollout.module_path import checkout
from evenkeel.rollout.trajectory import FailureKind

MAX_REPLY_BYTES = 1 << 24
"""Largest answer of a child."""
# Characters that are kept of an error's text.
_LONGEST_ERROR = 2000
_END_S = 10.0


class CallError(Exception):
    """A call that gave no answer, or an error of the user's code; the message says why."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.REWARD, *, is_none: bool = False) -> None:
        """Args: is_none: the reward returned None."""
        super().__init__(message)
        self.kind, self.is_none = kind, is_none


class SettingError(CallError):
    """The child can't do what its settings say; the message begins with the setting's key."""


class LimitedProcess:
    """One child process with its socket: down -> started -> ready -> (killed: down)."""

    def __init__(self, module: str, spec: dict[str, Any], *, name: str, section: str) -> None:
        """
        Args:
            module: what it runs (child.run).
            spec: the first message, with start_deadline_s and memory_gib; it may have variables, that the child gets beside the usual
                ones (variables.py), and most_processes, if it isn't guardian.MOST_PROCESSES.
            name: for messages, with "the".
            section: of the settings, for messages.
        """
        self._module, self._name, self._section = module, name, section
        self._spec = {"most_processes": MOST_PROCESSES} | spec | {"python_path": os.environ.get("PYTHONPATH")}
        # The guardian of the process.
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

        Raises: CallError if the machine has no process, memory or descriptor left for it; the next call tries again.
        """
        if self._child is not None:
            return
        try:
            self._start()
        except OSError as error:
            self.kill()
            raise self._refused(error) from error

    def _start(self) -> None:
        """Raises: OSError; nothing stays open, but what `kill` closes."""
        environment = passed_on(self._spec.get("variables", ())) | {
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
            command = [sys.executable, "-P", "-m", self._module, *map(str, passed), str(os.getpid())]
            # A session of its own: Ctrl-C is for the run.
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed, env=environment, start_new_session=True)
            self._socket, self._leash = ours, held
            unless_started.pop_all()
        ours.sendall(pack_message(self._spec))

    async def ready(self) -> None:
        """Wait until the child has imported what it needs. Raises: SettingError if it can't; CallError."""
        if self._is_ready:
            return
        self.start()
        try:
            self._streams = await asyncio.open_connection(sock=self._socket)
            self._watch()
        except OSError as error:
            self.kill()
            raise self._refused(error) from error
        except BaseException:  # cancelled: the socket is closed then
            self.kill()
            raise
        limit_s = self._spec["start_deadline_s"]
        reply = await self.reply(_as_start, "its imports", limit_s=limit_s, setting="start_deadline_s")
        if "error" in reply:
            self.kill()
            raise SettingError(reply["error"])
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

    def send(self, request: dict[str, Any]) -> None:
        """Send a request to a process that is ready."""
        assert self._streams is not None
        self._streams[1].write(pack_message(request))

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

    async def reply(
        self, parse: Callable[[bytes], dict[str, Any]], what: str, *, limit_s: float | None = None, setting: str = ""
    ) -> dict[str, Any]:
        """The next answer. Whatever else comes, or if nothing does in time, the child is killed and another started.

        Args:
            parse: of the bytes of an answer; raises ValueError or RecursionError for anything else.
            what: is waited for, for messages.
            limit_s: None: no limit.
            setting: that has the limit.
        Raises: CallError.
        """
        assert self._streams is not None
        reader, child = self._streams[0], self._child
        try:
            async with asyncio.timeout(limit_s):
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size > MAX_REPLY_BYTES:
                    raise ValueError(f"{size} bytes")
                return parse(await reader.readexactly(size))
        except TimeoutError:
            self._restart()
            late = f"{self._name} took more than {limit_s:g} s for {what} ({self._section}.{setting}); its process was killed"
            raise CallError(late, FailureKind.REWARD_TIMEOUT) from None
        except (ValueError, RecursionError) as error:  # the user's code has written to the socket itself; the latter: a thousand brackets
            self._restart()
            raise CallError(f"the process of {self._name} sent no reply at {what}, but something else ({error}); it was killed") from None
        except (ConnectionError, EOFError):
            if child is None or self._child is not child:
                raise CallError(f"the processes of {self._name} were closed") from None
            try:
                exit_code = await asyncio.to_thread(self._exit_code, child)
            except RuntimeError as error:  # no thread is left to wait for it
                exit_code = str(error)
            finally:
                if self._child is child:
                    self._restart()
            raise CallError(f"the process of {self._name} died at {what} ({exit_code})") from None
        except BaseException:  # cancelled: the answer to this request must not be taken for the next one's
            if self._child is child:  # and not another that somebody has started since
                self.kill()
            raise

    def _restart(self) -> None:
        self.kill()
        with contextlib.suppress(CallError):  # tried again, and reported, by the next call
            self.start()

    def _exit_code(self, child: subprocess.Popen[bytes]) -> str:
        """How the child ended, in words. It has closed its socket, so it ends as soon as it has ended what it started."""
        try:
            code = child.wait(timeout=_END_S / 2)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if reason := limit_passed(code, self._spec["memory_gib"], self._spec["most_processes"], self._section):
            return reason
        return f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"

    def _refused(self, error: OSError) -> CallError:
        return CallError(f"the machine lets no process of {self._name} start ({error})")


def _see_to_its_end(guardian: subprocess.Popen[bytes]) -> None:
    """Wait until the guardian has ended its tree and itself. If it can't, kill the tree from here; if it was killed, its process group:
    processes in sessions of their own go on then."""
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


def _as_start(payload: bytes) -> dict[str, Any]:
    reply = json.loads(payload)
    if (error := error_in(reply)) is not None:
        return {"error": error}
    if reply == {"ready": True}:
        return {"ready": True}
    raise ValueError(repr(payload[:60]))


def error_in(reply: Any) -> str | None:
    """The text of an answer {"error": text, ...}; None: it is another one. Half a surrogate pair, which can't be written as UTF-8, stands
    there as its escape."""
    if not isinstance(reply, dict) or not isinstance(error := reply.get("error"), str):
        return None
    return shortened(error, _LONGEST_ERROR).encode(errors="backslashreplace").decode()
