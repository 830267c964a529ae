"""Groups with routed experts and likeliest tokens: a worker takes large ones apart, a checkpoint puts them together, and the service, which
never reads what lies apart, has those sampled again of which a part is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray

from evenkeel.actors.carriers import StoredGroup, Ticket
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups import tokens as payloads
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.actors.pool.workers import WorkerHandle
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import DataError, LateError
from evenkeel.learner.config import LearnerConfig
from evenkeel.rollout import wide_fields
from evenkeel.rollout.config import TrainOverlong
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.trajectory import Group, KeptTokens, RoutedExperts, TopLogprobs
from evenkeel.rollout.wide_fields import join_wide_fields, split_wide_fields
from tests.actors.cases import FakeActor, OpenBook, group, prompt, prompts, trajectory
from tests.actors.groups.test_wide_fields import differences
from tests.actors.pool.pool_cases import worker_settings
from tests.actors.pool.started_worker import started_worker
from tests.actors.service.service_scene import GROUPS, ServiceScene, answered, play
from tests.learner.learner_cases import VOCAB
from tests.learner.moe_cases import EXPERTS, LAYERS
from tests.learner.moe_cases import TOPK as TOPK_EXPERTS


def wide_group(ticket: Ticket) -> Group:
    """Two answers, each token with two likely ones, a kept set of none, one, two or three, and two experts in one layer."""
    whole = answered(ticket)
    answers = []
    for one in whole.trajectories:
        n = len(one.response_ids)
        routes = array("B", [x % 250 for t in range(len(one.prompt_ids) + n - 1) for x in (ticket.group_id, t)])
        rows = [[(-1.0 - t, t), (-2.0 - t, ticket.group_id)] for t in range(n)]
        sets = KeptTokens.of([[token, *range(60, 63)][: t % 4] for t, token in enumerate(one.response_ids)])
        wide = {"top_logprobs": TopLogprobs.of(2, rows), "kept_tokens": sets, "routed_experts": RoutedExperts(1, 2, routes)}
        answers.append(replace(one, **wide))  # type: ignore[arg-type]
    return replace(whole, trajectories=tuple(answers))


def routed_group(ticket: Ticket) -> Group:
    """Four answers of 60 tokens in the vocabulary of the tests' mixture of experts, sampled at their ticket's version; random experts."""
    draw = random.Random(ticket.group_id)
    answers = []
    for reward in (0.0, 1.0, 0.0, 1.0):
        one = trajectory(ticket.prompt, [draw.randrange(VOCAB) for _ in range(60)], reward=reward, version=ticket.admitted_version)
        chosen = [expert for _ in range(62 * LAYERS) for expert in draw.sample(range(EXPERTS), TOPK_EXPERTS)]
        answers.append(replace(one, routed_experts=RoutedExperts(LAYERS, TOPK_EXPERTS, array("B", chosen))))
    return Group(ticket.group_id, ticket.prompt, tuple(answers), ticket.admitted_version)


def tickets(count: int) -> list[Ticket]:
    return GroupBook(groups_per_step=count, max_staleness=0).admit(prompts(0, count), now=0.0)


def packed(groups: list[Group], **options: Any) -> PackedBatch:
    own: dict[str, Any] = {
        "learner_version": 0,
        "advantage": lambda rewards, ids: rewards,
        "overlong": TrainOverlong(),
        "max_tokens": {"": 99},
    }
    return pack_groups(groups, **own, **options).batch


def test_a_group_that_was_taken_apart_packs_to_the_same_batch_and_can_be_put_together() -> None:
    groups = [wide_group(ticket) for ticket in tickets(3)]
    failed = trajectory(groups[1].prompt, reward=None)
    groups[1] = replace(groups[1], trajectories=(groups[1].trajectories[0], failed, *groups[1].trajectories[1:]))
    whole, pairs = packed(groups), [split_wide_fields(one) for one in groups]
    held = {one.group_id: found for one, found in pickle.loads(pickle.dumps(pairs))}
    light = packed([one for one, _ in pairs], wide_of=held)
    assert light.routed_experts is None and light.topk_ids is None and light.kept_ids is None and light.has_routes
    assert differences(whole, light.with_wide_fields()) == [] and whole.topk_ids is not None and whole.routed_experts is not None
    sets = [one.kept_tokens for of_group in groups for one in of_group.valid if one.kept_tokens is not None]
    assert whole.kept_counts is not None and whole.kept_ids is not None
    assert whole.kept_counts[whole.loss_mask].tolist() == [count for one in sets for count in one.counts]
    assert whole.kept_ids.tolist() == [token for one in sets for token in one.ids] and int(whole.kept_counts[~whole.loss_mask].sum()) == 0
    assert [join_wide_fields(*pair) for pair in pairs] == groups
    with pytest.raises(Exception, match="group 2 has no wide fields"):
        packed([one for one, _ in pairs], wide_of={0: held[0], 1: held[1]})
    unread = packed([one for one, _ in pairs], wide_of={**held, 1: "a reference"})
    with pytest.raises(DataError, match="wide fields of a sequence were not read: there is a str in their place"):
        unread.with_wide_fields()


def test_a_worker_takes_large_groups_apart_alone() -> None:
    """Below Ray's limit of 100 KiB a result would be copied to the driver and stay there; such a group goes on as it is."""
    (ticket,) = tickets(1)
    small = wide_group(ticket)
    assert payloads.split_answer(small) == (small.facts, small, None)
    one = small.trajectories[0]
    routes = RoutedExperts(1, 2, array("B", bytes(2 * 60_000)))
    large = replace(small, trajectories=(replace(one, routed_experts=routes),))
    facts, light, found = payloads.split_answer(large)
    assert found is not None and facts.wide_bytes == sum(each.nbytes for each in found) > 120_000
    assert light.trajectories[0].routed_experts is None and join_wide_fields(light, found) == large


class WideSampler:
    """Of the groups that it samples all but number 0 have wide fields."""

    engine = SimpleNamespace(requests_in_flight=0, metrics=None)

    async def group(self, prompt: Any, *, group_id: int, admitted_version: int, **_: Any) -> Group:
        ticket = Ticket(group_id, prompt, admitted_version)
        return wide_group(ticket) if group_id else group(ticket)


async def wide_worker(
    monkeypatch: pytest.MonkeyPatch, *, has_wide_fields: bool = True, counted: Callable[[str, float], object] = lambda *_: None
) -> RolloutWorker:
    """Args: counted: takes what the worker adds to its metrics."""
    return await started_worker(monkeypatch, WideSampler(), counted=counted, topk=2 * has_wide_fields)


def test_taking_groups_apart_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the worker that sampled them, and in the service, which gets small ones whole. Long prompts with routed experts take 50 ms."""
    threads: dict[str, list[int]] = {"split": [], "put": []}

    def noted(name: str, found: Any) -> Any:
        threads[name].append(threading.get_ident())
        return found

    monkeypatch.setattr(wide_fields, "split_wide_fields", lambda one: noted("split", split_wide_fields(one)))
    monkeypatch.setattr(ray, "put", lambda content: noted("put", content))

    async def scenario() -> None:
        scene = ServiceScene(preset="tis-token", learner=LearnerConfig(routing_replay="rollout"))
        admitted = await scene.admit(0, GROUPS)
        worker = await wide_worker(monkeypatch)
        assert (await worker.generate_group(admitted[1]))[1:] == (wide_group(admitted[1]), None)
        waiting = asyncio.create_task(scene.next_batch(0))
        scene.books.put(*[StoredGroup(one.facts, one) for one in map(wide_group, admitted)])
        batch = (await waiting).corrected.batch
        assert differences(packed([wide_group(t) for t in admitted]), batch.with_wide_fields()) in ([], ["advantages"])
        scene.stop()

    play(scenario)
    assert len(threads["split"]) == 1 + GROUPS and len(threads["put"]) >= GROUPS
    assert threading.get_ident() not in {*threads["split"], *threads["put"]}


def test_a_group_that_is_withdrawn_while_it_is_taken_apart_was_never_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, counted = threading.Event(), threading.Event(), []

    def slow(one: Group) -> Any:
        begun.set()
        assert may_end.wait(60)
        return split_wide_fields(one)

    monkeypatch.setattr(wide_fields, "split_wide_fields", slow)

    async def scenario() -> None:
        worker = await wide_worker(monkeypatch, counted=lambda *what: counted.append(what))
        calls = [asyncio.ensure_future(worker.generate_group(ticket)) for ticket in tickets(3)[1:]]
        assert await asyncio.to_thread(begun.wait, 60)
        await worker.abort(1)
        await worker.follow(1)
        with pytest.raises(LateError, match="was withdrawn"):
            await calls[0]
        with pytest.raises(LateError, match="was withdrawn"):
            await calls[1]
        may_end.set()
        await asyncio.sleep(0.05)
        assert counted == []

    asyncio.run(scenario())


def test_a_large_group_of_a_worker_reaches_the_queue_in_two_objects_and_a_small_one_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real worker and pool. Of a worker whose groups have no wide fields there is no third result at all."""
    monkeypatch.setattr(payloads, "_INLINE_BYTES", 60)

    async def scenario() -> None:
        workers = [await wide_worker(monkeypatch, has_wide_fields=wide) for wide in (True, False)]
        asked = [await worker.generate_group(tickets(2)[1]) for worker in workers]
        (facts, light, found), (_, whole) = asked
        assert join_wide_fields(light, found) == whole and facts.wide_bytes == sum(one.nbytes for one in found)

        books, actor = OpenBook(groups_per_step=2, max_staleness=0), FakeActor(workers[0])
        settings = replace(worker_settings(1), topk=2)
        pool = RolloutPool(settings, DeadlinesConfig(), books.book, books.changes, MagicMock())
        pool.create = lambda name, *_: WorkerHandle(name, actor, SyncTarget(name, actor))
        pool.start()
        await pool.first_worker()
        pool.follow(SimpleNamespace(version=0, join=lambda target: setattr(target, "version", 0)))  # type: ignore[arg-type]
        feeding = asyncio.create_task(pool.feed(map(prompt, itertools.count()), [], lambda _: None, lambda _: None))
        await books.changes.until(lambda: books.book.counts()["finished"] == 2, within_s=10.0)
        first, second = await books.draw(0, 2, 5.0)
        assert (first.wide, first.facts.wide_bytes) == (None, 0) and await second.wide is not None and second.facts.wide_bytes > 0
        assert first.source == second.source and first.source.startswith("rollout worker "), "whom notices and errors name"
        assert (await payloads.whole([first, second], deadline_s=5.0))[0] == [group(admitted(0)), wide_group(admitted(1))]
        feeding.cancel()

    def admitted(number: int) -> Ticket:
        return Ticket(number, prompt(number), 0)

    play(scenario)


def test_a_checkpoint_has_whole_groups_and_those_that_lost_a_part_are_sampled_again() -> None:
    async def scenario() -> None:
        groups = [wide_group(ticket) for ticket in tickets(3)]
        stored = []
        for number, one in enumerate(groups):
            light, found = split_wide_fields(one)
            reference = asyncio.get_running_loop().create_future()
            error = ray.exceptions.ObjectLostError("id", "owner", "")
            reference.set_exception(error) if number == 1 else reference.set_result(found)
            stored.append(StoredGroup(one.facts, light, reference) if number else StoredGroup(one.facts, one))
        assert await payloads.whole(stored, deadline_s=5.0) == ([groups[0], groups[2]], [1])

    asyncio.run(scenario())


def test_a_group_whose_wide_fields_are_lost_is_sampled_again_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks can't read group 2 of a finished batch: its place stays, another worker samples it, and the batch is whole when the learner
    gets it. With a forward of their own (decoupled-ppo) as without one; the service never holds the fields that lie apart."""

    monkeypatch.setattr(ray, "put", lambda content: content)

    async def scenario() -> None:
        for preset, steps in (("tis-token", 1), ("decoupled-ppo", 2)):
            learner = LearnerConfig(routing_replay="rollout", optimizer_steps_per_batch=steps)
            scene = ServiceScene(preset=preset, learner=learner)
            monkeypatch.setattr(scene.learner, "proximal", without_routes(scene.learner.proximal))
            scene.learner.lost = {2}
            admitted = await scene.admit(0, GROUPS)
            waiting = asyncio.create_task(scene.next_batch(0))
            held: dict[str, Any] = {}

            async def put(ticket: Ticket, reference: str) -> None:
                light, held[reference] = split_wide_fields(wide_group(ticket))  # noqa: B023
                scene.books.put(*[StoredGroup(light.facts, light, reference)])  # noqa: B023

            for ticket in admitted:
                await put(ticket, f"group {ticket.group_id}")
            await scene.books.changes.until(lambda: scene.books.book.has_lost, within_s=5.0)  # noqa: B023
            again = scene.books.book.take_lost()
            assert again == [admitted[2]] and not waiting.done()
            await put(again[0], "group 2 again")
            prepared = await waiting
            batch = prepared.corrected.batch
            assert prepared.group_ids == [0, 1, 2, 3] and scene.books.book.counts()["drawn"] == GROUPS
            assert {place.references[0] for place in batch.wide} == {"group 0", "group 1", "group 2 again", "group 3"}
            assert differences(packed([wide_group(t) for t in admitted]), batch.holding(held).with_wide_fields()) in ([], ["advantages"])
            assert [one.corrected.batch.wide for one in scene.service._undiagnosed.values()] == [None], "diagnostics need none of it"
            assert (await scene.observe(prepared)).diagnostics
            scene.stop()

    def without_routes(proximal: Any) -> Any:
        async def call(batch: PackedBatch, *, version: int) -> Any:
            assert batch.wide is not None, "the forward replays what the engine did"
            return SimpleNamespace(logprobs=(await proximal(batch, version=version)).logprobs, route_places=None)

        return call

    play(scenario)
