"""The service between queue and learner, with the real queue and correction, and a learner that answers with values that tell tokens apart.

Behaviours locked here: proximal logprobs land at their own tokens, however the batch was put together; they are asked for at the version
from which the update starts, never before; batch k+1 is prepared while k trains; groups without two valid answers are replaced; diagnostics
and monitor follow in the order of steps, while the event loop goes on, and hold a batch no longer than they need it.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel.actors.carriers import Ticket
from evenkeel.actors.config import DeadlinesConfig, EarlyWarningConfig, MetricsConfig
from evenkeel.actors.service import correction_service, gap_split
from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import DeadlineExceeded, LateError
from evenkeel.rollout.config import MaskOverlong
from evenkeel.rollout.trajectory import FinishReason, KeptTokens
from tests.actors.cases import group, prompt, stored, trajectory
from tests.actors.service.service_scene import GROUPS, ROLLOUT, ServiceScene, answered, code, play, routes


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 3, 0, 1]])
def test_proximal_logprobs_land_at_their_tokens(order: list[int]) -> None:
    """Two forwards of two groups each, in the order of arrival; the batch is in the order of admission."""

    async def scenario() -> None:
        scene = ServiceScene(correction=CorrectionConfig.model_validate({"preset": "decoupled-ppo", "kl": {"coefficient": 0.1}}))
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        await scene.put(*[answered(tickets[i]) for i in order[:2]])
        while not scene.learner.asked:  # the queue gives groups out by the handful
            await asyncio.sleep(0.01)
        await scene.put(*[answered(tickets[i]) for i in order[2:]])
        prepared = await waiting
        batch = prepared.corrected.batch
        assert len(scene.learner.asked) == 2
        assert [g.group_id for g in prepared.groups] == [0, 1, 2, 3]
        assert batch.proximal_logprobs is not None and batch.reference_logprobs is not None
        assert prepared.proximal_s > 0 and prepared.split_s == 0, "no gap is split, so that the step has no time for it"
        torch.testing.assert_close(batch.proximal_logprobs, code(batch.token_ids), rtol=0, atol=0)
        torch.testing.assert_close(batch.reference_logprobs, 2 * code(batch.token_ids), rtol=0, atol=0)
        experts, last = batch.with_wide_fields().routed_experts, batch.offsets[1:] - 1
        assert experts is not None and scene.learner.fetched == [8], "for training alone: nothing is replayed before it"
        expected = routes(batch.token_ids)
        expected[last] = torch.arange(2, dtype=torch.uint8)
        assert torch.equal(experts, expected)
        trained = batch.token_ids[batch.loss_mask].tolist()
        assert trained == [token for ticket in tickets for t in answered(ticket).trajectories for token in t.response_ids]

    play(scenario)


@pytest.mark.parametrize(("preset", "split_every"), [("decoupled-ppo", 0), ("split-tis", 0), ("decoupled-ppo", 1)])
def test_kept_sets_go_to_every_forward(preset: str, split_every: int) -> None:
    """Under top-p all policies are normalised over the set that a token was drawn from; the logprobs of a forward that doesn't have the
    sets would be of the whole vocabulary. Every second token here has one of three tokens. The batch is stale, and those that split the gap
    score it at its own weights, too."""

    async def scenario() -> None:
        rollout = ROLLOUT.model_copy(update={"sampling": ROLLOUT.sampling.model_copy(update={"top_p": 0.9})})
        monitor = EarlyWarningConfig(detailed=False, split_every=split_every)
        scene = ServiceScene(preset=preset, rollout=rollout, monitor=monitor)
        await scene.batch(0)
        scene.learner.asked.clear()
        scene.learner.asked_then.clear()
        tickets = [replace(ticket, admitted_version=0) for ticket in await scene.admit(GROUPS, 2 * GROUPS)]
        waiting = asyncio.create_task(scene.next_batch(1))
        for ticket in tickets:
            answers = answered(ticket).trajectories
            rows = [[[one, 200, 201] if i % 2 else [] for i, one in enumerate(t.response_ids)] for t in answers]
            sets = [replace(t, kept_tokens=KeptTokens.of(row)) for t, row in zip(answers, rows, strict=True)]
            await scene.put(replace(answered(ticket), trajectories=tuple(sets)))
        prepared = await waiting
        trained = prepared.corrected.batch
        for batch in [*(batch for _, batch in scene.learner.asked), *scene.learner.asked_then, trained]:
            counts = batch.with_wide_fields().kept_counts
            assert counts is not None and set(counts[batch.loss_mask].tolist()) == {0, 3} and not counts[~batch.loss_mask].any()
        assert scene.learner.asked and bool(scene.learner.asked_then) == (preset == "split-tis" or split_every == 1)
        shown = (await scene.observe(prepared)).tokens
        assert shown is not None
        own = shown.columns["sampled"]
        assert set(shown.columns["kept_set"][own].tolist()) == {0, 3} and not shown.columns["kept_set"][~own].any()
        assert np.all((shown.columns["kept_set"][own] == 3) == (shown.columns["token_ids"][own] % 2 == 1)), (
            "every second one's, in its place"
        )
        scene.stop()

    play(scenario)


def test_forwards_wait_for_the_learner_to_reach_their_version() -> None:
    async def scenario() -> None:
        scene = ServiceScene()
        tickets = await scene.admit(0, 2 * GROUPS)
        await scene.put(*[answered(ticket) for ticket in tickets])
        first = await scene.next_batch(0)
        assert {version for version, _ in scene.learner.asked} == {0}

        await asyncio.sleep(0.05)
        counts = scene.books.book.counts()
        assert counts["drawn"] == 2 * GROUPS, "the next batch is drawn while this one trains"
        assert {version for version, _ in scene.learner.asked} == {0}, "but version 1 isn't there yet"
        scene.books.advance(1, [g.group_id for g in first.groups])
        second = await scene.next_batch(1)
        assert {version for version, _ in scene.learner.asked} == {0, 1}
        assert second.version == 1 and [g.group_id for g in second.groups] == [4, 5, 6, 7]
        batch = second.corrected.batch
        assert batch.proximal_logprobs is not None and torch.equal(batch.proximal_logprobs, code(batch.token_ids))
        scene.stop()

    play(scenario)


def test_one_optimizer_step_needs_no_forward() -> None:
    async def scenario() -> None:
        scene = ServiceScene(steps=1)
        tickets = await scene.admit(0, GROUPS)
        await scene.put(*[answered(ticket) for ticket in tickets])
        prepared = await scene.next_batch(0)
        assert scene.learner.asked == [] and prepared.corrected.is_deferred
        assert prepared.trained_tokens == tuple(one.response_tokens for one in prepared.groups), "by the batch's own mask"
        scene.stop()

    play(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_which_groups_fill_a_synchronous_batch_does_not_depend_on_arrival(seed: int) -> None:
    """The first ones of the stream that are worth training, in their order, whichever is finished or discarded first."""
    uniform, order = {1, 2, 4, 5, 6, 9, 13}, random.Random(seed)

    async def sample(scene: ServiceScene) -> None:
        under_way: list[Ticket] = []
        while True:
            places, admitted = scene.books.book.free_places, scene.books.book.admitted
            under_way += await scene.admit(admitted, admitted + places)
            if under_way:
                ticket = under_way.pop(order.randrange(len(under_way)))
                await scene.put(answered(ticket, rewards=(1.0, 1.0) if ticket.group_id in uniform else (0.0, 1.0)), apart_s=0.0)
            await asyncio.sleep(0.02 * order.random())

    async def scenario() -> None:
        scene = ServiceScene(steps=1, max_staleness=0, dynamic_sampling=True)
        sampling = asyncio.create_task(sample(scene))
        batches = []
        for version in range(3):
            prepared = await scene.next_batch(version)
            batches.append([g.group_id for g in prepared.groups])
            scene.books.advance(version + 1, batches[-1])
        sampling.cancel()
        scene.stop()
        assert batches == [[0, 3, 7, 8], [10, 11, 12, 14], [15, 16, 17, 18]]

    play(scenario)


@pytest.mark.parametrize(("rewards", "reason"), [((1.0, None), "fewer than two valid"), ((1.0, 1.0), "alike")])
def test_groups_that_teach_nothing_are_replaced(rewards: tuple[float | None, ...], reason: str) -> None:
    """Their places go to new prompts of the same version, and the batch is as large as ever."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1, max_staleness=0, dynamic_sampling=True)
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        await scene.put(answered(tickets[0], rewards=rewards), *[answered(ticket) for ticket in tickets[1:]])
        await scene.books.changes.until(lambda: scene.books.book.free_places > 0, within_s=1.0)
        assert scene.books.book.free_places == 1
        (refill,) = await scene.admit(GROUPS, GROUPS + 1)
        assert not waiting.done()
        await scene.put(answered(refill))
        prepared = await waiting
        assert [g.group_id for g in prepared.groups] == [1, 2, 3, 4]
        (gone,) = scene.books.advance(1, [1, 2, 3, 4])
        assert gone.prompt_id == "train/0/0" and reason in gone.reason
        scene.stop()

    play(scenario)


@pytest.mark.parametrize("steps", [1, 2], ids=["without a forward", "with forwards"])
def test_a_batch_of_answers_that_were_all_cut_is_one_without_tokens(steps: int) -> None:
    """Nothing is asked of the learner about it, and its diagnosis says of no token anything."""

    async def scenario() -> None:
        masked = ROLLOUT.model_copy(update={"overlong": MaskOverlong()})
        scene = ServiceScene(steps=steps, rollout=masked)
        whole = [answered(ticket) for ticket in await scene.admit(0, GROUPS)]
        cut = [replace(g, trajectories=tuple(replace(t, finish_reason=FinishReason.LENGTH) for t in g.trajectories)) for g in whole]
        waiting = asyncio.create_task(scene.next_batch(0))
        await scene.put(*cut)
        prepared = await waiting
        assert (prepared.tokens, len(prepared.groups), prepared.trained, scene.learner.asked) == (0, GROUPS, [], [])
        found = await scene.observe(prepared)
        assert found.events == () and not any(name.startswith("rho") for name in found.diagnostics)
        scene.stop()

    play(scenario)


def test_a_call_that_is_made_twice_is_one_call() -> None:
    """Its answer was lost on its way, before or after the service had it: nothing is read, packed or corrected again; a call for a batch
    that is past says so."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1)
        service, correction = scene.service, scene.config.correction
        groups = stored(*map(answered, await scene.admit(0, GROUPS)), lost=(1,))
        pulled = await asyncio.gather(service.pull(0, 0, groups), service.pull(0, 0, groups))
        assert pulled[0] is pulled[1] is await service.pull(0, 0, groups) and pulled[0].keys() == {1}
        assert await service.pull(0, 1, stored(answered(Ticket(1, prompt(1), 0)))) == {}
        ids = [0, 1, 2, 3]
        corrected = await asyncio.gather(service.correct(0, 2, ids, correction), service.correct(0, 2, ids, correction))
        assert corrected[0] is corrected[1] is await service.correct(0, 2, ids, correction)
        await service.pull(1, 0, [])
        with pytest.raises(LateError, match="batch of version 0: a call came after the first one for that of version 1"):
            await service.correct(0, 2, ids, correction)

    play(scenario)


def test_a_batch_that_is_not_whole_names_what_is_missing() -> None:
    async def scenario() -> None:
        scene = ServiceScene(deadlines=DeadlinesConfig(batch_s=0.3))
        tickets = await scene.admit(0, GROUPS)
        await scene.put(answered(tickets[1]))
        with pytest.raises(DeadlineExceeded, match=r"batch of version 0 .*1 of 4 groups drawn, 3 being sampled"):
            await scene.next_batch(0)
        scene.stop()

    play(scenario)


@pytest.mark.parametrize("settings", [{"preset": "bypass"}, {"proximal": "recompute", "objective": {"kind": "score", "ratio": "q"}}])
def test_without_a_proximal_policy_there_may_be_several_optimizer_steps(settings: dict[str, Any]) -> None:
    """No forward, and nothing left to the first of the steps: the learner refuses a deferred batch that has more than one."""

    async def scenario() -> None:
        scene = ServiceScene(steps=2, correction=CorrectionConfig.model_validate(settings))
        prepared = await scene.batch(0)
        assert scene.learner.asked == [] and not prepared.corrected.is_deferred
        scene.stop()

    play(scenario)


def test_a_switch_takes_the_next_batch_that_is_begun() -> None:
    """The batch under way keeps its correction, and every batch says which one it has; the forward comes and goes with the need for it."""

    async def scenario() -> None:
        scene = ServiceScene(steps=2, preset="bypass")
        await scene.batch(0)  # and 1 is being prepared
        replacement = CorrectionConfig.model_validate({"preset": "mis-token"})
        await scene.source.switch(replacement)
        second = await scene.batch(1)
        assert second.correction.preset == "bypass" and scene.learner.asked == []
        third = await scene.batch(2)
        assert third.correction == replacement and third.corrected.batch.proximal_logprobs is not None
        # The learner's logprobs lie at most 0.5 from -1: within mis-token's band, no token is rejected, and weights are their ratio.
        expected = (code(third.corrected.batch.token_ids) + 1).exp()
        mask = third.corrected.batch.loss_mask
        torch.testing.assert_close(third.corrected.importance_weights[mask], expected[mask], rtol=1e-5, atol=0)
        scene.stop()

    play(scenario)


def test_groups_whose_tokens_are_lost_are_sampled_again() -> None:
    """The batch waits for them: it has the same groups as without the loss, and the queue's counts balance all along."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1, max_staleness=0)
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        finished = [answered(ticket) for ticket in tickets]
        scene.books.put(*stored(*finished, lost=(1, 3)))
        await scene.books.changes.until(lambda: scene.books.book.has_lost, within_s=5.0)
        again = scene.books.book.take_lost()
        assert [ticket.group_id for ticket in again] == [1, 3] and not waiting.done()
        counts = scene.books.book.counts()
        assert (counts["admitted"], counts["in_flight"], counts["drawn"], counts["discarded"]) == (GROUPS, 2, 2, 0)
        await scene.put(*[answered(ticket) for ticket in again])
        prepared = await waiting
        assert [g.group_id for g in prepared.groups] == [0, 1, 2, 3]
        trained = prepared.corrected.batch.token_ids[prepared.corrected.batch.loss_mask].tolist()
        assert trained == [token for one in finished for t in one.trajectories for token in t.response_ids]
        scene.stop()

    play(scenario)


def test_packing_and_correcting_leave_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches whose packing, correction, joining with the learner's logprobs and split gap would stop the event loop."""
    loop_thread = threading.get_ident()
    threads: dict[str, set[int]] = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments, **named)

        return noted

    async def scenario() -> None:
        of_service = [(correction_service, name) for name in ("pack_groups", "correct", "defer")]
        places: list[tuple[Any, str]] = [*of_service, (gap_split, "split_numbers"), (PackedBatch, "token_index"), (PackedBatch, "select")]
        for place, name in places:
            monkeypatch.setattr(place, name, noting(name, getattr(place, name)))
        for steps in (1, 2):
            scene = ServiceScene(steps=steps, monitor=EarlyWarningConfig(detailed=False, split_every=1))
            tickets = await scene.admit(0, 2 * GROUPS)  # all at version 0: the second batch is stale
            for version in range(2):
                waiting = asyncio.create_task(scene.next_batch(version))
                await scene.put(*map(answered, tickets[version * GROUPS : (version + 1) * GROUPS]))
                batch = await waiting
                scene.books.advance(version + 1, [one.group_id for one in batch.groups])
            scene.stop()
        assert threads.keys() == {name for _, name in places} and loop_thread not in set().union(*threads.values())

    play(scenario)


def test_the_text_that_is_kept_is_of_the_answer_whose_length_is_told() -> None:
    async def scenario() -> None:
        scene = ServiceScene(steps=1)
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        given_up, *answers = (trajectory(prompt(0), (7,) * n, reward=[None, 0.0, 1.0][n]) for n in range(3))
        named = tuple(replace(one, text=f"{one.response_tokens} tokens") for one in (given_up, *answers))
        await scene.put(*[replace(group(ticket), trajectories=named) for ticket in tickets])
        prepared = await waiting
        scene.stop()
        assert {example.text for example in prepared.examples} == {"1 tokens"}
        assert {one.example.response_tokens for one in prepared.groups} == {1}

    play(scenario)


def test_what_the_driver_gets_does_not_grow_with_the_answers() -> None:
    """Ids, rewards, lengths and spans: a batch of answers a hundred times as long is as large, but for the digits of its numbers."""

    async def size(length: int) -> int:
        scene = ServiceScene(steps=1, metrics=MetricsConfig(trajectories_per_step=0))
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        answers = {r: [trajectory(prompt(i), range(length), reward=float(r)) for i in range(GROUPS)] for r in range(2)}
        await scene.put(*[replace(group(ticket), trajectories=(answers[0][i], answers[1][i])) for i, ticket in enumerate(tickets)])
        prepared = await waiting
        scene.stop()
        assert prepared.tokens == 2 * GROUPS * (3 + length)
        return len(pickle.dumps(replace(prepared, corrected=None)))

    async def scenario() -> None:
        assert abs(await size(1000) - await size(10)) < 100

    play(scenario)
