"""Rollouts of several sequences: how these share the weight of theirs in the loss.

A branch is a sequence of its own from a place in another one: what stands before is read there, and trained where it was sampled. So where
a rollout's tokens are cut into sequences may not change the loss, unless its denominator counts sequences.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction import CorrectionConfig, DataError, PackedBatch, correct, policy_loss, shard_sums
from tests.correction.fixtures import flat_log, random_batch, worked_example

WHOLE = ["token_mean", "prompt_mean", "rollout_mean"]
"""Denominators that don't count sequences."""


def config_of(kind: str, count: str = "original") -> CorrectionConfig:
    penalty = 0.1 if count == "original" else 0.0  # with kept counts a sequence of which nothing is kept has none
    return CorrectionConfig(preset="mis-token", denominator={"kind": kind, "count": count}, kl={"coefficient": penalty, "estimator": "k3"})


def loss_and_gradient(batch: PackedBatch, target: torch.Tensor, config: CorrectionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = target.clone().requires_grad_()
    loss = policy_loss(correct(batch, config), leaf, config).loss
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def test_rollout_mean_weighs_rollouts_alike() -> None:
    """Rollouts {A, C} and {B}: (sum over 4 + 2 tokens / 6 + sum over 3 / 3) / 2."""
    config = CorrectionConfig(preset="ppo", denominator={"kind": "rollout_mean"})
    batch = worked_example(rollout_ids=torch.tensor([4, 9, 4]))
    theta = flat_log(((0.55, 0.58, 0.03, 0.80), (0.54, 0.18, 0.18), (0.612, 0.693)))
    base = [-1.1, -1.16, -1.2, -1 / 1.1, 0.8, 0.8, 0.8, -0.5, -0.5]
    expected = ((sum(base[:4]) + sum(base[7:])) / 6 + sum(base[4:7]) / 3) / 2
    assert float(policy_loss(correct(batch, config), theta, config).loss) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.sampled_from(["original", "kept"]), ids=st.permutations(range(12)))
def test_a_rollout_of_one_sequence_is_as_before_to_the_last_bit(seed: int, count: str, ids: list[int]) -> None:
    """With ids of their own, or with none; and rollout_mean is sequence_mean then."""
    batch, target = random_batch(seed)
    for kind in ("token_mean", "sequence_mean", "prompt_mean", "rollout_mean"):
        config = config_of(kind, count)
        found = [loss_and_gradient(replace(batch, rollout_ids=of), target, config) for of in (None, torch.tensor(ids))]
        if kind == "rollout_mean":
            found.append(loss_and_gradient(batch, target, config_of("sequence_mean", count)))
        for loss, gradient in found[1:]:
            assert torch.equal(loss, found[0][0]) and torch.equal(gradient, found[0][1])


def cut_at(batch: PackedBatch, target: torch.Tensor, cuts: list[tuple[int, int]]) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """The batch with sequences cut in two: what is sampled from a place on is a branch's, which reads all that stands before it.

    Args: cuts: sequences, and their places.
    Returns: the batch, its target logprobs, and for each token the token of the given batch that it is.
    """
    at = dict(cuts)
    pieces, masks, rollouts, groups = [], [], [], []
    for i, (start, end) in enumerate(zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)):
        place = start + at[i] % (end - start) if i in at else end
        for own, first, last in ((range(start, place), start, place), (range(start, end), place, end)):
            if first < last:
                pieces.append(torch.tensor(own))
                masks.append(batch.loss_mask[own] & (torch.tensor(own) >= first))
                rollouts.append(i)
                groups.append(int(batch.group_ids[i]))
    index = torch.cat(pieces)
    changes = {name: getattr(batch, name)[index] for name in PackedBatch.__slots__ if _is_by_token(batch, name)}
    offsets = torch.tensor([0, *map(len, pieces)]).cumsum(0)
    rest = {"offsets": offsets, "loss_mask": torch.cat(masks), "group_ids": torch.tensor(groups), "rollout_ids": torch.tensor(rollouts)}
    return replace(batch, **changes | rest).validate(), target[index], index


def _is_by_token(batch: PackedBatch, name: str) -> bool:
    value = getattr(batch, name)
    return isinstance(value, torch.Tensor) and name not in ("offsets", "group_ids", "rollout_ids")


CUTS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 8)), min_size=1, max_size=12, unique_by=lambda cut: cut[0])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.sampled_from(["original", "kept"]), cuts=CUTS)
def test_where_a_rollout_is_cut_into_sequences_doesn_t_change_its_loss(seed: int, count: str, cuts: list[tuple[int, int]]) -> None:
    """Weights and rejection by token: the loss, and each token's gradient summed over the sequences that it is in."""
    batch, target = random_batch(seed)
    branched, of_branched, index = cut_at(batch, target, cuts)
    for kind in WHOLE:
        config = config_of(kind, count)
        loss, gradient = loss_and_gradient(batch, target, config)
        cut_loss, cut_gradient = loss_and_gradient(branched, of_branched, config)
        torch.testing.assert_close(cut_loss, loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.zeros_like(gradient).index_add_(0, index, cut_gradient), gradient, rtol=1e-12, atol=1e-14)


def test_a_denominator_that_counts_sequences_says_so() -> None:
    """A rollout of 4 trained tokens cut in the middle, beside one of 2: 1 / (4 * 2) a token before; 1 / (2 * 3) after, of either half."""
    batch = worked_example(loss_mask=torch.tensor([1, 1, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool))
    branched, _, _ = cut_at(batch, batch.behavior_logprobs, [(0, 2)])
    config = CorrectionConfig(preset="ppo", denominator={"kind": "sequence_mean"})
    scales = [correct(one, config).token_scale[one.loss_mask].tolist() for one in (batch, branched)]
    assert scales == [[1 / 8] * 4 + [1 / 4] * 2, [1 / 6] * 6]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_shards_with_whole_rollouts_are_the_whole_batch(seed: int, ranks: list[int]) -> None:
    """Rollouts of two sequences each, which don't lie side by side."""
    batch, _ = random_batch(seed)
    batch = replace(batch, rollout_ids=torch.arange(12) % 6)
    for count in ("original", "kept"):
        config = config_of("rollout_mean", count)
        shards = [[k for k in range(12) if ranks[k % 6] == rank] for rank in range(3)]
        totals = sum(shard_sums(batch.select(shard), config) for shard in shards)
        whole = correct(batch, config)
        for shard in shards:
            found = correct(batch.select(shard), config, totals=totals)
            torch.testing.assert_close(found.token_scale, whole.select(shard).token_scale, rtol=1e-12, atol=0)


def test_an_id_for_each_sequence() -> None:
    with pytest.raises(DataError, match=r"PackedBatch.rollout_ids has shape \(2,\); it must be \[3\]"):
        worked_example(rollout_ids=torch.arange(2))
