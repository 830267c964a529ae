"""What the service says of a batch after its step: diagnostics, the early warning, the split of the gap; and that they hold up nobody."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import urllib.request
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from evenkeel.actors.carriers import PreparedBatch, Ticket
from evenkeel.actors.config import DeadlinesConfig, EarlyWarningConfig, MetricsConfig, RunConfig
from evenkeel.actors.driver.batches import keeps_weights, splits_gap
from evenkeel.actors.groups import tokens as payloads
from evenkeel.actors.service import correction_service
from evenkeel.correction.batch import FinalDecision, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.decision import no_counts
from evenkeel.correction.diagnostics.quantities import DIAGNOSTIC_FAMILIES, DIAGNOSTICS
from evenkeel.correction.early_warning.monitor import MonitorConfig, State
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.results import StepValues
from evenkeel.rollout.trajectory import Group, KeptTokens, TopLogprobs
from tests.actors.service.service_scene import GROUPS, ROLLOUT, ServiceScene, answered, no_decision, play, result_of


def test_the_kl_to_the_start_model_is_told_now_and_then_and_is_no_part_of_the_batch() -> None:
    """Every second version. The learner gets what it gets without a report, tensor by tensor; the KL is the mean of k3 over the trained
    tokens, by hand: the target's logprob is -0.9, the reference's 2 (-1 - id / 10,000)."""

    async def prepared(every: int, preset: str, steps: int) -> tuple[list[PreparedBatch], list[dict[str, float]]]:
        scene = ServiceScene(preset=preset, learner=LearnerConfig(report_kl_every=every, optimizer_steps_per_batch=steps))
        batches = [await scene.batch(version) for version in range(3)]
        told = [(await scene.observe(batch)).diagnostics for batch in batches[1:]]  # the service keeps those of two versions
        scene.stop()
        return batches, told

    async def scenario() -> None:
        for preset, steps in (("tis-token", 1), ("decoupled-ppo", 2), ("prime-tv", 2)):  # the last has a KL penalty on another policy
            with_report, told = await prepared(2, preset, steps)
            without, told_without = await prepared(0, preset, steps)
            assert [("reference_kl" in numbers) for numbers in told] == [False, True]
            assert not any("reference_kl" in numbers for numbers in told_without)
            listed = [name in DIAGNOSTICS or name.startswith(tuple(DIAGNOSTIC_FAMILIES)) for numbers in told for name in numbers]
            assert listed and all(listed)
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
                assert theirs.corrected.batch.reference_logprobs is None

    play(scenario)


def test_diagnostics_are_of_the_batch_that_was_trained_last() -> None:
    """Proximal equals behaviour plus 0.1 on every token: k1 = -0.1 and k3 = exp(0.1) - 1 - 0.1 by their definitions."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1)
        prepared = await scene.batch(0)
        nothing = FinalDecision(torch.zeros(1).bool(), torch.ones(1), no_counts(prepared.correction))
        values = StepValues(torch.zeros(1), nothing, torch.zeros(1))
        assert await scene.service.observe(8, 7, result_of(values)) is None, "version 7 is none that was trained"
        prepared = await scene.batch(1)
        numbers = (await scene.observe(prepared, gap=0.1, step=5)).diagnostics
        assert numbers["mismatch_k1_kl"] == pytest.approx(-0.1, rel=1e-5)
        assert numbers["mismatch_k3_kl"] == pytest.approx(0.005170918, rel=1e-4)
        scatter = await scene.service.scatter()
        assert scatter is not None and set(scatter.step.tolist()) == {5}, "the step of the batch, not its version, which is 1"
        scene.stop()

    play(scenario)


@pytest.mark.parametrize("criterion", [{"statistic": "topk_tv", "ratio": "q", "upper": 0.1}, {"upper": 9.0}])
def test_what_was_dropped_and_why_is_what_the_learner_says(criterion: dict[str, Any]) -> None:
    """The learner kept every fourth token: nothing is decided again here, where some of it could not be."""

    async def scenario() -> None:
        settings = {"preset": "bypass", "topk": 4, "rejection": [criterion]}
        scene = ServiceScene(steps=1, correction=CorrectionConfig.model_validate(settings))
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
        scene.stop()

    play(scenario)


def test_diagnostics_do_not_hold_up_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagnostics that last until the next batch is there: on the event loop, or in the way of the batch, they would wait for ever."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1)
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
        scene.stop()

    play(scenario)


def test_a_batch_is_let_go_once_it_is_diagnosed() -> None:
    """Not when the next one is there: that may be a while, and a batch can be large."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1)
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
        scene.stop()

    play(scenario)


def test_the_monitor_follows_steps_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """k3 = exp(g) - 1 - g of a gap g: from 5e-5 at 0.01 to 5.2e-3 at 0.1, 103 times as much, after a start of eight steps."""
    thresholds = MonitorConfig(skip_steps=0, baseline_steps=8, level_steps=3, jump_steps=3, trend_steps=8, patience=1)

    async def scenario() -> None:
        scene = ServiceScene(steps=1, monitor=EarlyWarningConfig(thresholds=thresholds))
        events = []
        for version in range(13):
            observation = await scene.observe(await scene.batch(version), gap=0.1 if version >= 10 else 0.01)
            assert observation.diagnostics["log_ratio_quantile_50"] == pytest.approx(0.1 if version >= 10 else 0.01, rel=1e-4)
            events += observation.events
            assert observation.state is (State.ALARM if version >= 11 else State.OK)
        # Three values make the level, whose median follows the second new one: of version 11, in step 12.
        assert [(event.step, event.name, event.state) for event in events] == [(12, "mismatch_k3_kl", State.ALARM)]
        assert events[0].growth == pytest.approx(5.170918e-3 / 5.0167e-5, rel=1e-2)
        scene.stop()

    play(scenario)


def test_the_service_has_an_endpoint_of_its_own_and_says_where_with_its_first_numbers() -> None:
    """Its memory grows with the batch; nobody else could say how far."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1)
        first, second = [await scene.observe(await scene.batch(version)) for version in (0, 1)]
        assert first.info is not None and first.info == second.info and first.info.key == "correction-0"
        with urllib.request.urlopen(f"http://{first.info.target}/metrics") as answer:
            families = {one.name: one.samples for one in text_string_to_metric_families(answer.read().decode())}
        assert families["evenkeel_time_diagnose_seconds"][0].value == second.seconds
        assert families["process_resident_memory_bytes"][0].value > 1e8, "torch alone takes more"
        scene.stop()

    play(scenario)


def test_an_endpoint_that_cannot_open_costs_no_step_its_diagnostics(caplog: pytest.LogCaptureFixture) -> None:
    """The monitor has taken the step by then: its events would be said to nobody, at every step."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1, metrics=MetricsConfig(bind="192.0.2.1"))  # an address for examples: no node has it
        observation = await scene.observe(await scene.batch(0), gap=0.1)
        assert observation.info is None and observation.diagnostics["k3_kl"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-4)
        scene.stop()

    play(scenario)
    assert "metrics endpoint of correction 0: can't listen on 192.0.2.1" in caplog.text


def test_kept_sets_that_are_late_hold_up_no_diagnostics(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for people alone. Where they never come, each step would wait for batch_s, and the early warning with it."""

    async def never(batch: PackedBatch, *, deadline_s: float, has_topk: bool) -> PackedBatch:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    monkeypatch.setattr(payloads, "with_wide_fields", never)

    async def scenario() -> None:
        rollout = ROLLOUT.model_copy(update={"sampling": ROLLOUT.sampling.model_copy(update={"top_p": 0.9})})
        scene = ServiceScene(steps=1, rollout=rollout, deadlines=DeadlinesConfig(batch_s=1e4))
        tickets = await scene.admit(0, GROUPS)
        waiting = asyncio.create_task(scene.next_batch(0))
        for ticket in tickets:
            answers = answered(ticket).trajectories
            sets = [replace(t, kept_tokens=KeptTokens.of([[one, 200] for one in t.response_ids])) for t in answers]
            await scene.put(replace(answered(ticket), trajectories=tuple(sets)))
        observation = await scene.observe(await waiting, gap=0.1)
        assert observation.diagnostics["k3_kl"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-4)
        assert observation.tokens is not None and observation.tokens.columns["token_ids"].size
        scene.stop()

    play(scenario)


def test_a_resumed_service_warns_where_the_first_would_have() -> None:
    """Step 12 needs the nine steps before the checkpoint: a monitor that began anew would still be learning what is usual."""
    thresholds = MonitorConfig(skip_steps=0, baseline_steps=8, level_steps=3, jump_steps=3, trend_steps=8, patience=1)
    warning = EarlyWarningConfig(thresholds=thresholds, detailed=False)

    async def scenario() -> None:
        first = ServiceScene(steps=1, monitor=warning)
        for version in range(9):
            observation = await first.observe(await first.batch(version), gap=0.01)
        second = ServiceScene(steps=1, monitor=warning, monitor_state=observation.monitor)
        first.stop()
        steps = []
        for version in range(4):
            prepared = await second.batch(version)
            observation = await second.observe(prepared, gap=0.1 if version >= 1 else 0.01, step=10 + version)
            steps += [event.step for event in observation.events if event.state is State.ALARM]
        assert steps == [12]
        second.stop()

    play(scenario)


def test_a_switch_begins_what_it_changes_anew() -> None:
    """Rejection's usual level is that of the bounds; the gap from behaviour to proximal has the same under any bounds."""
    thresholds = MonitorConfig(skip_steps=0, baseline_steps=8, level_steps=3, jump_steps=3, trend_steps=8, patience=1)
    warning = EarlyWarningConfig(thresholds=thresholds, detailed=False)

    async def scenario() -> None:
        scene = ServiceScene(steps=1, preset="mis-token", monitor=warning)
        for version in range(3):
            await scene.observe(await scene.batch(version), gap=0.01)
        await scene.source.switch(CorrectionConfig.model_validate({"preset": "mis-geometric"}))
        assert scene.source.monitor is not None and {"k3_kl", "ess_token"} <= scene.source.monitor["series"].keys()
        assert "rejected_share" not in scene.source.monitor["series"]
        await scene.source.switch(CorrectionConfig.model_validate({"preset": "bypass"}))
        assert scene.source.monitor["series"] == {}
        scene.stop()

    play(scenario)


def test_what_the_step_clipped_and_how_sure_it_was_of_it_is_told() -> None:
    """Entropies come from the learner with the logprobs: those of rejected and of clipped tokens, and the clipped tokens' ids."""

    async def scenario() -> None:
        scene = ServiceScene()
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
        scene.stop()

    play(scenario)


def test_the_gap_of_stale_tokens_is_split_at_their_own_weights() -> None:
    """Every third batch: versions 1 and 2 are kept before batch 3, no others; its tokens of version 2 are scored there and now. Top-K
    logprobs, which training reads, are not fetched for that: no such forward looks at them, and a lost one would cost the groups."""

    def listed(ticket: Ticket) -> Group:
        rows = [TopLogprobs.of(1, [[(-1.0, token)] for token in one.response_ids]) for one in answered(ticket).trajectories]
        answers = zip(answered(ticket).trajectories, rows, strict=True)
        return replace(answered(ticket), trajectories=tuple(replace(one, top_logprobs=row) for one, row in answers))

    async def scenario() -> None:
        scene = ServiceScene(max_staleness=2, monitor=EarlyWarningConfig(detailed=False, split_every=3))
        kept = []
        tickets = {version: await scene.admit(version * GROUPS, (version + 1) * GROUPS) for version in range(3)}
        for version in range(4):
            if version == 3:
                tickets[3] = [replace(ticket, admitted_version=2) for ticket in await scene.admit(3 * GROUPS, 4 * GROUPS)]
            waiting = asyncio.create_task(scene.next_batch(version))
            await scene.put(*[listed(replace(ticket, admitted_version=2 if version == 3 else version)) for ticket in tickets[version]])
            prepared = await waiting
            kept.append(set(getattr(scene.learner, "kept", set())))
            assert bool(scene.service._undiagnosed[version].split) == (version == 3)
            scene.books.advance(version + 1, [g.group_id for g in prepared.groups])
        assert kept == [set(), {1}, {1, 2}, set()]
        assert scene.learner.fetched == [2 * GROUPS] * 4, "whole batches, for their steps alone"
        observation = await scene.observe(prepared)
        numbers = observation.diagnostics
        tokens = sum(t.response_tokens for g in prepared.groups for t in g.trajectories)
        assert numbers["split_tokens"] == tokens
        assert numbers["split_mismatch_k3_kl"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-5)
        assert numbers["split_staleness_k3_kl"] == pytest.approx(math.expm1(0.4) - 0.4, rel=1e-5)
        scene.stop()

    play(scenario)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_correction_by_mismatch_has_every_stale_token_scored_at_its_own_weights(steps: int) -> None:
    """Of each version a copy is kept until no batch can have tokens of it, and never more than max_staleness. Batch 2 has groups of
    versions 0, 1 and 2: of the last pi_prox stands for pi_v, and of all others the parts of the gap are told. No sample is asked for."""

    async def scenario() -> None:
        monitor = EarlyWarningConfig(detailed=False, split_every=1)
        scene = ServiceScene(steps=steps, preset="split-tis", max_staleness=2, monitor=monitor)
        kept = []
        for version in range(4):
            tickets = await scene.admit(version * GROUPS, (version + 1) * GROUPS)
            ages = [i % 3 if version == 2 else 0 for i in range(GROUPS)]
            waiting = asyncio.create_task(scene.next_batch(version))
            await scene.put(*[answered(replace(one, admitted_version=version - age)) for one, age in zip(tickets, ages, strict=True)])
            prepared = await waiting
            kept.append(set(scene.learner.kept))
            if version == 2:
                mixed, observation = prepared, await scene.observe(prepared, gap=0.5)
            scene.books.advance(version + 1, [g.group_id for g in prepared.groups])
        assert kept == [{0}, {0, 1}, {1, 2}, {2, 3}]
        batch = mixed.corrected.batch
        expected = torch.tensor([-0.9, -0.8, torch.nan])[batch.weight_versions.clamp(min=0)]
        trained = batch.loss_mask
        assert set(batch.weight_versions[trained].tolist()) == {0, 1, 2}
        torch.testing.assert_close(batch.at_sampling_logprobs[trained], expected[trained], equal_nan=True)
        if steps == 2:
            stale = trained & (batch.weight_versions < 2)
            torch.testing.assert_close(mixed.corrected.importance_weights[stale], (expected + 1).exp()[stale])
            fresh = (batch.proximal_logprobs + 1).exp().clamp(max=2)[trained & ~stale]
            torch.testing.assert_close(mixed.corrected.importance_weights[trained & ~stale], fresh)
        numbers, stale = observation.diagnostics, trained & (batch.weight_versions < 2)
        assert numbers["split_tokens"] == int(stale.sum()) > 0
        gaps = (expected + 1)[stale].double()
        assert numbers["split_mismatch_k3_kl"] == pytest.approx(float((gaps.expm1() - gaps).mean()), rel=1e-5)
        assert observation.tokens is not None
        of, own = observation.tokens.columns, observation.tokens.columns["sampled"]
        then = np.array([-0.9, -0.8, np.nan])[of["versions"][own]]
        then = np.where(np.isnan(then), of["proximal"][own], then)
        assert of["at_sampling"][own] == pytest.approx(then) and np.isnan(of["at_sampling"][~own]).all(), "what is kept for people says so"
        scene.stop()

    play(scenario)


@pytest.mark.parametrize("split_every", [0, 5])
def test_copies_of_weights_are_freed_when_an_alarm_puts_another_correction_in_place(split_every: int) -> None:
    """Each is a whole model in every rank's memory. The batch that is begun keeps its correction; of the next one on none is needed, but
    for a later batch whose gap is split: that of version 5 may have tokens of 3 and 4."""

    async def scenario() -> None:
        monitor = EarlyWarningConfig(detailed=False, split_every=split_every)
        scene = ServiceScene(steps=2, preset="split-tis", max_staleness=2, monitor=monitor)
        kept = []
        for version in range(5):
            await scene.batch(version)
            kept.append(set(scene.learner.kept))
            if version == 2:
                await scene.source.switch(CorrectionConfig(preset="mis-token"))
        assert kept[:4] == [{0}, {0, 1}, {1, 2}, {2, 3}]
        assert kept[4] == (set() if split_every == 0 else {3, 4})
        scene.stop()

    play(scenario)


def test_without_stale_tokens_a_correction_by_mismatch_asks_no_forward() -> None:
    """One optimizer step, synchronous: the batch is ready before the learner comes for it, and nothing is kept."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1, preset="split-mis", max_staleness=0)
        batch = (await scene.batch(0)).corrected.batch
        assert bool(batch.at_sampling_logprobs.isnan().all()) and not scene.learner.asked and not hasattr(scene.learner, "kept")
        scene.stop()

    play(scenario)


def test_without_the_setting_or_without_staleness_nothing_is_kept() -> None:
    def splitting(every: int, max_staleness: int) -> RunConfig:
        monitor = EarlyWarningConfig(split_every=every)
        own = {"steps": 100, "groups_per_step": GROUPS, "max_staleness": max_staleness, "rollout": ROLLOUT, "monitor": monitor}
        return RunConfig.model_validate({"model": "none", **own})

    for config in (splitting(0, 2), splitting(3, 0)):
        assert not any(keeps_weights(config, version) or splits_gap(config, version) for version in range(12))
    often = splitting(2, 3)
    assert all(keeps_weights(often, version) for version in range(12))  # every version may be in a later batch that is split


def test_one_batch_waits_for_its_diagnostics_and_the_next_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps while the first is diagnosed: of the second the numbers come later, of the third none, and its batch is let go."""

    async def scenario() -> None:
        scene = ServiceScene(steps=1)
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
            observing.append(asyncio.create_task(scene.service.observe(version + 1, version, result_of(values))))
            await asyncio.sleep(0.05)
        assert [task.done() for task in observing] == [False, False, True] and observing[2].result() is None
        assert scene.service._undiagnosed.keys() <= {3}, "nothing holds the batches of steps past but the two that are at it"
        go_on.set()
        assert None not in await asyncio.gather(*observing[:2]) and diagnosed == [0, 1]
        scene.stop()

    play(scenario)
