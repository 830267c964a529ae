"""Groups to a packed batch: closed forms of advantages, masks, versions and overlong penalties."""

from __future__ import annotations

import math
import pickle
from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import DataError
from evenkeel.rollout.config import MaskOverlong, OverlongConfig, PenaliseOverlong, TrainOverlong
from evenkeel.rollout.packing import overlong_penalty, pack_groups
from evenkeel.rollout.trajectory import (
    AnswerPlace,
    FinishReason,
    Group,
    Prompt,
    RoutedExperts,
    TopLogprobs,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)

PROMPT_IDS = (7, 8, 9)
MAX_TOKENS = 6


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
    return pack_groups(groups, learner_version=5, advantage=centred, overlong=overlong or TrainOverlong(), max_tokens=MAX_TOKENS).batch


def test_two_sequences_lie_end_to_end_with_their_values_at_their_own_tokens() -> None:
    first = replace(trajectory(1.0, 2), version_spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)))
    batch = pack_groups(
        [group(11, first, trajectory(0.0, 1))],
        learner_version=5, advantage=centred, overlong=TrainOverlong(), max_tokens=MAX_TOKENS, temperature=0.8,
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
        learner_version=5, advantage=centred, overlong=TrainOverlong(), max_tokens=MAX_TOKENS,
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
    packed = pack_groups(groups, learner_version=5, advantage=centred, overlong=MaskOverlong(), max_tokens=MAX_TOKENS)
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
            [group(1, trajectory(1.0), trajectory(1.0))], learner_version=0, overlong=TrainOverlong(), max_tokens=MAX_TOKENS,
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
