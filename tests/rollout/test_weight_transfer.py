"""When an engine is paused for new weights: as late as can be. What SGLang would be asked is a list here; test_engine_updates.py asks it.

Behaviours locked here: whatever is slow (the network, checksums, the copy into shared memory) is done with before the pause; weights that
arrive wrong, or too late, leave the engine as it was; each further bucket is prepared while the one before is loaded, never over it.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenkeel.actors.carriers import WeightChecksums, WorkerSettings
from evenkeel.actors.pool import rollout_worker
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.correction.errors import DeadlineExceeded, SyncError
from evenkeel.engines import machine as host_memory
from evenkeel.engines.weights import WeightBucket, WeightSpec, digest_of
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.engine import engine as rollout_engine
from evenkeel.rollout.engine import weight_transfer
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sglang_plugin import hooks
from tests.actors.cases import prompt
from tests.actors.simulated_time import simulate
from tests.rollout.memory_reader import read_all

WEIGHTS = {f"layer{i}": torch.arange(4.0) + i for i in range(3)}
BUCKETS = [WeightBucket.of({name: tensor}) for name, tensor in WEIGHTS.items()]
SUMS = {name: checksum for bucket in BUCKETS for name, checksum in bucket.checksums().items()}


def sums_on_their_way() -> WeightChecksums:
    return WeightChecksums(asyncio.sleep(0.0, SUMS), digest_of(SUMS))


HALVES: dict[int, torch.Tensor] = {}
"""Memory that two processes would share, by its address."""


class TransferScene:
    """A worker whose engine's SGLang keeps what it was asked, and what it read of each bucket while the next one was prepared."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, update_s: float = 20.0, load_s: float = 0.0, waits_for_next: bool = False
    ) -> None:
        self.events: list[str] = []
        self.loads: dict[str, torch.Tensor] = {}
        self.held = {"buckets": "0", "version": "0", "failure": "", "unfinished": "0"}
        sglang = SimpleNamespace(tokenizer_manager=SimpleNamespace(max_req_input_len=8))
        process: Any = SimpleNamespace(raise_if_lost=lambda: None, wait=self._wait, engine=sglang)
        config = EngineConfig.model_validate({"device": "cpu", "deadlines": {"update_s": update_s}})
        self.engine = RolloutEngine("engine", config, process, vocab_size=8, version=0)
        self.engine._specs = {name: WeightSpec.of(name, tensor) for name, tensor in WEIGHTS.items()}

        def payloads(staging: weight_transfer.SharedStaging, bucket: WeightBucket) -> list[bytes]:
            half = staging.copy(bucket)
            HALVES[half.data_ptr()] = half.view(torch.float32)
            self.events.append(f"prepare {bucket.specs[0].name}")
            return [pickle.dumps((bucket.specs[0].name, half.data_ptr()))]

        async def send(manager: Any, payloads: list[bytes], *, version: int | None, flush: bool) -> None:
            name, half = pickle.loads(payloads[0])
            if name == "layer0":
                self.held["buckets"] = "0"
            while waits_for_next and version is None and f"prepare layer{int(name[-1]) + 1}" not in self.events:
                await asyncio.sleep(0.01)
            await asyncio.sleep(load_s)
            self.events.append(f"load {name}" + ("" if version is None else f" as v{version}"))
            self.loads[name] = HALVES[half].clone()
            self.held |= {"buckets": str(int(self.held["buckets"]) + 1), "version": str(version)}

        async def step(name: str) -> None:
            self.events.append(name)

        monkeypatch.setattr(weight_transfer.SharedStaging, "payloads", payloads)
        monkeypatch.setattr(weight_transfer, "pause_and_begin", lambda *_: step("pause"))
        monkeypatch.setattr(weight_transfer, "send", send)
        monkeypatch.setattr(self.engine, "_inspect", lambda *_: asyncio.sleep(0, [self.held]))
        monkeypatch.setattr(weight_transfer, "end", lambda _: asyncio.sleep(0))
        monkeypatch.setattr(weight_transfer, "resume", lambda _: step("resume"))
        settings = RolloutConfig.model_validate({"task": {"kind": "file", "path": "none"}, "reward": {"kind": "exact_match"}})
        self.worker = RolloutWorker("0", WorkerSettings(settings, Path("model"), prompt(0), bind="", resource="rollout"))
        living = {"succeeded": lambda: asyncio.sleep(0), "lost_of": "", "has_its_weights": lambda: None}
        self.worker._sampler = SimpleNamespace(engine=self.engine, **living)  # type: ignore[assignment]
        self.worker._endpoint = SimpleNamespace(set=lambda *_: None)  # type: ignore[assignment]
        monkeypatch.setattr(self.worker, "load", lambda: asyncio.sleep(0))  # there is no sampler that would know it

    async def _wait(self, awaitable: Awaitable[Any], *_: Any, **__: Any) -> Any:
        return await awaitable

    async def arrives(self, bucket: WeightBucket, after_s: float = 0.0) -> WeightBucket:
        """A bucket that a slow network brings."""
        await asyncio.sleep(after_s)
        self.events.append(f"fetch {bucket.specs[0].name}")
        return bucket


LOADED = ["load layer0", "load layer1", "load layer2 as v1"]


def test_a_slow_network_lengthens_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bucket comes after 5 s: nothing but loading stands between pause and resume, as without the delay. In simulated time, where
    nothing but fetching and loading takes any: 0.1 s for each of three buckets is the pause that the receipt tells, both times."""

    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(rollout_engine, "time", SimpleNamespace(perf_counter=now))
        monkeypatch.setattr(rollout_worker, "time", SimpleNamespace(monotonic=now, time=now))
        paused = []
        for delay_s in (0.0, 5.0):
            scene = TransferScene(monkeypatch, load_s=0.1)
            buckets = [scene.arrives(bucket, delay_s * i / 2) for i, bucket in enumerate(BUCKETS)]
            monkeypatch.setattr(scene.engine, "weight_checksums", lambda *_: asyncio.sleep(0.0, SUMS))
            receipt = await scene.worker.update_weights(1, buckets, sums_on_their_way())
            assert receipt.version == scene.engine.version == 1
            assert (receipt.pause_s, receipt.seconds) == pytest.approx((0.3, delay_s + 0.3))
            assert all(torch.equal(scene.loads[name], tensor) for name, tensor in WEIGHTS.items())
            begins, ends = scene.events.index("pause"), scene.events.index("resume")
            assert {event for event in scene.events[:begins] if event.startswith("fetch")} == {f"fetch {name}" for name in WEIGHTS}
            assert "prepare layer0" in scene.events[:begins], "and the first is copied"
            paused.append([event for event in scene.events[begins:ends] if not event.startswith("prepare")])
        assert paused[0] == paused[1] == ["pause", *LOADED]

    async def at_once(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return work(*arguments, **named)

    monkeypatch.setattr(asyncio, "to_thread", at_once)  # simulated time doesn't wait for threads
    simulate(scenario)


def test_the_pause_begins_when_sampling_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang ends the forward under way (0.5 s, whose tokens count), then stops; the weights take 0.25 s a bucket, and `end` 0.125 s: the
    pause is 3 x 0.25 + 0.125 s."""
    now = [0.0]

    async def takes(seconds: float) -> None:
        now[0] += seconds

    scene = TransferScene(monkeypatch)
    scene.held |= {"buckets": "3", "version": "1"}
    monkeypatch.setattr(rollout_engine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(weight_transfer, "pause_and_begin", lambda *_: takes(0.5))
    monkeypatch.setattr(weight_transfer, "send", lambda *_, **__: takes(0.25))
    monkeypatch.setattr(weight_transfer, "end", lambda _: takes(0.125))
    receipt = asyncio.run(scene.engine.update_weights(1, BUCKETS))
    assert receipt.pause_s == 3 * 0.25 + 0.125


def test_the_next_bucket_is_prepared_while_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the other half, and not before that has been loaded: two buckets' memory for any number of them, kept for the next update.

    A load ends only when the next bucket is ready, so that one which waited for the load to end would wait for ever.
    """

    async def scenario() -> None:
        HALVES.clear()
        scene = TransferScene(monkeypatch, waits_for_next=True)
        for _ in range(2):
            scene.events.clear()
            await asyncio.wait_for(scene.engine.update_weights(1, BUCKETS), 20.0)
            assert [event for event in scene.events if event.startswith("load")] == LOADED
            assert scene.events.index("prepare layer2") > scene.events.index("load layer0"), "they share a half"
            assert all(torch.equal(scene.loads[name], tensor) for name, tensor in WEIGHTS.items())
        assert len(HALVES) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", ["bytes", "shape"])
def test_weights_that_arrive_wrong_do_not_stop_the_engine(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """One bit differs; or a tensor is none of this model's, in a bucket that an iterator brings first."""

    async def scenario() -> None:
        scene = TransferScene(monkeypatch)
        other = WeightBucket.of({"layer0": torch.arange(4.0) + 1e-6 if wrong == "bytes" else torch.zeros(5)})
        message = "layer0 arrived with other bytes" if wrong == "bytes" else r"layer0 is float32 \[5\].*still serves its old weights"
        with pytest.raises(SyncError, match=message):
            if wrong == "bytes":
                await scene.worker.update_weights(1, [scene.arrives(bucket) for bucket in (other, *BUCKETS[1:])], sums_on_their_way())
            else:
                await scene.engine.update_weights(1, iter([other, *BUCKETS[1:]]))
        assert "pause" not in scene.events and scene.engine.version == 0 and scene.engine._dirty is None

    asyncio.run(scenario())


def test_weights_that_never_arrive_leave_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> AsyncIterator[WeightBucket]:
        await asyncio.sleep(60.0)
        yield BUCKETS[0]

    async def scenario() -> None:
        scene = TransferScene(monkeypatch, update_s=2.0)
        with pytest.raises(DeadlineExceeded, match=r"v0 -> v1, retract: the weights were not there in 2 s; The engine still serves"):
            await scene.engine.update_weights(1, nothing())
        assert scene.events == [] and scene.engine.version == 0
        await scene.engine.update_weights(1, BUCKETS)
        assert scene.engine.version == 1, "it takes the next ones"

    asyncio.run(scenario())


def test_an_update_whose_weights_come_after_a_newer_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync has given it up: it must not take the engine back to an older version."""

    async def scenario() -> None:
        scene = TransferScene(monkeypatch)
        late = asyncio.create_task(scene.worker.update_weights(1, [scene.arrives(bucket, 0.2) for bucket in BUCKETS], None))
        await asyncio.sleep(0.05)
        await scene.worker.update_weights(2, [scene.arrives(bucket) for bucket in BUCKETS], None)
        with pytest.raises(SyncError, match="weights v1 came after others had been asked for"):
            await late
        assert scene.engine.version == 2 and scene.events.count("pause") == 1

    asyncio.run(scenario())


def test_a_call_for_older_weights_that_comes_late_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up long ago, and runs after newer ones are in. In another generation of the run the same number is another version."""

    async def scenario() -> None:
        scene = TransferScene(monkeypatch)
        await scene.worker.update_weights(2, [scene.arrives(bucket) for bucket in BUCKETS], None)
        refused = [scene.arrives(bucket) for bucket in BUCKETS]
        with pytest.raises(SyncError, match="weights v1 were asked for after v2; those stay"):
            await scene.worker.update_weights(1, refused, None)
        for unread in refused:
            unread.close()
        with pytest.raises(SyncError, match="weights v1 were asked for after v2; those stay"):
            await scene.worker.receive_weights(1, [], "weights-0-1")
        assert scene.engine.version == 2 and scene.events.count("pause") == 1
        await scene.worker.update_weights(2, [scene.arrives(bucket) for bucket in BUCKETS], None)
        await scene.worker.update_weights(1, [scene.arrives(bucket) for bucket in BUCKETS], None, 1)
        assert scene.engine.version == 1 and scene.events.count("pause") == 3

    asyncio.run(scenario())


def test_what_another_thread_still_copies_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that fails: the copy of the next bucket is under way, and its memory belongs to the next update."""
    may_copy, copied = threading.Event(), threading.Event()

    async def scenario() -> None:
        def make(number: int) -> int:
            if number == 1:
                may_copy.wait(10.0)
                copied.set()
            return number

        async def numbers() -> AsyncIterator[int]:
            for number in range(3):
                yield number

        made = weight_transfer.made_ahead(numbers(), make)
        assert await anext(made) == 0
        closing = asyncio.create_task(made.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        may_copy.set()
        await closing
        assert copied.is_set()

    asyncio.run(scenario())


def test_a_scheduler_maps_the_shared_memory_once() -> None:
    """Two halves of 32 MiB, in turn: 8,192 pages each, which the system hands out by sixteen. Read again, they are there."""
    context = torch.multiprocessing.get_context("spawn")
    (payloads, theirs), (found, told) = context.Pipe(), context.Pipe()
    process = context.Process(target=read_all, args=(theirs, told), daemon=True)
    process.start()
    staging = weight_transfer.SharedStaging()
    pages = []
    for turn in range(6):
        bucket = WeightBucket.of({"layer": torch.full((32 << 20,), turn, dtype=torch.uint8)})
        payloads.send(bytes(ForkingPickler.dumps(staging.copy(bucket))))
        assert found.poll(60.0), "no answer"
        total, faults = found.recv()
        assert total == turn * 8192
        pages.append(faults)
    payloads.send(None)
    process.join(30.0)
    assert min(pages[:2]) > 300 and max(pages[2:]) < 100, pages


@pytest.mark.parametrize(("device", "cpus", "threads"), [("cuda", 64, 4), ("cuda", 2, 2), ("cpu", 64, 1)])
def test_several_threads_copy_for_a_gpu(device: str, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads a bucket faster than one copies the next, and stands still meanwhile. Every byte arrives, whatever the pieces; a CPU's cores
    load, and one thread copies."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(weight_transfer, "_PIECE_BYTES", 1000)
    at_once, copied_by, copy = threading.Barrier(threads), set(), weight_transfer._copy

    def copy_at_once(piece: Any) -> None:
        copied_by.add(threading.get_ident())
        at_once.wait(30.0)
        copy(piece)

    staging = weight_transfer.SharedStaging(1, EngineConfig(device=device).copy_threads)
    bucket = WeightBucket.of({"a": torch.randn(2, 499), "b": torch.arange(13), "c": torch.randn(2501)})  # 4, 1 and 11 pieces
    monkeypatch.setattr(weight_transfer, "_copy", copy_at_once)
    held = WeightBucket.of_specs(bucket.specs, staging.copy(bucket)).tensors()
    assert all(torch.equal(held[name], tensor) for name, tensor in bucket.tensors().items())
    assert len(copied_by) == threads


def test_an_engine_gives_memory_back_after_its_pause_and_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang calls within an update gives nothing back; what it calls as requests go on has it done by a thread: the hook is back
    before a trim that takes until the test lets it end."""
    from sglang.srt.plugins import hook_registry

    registered: dict[str, list[Any]] = {}
    begun, may_end = threading.Event(), threading.Event()

    def slow(keep: int) -> None:
        begun.set()
        assert may_end.wait(30.0)

    def note(target: str, hook: Any, kind: Any) -> None:
        if kind is hook_registry.HookType.AFTER:
            registered.setdefault(target.rpartition(".")[2], []).append(hook)

    monkeypatch.setattr(hook_registry.HookRegistry, "register", note)
    monkeypatch.setattr(host_memory, "_next_s", 0.0)
    monkeypatch.setattr(host_memory, "_trim", lambda: slow)
    hooks.register(60.0)
    for hook in registered["record_weight_version_change"]:
        hook(None, SimpleNamespace(waiting_queue=[]))
    assert not begun.is_set()
    for hook in registered["continue_generation"]:
        hook(None, SimpleNamespace(), None)
    assert begun.wait(30.0) and host_memory._at_work.locked(), "the hook is back, the trim isn't"
    may_end.set()
    with host_memory._at_work:
        pass
