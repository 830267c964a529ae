"""Simulated runs against closed forms, and the promises of the queue in runs of any shape."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.carriers import Ticket
from actors.simulation.clock import SimulatedClock
from actors.simulation.costs import AnswerLengths, DecodeSpeed, RunCosts, RunShape
from actors.simulation.engine import SampledGroup, SimulatedEngine
from actors.simulation.outcome import ADMISSION, FULL_ENGINES, PUBLISH, UNDER_WAY, WEIGHTS, Outcome, SimulatedStep
from actors.simulation.run import simulate
from correction.errors import ConfigError
from rollout.trajectory import Prompt
from tests.actors.pool.test_dispatch import RECEIPTS_APART_S, Run
from tests.actors.simulated_time import simulate as in_asyncio

LENGTH, PROMPT = 100, 20


def shape(**changes: int) -> RunShape:
    """Four workers with room for half a batch each: 32 groups of 8."""
    settings = {"workers": 4, "groups_per_step": 32, "max_staleness": 2, "samples_per_group": 8, "slots": 16, "max_running_requests": 64}
    return RunShape(**(settings | changes))


def constant(length: int = LENGTH) -> AnswerLengths:
    return AnswerLengths.like([length], "one length")


def run(costs: RunCosts, *, lengths: AnswerLengths | None = None, steps: int = 20, **changes: int) -> Outcome:
    return simulate(shape(**changes), costs, lengths or constant(), prompt_tokens=PROMPT, steps=steps)


SPEED = DecodeSpeed(((64, 3200.0), (128, 6400.0)))
"""0.02 s a decoding step for up to 64 requests and beyond: an answer of 100 tokens takes 2 s, alone or with others."""
BATCH_TOKENS = 32 * 8 * (LENGTH + PROMPT)
ROLLOUT_S = 32 * 8 * LENGTH / (4 * 3200.0)
"""A batch's share of four full engines: 2 s."""


@pytest.mark.parametrize("train_s", [0.5, 1.0, 1.9, 2.1, 4.0, 10.0])
def test_a_step_takes_as_long_as_the_slower_side(train_s: float) -> None:
    """Equal lengths, no other costs, enough staleness to keep every engine full: throughput is that of the slower side, within 3 %."""
    found = run(RunCosts(SPEED, learner_token_s=train_s / BATCH_TOKENS))
    assert found.step_s == pytest.approx(max(train_s, ROLLOUT_S), rel=0.03)
    assert found.learner_share == pytest.approx(train_s / max(train_s, ROLLOUT_S), rel=0.03)
    assert found.tokens_per_s == pytest.approx(32 * 8 * LENGTH / max(train_s, ROLLOUT_S), rel=0.03)


@pytest.mark.parametrize("train_s", [0.5, 4.0])
def test_a_synchronous_step_takes_as_long_as_both_sides_and_all_that_is_between(train_s: float) -> None:
    """64 requests an engine; every cost has its place in the step: reading the prompts, sampling, hand-over, training, publishing, sync."""
    costs = RunCosts(
        SPEED, learner_token_s=train_s / BATCH_TOKENS, prompt_token_s=0.001, handover_s=0.3, publish_s=0.2, sync_s=0.7, pause_s=0.1
    )
    found = run(costs, max_staleness=0)
    between_s = 8 * PROMPT * 0.001 + 0.3 + 0.2 + 0.7
    assert found.step_s == pytest.approx(train_s + ROLLOUT_S + between_s, rel=1e-6)
    assert found.mean_staleness == 0.0
    assert found.engine_waits_s[WEIGHTS] == pytest.approx(4 * 0.7 * found.steps)


@pytest.mark.parametrize("sync_s", [0.1, 0.7])
def test_a_group_s_ways_are_a_part_of_a_synchronous_step(sync_s: float) -> None:
    """Tickets come 0.25 s after the step before, weights during that; then a call, sampling, its answer, and the batch's hand-over."""
    delays = {"admission_s": 0.25, "dispatch_s": 0.05, "answer_s": 0.15, "handover_s": 0.3}
    found = run(RunCosts(SPEED, learner_token_s=1.0 / BATCH_TOKENS, publish_s=0.2, sync_s=sync_s, pause_s=0.1, **delays), max_staleness=0)
    expected = max(0.25, sync_s) + 0.05 + ROLLOUT_S + 0.15 + 0.3 + 1.0 + 0.2
    assert found.step_s == pytest.approx(expected, rel=1e-6)


def test_engines_that_wait_for_places_wait_for_their_groups_ways_too() -> None:
    """With staleness 1 engines sample one batch while the learner trains on the other for 4 s. They have their next groups 0.3 s after its
    step, so that their 2 s are hidden in its 4. With answers that take 5 s it is the other way round: a place, of which there are two
    batches, is taken for 0.3 + 2 + 5 + 4 s, and two steps pass meanwhile."""
    short = run(RunCosts(SPEED, learner_token_s=4.0 / BATCH_TOKENS, admission_s=0.2, dispatch_s=0.1), max_staleness=1)
    assert short.step_s == pytest.approx(4.0, rel=1e-6)
    assert short.engine_waits_s[ADMISSION] == pytest.approx(4 * (4.0 - ROLLOUT_S) * short.steps, rel=1e-6)
    long = run(RunCosts(SPEED, learner_token_s=4.0 / BATCH_TOKENS, admission_s=0.2, dispatch_s=0.1, answer_s=5.0), max_staleness=1)
    assert long.step_s == pytest.approx((0.2 + 0.1 + ROLLOUT_S + 5.0 + 4.0) / 2, rel=1e-6)


def test_training_steps_that_vary_hold_up_those_that_are_as_long_as_sampling() -> None:
    """Half of the steps take 1 s and half 3 s, sampling takes 2 s. Synchronous: 4 s on average, as without. Asynchronous: more than the 2 s
    of either side's mean, less than the 2.5 s of a batch that is always ready no sooner than two seconds after the one before."""
    costs = RunCosts(SPEED, learner_token_s=2.0 / BATCH_TOKENS, learner_factors=(0.5, 1.5))
    steps: list[SimulatedStep] = []
    found = simulate(shape(max_staleness=0), costs, constant(), prompt_tokens=PROMPT, steps=300, on_step=steps.append)
    assert found.step_s == pytest.approx(4.0, rel=0.03)
    assert {round(step.seconds, 6) for step in steps} == {3.0, 5.0}
    assert 2.0 < run(costs, steps=300).step_s < 2.5


def test_waits_and_work_of_each_side_make_up_its_time() -> None:
    costs = RunCosts(SPEED, learner_token_s=1e-4, handover_s=0.1, publish_s=0.2, sync_s=0.5, pause_s=0.2)
    found = run(costs, lengths=AnswerLengths.lognormal(100, 600), max_staleness=1)
    assert found.learner_share + sum(found.learner_wait_shares().values()) == pytest.approx(1.0)
    assert found.engine_share + sum(found.engine_wait_shares().values()) == pytest.approx(1.0)
    assert sum(found.tokens_by_staleness.values()) == found.tokens


def test_what_the_learner_waits_for() -> None:
    """768 requests for 256 places: full engines. Places for all of them, and one answer in a thousand is 30 times as long: these."""
    slow = run(RunCosts(SPEED, learner_token_s=1e-9))
    assert slow.learner_waits_s[FULL_ENGINES] > 0.95 * slow.seconds
    tail = AnswerLengths.like([LENGTH] * 999 + [30 * LENGTH], "a tail")
    held_up = run(RunCosts(SPEED, learner_token_s=1.5 / BATCH_TOKENS), lengths=tail, steps=60, workers=16)
    assert held_up.learner_waits_s[UNDER_WAY] > 0.3 * held_up.seconds
    assert FULL_ENGINES not in held_up.learner_wait_shares()


def test_engines_of_a_slow_learner_wait_for_admission_and_their_tokens_are_as_old_as_they_may_be() -> None:
    found = run(RunCosts(SPEED, learner_token_s=10.0 / BATCH_TOKENS), max_staleness=3)
    assert found.engine_waits_s[ADMISSION] == pytest.approx(4 * (10.0 - ROLLOUT_S) * found.steps, rel=0.03)
    assert found.tokens_by_staleness[3] == found.tokens


@pytest.mark.parametrize("max_staleness", [8, 12])
@pytest.mark.parametrize(("waves", "train_s"), [(1, 0.2), (1, 1.0), (2, 0.2), (2, 0.8), (4, 0.2), (4, 0.48)])
def test_tokens_of_engines_that_the_learner_waits_for_are_as_old_as_the_time_says(waves: int, train_s: float, max_staleness: int) -> None:
    """Engines with room for k batches, all answers of one length, a learner that has trained k batches (t each) before the next k are
    sampled (T): the bound is never reached, and the mean staleness is (k - 1) / 2 + t / T x k (k + 1) / 2.

    All answers in flight begin at one moment, say 0 at version 0, and end at T. Meanwhile the k batches of before are trained: version j
    holds in [j t, (j + 1) t) for j < k, and version k from k t on, so a token's mean version is k - t / T x k (k + 1) / 2. Batch i of the k
    that end at T is trained from version k + i, which is k + (k - 1) / 2 on average. The oldest tokens are those of version 0 in the last
    batch, 2 k - 1.
    """
    engines = {1: {"workers": 4}, 2: {"workers": 8}, 4: {"workers": 8, "max_running_requests": 128}}[waves]
    costs = RunCosts(SPEED, learner_token_s=train_s / BATCH_TOKENS)
    found = run(costs, max_staleness=max_staleness, **engines)
    assert found.step_s == pytest.approx(ROLLOUT_S / waves), "engines never wait"
    assert found.mean_staleness == pytest.approx((waves - 1) / 2 + train_s / ROLLOUT_S * waves * (waves + 1) / 2)
    assert max(found.tokens_by_staleness) == 2 * waves - 1 < max_staleness


def test_fewer_versions_cost_engines_fewer_waits_and_make_older_tokens() -> None:
    """Pauses of 0.4 s a sync: engines wait for weights a third as long if every third version goes out, and an answer is one version older
    on average, (0 + 1 + 2) / 3, than if every one does."""
    costs = RunCosts(SPEED, learner_token_s=ROLLOUT_S / BATCH_TOKENS, sync_s=0.4, pause_s=0.4, publish_s=0.1)
    every, third = (run(costs, steps=30, max_staleness=5, every_steps=one) for one in (1, 3))
    assert third.engine_waits_s[WEIGHTS] / third.steps == pytest.approx(every.engine_waits_s[WEIGHTS] / every.steps / 3, rel=0.1)
    assert third.learner_waits_s[PUBLISH] == pytest.approx(every.learner_waits_s[PUBLISH] / 3, rel=0.1)
    mean = [sum(age * n for age, n in one.tokens_by_staleness.items()) / one.tokens for one in (every, third)]
    assert max(third.tokens_by_staleness) <= 5 and 0.5 < mean[1] - mean[0] < 1.5


def test_an_answer_that_met_new_weights_has_tokens_of_both() -> None:
    """One worker with room for the two groups that staleness 1 admits: a group under way at the update is sampled by both versions."""
    steps: list[SimulatedStep] = []
    lengths = AnswerLengths.like([50, 100], "two lengths", seed=3)
    one = shape(workers=1, groups_per_step=1, max_staleness=1, samples_per_group=2)
    simulate(one, RunCosts(SPEED, learner_token_s=1e-4), lengths, prompt_tokens=0, steps=30, on_step=steps.append)
    assert any(len(step.tokens_by_staleness) == 2 for step in steps)
    assert {sum(step.tokens_by_staleness.values()) for step in steps} <= {100, 150, 200}, "two answers of 50 or 100, none cut by an update"


class Alone:
    """Takes down when an engine's groups end."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.ends: list[tuple[float, dict[int, int]]] = []

    def group_finished(self, engine: SimulatedEngine, group: SampledGroup) -> None:
        self.ends.append((self.clock.now, group.tokens_by_version))

    def activity_changed(self, by: int) -> None: ...

    def waiting_changed(self, by: int) -> None: ...


@pytest.mark.parametrize(("retracts", "read_again"), [(True, 2 * PROMPT + 2 * 50), (False, 0)])
def test_requests_in_flight_are_read_again_at_an_update(retracts: bool, read_again: int) -> None:
    """Two answers of 100 tokens to one prompt, half done after 1.02 s; the engine stands still for 0.5 s then, and reads 1,000 tokens/s."""
    clock = SimulatedClock()
    owner = Alone(clock)
    two = shape(samples_per_group=2)
    two = RunShape(**{name: getattr(two, name) for name in two.__slots__ if name != "retracts"}, retracts=retracts)
    engine = SimulatedEngine("0", two, RunCosts(SPEED, 0.0, prompt_token_s=0.001), constant(), [0.02] * 65, clock, owner)
    engine.take([Ticket(0, Prompt("p", "", (), "", {"tokens": PROMPT}), 0)])
    clock.after(1.02, engine.pause)
    clock.after(1.52, lambda: engine.resume(1))
    clock.run(lambda: False)
    ((when, tokens_by_version),) = owner.ends
    assert when == pytest.approx(0.02 + 100 * 0.02 + 0.5 + 0.001 * read_again)
    assert tokens_by_version == {0: 100, 1: 100}


@pytest.mark.parametrize("other_cores", [0.0, 0.5])
def test_a_shared_machine_slows_the_engines_while_the_learner_trains(other_cores: float) -> None:
    """Two engines and the learner on two cores, the learner first: the engines share one while it trains, and have one each otherwise; less
    what the rest of the run takes."""
    shared = {"workers": 2, "max_staleness": 4, "slots": 16, "max_running_requests": 128}
    alone = DecodeSpeed(((1, 64.0), (128, 64.0 * 128)))
    train_s = 32 * 8 * LENGTH / (2 * 64.0 * 128) * 1.0
    costs = RunCosts(alone, learner_token_s=train_s / BATCH_TOKENS, cores=2.0, other_cores=other_cores)
    found = run(costs, **shared)
    # In a step the learner works train_s; the engines need 2 x rollout core seconds, of which 1 a second is left while it trains, then 2.
    rollout_s = 32 * 8 * LENGTH / (2 * 64.0 * 128)
    expected = train_s + (2 * rollout_s - (1 - other_cores) * train_s) / (2 - other_cores)
    assert found.step_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("max_staleness", "slots"), [(0, 64), (1, 8), (1, 64), (3, 4)])
def test_it_agrees_with_the_pool_itself(monkeypatch: pytest.MonkeyPatch, max_staleness: int, slots: int) -> None:
    """The real pool and the queue's real actor, in asyncio's simulated time, with engines that take 0.5 to 1.5 s for a group and a learner
    that takes none: as many groups a second as here, within 4 % (each side draws its lengths, 20 batches of 64 and 40)."""
    rates: list[float] = []

    async def scenario() -> None:
        pool = Run(monkeypatch, [1.0] * 4, groups_per_step=64, max_staleness=max_staleness, slots=slots)
        rates.append(await pool.groups_per_second(20))

    in_asyncio(scenario)
    costs = RunCosts(DecodeSpeed(((1, 100.0), (100, 10_000.0))), learner_token_s=0.0, sync_s=2.5 * RECEIPTS_APART_S, pause_s=0.0)
    lengths = AnswerLengths.like(range(50, 151), "50 to 150")
    found = simulate(RunShape(4, 64, max_staleness, 1, slots, 100), costs, lengths, prompt_tokens=0, steps=40)
    assert 64 / found.step_s == pytest.approx(rates[0], rel=0.04)


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 4),
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    slots=st.integers(1, 5),
    running=st.integers(1, 20),
    token_s=st.floats(1e-6, 1e-2),
    sync_s=st.floats(0.0, 5.0),
    tail=st.floats(1.0, 30.0),
    cores=st.sampled_from([2.0, math.inf]),
    every_steps=st.integers(1, 4),
    way_s=st.sampled_from([0.0, 0.3]),
)
def test_nothing_is_trained_twice_and_nothing_is_too_old(
    workers: int,
    groups_per_step: int,
    max_staleness: int,
    slots: int,
    running: int,
    token_s: float,
    sync_s: float,
    tail: float,
    cores: float,
    every_steps: int,
    way_s: float,
) -> None:
    """In any shape: each batch is whole, every group is trained once, no token is older than max_staleness, versions grow one by one."""
    steps: list[SimulatedStep] = []
    every_steps = min(every_steps, max_staleness + 1)
    any_shape = RunShape(workers, groups_per_step, max_staleness, 2, slots, running, every_steps=every_steps)
    costs = RunCosts(SPEED, token_s, prompt_token_s=1e-4, handover_s=0.1, publish_s=0.1, sync_s=sync_s, pause_s=sync_s / 2, cores=cores)
    costs = replace(costs, admission_s=way_s, dispatch_s=way_s / 2, answer_s=way_s / 3)
    lengths = AnswerLengths.lognormal(40, 40 * tail, max_tokens=2000)
    simulate(any_shape, costs, lengths, prompt_tokens=PROMPT, steps=12, on_step=steps.append)
    trained = [group_id for step in steps for group_id in step.group_ids]
    assert len(trained) == len(set(trained)) == len(steps) * groups_per_step
    assert all(0 <= age <= max_staleness for step in steps for age in step.tokens_by_staleness)
    assert [step.version for step in steps] == list(range(len(steps)))


def test_equal_seeds_make_equal_runs() -> None:
    costs = RunCosts(SPEED, learner_token_s=1e-4)
    lengths = AnswerLengths.lognormal(100, 600, seed=5)
    assert run(costs, lengths=lengths.afresh()) == run(costs, lengths=lengths.afresh())
    assert run(costs, lengths=lengths.afresh()) != run(costs, lengths=AnswerLengths.lognormal(100, 600, seed=6))


def test_lengths_have_the_percentiles_that_were_asked_for() -> None:
    lengths = AnswerLengths.lognormal(6000, 32000, max_tokens=40000)
    drawn = sorted(lengths.next() for _ in range(100_000))
    assert drawn[50_000] == pytest.approx(6000, rel=0.02)
    assert drawn[99_000] == pytest.approx(32000, rel=0.03)
    assert drawn[-1] == 40000


def test_speeds_between_and_beyond_the_points() -> None:
    """0.02 s a step for one request and 0.04 s for 101: 0.03 s for 51, 0.06 s for 201. One point: half of the step is for any number."""
    speed = DecodeSpeed(((1, 50.0), (101, 2525.0)))
    assert [speed.step_s(requests) for requests in (1, 51, 101, 201)] == pytest.approx([0.02, 0.03, 0.04, 0.06])
    assert DecodeSpeed(((50, 2500.0),)).step_s(100) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AnswerLengths.lognormal(500, 100), "p50 500 and p99 100"),
        (lambda: AnswerLengths.like([], "runs/x"), "runs/x"),
        (lambda: DecodeSpeed(()), "decode speed"),
        (lambda: DecodeSpeed(((8, 100.0), (8, 200.0))), "8:100,8:200"),
        (lambda: run(RunCosts(SPEED, 1e-4), workers=0), "workers=0"),
        (lambda: run(RunCosts(SPEED, 1e-4), every_steps=4), "every_steps = 4 and max_staleness 2: .* Try bounds of 3 or more"),
    ],
)
def test_what_makes_no_run_is_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


def test_timers_of_one_moment_keep_their_order_and_a_timer_that_was_set_anew_is_due_once() -> None:
    clock, seen = SimulatedClock(), []
    timer = clock.timer(lambda: seen.append(f"late {clock.now}"))
    timer.set(1.0)
    timer.set(3.0)
    for name in "ab":
        clock.after(2.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    stopped = clock.timer(lambda: seen.append("never"))
    stopped.set(2.5)
    stopped.stop()
    assert not clock.run(lambda: False)
    assert seen == ["a", "b", "late 3.0"]
