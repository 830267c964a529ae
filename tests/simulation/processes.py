"""Actors without Ray: an actor is an object in this process, called through a handle, with a delay each way.

What can befall a process can befall these: it is killed (its tasks end, calls to it fail, its own calls go nowhere), it stands still
(nothing of it moves until it is thawed), it is slow to come up. Methods of an actor with coroutines overlap, those of one without run one
after the other in the order of the calls. What a method raises arrives as Ray hands it on.

Delays are a hash of the seed, the actor's name and the number of the call, so that to leave one fault out of a schedule moves as little
of the rest as possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Container, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace, coroutine
from typing import Any
from unittest import mock

import ray
import ray.exceptions

import evenkeel.actors.driver.controller
import evenkeel.actors.pool.preemption
from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.config import RunConfig
from tests.simulation.broadcast import Meetings
from tests.simulation.node import Node
from tests.simulation.ref import Ref, as_ray_says, compute

HERE: ContextVar[Process | None] = ContextVar("process", default=None)
"""The actor's process in which this runs; None: the driver's."""
DRIVER: ContextVar[Process | None] = ContextVar("driver", default=None)
"""The driver's own, of a run in which it stands still for a while; None: its tasks are plain ones, which are faster."""

# Calls in a thread of their own: they wait for none of the others.
_OUT_OF_TURN = ("heartbeat", "begun", "hold", "release", "is_saved", "address", "serve_broadcast", "open_broadcast", "close_broadcast")
_ON_A_NODE = 2
# More than so many tasks of a process are looked through for those that have ended.
_TASKS = 32


class Process:
    """One actor's process."""

    def __init__(self, cluster: SimulatedRay, name: str, kind: str, *, overlaps: bool) -> None:
        self.cluster, self.name, self.kind = cluster, name, kind
        self.overlaps = overlaps
        """Its calls do, and may come in another order than they were made in."""
        self._may_freeze = kind in cluster.may_freeze
        self.last_arrival = 0.0
        self.node = cluster.node_of(kind)
        self.instance: Any = None
        """None while it starts."""
        self.is_dead = self.is_frozen = False
        self.thawed: asyncio.Future[None] | None = None
        # In the order in which they were made; some have ended.
        self._tasks: list[asyncio.Task[Any]] = []
        self._room = _TASKS
        self.pending: dict[Ref, None] = {}
        self.calls: deque[Callable[[], None]] = deque()
        """Arrived, and not begun: it starts, stands still, or has another one to end first."""
        self.is_busy = False
        self.out_of_turn: deque[Callable[[], None]] = deque()
        """Likewise, of calls that wait for none of the others to end."""
        self.context = copy_context()
        self.context.run(HERE.set, self)

    @property
    def is_up(self) -> bool:
        return self.instance is not None and not self.is_dead

    def make_task(self, work: Coroutine[Any, Any, Any], **named: Any) -> asyncio.Task[Any]:
        if len(self._tasks) >= self._room:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._room = 2 * len(self._tasks) + _TASKS
        task = asyncio.Task(_stepped(self, work) if self._may_freeze else work, loop=self.cluster.loop, **named)
        self._tasks.append(task)
        return task

    def take_calls(self) -> None:
        while self.out_of_turn and self.is_up and not self.is_frozen:
            self.out_of_turn.popleft()()
        while self.calls and self.is_up and not self.is_frozen and not self.is_busy:
            self.calls.popleft()()

    def freeze(self) -> None:
        assert self._may_freeze, f"{self.kind} is not among what may be frozen"
        if not self.is_dead and not self.is_frozen:
            self.is_frozen, self.thawed = True, self.cluster.loop.create_future()

    def thaw(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            if self.thawed is not None and not self.thawed.done():
                self.thawed.set_result(None)
            self.take_calls()

    def kill(self) -> None:
        """As by SIGKILL: who waits for it learns that a little later."""
        if self.is_dead:
            return
        self.is_dead = True
        self.calls.clear()
        self.out_of_turn.clear()
        for task in self._tasks:
            task.cancel()
        self.thaw()
        delay_s = self.cluster.delay(f"death of {self.name}", 0.01, 1.0)
        for ref in self.pending:
            self.cluster.loop.call_later(delay_s, ref.fail, ray.exceptions.ActorDiedError())
        self.pending.clear()
        self.cluster.died(self)


@coroutine
def _stepped(process: Process, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Each step of `work` waits while its process stands still."""
    error: BaseException | None = None
    while True:
        while process.is_frozen and process.thawed is not None:
            try:
                yield from asyncio.shield(process.thawed).__await__()
            except BaseException as interruption:
                error = interruption
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration as end:
            return end.value
        error = None
        try:
            yield awaited
        except BaseException as raised:
            error = raised


def make_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **named: Any) -> asyncio.Task[Any]:
    """A loop's task factory: tasks belong to the process in which they were made."""
    process = HERE.get() or DRIVER.get()
    return asyncio.Task(work, loop=loop, **named) if process is None else process.make_task(work, **named)


class Handle:
    """An actor's handle: handle.method.remote(...)."""

    def __init__(self, process: Process) -> None:
        self.__dict__["process"] = process

    def __getattr__(self, name: str) -> Method:
        return Method(self.__dict__["process"], name)


class Method:
    def __init__(self, process: Process, name: str, results: int = 1) -> None:
        self._process, self._method_name, self._results = process, name, results

    def options(self, *, num_returns: int = 1, **_: Any) -> Method:
        return Method(self._process, self._method_name, num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        if self._method_name == "__ray_call__":
            return None
        return self._process.cluster.call(self._process, self._method_name, args, named, self._results)


class SimulatedRay:
    """What the product calls of Ray, for one driver; a crash of the driver ends its actors, and the next one has its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: str, casts: dict[str, type], watch: Any, may_freeze: Container[str]) -> None:
        """
        Args:
            casts: by name of an actor's class: what plays it.
            may_freeze: kinds of processes that may be frozen; the steps of the others go without a look whether they are.
            watch: is told of calls, returns and deaths, and says what befalls them (world.World).
        """
        self.loop, self._seed, self._casts, self._watch = loop, seed, casts, watch
        self.processes: list[Process] = []
        self.may_freeze = may_freeze
        self.meetings = Meetings()
        self.driver: Process | None = None
        self.draining: dict[str, int] | None = None
        """Nodes that Ray drains, and when they go, as Ray says it; None: nobody looks."""
        self._numbers: Counter[str] = Counter()
        # By kind of their processes.
        self._newest: dict[str, Node] = {}

    def delay(self, what: str, least_s: float, most_s: float) -> float:
        """Of the next event of that name, seconds: most are short, a few are not."""
        self._numbers[what] += 1
        share = zlib.crc32(f"{self._seed}/{what}/{self._numbers[what]}".encode()) / 2**32
        return least_s + (most_s - least_s) * share**3

    def alive(self, kind: str) -> list[Process]:
        return [p for p in self.processes if p.kind == kind and not p.is_dead]

    def node_of(self, kind: str) -> Node:
        """For a new process: two of one kind share a node, as long as that is there."""
        number = self._numbers[f"made {kind}"] - 1
        node = self._newest.get(kind)
        if node is None or number % _ON_A_NODE == 0 or node.is_leaving or node.is_gone:
            self._numbers["nodes"] += 1
            node = self._newest[kind] = Node(self, f"{self._numbers['nodes']:056x}")
        return node

    def died(self, process: Process) -> None:
        self._watch.died(process)

    # -- what the product sees as `ray` ------------------------------------------------------------------------------

    def remote(self, *args: Any, num_returns: int = 1, **_: Any) -> Any:
        if not args:
            return lambda target: self.remote(target, num_returns=num_returns)
        (target,) = args
        make: Callable[..., Any] = self._actor if inspect.isclass(target) else partial(self._function, num_returns)
        return SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda *a, **named: make(target, a, named)),
            remote=lambda *a, **named: make(target, a, named),
        )

    def put(self, value: Any) -> Ref:
        ref = Ref(self.loop)
        ref.owner = HERE.get()
        ref.resolve(value)
        return ref

    def kill(self, handle: Handle, **_: Any) -> None:
        handle.process.kill()

    async def wait(self, refs: list[Ref], *, num_returns: int = 1, timeout: float | None = None, **_: Any) -> None:
        """Awaited by what stands in place of a thread (clock.py)."""
        await asyncio.wait([asyncio.ensure_future(_ended(ref)) for ref in refs], timeout=timeout)

    def _actor(self, actor: type, args: tuple[Any, ...], named: dict[str, Any]) -> Handle:
        kind = actor.__name__
        self._numbers[f"made {kind}"] += 1
        cast = self._casts.get(kind, actor)
        process = Process(self, f"{kind} {self._numbers[f'made {kind}'] - 1}", kind, overlaps=getattr(cast, "overlaps", True))
        self.processes.append(process)

        def begin() -> None:
            if process.is_dead:
                return
            if (longer_s := self._watch.start_is_held_up(process)) > 0:
                self.loop.call_later(longer_s, begin)
                return
            process.instance = process.context.run(cast, *args, **named)
            self._watch.came_up(process)
            process.take_calls()

        self.loop.call_later(self.delay(f"start of {process.name}", 0.02, 2.0), begin)
        return Handle(process)

    def _function(self, results: int, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        refs = [Ref(self.loop) for _ in range(results)]
        self._watch.computes(function.__name__)
        self.loop.call_later(self.delay(f"task {function.__name__}", 0.2, 3.0), compute, refs, function, args, named)
        return refs if results > 1 else refs[0]

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, process: Process, method: str, args: tuple[Any, ...], named: dict[str, Any], results: int) -> Any:
        refs = [Ref(self.loop) for _ in range(results)]
        caller = HERE.get()
        if caller is not None and caller.is_dead:
            return refs[0] if results == 1 else refs  # nothing leaves a dead process
        fate = self._watch.called(caller, process, method, args, refs[0])
        if process.is_dead:
            for ref in refs:
                self.loop.call_later(0.01, ref.fail, ray.exceptions.ActorDiedError())
            return refs[0] if results == 1 else refs
        if fate.is_swallowed:
            for ref in refs:
                self.loop.call_later(0.01, ref.fail, ray.exceptions.ActorUnavailableError("the connection was lost", b"\0" * 16))
            return refs[0] if results == 1 else refs
        for ref in refs:
            process.pending[ref] = None
        if fate.is_stuck:
            return refs[0] if results == 1 else refs
        what = f"{process.name}.{method}"
        attempt = _Call(self, process, method, args, named, refs, fate)
        arrives = self.loop.time() + self.delay(what, 0.001, 0.05) + fate.sent_late_s
        if not process.overlaps:  # Ray keeps the order of one caller; a loop doesn't, of what comes at the same moment
            arrives = process.last_arrival = max(math.nextafter(process.last_arrival, math.inf), arrives)
        self.loop.call_at(arrives, attempt.arrive)
        if fate.is_repeated:
            self.loop.call_later(self.delay(f"{what} again", 0.001, 0.3), _Call(self, process, method, args, named, [], fate).arrive)
        return refs[0] if results == 1 else refs


class _Call:
    """One call on its way to an actor, in it, and back."""

    def __init__(
        self, cluster: SimulatedRay, process: Process, method: str, args: tuple[Any, ...], named: dict[str, Any], refs: list[Ref], fate: Any
    ) -> None:
        self.cluster, self.process, self.method, self.args, self.named, self.refs, self.fate = (
            cluster,
            process,
            method,
            args,
            named,
            refs,
            fate,
        )
        self.is_out_of_turn = method in _OUT_OF_TURN

    def arrive(self) -> None:
        if not self.process.is_dead:
            (self.process.out_of_turn if self.is_out_of_turn else self.process.calls).append(self.begin)
            self.process.take_calls()

    def begin(self) -> None:
        process = self.process
        function = _is_ready if self.method == "__ray_ready__" else getattr(process.instance, self.method)
        process.is_busy = process.is_busy or not (process.overlaps or self.is_out_of_turn)
        task: asyncio.Task[Any] = process.context.run(self.cluster.loop.create_task, self._run(function))  # type: ignore[arg-type]
        task.add_done_callback(self._ended)

    async def _run(self, function: Callable[..., Any]) -> Any:
        args = [await a if isinstance(a, Ref) else a for a in self.args]
        if not (self.process.overlaps or self.is_out_of_turn):
            await asyncio.sleep(self.process.instance.takes_s(self.method))
        result = function(*args, **self.named)
        return await result if inspect.iscoroutine(result) else result

    def _ended(self, task: asyncio.Task[Any]) -> None:
        process = self.process
        process.is_busy = process.is_busy and self.is_out_of_turn
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if process.is_dead:
            return
        for ref in self.refs:
            process.pending.pop(ref, None)
        delay_s = self.cluster.delay(f"{process.name}.{self.method} back", 0.001, 0.05) + self.fate.late_s
        if self.fate.is_lost:
            error = ray.exceptions.ActorUnavailableError("the connection was lost", b"\0" * 16)
        if error is None:
            results = [task.result()] if len(self.refs) == 1 else list(task.result()) if self.refs else []
            for ref in self.refs[1:]:
                process.node.stores(ref)
            for ref, result in zip(self.refs, results, strict=True):
                self.cluster.loop.call_later(delay_s, ref.resolve, result)
        else:
            failure = error if self.fate.is_lost else as_ray_says(error, self.method)
            for ref in self.refs:
                self.cluster.loop.call_later(delay_s, ref.fail, failure)
        process.take_calls()


def _is_ready() -> bool:
    return True


async def _ended(ref: Ref) -> None:
    with contextlib.suppress(Exception):
        await ref


@contextmanager
def in_place_of_ray(cluster: SimulatedRay) -> Iterator[None]:
    """While this lasts, who calls `ray` calls the cluster."""
    here = _Context()
    with (
        mock.patch.object(ray, "remote", cluster.remote),
        mock.patch.object(ray, "put", cluster.put),
        mock.patch.object(ray, "kill", cluster.kill),
        mock.patch.object(ray, "wait", cluster.wait),
        mock.patch.object(ray, "is_initialized", lambda: cluster.draining is not None),
        mock.patch.object(evenkeel.actors.pool.preemption, "_draining_nodes", lambda: dict(cluster.draining or {})),
        mock.patch.object(ray, "get_runtime_context", lambda: here),
        mock.patch.object(evenkeel.actors.driver.controller, "reserve", anywhere),
    ):
        yield


class _Context:
    """What a process knows of itself."""

    def get_node_id(self) -> str:
        process = HERE.get()
        return process.node.name if process is not None else "0" * 56

    @property
    def current_actor(self) -> Handle:
        process = HERE.get()
        assert process is not None, "asked in the driver"
        return Handle(process)


async def anywhere(run: RunConfig) -> RankPlaces:
    return RankPlaces(run.learner, {})
