"""Numbers of a step from what the parts report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest

from evenkeel.actors.carriers import Example, PreparedBatch
from evenkeel.actors.record.step_numbers import (
    batch_metrics,
    first_lengths,
    rollout_metrics,
    sync_metrics,
    trajectories_text,
    undiagnosed,
    worker_metrics,
)
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct
from evenkeel.correction.diagnostics.diagnose import diagnose
from evenkeel.learner.results import StepResult
from evenkeel.rollout.config import MaskOverlong, OverlongConfig, TrainOverlong
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.trajectory import (
    AnswerFacts,
    AnswerPlace,
    FinishReason,
    Group,
    GroupFacts,
    KeptTokens,
    Prompt,
    Trajectory,
    VersionSpan,
    WorkerLoad,
    ids_of,
    logprobs_of,
)
from tests.actors.cases import facts


def test_waiting_is_waited_seconds_by_lived_seconds_of_whoever_was_there() -> None:
    """A step of 10 s. Worker 0 was there all the time and busy for 8 s of it; worker 1 came 4 s ago and was busy for 1 s; worker 2 left,
    or does not answer. Waited: 2 + 3 s, lived: 10 + 4 s."""
    before = {"0": WorkerLoad(50.0, 100.0, 1000, 3), "2": WorkerLoad(90.0, 100.0, 5000, 3, late_s=9.0)}
    now = {"0": WorkerLoad(58.0, 110.0, 1600, 3, late_s=0.25), "1": WorkerLoad(1.0, 4.0, 50, 2, late_s=0.125)}
    numbers = rollout_metrics({}, now, before, 10.0)
    assert numbers["wait/rollout_share"] == pytest.approx(5 / 14)
    assert numbers["wait/rollout_s"] == pytest.approx(10 * 5 / 14)
    assert numbers["throughput/rollout_tokens_per_s"] == pytest.approx(600 / 10 + 50 / 4)
    assert numbers["rollout/requests_in_flight"] == 5
    assert numbers["time/rollout_late_s"] == 0.25
    assert numbers["worker/wait_share/0"] == pytest.approx(2 / 10) and numbers["worker/wait_share/1"] == pytest.approx(3 / 4)
    assert "worker/wait_share/2" not in numbers


def test_a_worker_that_missed_a_step_counts_both_when_it_answers() -> None:
    """Its last answer is of 20 s ago: waited 15 s of them."""
    numbers = rollout_metrics({}, {"0": WorkerLoad(15.0, 120.0, 10, 0)}, {"0": WorkerLoad(10.0, 100.0, 0, 0)}, 10.0)
    assert numbers["wait/rollout_share"] == pytest.approx(15 / 20)


def test_throughput_is_by_the_time_between_a_workers_own_reports() -> None:
    """Both sample 100 tokens/s. In a step of 10 s worker 0's last two receipts are 13 s apart, worker 1's 7 s; 2 has just reported."""
    before = {name: WorkerLoad(0.0, 100.0, 10_000, 0) for name in "012"}
    now = {"0": WorkerLoad(0.0, 113.0, 11_300, 0), "1": WorkerLoad(0.0, 107.0, 10_700, 0), "2": before["2"]}
    for name in "01":
        alone = rollout_metrics({}, {name: now[name]}, before, 10.0)
        assert alone["throughput/rollout_tokens_per_s"] == pytest.approx(100)
    assert rollout_metrics({}, now, before, 10.0)["throughput/rollout_tokens_per_s"] == pytest.approx(200)


def test_nothing_is_said_without_a_worker_or_something_to_compare_with() -> None:
    assert set(rollout_metrics({}, {"0": WorkerLoad(1.0, 2.0, 3, 0)}, None, 10.0)) == {"rollout/requests_in_flight", "time/rollout_late_s"}
    assert "wait/rollout_share" not in rollout_metrics({}, {}, {}, 10.0)


def test_who_did_what() -> None:
    """Worker 0 finished two groups, 2 is there and finished none, 1 is new and holds no weights; 3 finished one and has left."""
    finished = {"0": [facts(0, 4, 6), facts(2, 5)], "3": [facts(1, 20)]}
    assert worker_metrics(finished, {"0": 4, "1": -1, "2": 3}) == {
        "worker/tokens/0": 15, "worker/tokens/1": 0, "worker/tokens/2": 0, "worker/tokens/3": 20,
        "worker/groups/0": 2, "worker/groups/1": 0, "worker/groups/2": 0, "worker/groups/3": 1,
        "worker/weight_version/0": 4, "worker/weight_version/2": 3,
    }  # fmt: skip


def test_the_mean_length_is_over_answers_not_groups() -> None:
    assert rollout_metrics({"0": [facts(0, 4, 6), facts(2, 5)], "3": [facts(1, 29)]}, {}, None, 1.0)["length/sampled_tokens"] == 44 / 4


def test_the_share_without_gradient_is_of_turns_where_advantages_are() -> None:
    """Two answers with the sum 1 (as `facts` makes them), one earned in the first turn and one in the second."""
    one = facts(0, 4, 4)
    answers = tuple(replace(answer, turn_rewards=of) for answer, of in zip(one.trajectories, ((1.0, 0.0), (0.0, 1.0)), strict=True))
    finished = {"0": [replace(one, trajectories=answers)]}
    shares = [rollout_metrics(finished, {}, None, 1.0, by_turn=by_turn)["groups/no_gradient_share"] for by_turn in (False, True)]
    assert shares == [1, 0]


def test_an_answer_without_tokens_stands_for_no_group() -> None:
    """The first answer of a group was given up before its first token; a group of such answers alone is never trained."""
    groups = [facts(0, 0, 6, 9), facts(1, 5, 7)]
    assert first_lengths(groups) == [6, 5]
    text = trajectories_text(groups, [Example(Prompt("p", "", (1,), ""), name) for name in "ab"], step=3)
    assert "'a'  (stop, 6 tokens, v0: 0-6)" in text and "'b'  (stop, 5 tokens, v0: 0-5)" in text


def test_a_probe_that_came_without_a_receipt_is_told() -> None:
    """A full engine answers the probe of a version in a later step than that of its receipt."""
    assert sync_metrics([], [0.5, 0.25]) == {"sync/probe_max_abs_difference": 0.5}
    assert sync_metrics([], []) == {}


def answer(spans: list[tuple[int, int, int]], *, retractions: int, reward: float | None = 1.0) -> Trajectory:
    """To a prompt of 100 tokens."""
    tokens = spans[-1][2]
    ids, logprobs, found = ids_of(range(tokens)), logprobs_of([-1.0] * tokens), tuple(VersionSpan(*span) for span in spans)
    return Trajectory("p", ids_of(range(100)), ids, logprobs, found, FinishReason.STOP, retractions=retractions, reward=reward)


def test_what_newer_weights_read_again_is_counted() -> None:
    """Prompt and answer so far, at each change of version: 100 + 7, and 100 + 20; nothing where the cache was kept, or nothing changed, and
    nothing for a retraction for want of memory."""
    answers = (
        answer([(3, 0, 7), (4, 7, 20), (5, 20, 30)], retractions=2),
        answer([(3, 0, 7), (4, 7, 20)], retractions=0),
        answer([(4, 0, 12)], retractions=0),
        answer([(4, 0, 12)], retractions=1, reward=0.0),
    )
    facts = Group(0, Prompt("p", "", (1,), ""), answers, 3).facts
    assert [one.read_again_tokens for one in facts.trajectories] == [107 + 120, 0, 0, 0]
    places = tuple(AnswerPlace(0, i) for i in range(4))
    batch = PreparedBatch(5, CorrectionConfig(preset="tis-token"), None, 500, (facts,), places, 0.0, 0.0)
    assert batch_metrics(batch, correct_at={"": 1.0})["sync/read_again_tokens"] == 227


def test_the_mean_kept_set_is_of_all_tokens_and_absent_without_any() -> None:
    """Of 30 tokens 10 have a set of 4, 8 one of 2; the last answer's come from the whole vocabulary."""
    answers = [answer([(3, 0, 10)], retractions=0) for _ in range(3)]
    answers[0] = replace(answers[0], kept_tokens=KeptTokens.of([range(4)] * 10))
    answers[1] = replace(answers[1], kept_tokens=KeptTokens.of([range(2)] * 8 + [()] * 2), reward=0.0)
    for some, expected in ((answers, 56 / 30), ([answers[2]] * 2, None)):
        facts = Group(0, Prompt("p", "", (1,), ""), tuple(some), 3).facts
        places = tuple(AnswerPlace(0, i) for i in range(len(some)))
        batch = PreparedBatch(5, CorrectionConfig(preset="tis-token"), None, 500, (facts,), places, 0.0, 0.0)
        assert batch_metrics(batch, correct_at={"": 1.0}).get("length/kept_set_tokens") == expected


def test_calls_of_tools_are_told_of_each_step_of_a_run_that_has_tools() -> None:
    """Also of one in which the model makes none: that is what a person looks for."""
    made = [answer([(3, 0, 10)], retractions=0) for _ in range(2)]
    for calls, has_tools, expected in ((4, True, 2.0), (0, True, 0.0), (0, False, None)):
        facts = Group(0, Prompt("p", "", (1,), ""), (replace(made[0], tool_calls=calls), made[1]), 3).facts
        places = (AnswerPlace(0, 0), AnswerPlace(0, 1))
        batch = PreparedBatch(5, CorrectionConfig(preset="tis-token"), None, 500, (facts,), places, 0.0, 0.0)
        assert batch_metrics(batch, correct_at={"": 1.0}, has_tools=has_tools).get("turns/tool_calls") == expected


def test_rewards_of_a_batch_by_group_each_of_which_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 groups this holds up the driver's event loop in one go. Rewards 1, 1 (all correct), 0, 0 (all wrong) and 1, 0, with one
    answer that failed: means 1, 0 and 1/2, deviations 0, 0 and 1/2."""
    looks: list[int] = []

    def valid(self: GroupFacts) -> tuple[AnswerFacts, ...]:
        looks.append(self.group_id)
        return tuple(one for one in self.trajectories if one.is_valid)

    monkeypatch.setattr(GroupFacts, "valid", property(valid))
    rewards = [(1.0, 1.0), (0.0, 0.0), (1.0, None, 0.0)]
    groups = [
        GroupFacts(i, f"p{i}", tuple(replace(one, reward=r) for one, r in zip(facts(i, *[5] * len(of)).trajectories, of, strict=True)), 0)
        for i, of in enumerate(rewards)
    ]
    failed = replace(groups[2].trajectories[1], error="it failed")
    groups[2] = replace(groups[2], trajectories=(groups[2].trajectories[0], failed, groups[2].trajectories[2]))
    places = tuple(AnswerPlace(g, i) for g, i in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 2)))
    batch = PreparedBatch(0, CorrectionConfig(preset="bypass"), None, 30, tuple(groups), places, 0.0, 0.0)
    numbers = batch_metrics(batch, correct_at={"": 1.0})
    assert (numbers["groups/all_correct"], numbers["groups/all_wrong"]) == (1, 1)
    assert numbers["reward/accuracy"] == 3 / 6
    assert [numbers[f"reward/{name}"] for name in ("mean", "std", "group_std")] == pytest.approx([0.5, 0.5, 1 / 6])
    assert looks == [0, 1, 2]


def test_each_of_several_tasks_has_its_own_rewards() -> None:
    """Of three groups one is of words, with 1 and 0; sums have 1, 1, 0.5 and 0, of which three are right by their own measure."""
    rewards = {"words/train/0/0": (1.0, 0.0), "sums/train/0/0": (1.0, 1.0), "sums/train/0/1": (0.5, 0.0)}
    groups = [
        Group(i, Prompt(name, "", (1,), ""), tuple(answer([(5, 0, 4)], retractions=0, reward=one) for one in of), 5)
        for i, (name, of) in enumerate(rewards.items())
    ]
    numbers = batch_metrics(prepared(groups, TrainOverlong(), longest={"words": 30, "sums": 30})[0], correct_at={"words": 1.0, "sums": 0.5})
    of_tasks = {name: value for name, value in numbers.items() if name.startswith("task/")}
    assert of_tasks == {
        "task/accuracy/words": 0.5,
        "task/reward/words": 0.5,
        "task/groups_share/words": 1 / 3,
        "task/accuracy/sums": 0.75,
        "task/reward/sums": 0.625,
        "task/groups_share/sums": 2 / 3,
    }
    assert numbers["reward/accuracy"] == 4 / 6


def cut(one: Trajectory) -> Trajectory:
    return replace(one, finish_reason=FinishReason.LENGTH)


def prepared(
    groups: list[Group], overlong: OverlongConfig, version: int = 5, longest: Mapping[str, int] = MappingProxyType({"": 30})
) -> tuple[PreparedBatch, dict[str, float]]:
    """The batch that is made of them, and what the correction says of it."""
    packed = pack_groups(groups, learner_version=version, advantage=lambda rewards, _: rewards, overlong=overlong, max_tokens=longest)
    config, facts = CorrectionConfig(preset="bypass"), tuple(group.facts for group in groups)
    batch = PreparedBatch(version, config, None, packed.batch.num_tokens, facts, packed.places, 0.0, 0.0)
    return batch, diagnose(packed.batch, correct(packed.batch, config))


def test_an_answer_that_is_left_out_of_the_batch_is_no_trained_one() -> None:
    """One of 30 tokens was cut, the other two have 20 and 10; its reward is in the baseline, so that it counts as one of the rewards."""
    answers = (
        cut(answer([(1, 0, 30)], retractions=0, reward=0.0)),
        answer([(3, 0, 8), (4, 8, 20)], retractions=0),
        answer([(5, 0, 10)], retractions=0),
    )
    group = Group(0, Prompt("p", "", (1,), ""), answers, 1)
    of_trained = ("length/trained_tokens", "staleness/mean", "staleness/max", "staleness/mixed_version_share")
    expected: list[tuple[OverlongConfig, list[float], dict[str, float]]] = [
        (TrainOverlong(), [20, (30 * 4 + 8 * 2 + 12) / 60, 4, 1 / 3], {"0": 10, "1": 12, "2": 8, "4": 30}),
        (MaskOverlong(), [15, (8 * 2 + 12) / 30, 2, 1 / 2], {"0": 10, "1": 12, "2": 8}),
    ]
    for overlong, values, tokens in expected:
        batch, theirs = prepared([group], overlong)
        numbers = batch_metrics(batch, correct_at={"": 1.0})
        assert [numbers[name] for name in of_trained] == pytest.approx(values)
        assert {name.rpartition("/")[2]: n for name, n in numbers.items() if name.startswith("staleness/tokens/")} == tokens
        of_all = [numbers[name] for name in ("reward/mean", "length/max_tokens", "length/truncated_share")]
        assert of_all == pytest.approx([2 / 3, 30, 1 / 3])
        of_both = ("staleness_mean", "staleness_max", "mixed_version_share")
        assert [theirs[name] for name in of_both] == [numbers[name] for name in of_trained[1:]], "the correction's, to the last bit"


def test_a_batch_of_which_every_answer_is_left_out_has_no_trained_ones() -> None:
    group = Group(0, Prompt("p", "", (1,), ""), tuple(cut(answer([(5, 0, 4)], retractions=0, reward=one)) for one in (0.0, 1.0)), 5)
    batch, theirs = prepared([group], MaskOverlong())
    numbers = batch_metrics(batch, correct_at={"": 1.0})
    assert numbers["reward/mean"] == 0.5 and not any(name.startswith("staleness/") for name in numbers)
    assert "length/trained_tokens" not in numbers and "staleness_mean" not in theirs


def test_the_oldest_tokens_are_counted_together() -> None:
    """8 versions and more."""
    answers = (answer([(0, 0, 3), (1, 3, 8)], retractions=0), answer([(2, 0, 2), (3, 2, 9)], retractions=0))
    group = Group(0, Prompt("p", "", (1,), ""), answers, 0)
    numbers = batch_metrics(prepared([group], TrainOverlong(), version=10)[0], correct_at={"": 1.0})
    assert (numbers["staleness/tokens/8+"], numbers["staleness/tokens/7"], numbers["staleness/max"]) == (3 + 5 + 2, 7, 10)


def test_what_the_learner_knows_of_the_tokens_of_a_step() -> None:
    trained = SimpleNamespace(trained_tokens=8, kept_tokens=6, broken_tokens=2)
    assert undiagnosed(trained) == {"correction/kept_share": 0.75, "correction/broken_tokens": 2}  # type: ignore[arg-type]
    nothing = StepResult.of_nothing(1, CorrectionConfig(preset="bypass"), updates=1, learning_rate=0.1, loss_scale=None)
    assert undiagnosed(nothing) == {}
