"""The service between queue and learner, with the real queue and correction, and a learner that answers with values that tell tokens apart.

Behaviours locked here: proximal logprobs land at their own tokens, however the batch was put together; they are asked for at the version
from which the update starts, never before; batch k+1 is prepared while k trains; groups without two valid answers are replaced; diagnostics
and monitor follow in the order of steps, beside the event loop, and hold a batch no longer than they need it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import pickle
import random
import threading
import weakref
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from actors.carriers import Observation, PreparedBatch, Ticket
from actors.config import DeadlinesConfig, EarlyWarningConfig, MetricsConfig, RunConfig
from actors.queue.payloads import GONE
from actors.queue.queue_actor import TrajectoryQueueActor
from actors.ranks.forwards import next_batch
from actors.service import correction_service, drawing
from actors.service.correction_service import CorrectionService
from actors.service.gap_split import GapSplit
from correction.batch import FinalDecision, PackedBatch
from correction.config import CorrectionConfig
from correction.decision import no_counts
from correction.errors import ActorLost, DeadlineExceeded, LateError
from correction.monitor import MonitorConfig, State
from correction.wide import WideFields, WidePlace
from learner.config import LearnerConfig
from learner.results import StepValues
from rollout.config import MaskOverlong, RolloutConfig
from rollout.trajectory import FinishReason, Group
from tests.actors.cases import FakeActor, group, prompt, prompts, stored, trajectory

GROUPS = 4
ROLLOUT = RolloutConfig.model_validate(
    {
        "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
        "reward": {"kind": "exact_match"},
        "sampling": {"max_tokens": 16},
        "engine": {"device": "cpu"},
    }
)


def code(token_ids: Tensor) -> Tensor:
    """The fake learner's logprob of a token: a different number for each token id, as far from -1 as a real one may be."""
    return -1.0 - token_ids / 10_000.0


def routes(token_ids: Tensor) -> Tensor:
    """[N, 1 layer, 2 experts]: likewise."""
    return torch.stack([token_ids % 100, token_ids // 100], -1)[:, None].to(torch.uint8)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray a reference is the object."""
    monkeypatch.setattr(ray, "put", lambda content: content)


class Learner:
    """Keeps what it was asked, at which version."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, PackedBatch]] = []
        self.fetched: list[int] = []
        """Sequences of each batch whose wide fields it was to read."""
        self.lost = set[int]()
        """Groups that it will not find."""

    async def proximal(self, batch: PackedBatch, *, version: int) -> SimpleNamespace:
        self.asked.append((version, batch))
        await asyncio.sleep(0)
        bounds = itertools.pairwise(batch.offsets.tolist())
        fields = tuple(WideFields(routes(batch.token_ids[start : end - 1])) for start, end in bounds)
        places = tuple(WidePlace(((fields, i),), array("I")) for i in range(len(fields)))
        return SimpleNamespace(logprobs=code(batch.token_ids), route_places=places)

    async def fetch(self, batch: Any, correction: CorrectionConfig | None, **_: Any) -> dict[int, str]:
        """Without Ray a batch holds what it names."""
        packed = batch.batch if correction else batch
        self.fetched.append(packed.num_sequences)
        lost = sorted(set(packed.group_ids.tolist()) & self.lost)
        self.lost -= set(lost)
        return dict.fromkeys(lost, GONE)

    async def reference_logprobs(self, batch: PackedBatch, *, version: int) -> Tensor:
        return 2 * code(batch.token_ids)

    async def keep_weights(self, version: int, *, oldest: int) -> None:
        self.kept = {v for v in getattr(self, "kept", set()) if v >= oldest} | {version}

    async def at_sampling(self, batch: PackedBatch, *, version: int, oldest: int) -> tuple[Tensor, Tensor]:
        """The engine says -1 of every token. The learner: 0.1 more at kept weights of even versions and 0.2 at odd ones; now, 0.5 more."""
        kept = sum((batch.weight_versions == v for v in self.kept), torch.zeros_like(batch.loss_mask))
        self.kept = {v for v in self.kept if v >= oldest}
        told = torch.where(kept.bool(), -0.9 + 0.1 * (batch.weight_versions % 2), torch.nan)
        return told, torch.full_like(told, -0.5)


def answered(ticket: Ticket, *, rewards: Sequence[float | None] = (0.0, 1.0)) -> Group:
    """A group whose tokens say where they belong: response token j of answer a of group g has the id 100 g + 10 a + j; lengths differ."""
    lengths = [2 + (ticket.group_id + a) % 3 for a in range(len(rewards))]
    ids = [[100 * ticket.group_id + 10 * a + j for j in range(length)] for a, length in enumerate(lengths)]
    pairs = zip(ids, rewards, strict=True)
    answers = (trajectory(ticket.prompt, tokens, reward=reward, version=ticket.admitted_version) for tokens, reward in pairs)
    return replace(group(ticket), trajectories=tuple(answers))


class Scene:
    def __init__(
        self,
        *,
        steps: int = 2,
        preset: str = "decoupled-ppo",
        max_staleness: int = 1,
        monitor_state: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.queue = TrajectoryQueueActor(groups_per_step=GROUPS, max_staleness=max_staleness)
        self.learner = Learner()
        settings: dict[str, Any] = {
            "model": "none",
            "steps": 100,
            "correction": CorrectionConfig.model_validate({"preset": preset}),
            "groups_per_step": GROUPS,
            "max_staleness": max_staleness,
            "dynamic_sampling": False,
            "rollout": ROLLOUT,
            "learner": LearnerConfig(optimizer_steps_per_batch=steps),
            "deadlines": DeadlinesConfig(batch_s=5.0, step_s=2.0, checkpoint_s=1.0),
            "monitor": EarlyWarningConfig(detailed=False),
        }
        self.service = CorrectionService(RunConfig.model_validate(settings | changes), FakeActor(self.queue), monitor_state)

    async def admit(self, start: int, stop: int) -> list[Ticket]:
        return await self.queue.admit(prompts(start, stop))

    async def next_batch(self, version: int) -> PreparedBatch:
        """As the controller asks, which has the learner run what the service needs."""
        service: Any = FakeActor(self.service)
        ask = lambda: service.next_batch.remote(version)  # noqa: E731
        return await next_batch(ask, service, self.learner, step=version, deadline_s=5.0)  # type: ignore[arg-type]

    async def batch(self, version: int) -> PreparedBatch:
        """The whole way of a batch up to the learner."""
        tickets = await self.admit(version * GROUPS, (version + 1) * GROUPS)
        waiting = asyncio.create_task(self.next_batch(version))
        await self.put(*[answered(ticket) for ticket in tickets])
        prepared = await waiting
        await self.queue.advance(version + 1, [g.group_id for g in prepared.groups])
        return prepared

    async def observe(
        self,
        prepared: PreparedBatch,
        *,
        gap: float = 0.1,
        decided: FinalDecision | None = None,
        step: int | None = None,
        entropies: Tensor | None = None,
        **learned: float,
    ) -> Observation:
        """After a step whose target logprobs are the behaviour's, which are -1, plus `gap`, and which dropped what `decided` says."""
        target = torch.full((prepared.corrected.batch.num_tokens,), -1.0 + gap)
        corrected = prepared.corrected
        if decided is None:
            decided = FinalDecision(corrected.keep_mask, corrected.importance_weights, no_counts(prepared.correction))
        number = prepared.version + 1 if step is None else step
        values = StepValues(target, decided, torch.full_like(target, torch.nan) if entropies is None else entropies)
        observation = await self.service.observe(number, prepared.version, (values,), learned)
        assert observation is not None
        return observation

    async def put(self, *groups: Group) -> None:
        for finished in groups:
            await self.queue.put(stored(finished))
            await asyncio.sleep(0.01)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))  # type: ignore[arg-type]


def test_the_kl_to_the_start_model_is_told_now_and_then_and_is_no_part_of_the_batch() -> None:
    """Every second version. The learner gets what it gets without a report, tensor by tensor; the KL is the mean of k3 over the trained
    tokens, by hand: the target's logprob is -0.9, the reference's 2 (-1 - id / 10,000)."""

    async def prepared(every: int, preset: str, steps: int) -> tuple[list[PreparedBatch], list[dict[str, float]]]:
        scene = Scene(preset=preset, learner=LearnerConfig(report_kl_every=every, optimizer_steps_per_batch=steps))
        batches = [await scene.batch(version) for version in range(3)]
        told = [(await scene.observe(batch)).diagnostics for batch in batches[1:]]  # the service keeps those of two versions
        await scene.service.stop()
        return batches, told

    async def scenario() -> None:
        for preset, steps in (("tis-token", 1), ("decoupled-ppo", 2)):
            with_report, told = await prepared(2, preset, steps)
            without, told_without = await prepared(0, preset, steps)
            assert [("reference_kl" in numbers) for numbers in told] == [False, True]
            assert not any("reference_kl" in numbers for numbers in told_without)
            batch = with_report[2].corrected.batch
            ids = batch.token_ids[batch.loss_mask].double()
            x = 2 * (-1 - ids / 10_000) + 0.9
            assert told[1]["reference_kl"] == pytest.approx(float((torch.expm1(x) - x).mean()), rel=1e-6)
            for ours, theirs in zip(with_report, without, strict=True):
                for part in (lambda one: one.corrected, lambda one: one.corrected.batch):
                    for name in part(ours).__dataclass_fields__:
                        left, right = getattr(part(ours), name), getattr(part(theirs), name)
                        assert (left is None) == (right is None), name
                        assert not isinstance(left, Tensor) or torch.equal(left, right), name
                assert ours.corrected.is_deferred == theirs.corrected.is_deferred == (steps == 1)

    play(scenario)



@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 3, 0, 1]])
def test_proximal_logprobs_land_at_their_tokens(order: list[int]) -> None:
    """Two forwards of two groups each, in the order of arrival; the batch is in the order of admission."""

    async def scenario() -> None:
        scene = Scene(correction=CorrectionConfig.model_validate({"preset": "decoupled-ppo", "kl": {"coefficient": 0.1}}))
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


def test_forwards_wait_for_the_learner_to_reach_their_version() -> None:
    async def scenario() -> None:
        scene = Scene()
        tickets = await scene.admit(0, 2 * GROUPS)
        await scene.put(*[answered(ticket) for ticket in tickets])
        first = await scene.next_batch(0)
        assert {version for version, _ in scene.learner.asked} == {0}

        await asyncio.sleep(0.05)
        counts = scene.queue._queue.counts()
        assert counts["drawn"] == 2 * GROUPS, "the next batch is drawn while this one trains"
        assert {version for version, _ in scene.learner.asked} == {0}, "but version 1 isn't there yet"
        await scene.queue.advance(1, [g.group_id for g in first.groups])
        second = await scene.next_batch(1)
        assert {version for version, _ in scene.learner.asked} == {0, 1}
        assert second.version == 1 and [g.group_id for g in second.groups] == [4, 5, 6, 7]
        batch = second.corrected.batch
        assert batch.proximal_logprobs is not None and torch.equal(batch.proximal_logprobs, code(batch.token_ids))
        await scene.service.stop()

    play(scenario)


def test_one_optimizer_step_needs_no_forward() -> None:
    async def scenario() -> None:
        scene = Scene(steps=1)
        tickets = await scene.admit(0, GROUPS)
        await scene.put(*[answered(ticket) for ticket in tickets])
        prepared = await scene.next_batch(0)
        assert scene.learner.asked == [] and prepared.corrected.is_deferred
        await scene.service.stop()

    play(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_which_groups_fill_a_synchronous_batch_does_not_depend_on_arrival(seed: int) -> None:
    """The first ones of the stream that are worth training, in their order, whichever is finished or discarded first."""
    uniform, order = {1, 2, 4, 5, 6, 9, 13}, random.Random(seed)

    async def sample(scene: Scene) -> None:
        under_way: list[Ticket] = []
        while True:
            places = await scene.queue.wait_for_places(0.0)
            admitted = scene.queue._queue.admitted
            under_way += await scene.admit(admitted, admitted + places)
            if under_way:
                ticket = under_way.pop(order.randrange(len(under_way)))
                await scene.queue.put(stored(answered(ticket, rewards=(1.0, 1.0) if ticket.group_id in uniform else (0.0, 1.0))))
            await asyncio.sleep(0.02 * order.random())

    async def scenario() -> None:
        scene = Scene(steps=1, max_staleness=0, dynamic_sampling=True)
        sampling = asyncio.create_task(sample(scene))
        batches = []
        for version in range(3):
            prepared = await scene.next_batch(version)
            batches.append([g.group_id for g in prepared.groups])
            await scene.queue.advance(version + 1, batches[-1])
        sampling.cancel()
        await scene.service.stop()
        assert batches == [[0, 3, 7, 8], [10, 11, 12, 14], [15, 16, 17, 18]]

    play(scenario)


@pytest.mark.parametrize(("rewards", "reason"), [((1.0, None), "fewer than two valid"), ((1.0, 1.0), "alike")])
def test_groups_that_teach_nothing_are_replaced(rewards: tuple[float | None, ...], reason: str) -> None:
    """Their places go to new prompts of the same version, and the batch is as large as ever."""

    async def scenario() -> None:
        scene = Scene(steps=1, max_staleness=0, dynamic_sampling=True)
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        await scene.put(answered(tickets[0], rewards=rewards), *[answered(ticket) for ticket in tickets[1:]])
        assert await scene.queue.wait_for_places(1.0) == 1
        (refill,) = await scene.admit(GROUPS, GROUPS + 1)
        assert not waiting.done()
        await scene.put(answered(refill))
        prepared = await waiting
        assert [g.group_id for g in prepared.groups] == [1, 2, 3, 4]
        ((prompt_id, why),), _, _ = await scene.queue.advance(1, [1, 2, 3, 4])
        assert prompt_id == "train/0/0" and reason in why
        await scene.service.stop()

    play(scenario)


@pytest.mark.parametrize("steps", [1, 2], ids=["without a forward", "with forwards"])
def test_a_batch_of_answers_that_were_all_cut_is_one_without_tokens(steps: int) -> None:
    """Nothing is asked of the learner about it, and its diagnosis says of no token anything."""

    async def scenario() -> None:
        masked = ROLLOUT.model_copy(update={"overlong": MaskOverlong()})
        scene = Scene(steps=steps, rollout=masked)
        whole = [answered(ticket) for ticket in await scene.admit(0, GROUPS)]
        cut = [replace(g, trajectories=tuple(replace(t, finish_reason=FinishReason.LENGTH) for t in g.trajectories)) for g in whole]
        waiting = asyncio.create_task(scene.next_batch(0))
        await scene.put(*cut)
        prepared = await waiting
        assert (prepared.tokens, len(prepared.groups), scene.learner.asked) == (0, GROUPS, [])
        found = await scene.observe(prepared)
        assert found.events == () and not any(name.startswith("rho") for name in found.diagnostics)
        await scene.service.stop()

    play(scenario)


def test_a_batch_that_is_asked_for_twice_is_one_batch() -> None:
    """Its answer was lost on the way, before or after the service had it: the groups are drawn once, and the batch after it begun once."""

    async def scenario() -> None:
        scene = Scene(steps=1)
        tickets = await scene.admit(0, 2 * GROUPS)
        asked = [asyncio.create_task(scene.service.next_batch(0)) for _ in range(2)]
        await scene.put(*map(answered, tickets[:GROUPS]))
        first, second = await asyncio.gather(*asked)
        again = await scene.service.next_batch(0)
        assert first is second is again
        await scene.put(*map(answered, tickets[GROUPS:]))
        await scene.queue.advance(1, [one.group_id for one in first.groups])
        following = await scene.next_batch(1)
        assert {one.group_id for one in following.groups} == {ticket.group_id for ticket in tickets[GROUPS:]}
        await scene.observe(following)
        with pytest.raises(LateError, match="batch of version 0: asked for after that of version 1"):
            await scene.service.next_batch(0)
        await scene.service.stop()

    play(scenario)


def test_a_batch_that_is_not_whole_names_what_is_missing() -> None:
    async def scenario() -> None:
        scene = Scene(deadlines=DeadlinesConfig(batch_s=0.3))
        tickets = await scene.admit(0, GROUPS)
        await scene.put(answered(tickets[1]))
        with pytest.raises(DeadlineExceeded, match=r"batch of version 0 .*1 of 4 groups drawn, 3 being sampled"):
            await scene.next_batch(0)
        await scene.service.stop()

    play(scenario)


def test_a_queue_that_does_not_answer_is_asked_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the draw nor the question what the batch lacks gets an answer: the batch's deadline still comes, and says who is silent. The
    run hears of it with the next heartbeat."""
    asked, told = list[int](), list[str]()

    async def silent(*_: Any, number: int = 0, **__: Any) -> Any:
        asked.append(number)
        await asyncio.sleep(60.0)

    async def scenario() -> None:
        monkeypatch.setattr(drawing, "_POLL_S", 0.1)
        monkeypatch.setattr(drawing, "ANSWER_S", 0.4)
        scene = Scene(deadlines=DeadlinesConfig(batch_s=2.0))
        monkeypatch.setattr(scene.queue, "draw", silent)
        monkeypatch.setattr(scene.queue, "waiting_for", silent)
        with pytest.raises(DeadlineExceeded, match=r"^batch of version 0 <- trajectory queue: not done in 2 s"):
            await scene.next_batch(0)
        told.extend(await scene.service.heartbeat(0))
        await scene.service.stop()

    play(scenario)
    assert len(asked) > 2 and {number for number in asked if number} == {1}, "one call, made again"
    assert all(text.startswith("groups of version 0 <- trajectory queue: late, no answer in") for text in told) and told


@pytest.mark.parametrize("method", ["draw", "discard"])
def test_a_queue_that_is_late_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The answer comes after its caller's patience has ended, once more than that: the call is made again and has run once."""

    async def scenario() -> None:
        monkeypatch.setattr(drawing, "_POLL_S", 0.1)
        monkeypatch.setattr(drawing, "ANSWER_S", 0.1)
        scene = Scene(steps=1, dynamic_sampling=True)
        real, held = getattr(scene.queue, method), list[int]()

        async def late(*arguments: Any, **named: Any) -> Any:
            held.append(named["number"])
            await asyncio.sleep(0.5 if len(held) < 3 else 0.0)
            return await real(*arguments, **named)

        monkeypatch.setattr(scene.queue, method, late)
        tickets = await scene.admit(0, GROUPS + 1)
        waiting = asyncio.create_task(scene.next_batch(0))
        await scene.put(answered(tickets[0], rewards=(1.0, 1.0)), *[answered(ticket) for ticket in tickets[1:]])
        prepared = await waiting
        assert [g.group_id for g in prepared.groups] == [1, 2, 3, 4] and held[0] == held[1]
        discarded, counts, _ = await scene.queue.advance(1, [1, 2, 3, 4])
        assert len(discarded) == 1 and (counts["admitted"], counts["trained"], counts["discarded"]) == (GROUPS + 1, GROUPS, 1)
        assert counts["in_flight"] + counts["finished"] + counts["drawn"] == 0
        await scene.service.stop()

    play(scenario)


def test_a_learner_that_comes_too_late_is_named() -> None:
    async def scenario() -> None:
        scene = Scene(deadlines=DeadlinesConfig(batch_s=30.0, step_s=0.25, checkpoint_s=1.0))
        tickets = await scene.admit(0, 2 * GROUPS)
        await scene.put(*[answered(ticket) for ticket in tickets])
        await scene.next_batch(0)
        await asyncio.sleep(3.0)  # 4 steps and a checkpoint may pass until its forward is there
        with pytest.raises(ActorLost, match=r"^forward at version 1 <- learner: not done in 2 s"):  # who is asked again has no other answer
            await scene.next_batch(1)

    play(scenario)


def test_diagnostics_are_of_the_batch_that_was_trained_last() -> None:
    """Proximal equals behaviour plus 0.1 on every token: k1 = -0.1 and k3 = exp(0.1) - 1 - 0.1 by their definitions."""

    async def scenario() -> None:
        scene = Scene(steps=1)
        prepared = await scene.batch(0)
        nothing = FinalDecision(torch.zeros(1).bool(), torch.ones(1), no_counts(prepared.correction))
        values = StepValues(torch.zeros(1), nothing, torch.zeros(1))
        assert await scene.service.observe(8, 7, (values,), {}) is None, "version 7 is none that was trained"
        prepared = await scene.batch(1)
        numbers = (await scene.observe(prepared, gap=0.1)).diagnostics
        assert numbers["mismatch_k1_kl"] == pytest.approx(-0.1, rel=1e-5)
        assert numbers["mismatch_k3_kl"] == pytest.approx(0.005170918, rel=1e-4)
        await scene.service.stop()

    play(scenario)


@pytest.mark.parametrize("criterion", [{"statistic": "topk_tv", "ratio": "q", "upper": 0.1}, {"upper": 9.0}])
def test_what_was_dropped_and_why_is_what_the_learner_says(criterion: dict[str, Any]) -> None:
    """The learner kept every fourth token: nothing is decided again here, where some of it could not be."""

    async def scenario() -> None:
        settings = {"preset": "bypass", "topk": 4, "rejection": [criterion]}
        scene = Scene(steps=1, correction=CorrectionConfig.model_validate(settings))
        prepared = await scene.batch(0)
        keep = torch.arange(prepared.corrected.batch.num_tokens) % 4 == 0
        keep &= prepared.corrected.batch.loss_mask
        tokens, kept = int(prepared.corrected.batch.loss_mask.sum()), int(keep.sum())
        counts = no_counts(prepared.correction)
        counts.values[:2] = torch.tensor([tokens, tokens - kept])
        decided = FinalDecision(keep, prepared.corrected.importance_weights, counts)
        numbers = (await scene.observe(prepared, decided=decided)).diagnostics
        assert 0 < kept < tokens and numbers["kept_share"] == kept / tokens
        label = prepared.correction.rejection[0].label
        assert numbers["rejected_share"] == numbers[f"rejected_by_{label}"] == pytest.approx(1 - kept / tokens)
        await scene.service.stop()

    play(scenario)


@pytest.mark.parametrize("settings", [{"preset": "bypass"}, {"proximal": "recompute", "objective": {"kind": "score", "ratio": "q"}}])
def test_without_a_proximal_policy_there_may_be_several_optimizer_steps(settings: dict[str, Any]) -> None:
    """No forward, and nothing left to the first of the steps: the learner refuses a deferred batch that has more than one."""

    async def scenario() -> None:
        scene = Scene(steps=2, correction=CorrectionConfig.model_validate(settings))
        prepared = await scene.batch(0)
        assert scene.learner.asked == [] and not prepared.corrected.is_deferred
        await scene.service.stop()

    play(scenario)


def test_diagnostics_do_not_hold_up_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagnostics that last until the next batch is there: on the event loop, or in the way of the batch, they would wait for ever."""

    async def scenario() -> None:
        scene = Scene(steps=1)
        first = await scene.batch(0)
        next_is_there = threading.Event()

        def slow(*arguments: Any, **named: Any) -> dict[str, float]:
            assert next_is_there.wait(10.0), "the next batch had to wait for these diagnostics"
            return {}

        monkeypatch.setattr(correction_service, "diagnose", slow)
        observing = asyncio.create_task(scene.observe(first))
        await scene.batch(1)
        next_is_there.set()
        await observing
        await scene.service.stop()

    play(scenario)


def test_a_batch_is_let_go_once_it_is_diagnosed() -> None:
    """Not when the next one is there: that may be a while, and a batch can be large."""

    async def scenario() -> None:
        scene = Scene(steps=1)
        prepared = await scene.batch(0)
        tensor = weakref.ref(prepared.corrected.batch.behavior_logprobs)
        await scene.observe(prepared)
        del prepared
        for _ in range(100):  # the thread lets go of its work a moment after the answer
            gc.collect()
            if tensor() is None:
                break
            await asyncio.sleep(0.01)
        assert tensor() is None
        await scene.service.stop()

    play(scenario)


def test_the_monitor_follows_steps_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """k3 = exp(g) - 1 - g of a gap g: from 5e-5 at 0.01 to 5.2e-3 at 0.1, 103 times as much, after a start of eight steps."""
    thresholds = MonitorConfig(skip_steps=0, baseline_steps=8, level_steps=3, jump_steps=3, trend_steps=8, patience=1)

    async def scenario() -> None:
        scene = Scene(steps=1, monitor=EarlyWarningConfig(thresholds=thresholds))
        events = []
        for version in range(13):
            observation = await scene.observe(await scene.batch(version), gap=0.1 if version >= 10 else 0.01, entropy=1.0)
            assert observation.diagnostics["log_ratio_quantile_50"] == pytest.approx(0.1 if version >= 10 else 0.01, rel=1e-4)
            events += observation.events
            assert observation.state is (State.ALARM if version >= 11 else State.OK)
        # Three values make the level, whose median follows the second new one: of version 11, in step 12.
        assert [(event.step, event.name, event.state) for event in events] == [(12, "mismatch_k3_kl", State.ALARM)]
        assert events[0].growth == pytest.approx(5.170918e-3 / 5.0167e-5, rel=1e-2)
        await scene.service.stop()

    play(scenario)


def test_a_resumed_service_warns_where_the_first_would_have() -> None:
    """Step 12 needs the nine steps before the checkpoint: a monitor that began anew would still be learning what is usual."""
    thresholds = MonitorConfig(skip_steps=0, baseline_steps=8, level_steps=3, jump_steps=3, trend_steps=8, patience=1)
    warning = EarlyWarningConfig(thresholds=thresholds, detailed=False)

    async def scenario() -> None:
        first = Scene(steps=1, monitor=warning)
        for version in range(9):
            await first.observe(await first.batch(version), gap=0.01)
        second = Scene(steps=1, monitor=warning, monitor_state=await first.service.monitor_state())
        await first.service.stop()
        steps = []
        for version in range(4):
            prepared = await second.batch(version)
            observation = await second.observe(prepared, gap=0.1 if version >= 1 else 0.01, step=10 + version)
            steps += [event.step for event in observation.events if event.state is State.ALARM]
        assert steps == [12]
        await second.service.stop()

    play(scenario)


def test_a_switch_takes_the_next_batch_that_is_begun() -> None:
    """The batch under way keeps its correction, and every batch says which one it has; the forward comes and goes with the need for it."""

    async def scenario() -> None:
        scene = Scene(steps=2, preset="bypass")
        await scene.batch(0)    # and 1 is being prepared
        replacement = CorrectionConfig.model_validate({"preset": "mis-token"})
        await scene.service.switch(replacement)
        second = await scene.batch(1)
        assert second.correction.preset == "bypass" and scene.learner.asked == []
        third = await scene.batch(2)
        assert third.correction == replacement and third.corrected.batch.proximal_logprobs is not None
        # The learner's logprobs lie at most 0.5 from -1: within mis-token's band, no token is rejected, and weights are their ratio.
        expected = (code(third.corrected.batch.token_ids) + 1).exp()
        mask = third.corrected.batch.loss_mask
        torch.testing.assert_close(third.corrected.importance_weights[mask], expected[mask], rtol=1e-5, atol=0)
        await scene.service.stop()

    play(scenario)


def test_a_switch_begins_what_it_changes_anew() -> None:
    """Rejection's usual level is that of the bounds; the gap from behaviour to proximal has the same under any bounds."""
    thresholds = MonitorConfig(skip_steps=0, baseline_steps=8, level_steps=3, jump_steps=3, trend_steps=8, patience=1)
    warning = EarlyWarningConfig(thresholds=thresholds, detailed=False)

    async def scenario() -> None:
        scene = Scene(steps=1, preset="mis-token", monitor=warning)
        for version in range(3):
            await scene.observe(await scene.batch(version), gap=0.01)
        await scene.service.switch(CorrectionConfig.model_validate({"preset": "mis-geometric"}))
        assert {"k3_kl", "ess_token"} <= (await scene.service.monitor_state())["series"].keys()
        assert "rejected_share" not in (await scene.service.monitor_state())["series"]
        await scene.service.switch(CorrectionConfig.model_validate({"preset": "bypass"}))
        assert (await scene.service.monitor_state())["series"] == {}
        await scene.service.stop()

    play(scenario)


def test_what_the_step_clipped_and_how_sure_it_was_of_it_is_told() -> None:
    """Entropies come from the learner with the logprobs: those of rejected and of clipped tokens, and the clipped tokens' ids."""

    async def scenario() -> None:
        scene = Scene()
        prepared = await scene.batch(0)
        batch, corrected = prepared.corrected.batch, prepared.corrected
        clipped = torch.zeros_like(batch.loss_mask)
        first = int(((batch.advantages > 0) & batch.loss_mask).nonzero()[0])
        clipped[first] = True
        keep = corrected.keep_mask.clone()
        last = int(batch.loss_mask.nonzero()[-1])
        keep[last] = False
        entropies = torch.arange(batch.num_tokens) / 10
        ones = torch.ones(batch.num_tokens)
        decided = FinalDecision(keep, ones, no_counts(prepared.correction), ones, clipped)
        observation = await scene.observe(prepared, gap=0.0, decided=decided, entropies=entropies)
        assert observation.clipped == {"positive": [(int(batch.token_ids[first]), 1)], "negative": []}
        assert observation.diagnostics["clipped_positive_entropy_mean"] == pytest.approx(first / 10)
        assert observation.diagnostics["clipped_positive_probability_mean"] == pytest.approx(math.exp(-1))
        assert observation.diagnostics["rejected_entropy_mean"] == pytest.approx(last / 10)
        await scene.service.stop()

    play(scenario)


def test_the_gap_of_stale_tokens_is_split_at_their_own_weights() -> None:
    """Every third batch: versions 1 and 2 are kept before batch 3, no others; its tokens of version 2 are scored there and now."""

    async def scenario() -> None:
        scene = Scene(max_staleness=2, monitor=EarlyWarningConfig(detailed=False, split_every=3))
        kept = []
        tickets = {version: await scene.admit(version * GROUPS, (version + 1) * GROUPS) for version in range(3)}
        for version in range(4):
            if version == 3:
                tickets[3] = [replace(ticket, admitted_version=2) for ticket in await scene.admit(3 * GROUPS, 4 * GROUPS)]
            waiting = asyncio.create_task(scene.next_batch(version))
            await scene.put(*[answered(replace(ticket, admitted_version=2 if version == 3 else version)) for ticket in tickets[version]])
            prepared = await waiting
            kept.append(set(getattr(scene.learner, "kept", set())))
            assert bool(prepared.split) == (version == 3)
            await scene.queue.advance(version + 1, [g.group_id for g in prepared.groups])
        assert kept == [set(), {1}, {1, 2}, set()]
        observation = await scene.observe(prepared)
        numbers = observation.diagnostics
        tokens = sum(t.response_tokens for g in prepared.groups for t in g.trajectories)
        assert numbers["split_tokens"] == tokens
        assert numbers["split_mismatch_k3_kl"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-5)
        assert numbers["split_staleness_k3_kl"] == pytest.approx(math.expm1(0.4) - 0.4, rel=1e-5)
        await scene.service.stop()

    play(scenario)


def test_without_the_setting_or_without_staleness_nothing_is_kept() -> None:
    for max_staleness, every in ((2, 0), (0, 3)):
        split = GapSplit(None, every=every, max_staleness=max_staleness, deadline_s=1.0, fetch_s=lambda _: 0.0)  # type: ignore[arg-type]
        assert not any(split.keeps(version) or split.splits(version) for version in range(12))
    often = GapSplit(None, every=2, max_staleness=3, deadline_s=1.0, fetch_s=lambda _: 0.0)  # type: ignore[arg-type]
    assert all(often.keeps(version) for version in range(12))  # every version may be in a later batch that is split


def test_groups_whose_tokens_are_lost_are_sampled_again() -> None:
    """The batch waits for them: it has the same groups as without the loss, and the queue's counts balance all along."""

    async def scenario() -> None:
        scene = Scene(steps=1, max_staleness=0)
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        finished = [answered(ticket) for ticket in tickets]
        await scene.queue.put(stored(*finished, lost=(1, 3)))
        again = await scene.queue.take_lost(1, 5.0)
        assert [ticket.group_id for ticket in again] == [1, 3] and not waiting.done()
        counts = scene.queue._queue.counts()
        assert (counts["admitted"], counts["in_flight"], counts["drawn"], counts["discarded"]) == (GROUPS, 2, 2, 0)
        await scene.put(*[answered(ticket) for ticket in again])
        prepared = await waiting
        assert [g.group_id for g in prepared.groups] == [0, 1, 2, 3]
        trained = prepared.corrected.batch.token_ids[prepared.corrected.batch.loss_mask].tolist()
        assert trained == [token for one in finished for t in one.trajectories for token in t.response_ids]
        await scene.service.stop()

    play(scenario)


def test_one_batch_waits_for_its_diagnostics_and_the_next_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps while the first is diagnosed: of the second the numbers come later, of the third none, and its batch is let go."""

    async def scenario() -> None:
        scene = Scene(steps=1)
        go_on = threading.Event()
        diagnosed: list[int] = []

        def slow(batch: PackedBatch, *_: Any, **__: Any) -> dict[str, float]:
            assert go_on.wait(10.0)
            diagnosed.append(batch.learner_version)
            return {}

        monkeypatch.setattr(correction_service, "diagnose", slow)
        observing = []
        for version in range(3):
            prepared = await scene.batch(version)
            values = StepValues(prepared.corrected.batch.behavior_logprobs, no_decision(prepared), prepared.corrected.batch.advantages)
            observing.append(asyncio.create_task(scene.service.observe(version + 1, version, (values,), {})))
            await asyncio.sleep(0.05)
        assert [task.done() for task in observing] == [False, False, True] and observing[2].result() is None
        assert scene.service._undiagnosed.keys() <= {3}, "nothing holds the batches of steps past but the two that are at it"
        go_on.set()
        assert None not in await asyncio.gather(*observing[:2]) and diagnosed == [0, 1]
        await scene.service.stop()

    play(scenario)


def no_decision(prepared: PreparedBatch) -> FinalDecision:
    return FinalDecision(prepared.corrected.keep_mask, prepared.corrected.importance_weights, no_counts(prepared.correction))


def test_packing_and_correcting_leave_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose packing and correction wait for the event loop to do something else."""
    loop_thread = threading.get_ident()
    threads: dict[str, int] = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            threads[name] = threading.get_ident()
            return function(*arguments, **named)

        return noted

    async def scenario() -> None:
        for name in ("pack_groups", "correct", "defer"):
            monkeypatch.setattr(correction_service, name, noting(name, getattr(correction_service, name)))
        for steps in (1, 2):
            scene = Scene(steps=steps)
            await scene.batch(0)
            await scene.service.stop()
        assert threads.keys() == {"pack_groups", "correct", "defer"} and loop_thread not in threads.values()

    play(scenario)


def test_what_the_driver_gets_does_not_grow_with_the_answers() -> None:
    """Ids, rewards, lengths and spans: a batch of answers a hundred times as long is as large, but for the digits of its numbers."""

    async def size(length: int) -> int:
        scene = Scene(steps=1, metrics=MetricsConfig(trajectories_per_step=0))
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        answers = {r: [trajectory(prompt(i), range(length), reward=float(r)) for i in range(GROUPS)] for r in range(2)}
        await scene.put(*[replace(group(ticket), trajectories=(answers[0][i], answers[1][i])) for i, ticket in enumerate(tickets)])
        prepared = await waiting
        await scene.service.stop()
        assert prepared.tokens == 2 * GROUPS * (3 + length)
        return len(pickle.dumps(replace(prepared, corrected=None)))

    async def scenario() -> None:
        assert abs(await size(1000) - await size(10)) < 100

    play(scenario)
