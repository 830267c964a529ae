"""What a rollout worker answers. Sampling itself is tested with real engines (tests/rollout, tests/e2e)."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions

from evenkeel.actors.carriers import GroupFailure, Ticket, WeightChecksums
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.parts import worker_settings
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.correction.errors import (
    DataError,
    DeadlineExceeded,
    EngineDirty,
    EngineError,
    EngineReplaced,
    EvenkeelError,
    LateError,
    RequestError,
    SyncError,
)
from evenkeel.engines.weights import digest_of
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.continuation import unsampled
from evenkeel.rollout.sampler import Sampler
from evenkeel.rollout.trajectory import FailureKind, Group, Prompt, SyncReceipt, UnfinishedGroup, WorkerLoad, ids_of
from tests.actors.cases import group, prompt
from tests.actors.pool.started_worker import started_worker

Start = Callable[..., Coroutine[Any, Any, RolloutWorker]]


class Engine:
    """Holds tensors of these checksums, which it shows once `compared` is set."""

    requests_in_flight, silent_s, metrics = 4, 0.0, None

    def __init__(self, checksums: dict[str, str] | None = None) -> None:
        self.checksums, self.compared = checksums or {}, asyncio.Event()

    def raise_if_lost(self) -> None: ...

    async def update_weights(self, version: int, buckets: list[Any]) -> SyncReceipt:
        return SyncReceipt(version, bytes=8, pause_s=0.1)

    async def weight_checksums(self, *_: Any) -> dict[str, str]:
        await self.compared.wait()
        return self.checksums


class Slow:
    """Samples a group until `finish` is set; or fails each request with `error`."""

    busy_s, up_s, generated_tokens = 1.0, 2.0, 3
    lost_of = ""

    async def succeeded(self) -> None: ...

    def has_its_weights(self) -> None:
        self.lost_of = ""

    def __init__(self, error: Exception | None = None, *, is_stubborn: bool = False, checksums: dict[str, str] | None = None) -> None:
        self.finish, self.begun, self.aborted, self._is_stubborn = asyncio.Event(), 0, 0, is_stubborn
        self.engine, self._error = Engine(checksums), error

    async def group(self, prompt: Prompt, *, group_id: int, admitted_version: int, **_: Any) -> Group:
        self.begun += 1
        if self._error is not None:
            raise self._error
        while not self.finish.is_set():
            try:
                await self.finish.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                if not self._is_stubborn:
                    raise
        return group(Ticket(group_id, prompt, admitted_version))

    async def answer(self, *_: Any) -> Any:
        raise self._error or AssertionError

    async def turned(self) -> None: ...

    def so_far(self, groups: Iterable[int]) -> dict[int, UnfinishedGroup]:
        """Two sampled tokens, and three of a prompt."""
        begun = replace(unsampled((1, 2, 3), "train/0/0"), response_ids=ids_of([4, 5]))
        return {group_id: UnfinishedGroup(group_id, (begun,)) for group_id in groups}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Start:
    return partial(started_worker, monkeypatch)


async def soon() -> None:
    await asyncio.sleep(0.01)


def ticket(group_id: int = 7, version: int = 3) -> Ticket:
    return Ticket(group_id, prompt(0), version)


def test_a_finished_group_is_answered_with_its_facts_and_with_its_tokens_apart(started: Start) -> None:
    """Two results: the second is for the object store, and nobody else need have it in its process."""

    async def scenario() -> None:
        sampler, counted = Slow(), dict[str, float]()
        sampler.finish.set()
        worker = await started(sampler, counted=lambda name, amount: counted.update({name: amount}))
        facts, whole = await worker.generate_group(ticket())
        assert whole == group(ticket()) and facts == whole.facts
        assert not any(hasattr(one, "response_ids") for one in facts.trajectories)
        assert counted == {"rollout/generated_tokens_total": 4, "rollout/finished_groups_total": 1}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "is_final"),
    [(RequestError("one logprob is not finite"), False), (DeadlineExceeded("no answer in 600 s"), False), (DataError("too long"), True)],
)
def test_one_request_that_fails_is_told_and_costs_nothing_else(started: Start, error: EvenkeelError, is_final: bool) -> None:
    async def scenario() -> None:
        worker = await started(Slow(error))
        assert await worker.generate_group(ticket()) == (GroupFailure(7, str(error), is_final), None)
        (answered,) = await worker.answer([prompt(0)], AnswerSampling(samples=2, temperature=1.0))
        assert [(one.error, one.reward, one.is_valid) for one in answered] == [(str(error), None, False)] * 2
        assert {one.failure for one in answered} == {FailureKind.ENGINE}

    asyncio.run(scenario())


@pytest.mark.parametrize("has_wide_fields", [False, True])
def test_an_error_that_nobody_has_foreseen_costs_its_group_and_its_traceback_is_kept(
    started: Start, caplog: pytest.LogCaptureFixture, has_wide_fields: bool
) -> None:
    """A tokenizer that can't decode a token would else end the run, and each resume of it. Asked again it samples again."""

    async def scenario() -> None:
        sampler = Slow(KeyError(151_936))
        worker = await started(sampler, topk=2 * has_wide_fields)
        expected = GroupFailure(7, "KeyError: 151936", is_final=False), *[None] * (1 + has_wide_fields)
        assert [await worker.generate_group(ticket()) for _ in range(2)] == [expected] * 2 and sampler.begun == 2

    with caplog.at_level(logging.ERROR, "evenkeel.pool"):
        asyncio.run(scenario())
    assert "rollout worker 0: group 7 (" in caplog.text and "raise self._error\nKeyError: 151936" in caplog.text


@pytest.mark.parametrize("error", [EngineError("the scheduler is gone"), ray.exceptions.ObjectStoreFullError("no room")], ids=repr)
def test_a_lost_engine_or_object_store_is_no_failed_request(started: Start, error: Exception) -> None:
    async def scenario() -> None:
        worker = await started(Slow(error))
        with pytest.raises(type(error), match=str(error)):
            await worker.generate_group(ticket())

    asyncio.run(scenario())


def test_a_lost_engine_that_another_one_takes_the_place_of_is_dirty(started: Start) -> None:
    """To the driver, which keeps the worker then and sends it weights: of groups, questions and heartbeats."""

    async def scenario() -> None:
        sampler = Slow(EngineError("the scheduler is gone"))
        sampler.lost_of = "another one takes its place"
        worker = await started(sampler)
        for call in (worker.generate_group(ticket()), worker.answer([prompt(0)], AnswerSampling())):
            with pytest.raises(EngineReplaced, match="another one takes its place"):
                await call
        assert (await worker.load()).lost_of == "another one takes its place"

    asyncio.run(scenario())


def test_an_engine_that_takes_another_s_place_takes_no_weights_uncompared(started: Start) -> None:
    """The driver may publish a version before it hears of the loss. Once weights were compared the next ones need not be."""

    async def scenario() -> None:
        sampler = Slow(checksums={"a": "1"})
        sampler.lost_of, buckets = "another one takes its place", lambda: [asyncio.sleep(0, "bucket")]
        sampler.engine.compared.set()
        worker = await started(sampler)
        with pytest.raises(EngineDirty, match="another one takes its place"):
            await worker.update_weights(4, buckets(), None)
        receipts = [await worker.update_weights(4, buckets(), sent({"a": "1"})), await worker.update_weights(5, buckets(), None)]
        assert [(one.version, one.digest) for one in receipts] == [(4, digest_of({"a": "1"})), (5, "")]

    asyncio.run(scenario())


def test_a_group_that_is_asked_for_again_is_the_one_that_is_being_sampled(started: Start) -> None:
    """The answer of the first call may be lost with a connection: to sample the group twice at once would only be slower."""

    async def scenario() -> None:
        sampler = Slow()
        worker = await started(sampler)
        calls = [asyncio.ensure_future(worker.generate_group(ticket())) for _ in range(2)]
        await soon()
        sampler.finish.set()
        first, second = await asyncio.gather(*calls)
        assert first == second and sampler.begun == 1
        await worker.generate_group(ticket())
        assert sampler.begun == 2, "nothing of a finished group is kept"

    asyncio.run(scenario())


def test_a_group_that_is_aborted_ends_and_may_begin_anew(started: Start) -> None:
    async def scenario() -> None:
        sampler = Slow()
        worker = await started(sampler)
        given_up = asyncio.ensure_future(worker.generate_group(ticket()))
        await soon()
        await worker.abort(7)
        assert sampler.aborted == 1, "by the time that the call ends"
        await worker.abort(8)
        with pytest.raises(LateError):
            await given_up
        again = asyncio.ensure_future(worker.generate_group(ticket()))
        await soon()
        sampler.finish.set()
        assert (await again)[0].group_id == 7 and (sampler.begun, sampler.aborted) == (2, 1)

    asyncio.run(scenario())


def test_an_abort_that_does_not_end_is_an_engine_that_failed(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.actors.pool.rollout_worker._ABORT_S", 0.05)

    async def scenario() -> None:
        sampler = Slow(is_stubborn=True)
        worker = await started(sampler)
        stubborn = asyncio.ensure_future(worker.generate_group(ticket()))
        await soon()
        for _ in range(2):  # asked again the answer is the same
            with pytest.raises(EngineError, match="group 7 was given up"):
                await worker.abort(7)
        sampler.finish.set()
        await stubborn

    asyncio.run(scenario())


def test_a_worker_that_is_asked_to_start_again_starts_once(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        worker = await started(Slow())
        monkeypatch.setattr(Sampler, "start", None)
        first, second = await asyncio.gather(worker.start(0), worker.start(0))
        assert first == second and first.node == "node"

    asyncio.run(scenario())


def sent(checksums: dict[str, str]) -> WeightChecksums:
    return WeightChecksums(asyncio.sleep(0, checksums), digest_of(checksums))


@pytest.mark.parametrize("differ", [0, 20_000])
def test_what_comes_back_of_checksums_is_small_however_many_there_are(started: Start, differ: int) -> None:
    """Hundreds of workers compare two megabytes each; through the driver go a digest, or the first name that differs."""
    expected = {f"model.layers.{number}.weight": "0" * 64 for number in range(20_000)}

    async def scenario() -> None:
        sampler = Slow(checksums={name: "1" * 64 if n < differ else one for n, (name, one) in enumerate(expected.items())})
        sampler.engine.compared.set()
        update = (await started(sampler)).update_weights(4, [asyncio.sleep(0, "bucket")], sent(expected))
        if differ:
            with pytest.raises(SyncError, match=r"20000 tensors differ, first model\.layers\.0\.weight; ") as found:
                await update
            assert len(pickle.dumps(found.value)) < 1000
        else:
            assert len(pickle.dumps(await update)) < 1000

    asyncio.run(scenario())


@pytest.mark.parametrize("arrives", [{"a": "1"}, {"a": "2"}], ids=["as sent", "otherwise"])
def test_what_ran_on_weights_that_arrived_otherwise_is_of_no_version(started: Start, arrives: dict[str, str]) -> None:
    """An engine that others take for dirty may have requests in flight while it is sent everything anew. What is done before the checksums
    are compared waits for that, whole groups and those that are under way."""

    async def scenario() -> None:
        sampler = Slow(checksums=arrives)
        worker = await started(sampler)
        group_of = asyncio.ensure_future(worker.generate_group(ticket()))
        await soon()
        update = asyncio.ensure_future(worker.update_weights(4, [asyncio.sleep(0, "bucket")], sent({"a": "1"})))
        await soon()
        turns = asyncio.ensure_future(worker.turns_so_far(0))
        await soon()
        sampler.finish.set()
        assert not (await asyncio.wait({group_of, turns}, timeout=0.05))[0], "its weights are not known yet"
        sampler.engine.compared.set()
        assert await turns == ((5, sampler.so_far([7])) if arrives == {"a": "1"} else (0, {}))
        if arrives == {"a": "1"}:
            receipt = await update
            assert receipt.digest == digest_of(arrives) and receipt.load == WorkerLoad(1.0, 2.0, 3, 4)
            assert (await group_of)[0].group_id == 7
        else:
            with pytest.raises(SyncError, match=r"^weight sync v4 -> rollout worker 0: 1 tensors differ, first a; the engine gets no work"):
                await update
            with pytest.raises(EngineDirty, match="other weights arrived than were sent"):
                await group_of
        assert (await worker.generate_group(ticket(8, 4)))[0].group_id == 8

    asyncio.run(scenario())


@pytest.mark.parametrize("first", ["weights", "group", "follow", "follow, of one that finishes all the same"])
def test_a_worker_gives_up_what_it_has_when_it_hears_of_another_generation(started: Start, first: str) -> None:
    """By `follow`, which a network may lose, or by the first weights or group of it. The group comes again under its number, and is not the
    one that was withdrawn; what is late by then, `follow` itself or a call of before, changes nothing."""

    async def scenario() -> None:
        sampler = Slow(is_stubborn="finishes" in first)
        worker = await started(sampler)
        withdrawn = asyncio.ensure_future(worker.generate_group(ticket()))
        await soon()
        if first != "group":
            await (worker.update_weights(2, [], None, 1) if first == "weights" else worker.follow(1))
            await soon()
            assert sampler.aborted == 1
        again = asyncio.ensure_future(worker.generate_group(ticket(version=2), 1))
        if "finishes" not in first:
            with pytest.raises(LateError, match="withdrawn"):
                await withdrawn
        await worker.follow(1)
        with pytest.raises(LateError, match="group 7 was withdrawn before its call came"):
            await worker.generate_group(ticket())
        sampler.finish.set()
        assert (await again)[0].admitted_version == 2 and (sampler.begun, sampler.aborted) == (2, 1)
        if "finishes" in first:
            with pytest.raises(LateError, match="withdrawn"):
                await withdrawn

    asyncio.run(scenario())


@pytest.mark.parametrize("is_late", [True, False])
def test_weights_that_do_not_come_are_told_apart_from_an_engine_that_takes_none(started: Start, is_late: bool) -> None:
    """The engine isn't asked for anything: it goes on as it was."""

    async def scenario() -> None:
        sampler = Slow()
        worker = await started(sampler, weights_fetch_s=0.05)
        sampler.engine = None  # type: ignore[assignment]
        bucket = asyncio.get_running_loop().create_future()
        if not is_late:
            bucket.set_exception(ray.exceptions.ObjectLostError("", "", ""))
        why = r"not all of 1 buckets came in 0 s" if is_late else r"could not be read from the object store \(ObjectLostError\)"
        with pytest.raises(LateError, match=f"rollout worker 0: weights v3:? {why}"):
            await worker.update_weights(3, [bucket], None)

    asyncio.run(scenario())


def test_weights_that_come_after_others_were_asked_for_are_dropped(started: Start) -> None:
    """They would take the engine back."""

    async def scenario() -> None:
        worker, bucket = await started(Slow()), asyncio.get_running_loop().create_future()
        late = asyncio.ensure_future(worker.update_weights(3, [bucket], None))
        await soon()
        assert (await worker.update_weights(4, [], None)).version == 4
        bucket.set_result("bucket")
        with pytest.raises(SyncError, match="weights v3 came after others had been asked for; these stay"):
            await late
        with pytest.raises(SyncError, match="weights v3 were asked for after v4; those stay"):
            await worker.update_weights(3, [], None)

    asyncio.run(scenario())


def test_an_attempt_at_new_weights_leaves_the_engine_its_own_time() -> None:
    engine = {"device": "cpu", "deadlines": {"update_s": 30.0, "control_s": 10.0}}
    rollout = {"task": {"kind": "file", "path": "none"}, "reward": {"kind": "exact_match"}, "engine": engine}
    run = {"model": "model", "steps": 1, "groups_per_step": 2, "rollout": rollout}
    found = [
        worker_settings(RunConfig.model_validate(run | {"deadlines": {"sync_s": sync_s}}), Path("model"), [prompt(0)]).weights_fetch_s
        for sync_s in (120.0, 40.0)
    ]
    assert found == [120.0 - 30.0 - 2 * 10.0, 20.0], "or half, where a recipe leaves none"
