"""The life of SGLang's processes: start, death, end; and waiting for them with a deadline.

An engine's owner is this process. Its children are SGLang's schedulers, one for each rank, which hold the model; and, with
attention_data_parallel > 1, a controller that deals requests out to the groups of ranks. What shapes this file:

* The children ask the kernel to be killed with their parent, and the kernel means the parent *thread*: the engine is therefore built in a
  thread that lives as long as the engine does, which also leaves the event loop free during the start.
* A failing child sends SIGQUIT to its parent, which would end the whole owner. The owner ignores that signal, watches the children itself,
  and turns a death into an EngineError for everybody who waits.
* SGLang's own shutdown kills every child of the owner, Ray's and the test runner's too. Ours ends the engine's processes only.
* Prompts and answers are token ids, so SGLang's third process, the detokenizer, would import for seconds, hold half a gigabyte and never
  be sent anything. It isn't started.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil

from evenkeel.correction.errors import DeadlineExceeded, EngineError, EvenkeelError
from evenkeel.engines.machine import ON_CPU, environment, gc_paused, unimportable
from evenkeel.rollout import sglang_plugin
from evenkeel.rollout.engine_settings.engine_capabilities import EngineCapabilities
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.engine_settings.engine_ranks import environment_of_ranks, free_ports
from evenkeel.rollout.sglang_plugin import last_error, served_models
from evenkeel.rollout.sglang_plugin.attention_kernel import check_compiler
from evenkeel.rollout.sglang_plugin.hooks import VARIABLE, PluginSettings

T = TypeVar("T")
CONTROLLER = "controller"
"""Role of the process that deals requests out to groups of ranks, and computes nothing."""

_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_BALANCE_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
# Held while an engine starts, by variables of this process: one at a time.
_ENVIRONMENT = threading.Lock()


class EngineProcess:
    """One running sglang.Engine and its processes. Bound to the event loop that started it."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.engine: Any = None
        """sglang.Engine, once started."""
        self.pids: dict[str, int] = {}
        """Role ("scheduler") -> process id; a tensor-parallel engine has several."""
        self._config = config
        self._engine_id = uuid.uuid4().hex
        self._last_error = Path(tempfile.gettempdir()) / f"evenkeel-{self._engine_id}.error"
        self.metrics_folder = self._last_error.with_suffix(".metrics")
        """In which its schedulers keep SGLang's own metrics."""
        # Children that this process had before the engine.
        self._strangers: set[psutil.Process] = set()
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._waiting: set[asyncio.Future[None]] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._pidfds: list[int] = []
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self.engine is not None and not self._lost.done()

    async def start(self, arguments: dict[str, Any]) -> None:
        """Build the engine.

        Raises: EngineError if SGLang gives up, with its exception, DeadlineExceeded after deadlines.start_s; no process is left.
        """
        started: asyncio.Future[Any] = self._loop.create_future()
        self.metrics_folder.mkdir()
        self._thread = threading.Thread(target=self._own_engine, args=(arguments, started), name=f"sglang-{self.name}", daemon=True)
        self._thread.start()
        try:
            self.engine = await self.wait(started, self._config.deadlines.start_s, "start")
        except BaseException:
            await asyncio.to_thread(self._end_processes)
            self._end.set()
            raise
        self._watch(self.engine)

    async def generate(self, **arguments: Any) -> list[dict[str, Any]]:
        """SGLang's answers to a batch of requests. Args: arguments: of its GenerateReqInput; Engine.async_generate lacks some of them."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        answers: list[dict[str, Any]] = await anext(self.engine.tokenizer_manager.generate_request(GenerateReqInput(**arguments), None))
        return answers

    async def wait(self, awaitable: Awaitable[T], deadline_s: float, phase: str, *, keep: bool = False) -> T:
        """The awaitable's result, unless the engine is lost or the deadline passes first.

        Args:
            keep: leave the awaitable running when nobody waits for it any more, instead of cancelling it. Calls of one kind queue up in
                SGLang, and the answer to a cancelled one would be taken for the answer to the next.
        Raises: EngineError with the dead process's name, DeadlineExceeded with engine and phase.
        """
        task = asyncio.ensure_future(awaitable)
        # A future for each caller: on the one `_lost`, each end of a wait would search through the callbacks of all that still wait.
        released: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(released)
        task.add_done_callback(lambda _: _succeed(released, None))
        if self._lost.done():
            _succeed(released, None)
        try:
            await asyncio.wait({released}, timeout=deadline_s)
            if task.done():
                return task.result()
            if self._lost.done():
                raise EngineError(f"{self.name}: {self._lost.result()} (phase: {phase}). Its log lines say why; start a new engine")
            said = f"{self.name}: no answer in {deadline_s:g} s (phase: {phase})"
            raise DeadlineExceeded(said, what=f"{self.name}: {phase}", seconds=deadline_s)
        finally:
            self._waiting.discard(released)
            if not keep:
                task.cancel()
            task.add_done_callback(_forget)

    def declare_lost(self, reason: str) -> None:
        """Mark the engine as lost: every waiting and every later call gets an EngineError. The processes stay until shutdown."""
        if not self._lost.done():
            self._lost.set_result(reason)
            for released in self._waiting:
                _succeed(released, None)

    def raise_if_lost(self) -> None:
        if self._lost.done():
            raise EngineError(f"{self.name}: {self._lost.result()}. Start a new engine")

    def watch_heartbeat(self, until_lost: Coroutine[Any, Any, str]) -> None:
        """Args: until_lost: returns why, when the engine is lost."""

        async def watch() -> None:
            self.declare_lost(await until_lost)

        self._heartbeat = asyncio.ensure_future(watch())
        self._heartbeat.add_done_callback(_forget)

    async def shutdown(self) -> None:
        """End the engine's processes; waiting calls get an EngineError. May be called twice."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for descriptor in self._pidfds:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._pidfds.clear()
        self.declare_lost("the engine was shut down")
        if self._thread is not None:
            await asyncio.to_thread(self._end_processes)
            self._end.set()
            await asyncio.to_thread(self._thread.join, self._config.deadlines.shutdown_s)
            atexit.unregister(self._end_processes)

    def _own_engine(self, arguments: dict[str, Any], started: asyncio.Future[Any]) -> None:
        """Body of the owning thread: the children die when it ends."""
        try:
            if self._config.has_compiled_attention:
                check_compiler()
            with _ENVIRONMENT, environment(self._environment()):
                self._strangers = set(psutil.Process().children(recursive=True))
                built = _build_engine(free_ports(self._config.attention_data_parallel) | arguments)
            atexit.register(self._end_processes)
        except BaseException as error:  # SystemExit too: SGLang raises it for bad arguments
            failure: BaseException = error
            if not isinstance(error, EvenkeelError):
                said = last_error.read(self._last_error) or str(error)
                failure = EngineError(f"{self.name}: SGLang did not start: {said}. Its log lines say more")
                failure.__cause__ = error
            self._loop.call_soon_threadsafe(_fail, started, failure)
        else:
            self._loop.call_soon_threadsafe(_succeed, started, built)
        self._end.wait()

    def _environment(self) -> dict[str, str]:
        on_cpu = self._config.resolved_device == "cpu"
        # Not validated again: a capture's engine has arguments of SGLang that a recipe may not name.
        settings = PluginSettings.model_construct(engine_id=self._engine_id, last_error=str(self._last_error), engine=self._config)
        environment = {VARIABLE: settings.as_variable(), _MODELS: os.environ.get(_MODELS, served_models.__name__)}
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(self.metrics_folder)
        if self._config.log_level == "error":
            environment |= {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}  # dozens of lines about kernels that a CPU has no use for
        if self._config.batch_invariant:  # scores by log_softmax, as sampled tokens have theirs
            environment["SGLANG_ENABLE_FAST_INPUT_LOGPROBS"] = "0"
        if on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # stays: the owner's half of SGLang asks for it later, too
            if not self._config.engine_args.get("enable_torch_compile"):
                environment["TORCHDYNAMO_DISABLE"] = "1"  # functions that only GPUs need; to mark them loads the whole compiler
            environment |= {name: os.environ.get(name, value) for name, value in ON_CPU.items()}  # ray.env of the user's wins
            environment["OMP_NUM_THREADS"] = str(self._config.threads)
            # Ranks look one after the other at what is free; on a CPU that is the host's memory, which others take and free meanwhile.
            environment[_BALANCE_CHECK] = os.environ.get(_BALANCE_CHECK, "0")
        if self._config.tensor_parallel > 1:
            environment |= environment_of_ranks(self._config.tensor_parallel, sorted(os.sched_getaffinity(0)) if on_cpu else ())
        return environment

    def _watch(self, engine: Any) -> None:
        """Have the loop notified at once when a child ends: a process descriptor becomes readable then."""
        for number, pid in enumerate(engine.get_all_child_pids()):
            role = CONTROLLER if number == 0 and self._config.attention_data_parallel > 1 else "scheduler"
            self.pids[role if role not in self.pids else f"{role} {pid}"] = pid
            descriptor = os.pidfd_open(pid)
            self._pidfds.append(descriptor)
            self._loop.add_reader(descriptor, self._note_death, role, pid, descriptor)

    def _note_death(self, role: str, pid: int, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        said = last_error.read(self._last_error)
        self.declare_lost(f"the {role} process (pid {pid}) ended" + (f": {said}" if said else ""))

    def _processes(self) -> list[psutil.Process]:
        """The living processes of this engine, also of one that failed to start and never reported its process ids."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if self._is_known(child) if self.pids else self._has_mark(child):
                    found.append(child)
        return found

    def _is_known(self, child: psutil.Process) -> bool:
        """Whether it is a process that the engine reported, or a descendant of one; a process of another engine is not."""
        return not {child.pid, *(parent.pid for parent in child.parents())}.isdisjoint(self.pids.values())

    def _has_mark(self, child: psutil.Process) -> bool:
        """Whether a new child belongs to this engine: its environment has our mark, until SGLang renames the process and so overwrites it;
        then its name begins with "sglang::"."""
        if child in self._strangers or "resource_tracker" in _command(child):
            return False
        return _command(child).startswith("sglang::") or self._engine_id in child.environ().get(VARIABLE, "")

    def _end_processes(self) -> None:
        """Kill the engine's processes and wait until they are gone: the scheduler holds nothing that would have to be saved."""
        deadline = time.monotonic() + self._config.deadlines.shutdown_s
        while (living := self._processes()) and time.monotonic() < deadline:
            for process in living:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(living, timeout=max(0.0, deadline - time.monotonic()))
        self._last_error.unlink(missing_ok=True)
        shutil.rmtree(self.metrics_folder, ignore_errors=True)
        multiprocessing.active_children()  # its side effect: ended children are reaped


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _build_engine(arguments: dict[str, Any]) -> Any:
    # Python's signal.signal works in the main thread only; the C library's works anywhere.
    ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(1))  # 1 is SIG_IGN
    sglang_plugin.platform()  # SGLang would ask for it only after some imports that need it
    warnings.filterwarnings("ignore", module=r"sglang\.")  # in this process: about kernels, as in the children
    policy = asyncio.get_event_loop_policy()
    with gc_paused(), unimportable(sglang_plugin.UNUSED):
        from sglang.srt.entrypoints.engine import Engine

    EngineCapabilities.of_this_machine(arguments["device"]).require()

    class IdsOnly(Engine):  # type: ignore[misc]
        """SGLang's, without its detokenizer: with skip_tokenizer_init the scheduler sends what it sampled past it, to the owner."""

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

    engine = IdsOnly(**arguments)
    asyncio.set_event_loop_policy(policy)  # SGLang's import makes uvloop the policy of the whole process
    atexit.unregister(engine.shutdown)
    manager = engine.tokenizer_manager
    manager._subprocess_watchdog.stop()
    for zmq_socket in (engine.send_to_rpc, manager.send_to_scheduler, manager.recv_from_detokenizer):
        zmq_socket.linger = 0  # or whoever drops a dead engine waits until it has read what was sent to it: the garbage collector, for good
    return engine


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _forget(task: asyncio.Future[Any]) -> None:
    """Read the task's exception, which nobody will ask for, so that asyncio logs no warning about it."""
    if not task.cancelled():
        task.exception()


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
