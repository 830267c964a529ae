"""Groups to a packed batch: closed forms of advantages, masks, versions and overlong penalties."""

from __future__ import annotations

import math
import pickle
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct
from evenkeel.correction.errors import DataError
from evenkeel.correction.terms.advantages import turn_advantages
from evenkeel.rollout.config import MaskOverlong, OverlongConfig, PenaliseOverlong, TrainOverlong
from evenkeel.rollout.packing import overlong_penalty, pack_groups
from evenkeel.rollout.trajectory import (
    AnswerPlace,
    FinishReason,
    Group,
    LaterReading,
    Prompt,
    RoutedExperts,
    TopLogprobs,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)
from evenkeel.rollout.wide_fields import has_wide_fields, join_wide_fields, split_wide_fields

PROMPT_IDS = (7, 8, 9)
MAX_TOKENS = 6
LONGEST = {"": MAX_TOKENS}


def trajectory(reward: float | None, length: int = 2, *, finish: FinishReason = FinishReason.STOP, error: str | None = None) -> Trajectory:
    return Trajectory(
        prompt_id="train/0/0",
        prompt_ids=ids_of(PROMPT_IDS),
        response_ids=ids_of(range(20, 20 + length)),
        behavior_logprobs=logprobs_of(-0.5 - i for i in range(length)),
        version_spans=(VersionSpan(4, 0, length),),
        finish_reason=finish,
        reward=reward,
        error=error,
    )


def group(group_id: int, *trajectories: Trajectory) -> Group:
    return Group(group_id, Prompt("train/0/0", "q", PROMPT_IDS, "a"), trajectories, admitted_version=4)


def centred(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward less the mean of its group, one by one: an estimator written independently of correction's."""
    return torch.stack([r - rewards[group_ids == g].mean() for r, g in zip(rewards, group_ids, strict=True)])


def pack(*groups: Group, overlong: OverlongConfig | None = None) -> PackedBatch:
    return pack_groups(groups, learner_version=5, advantage=centred, overlong=overlong or TrainOverlong(), max_tokens=LONGEST).batch


def test_two_sequences_lie_end_to_end_with_their_values_at_their_own_tokens() -> None:
    first = replace(trajectory(1.0, 2), version_spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)))
    batch = pack_groups(
        [group(11, first, trajectory(0.0, 1))],
        learner_version=5, advantage=centred, overlong=TrainOverlong(), max_tokens=LONGEST, temperature=0.8,
    ).batch  # fmt: skip
    assert batch.token_ids.tolist() == [7, 8, 9, 20, 21, 7, 8, 9, 20]
    assert batch.offsets.tolist() == [0, 5, 9]
    assert batch.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True]
    assert batch.behavior_logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, 0, 0, -0.5]
    assert batch.weight_versions.tolist() == [-1, -1, -1, 3, 4, -1, -1, -1, 4]
    assert batch.advantages.tolist() == [0.5] * 5 + [-0.5] * 4  # 1 and 0 less their mean
    assert batch.group_ids.tolist() == [11, 11]
    assert (batch.learner_version, batch.temperature) == (5, 0.8)
    assert [t.dtype for t in (batch.token_ids, batch.behavior_logprobs, batch.weight_versions)] == [torch.int64, torch.float32, torch.int32]


def test_a_token_travels_in_eight_bytes() -> None:
    """32 bits of its id and 32 of its logprob; as Python's numbers it took 13, and 76 in memory."""
    one, longer = (len(pickle.dumps(trajectory(1.0, length), protocol=5)) for length in (1000, 3000))
    assert longer - one == 2000 * 8


def test_logprobs_are_rounded_once_to_float32() -> None:
    """What a trajectory holds is what a tensor would make of the engine's numbers, to the last bit."""
    numbers = [-0.1, -1e-9, -7.000000001, -1e-42, 0.0]
    one = replace(trajectory(1.0, 5), behavior_logprobs=logprobs_of(numbers))
    packed = pack(group(1, one, trajectory(0.0))).behavior_logprobs[3:8]
    assert torch.equal(packed.view(torch.int32), torch.tensor(numbers, dtype=torch.float32).view(torch.int32))


def test_a_failed_trajectory_is_in_neither_baseline_nor_loss() -> None:
    failed = trajectory(None, error="the reward took more than 10 s")
    packed = pack_groups(
        [group(1, trajectory(1.0), failed, trajectory(0.0), trajectory(0.5))],
        learner_version=5, advantage=centred, overlong=TrainOverlong(), max_tokens=LONGEST,
    )  # fmt: skip
    batch = packed.batch
    assert packed.places == (AnswerPlace(0, 0), AnswerPlace(0, 2), AnswerPlace(0, 3))
    # a reward of 0 for the failed one would make the mean 0.375
    assert batch.advantages[batch.offsets[:-1]].tolist() == [0.5, -0.5, 0.0]
    assert batch.num_sequences == 3


def test_a_group_with_fewer_than_two_valid_trajectories_is_left_out() -> None:
    alone = group(1, trajectory(1.0), trajectory(None, error="raised"), trajectory(1.0, 0))  # no token: not valid either
    full = group(2, trajectory(1.0), trajectory(0.0))
    assert (alone.is_trainable, full.is_trainable) == (False, True)
    batch = pack(alone, full)
    assert batch.group_ids.tolist() == [2, 2]


def test_groups_whose_rewards_are_alike_carry_no_gradient() -> None:
    rewards = [(1.0, 1.0), (0.0, 0.0), (0.25, 0.25), (0.0, 0.5), (0.0, 1.0)]
    batch = pack(*(group(i, trajectory(one), trajectory(two)) for i, (one, two) in enumerate(rewards)))
    assert batch.group_ids[batch.advantages[batch.offsets[:-1]] == 0].unique().tolist() == [0, 1, 2]


def test_no_trainable_group_gives_a_batch_of_no_sequence() -> None:
    batch = pack(group(1, trajectory(1.0)))
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)


def in_turns(one: Trajectory, *readings: tuple[int, list[int]]) -> Trajectory:
    """With (response tokens before it, ids) of each reading."""
    return replace(one, later=tuple(LaterReading(after, ids_of(ids)) for after, ids in readings))


def test_what_is_read_between_turns_stands_in_its_place_and_is_not_trained() -> None:
    """Against the same sequences written out by hand, beside one of a single turn."""
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 4))
    turns = in_turns(replace(trajectory(1.0, 4), version_spans=spans), (2, [50, 51, 52]), (3, [53]))
    batch = pack(group(11, turns, trajectory(0.0, 1)))
    assert batch.token_ids.tolist() == [7, 8, 9, 20, 21, 50, 51, 52, 22, 53, 23, 7, 8, 9, 20]
    assert batch.offsets.tolist() == [0, 11, 15]
    read, said = False, True
    assert batch.loss_mask.tolist() == [read] * 3 + [said] * 2 + [read] * 3 + [said, read, said] + [read] * 3 + [said]
    assert batch.behavior_logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, 0, 0, -2.5, 0, -3.5, 0, 0, 0, -0.5]
    assert batch.weight_versions.tolist() == [-1, -1, -1, 3, 4, -1, -1, -1, 4, -1, 4, -1, -1, -1, 4]
    assert batch.turn_ids is not None and batch.turn_ids.dtype == torch.int32
    assert batch.turn_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 0, 0]
    assert batch.advantages.tolist() == [0.5] * 11 + [-0.5] * 4
    assert pack(group(11, trajectory(1.0), trajectory(0.0))).turn_ids is None, "single answers have no turns to tell apart"


def test_a_ratio_by_turn_is_over_the_tokens_of_a_turn_alone() -> None:
    """Turns of 2, 1 and 1 sampled tokens, with log pi_prox - log mu of 0.1, -0.4, 0.3 and -0.2: products of 0.74, 1.35 and 0.82, of which
    the first is out of bounds; the whole sequence's, 0.82, is within. Tokens that were read have numbers that no bound would let pass."""
    turns = in_turns(trajectory(1.0, 4), (2, [50, 51]), (3, [52]))
    batch = pack(group(1, turns, trajectory(0.0, 1)))
    proximal = torch.full_like(batch.behavior_logprobs, -50.0)
    proximal[batch.loss_mask] = batch.behavior_logprobs[batch.loss_mask] + torch.tensor([0.1, -0.4, 0.3, -0.2, 0.0])
    proximal = replace(batch, proximal_logprobs=proximal)

    def dropped(level: str) -> list[int]:
        config = CorrectionConfig(rejection=[{"level": level, "lower": 0.8, "upper": 1.4}])
        return (batch.loss_mask & ~correct(proximal, config).keep_mask).nonzero()[:, 0].tolist()

    assert (dropped("turn"), dropped("sequence"), dropped("token")) == ([3, 4], [], [4])


def test_turns_that_don_t_fit_the_response_are_refused() -> None:
    for readings in [(2, [5])], [(0, [5])], [(1, [5]), (1, [6])]:
        with pytest.raises(DataError, match="of its 2 response tokens, and each has at least one"):
            pack(group(1, in_turns(trajectory(1.0), *readings), trajectory(0.0)))


def test_the_length_that_is_punished_is_all_that_follows_the_prompt() -> None:
    """A ramp over the last 3 of 6 tokens: 3 sampled ones pay nothing, 3 with two that were read between them pay two thirds, whichever
    sequence of their rollout they are."""
    ramp = PenaliseOverlong(penalty=1.0, ramp_tokens=3)
    one = trajectory(1.0, 3)
    assert overlong_penalty(one, ramp, MAX_TOKENS) == 0
    longer = in_turns(one, (1, [50]), (2, [51]))
    assert overlong_penalty(longer, ramp, MAX_TOKENS) == pytest.approx(2 / 3)
    last = trajectory(1.0, 1)
    assert overlong_penalty(replace(last, branches=(one, longer)), ramp, MAX_TOKENS) == pytest.approx(2 / 3), "its longest sequence's"
    assert overlong_penalty(replace(last, branches=(one, one, one)), ramp, MAX_TOKENS) == 0, "and no sum: each may be so long"


def test_facts_cross_processes_with_their_turns() -> None:
    turns = in_turns(replace(trajectory(1.0, 4), version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 4)), retractions=1), (2, [50, 51]))
    facts = pickle.loads(pickle.dumps(group(1, turns, trajectory(0.0)).facts))
    assert [(one.turns, one.later_tokens, one.response_tokens) for one in facts.trajectories] == [(2, 2, 4), (1, 0, 2)]
    assert facts.trajectories[0].read_again_tokens == len(PROMPT_IDS) + 2 + 2, "all that came before the first token of the new weights"


# --- rollouts of several sequences ----------------------------------------------------------------------------------


def branch(one: Trajectory, place: int, reading: list[int], length: int, *, first: int = 60) -> Trajectory:
    """A sequence that goes on from a response token of another one with something else to read, and `length` sampled tokens."""
    prompt = ids_of([*one.token_ids[: one.tokens_before(place)], *reading])
    return replace(trajectory(None, length), prompt_ids=prompt, response_ids=ids_of(range(first, first + length)))


def test_a_rollout_is_one_in_its_group_however_many_sequences_it_has() -> None:
    """Rewards 1, 0, 0 with advantages 2/3, -1/3, -1/3, where the first has three sequences: with five rewards they would be others."""
    main = trajectory(1.0, 3)
    parts = branch(main, 2, [50], 1), branch(main, 0, [51, 52], 2, first=70)
    one = replace(main, branches=parts)
    packed = pack_groups(
        [group(1, one, trajectory(0.0, 1), trajectory(0.0, 1))],
        learner_version=5, advantage=centred, overlong=TrainOverlong(), max_tokens=LONGEST,
    )  # fmt: skip
    batch = packed.batch
    assert batch.advantages[batch.offsets[:-1]].tolist() == pytest.approx([2 / 3] * 3 + [-1 / 3] * 2)
    assert batch.rollout_ids is not None and batch.rollout_ids.tolist() == [0, 0, 0, 1, 2] and batch.group_ids.tolist() == [1] * 5
    assert packed.places == (AnswerPlace(0, 0, 0), AnswerPlace(0, 0, 1), AnswerPlace(0, 0, 2), AnswerPlace(0, 1), AnswerPlace(0, 2))
    first, second, third = ([7, 8, 9, 20, 21, 50, 60], [7, 8, 9, 51, 52, 70, 71], [7, 8, 9, 20, 21, 22])
    assert batch.token_ids.tolist()[:20] == [*first, *second, *third]
    trained = batch.token_ids[batch.loss_mask].tolist()
    assert trained == [60, 70, 71, 20, 21, 22, 20, 20], "20 and 21 are read in the first branch, and trained where they were sampled"
    facts = one.facts
    assert (facts.sequence_count, facts.response_tokens, facts.turns) == (3, 6, 3)
    assert facts.version_spans == (VersionSpan(4, 0, 1), VersionSpan(4, 1, 3), VersionSpan(4, 3, 6))
    assert pack(group(1, trajectory(1.0), trajectory(0.0))).rollout_ids is None


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=2, max_size=5),
    cut=st.lists(st.booleans(), min_size=25, max_size=25),
    kind=st.sampled_from(["token_mean", "prompt_mean", "rollout_mean"]),
)
def test_each_token_has_its_weight_once_wherever_its_rollout_is_cut(lengths: list[list[int]], cut: list[bool], kind: str) -> None:
    """Rollouts of several turns, and the same where turns are branches that go on from all before: the trained tokens have the same
    logprobs, versions, advantages and shares of the loss. As many are trained as were sampled; a copy sent between processes is equal."""
    whole, apart = [], []
    for i, turns in enumerate(lengths):
        ends = [sum(turns[: n + 1]) for n in range(len(turns))]
        spans = (VersionSpan(3, 0, 1), VersionSpan(5, 1, ends[-1])) if ends[-1] > 1 else (VersionSpan(4, 0, 1),)
        one = in_turns(replace(trajectory(float(i % 2), ends[-1]), version_spans=spans), *((end, [50 + end]) for end in ends[:-1]))
        whole.append(one)
        places = [0, *(end for end, is_cut in zip(ends[:-1], cut[5 * i :], strict=False) if is_cut), ends[-1]]
        pieces = [_piece(one, start, end) for start, end in pairwise(places)]
        apart.append(replace(pieces[-1], branches=tuple(replace(piece, reward=None) for piece in pieces[:-1])))
    config = CorrectionConfig(preset="bypass", denominator={"kind": kind})
    rows = []
    for rollouts in (whole, apart):
        of_group = group(1, *rollouts)
        batch = pack(pickle.loads(pickle.dumps(of_group)))
        assert int(batch.loss_mask.sum()) == of_group.response_tokens == of_group.facts.response_tokens
        scale = correct(batch, config).token_scale
        columns = batch.token_ids, batch.behavior_logprobs, batch.weight_versions, batch.advantages, scale
        rows.append(sorted(zip(*(column[batch.loss_mask].tolist() for column in columns), strict=True)))
    assert rows[0] == [pytest.approx(row, rel=1e-6) for row in rows[1]]


def _piece(one: Trajectory, start: int, end: int) -> Trajectory:
    """The response tokens from start to end as a sequence of their own, which reads all before."""
    later = tuple(LaterReading(reading.after - start, reading.ids) for reading in one.later if start < reading.after < end)
    spans = [VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start) for s in one.version_spans]
    return replace(
        one,
        prompt_ids=one.token_ids[: one.tokens_before(start)],
        response_ids=one.response_ids[start:end],
        behavior_logprobs=one.behavior_logprobs[start:end],
        version_spans=tuple(span for span in spans if span.start < span.end),
        later=later,
    )


def test_wide_fields_of_each_sequence_go_and_come_back() -> None:
    """Top-K logprobs and routes, the branch's with those of the tokens that it reads; taken out, told apart by number, put back."""
    main = with_routes(with_top(trajectory(1.0, 3), 2, 30), 2)
    other = with_routes(with_top(branch(main, 2, [50], 1), 2, 60), 2)
    whole = group(1, replace(main, branches=(other,)), with_routes(with_top(trajectory(0.0, 1), 2, 80), 2))
    light, fields = split_wide_fields(whole)
    assert len(fields) == 3 and not has_wide_fields(light) and has_wide_fields(whole)
    assert join_wide_fields(light, fields) == whole
    packed = pack_groups(
        [light], learner_version=5, advantage=centred, overlong=TrainOverlong(), max_tokens=LONGEST, wide_of={1: fields}
    ).batch  # fmt: skip
    expected, found = pack(whole), packed.with_wide_fields()
    for name in ("topk_ids", "topk_logprobs", "routed_experts", "rollout_ids", "token_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


# --- overlong: rewards 1 (finished) and 0 (cut) ---------------------------------------------------------------------

CUT = trajectory(0.0, MAX_TOKENS, finish=FinishReason.LENGTH)


def test_overlong_train_takes_the_cut_answer_like_any_other() -> None:
    batch = pack(group(1, trajectory(1.0), CUT))
    assert batch.advantages[batch.offsets[:-1]].tolist() == [0.5, -0.5]
    assert int(batch.loss_mask.sum()) == 2 + MAX_TOKENS


def test_overlong_mask_keeps_the_cut_answer_in_the_baseline_and_out_of_the_loss() -> None:
    batch = pack(group(1, trajectory(1.0), CUT), overlong=MaskOverlong())
    assert batch.advantages[batch.offsets[:-1]].tolist() == [0.5]  # alone it would be 0
    assert int(batch.loss_mask.sum()) == 2


def test_the_batch_says_which_answers_its_sequences_are() -> None:
    """By place among the groups given, untrainable ones counted: the recorder looks lengths and ages of the trained ones up by it."""
    failed = replace(trajectory(1.0), reward=None, error="timeout")
    groups = [group(4, trajectory(1.0)), group(7, CUT, trajectory(1.0), failed, trajectory(0.0, 1)), group(9, trajectory(0.0), CUT)]
    packed = pack_groups(groups, learner_version=5, advantage=centred, overlong=MaskOverlong(), max_tokens=LONGEST)
    assert packed.places == (AnswerPlace(1, 1), AnswerPlace(1, 3), AnswerPlace(2, 0))
    assert packed.batch.group_ids.tolist() == [7, 7, 9]
    assert packed.batch.lengths.tolist() == [len(PROMPT_IDS) + n for n in (2, 1, 2)]


def test_overlong_penalise_lowers_the_reward_before_the_baseline() -> None:
    batch = pack(group(1, trajectory(1.0), CUT), overlong=PenaliseOverlong(penalty=0.5))
    # rewards 1 and 0 - 0.5: mean 0.25
    assert batch.advantages[batch.offsets[:-1]].tolist() == [0.75, -0.75]


@pytest.mark.parametrize(
    ("length", "finish", "expected"),
    [
        (2, FinishReason.STOP, 0.0),  # at the start of the ramp, max_tokens - 4
        (3, FinishReason.STOP, 0.5),  # 2 * 1/4
        (5, FinishReason.STOP, 1.5),
        (6, FinishReason.STOP, 2.0),  # finished with the last token that it had
        (6, FinishReason.LENGTH, 2.0),
        (1, FinishReason.LENGTH, 2.0),  # cut by the context's end
    ],
)
def test_the_ramp_is_dapos(length: int, finish: FinishReason, expected: float) -> None:
    config = PenaliseOverlong(penalty=2.0, ramp_tokens=4)
    assert overlong_penalty(trajectory(1.0, length, finish=finish), config, MAX_TOKENS) == expected


def test_advantages_by_turn_stand_at_the_tokens_of_their_turns() -> None:
    """Rewards by turn 1, 0 and 0.5, 0, less their mean, summed from each turn on; what is read belongs to the turn after it. An
    answer whose reward is known of the whole alone has it for all of its turns, and the overlong penalty is the last turn's."""
    first = replace(in_turns(trajectory(1.0, 4), (1, [50]), (2, [51])), turn_rewards=(1.0, 0.0, 0.0))
    second = replace(trajectory(0.5, 2), turn_rewards=(0.5,))
    whole = in_turns(trajectory(0.0, 3), (1, [52]))
    seen = list[list[float]]()

    def summed(rewards: Tensor, rollouts: Tensor, groups: Tensor) -> Tensor:
        seen.extend([rewards.tolist(), rollouts.tolist(), groups.tolist()])
        return turn_advantages(rewards, rollouts, groups, estimator="grpo_no_std")

    how = {"learner_version": 5, "advantage": centred, "overlong": TrainOverlong(), "max_tokens": LONGEST}
    batch = pack_groups([group(1, first, second, whole)], **how, turn_advantage=summed).batch
    assert seen == [[1.0, 0.0, 0.0, 0.5, 0.0], [0, 0, 0, 1, 2], [1] * 5]
    assert batch.turn_ids is not None
    of_turn = {(s, int(batch.turn_ids[n])): float(batch.advantages[n]) for s in range(3) for n in range(*batch.offsets[s : s + 2].tolist())}
    expected = {(0, 0): 0.1, (0, 1): -0.6, (0, 2): -0.3, (1, 0): 0.2, (2, 0): -0.3, (2, 1): -0.3}
    assert of_turn == pytest.approx(expected), "the mean is 0.3, of five rewards"


def test_the_ramp_of_a_penalty_ends_at_the_tasks_own_longest_answer() -> None:
    """Both answers of each group have the same tokens, of which max_tokens of one task is the number, and of the other twice that."""
    pair = trajectory(1.0, 4), trajectory(0.0, 4)
    groups = [replace(group(n, *pair), prompt=Prompt(f"{task}/train/0/0", "", (1,), "")) for n, task in enumerate(("short", "long"))]
    ramp, seen = PenaliseOverlong(penalty=0.5, ramp_tokens=2), list[float]()

    def noted(rewards: Tensor, _: Tensor) -> Tensor:
        seen.extend(rewards.tolist())
        return rewards

    pack_groups(groups, learner_version=5, advantage=noted, overlong=ramp, max_tokens={"short": 4, "long": 8})
    assert seen == [0.5, -0.5, 1.0, 0.0]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spans",
    [
        (VersionSpan(4, 0, 1),),  # too short
        (VersionSpan(4, 0, 1), VersionSpan(5, 0, 2)),  # overlap
        (VersionSpan(4, 1, 2),),  # gap
        (VersionSpan(4, 0, 3),),  # too long
        (VersionSpan(4, 0, 2), VersionSpan(5, 3, 4)),  # complete, then a gap
    ],
)
def test_spans_that_do_not_cover_the_response_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(DataError, match="version spans"):
        pack(group(1, trajectory(1.0), replace(trajectory(0.0), version_spans=spans)))


def test_tokens_of_weights_that_the_learner_does_not_have_yet_are_refused() -> None:
    """They would count as fresh. No engine may have such weights; of a generation that was withdrawn nothing is left in a queue."""
    with pytest.raises(DataError, match="sampled at version 6, but the learner is at 5"):
        pack(group(1, trajectory(1.0), replace(trajectory(0.0), version_spans=(VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)))))


def test_a_logprob_too_few_is_refused() -> None:
    with pytest.raises(DataError, match="1 logprobs for 2"):
        pack(group(1, trajectory(1.0), replace(trajectory(0.0), behavior_logprobs=logprobs_of([-1.0]))))


def test_an_estimator_that_divides_by_zero_is_refused() -> None:
    with pytest.raises(DataError, match="not finite"):
        pack_groups(
            [group(1, trajectory(1.0), trajectory(1.0))], learner_version=0, overlong=TrainOverlong(), max_tokens=LONGEST,
            advantage=lambda rewards, ids: (rewards - rewards.mean()) / rewards.std() * math.inf,
        )  # fmt: skip


def with_top(one: Trajectory, k: int, first: int) -> Trajectory:
    """Ids count up from `first`; the logprob of id i is -i / 8, which float32 holds exactly."""
    rows = [[(-(first + t * k + j) / 8, first + t * k + j) for j in range(k)] for t in range(len(one.response_ids))]
    return replace(one, top_logprobs=TopLogprobs.of(k, rows))


def test_top_k_logprobs_stand_at_their_tokens_also_after_pickling() -> None:
    pair = group(1, with_top(trajectory(1.0, 2), 2, 30), with_top(trajectory(0.0, 1), 2, 50))
    batch = pack(pickle.loads(pickle.dumps(pair)))
    assert batch.topk_ids is not None and batch.topk_logprobs is not None
    nothing = [[0, 0]] * 3
    assert batch.topk_ids.tolist() == [*nothing, [30, 31], [32, 33], *nothing, [50, 51]]
    assert batch.topk_logprobs.tolist() == [*nothing, [-3.75, -3.875], [-4.0, -4.125], *nothing, [-6.25, -6.375]]
    assert (batch.topk_ids.dtype, batch.topk_logprobs.dtype) == (torch.int64, torch.float32)
    assert batch.select([1]).topk_ids.tolist() == [*nothing, [50, 51]]
    assert pack(group(1, trajectory(1.0), trajectory(0.0))).topk_ids is None


def with_routes(one: Trajectory, first: int, *, experts: int = 8, positions: int | None = None) -> Trajectory:
    """Two layers, 2 experts a token: token t of the sequence goes to first + t and 0 in layer 0, to 1 and first + t in layer 1."""
    count = len(one.prompt_ids) + len(one.response_ids) - 1 if positions is None else positions
    ids = array("B" if experts <= 256 else "h", [x for t in range(count) for x in (first + t, 0, 1, first + t)])
    return replace(one, routed_experts=RoutedExperts(2, 2, ids))


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (512, torch.int16)])
def test_routes_stand_at_the_tokens_that_were_read(experts: int, dtype: torch.dtype) -> None:
    """The last token of a sequence wasn't; what stands there are k different experts, as a dispatcher needs them."""
    first = 100 if experts == 256 else 300
    pair = group(1, with_routes(trajectory(1.0, 2), first, experts=experts), with_routes(trajectory(0.0, 1), first, experts=experts))
    batch = pack(pickle.loads(pickle.dumps(pair)))
    assert batch.routed_experts is not None and batch.routed_experts.dtype is dtype
    routes = [[[first + t, 0], [1, first + t]] for t in range(4)]
    nowhere = [[0, 1], [0, 1]]
    assert batch.routed_experts.tolist() == [*routes, nowhere, *routes[:3], nowhere]
    assert batch.select([1]).routed_experts.tolist() == [*routes[:3], nowhere]  # type: ignore[union-attr]
    assert pack(group(1, trajectory(1.0), trajectory(0.0))).routed_experts is None


@pytest.mark.parametrize("other", ["none", "too short", "too long"])
def test_routes_of_some_tokens_alone_are_refused(other: str) -> None:
    one, two = with_routes(trajectory(1.0, 2), 2), trajectory(0.0, 2)
    if other != "none":
        two = with_routes(two, 2, positions=3 if other == "too short" else 5)
    with pytest.raises(DataError, match="routed experts"):
        pack(group(1, one, two))


@pytest.mark.parametrize("other", ["none", "another k", "too short"])
def test_top_k_logprobs_of_some_tokens_alone_are_refused(other: str) -> None:
    one, two = with_top(trajectory(1.0, 2), 2, 30), trajectory(0.0, 2)
    if other != "none":
        two = with_top(two, 3 if other == "another k" else 2, 50)
    if other == "too short":
        longer = ids_of((20, 21, 22)), logprobs_of([-0.5] * 3), (VersionSpan(4, 0, 3),)
        two = replace(two, response_ids=longer[0], behavior_logprobs=longer[1], version_spans=longer[2])
    with pytest.raises(DataError, match="top-K logprobs"):
        pack(group(1, one, two))
