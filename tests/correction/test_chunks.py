"""Where a batch is cut for the cache changes nothing: parts of a few sequences, chunks of a few tokens, selection on bits."""

import itertools
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import PRESETS, CorrectionConfig, correct, diagnose, policy_loss, settle
from evenkeel.correction import batch as batches
from evenkeel.correction.terms import segments
from tests.correction.fixtures import random_batch

NAMES = sorted(name for name in PRESETS if "topk" not in name)


def everything(batch, target, config):
    corrected = settle(correct(batch, config), target, config)
    decided = policy_loss(corrected, target, config).decided
    numbers = diagnose(batch, corrected, target, decided=decided, entropy=target.abs(), detailed=True)
    return numbers, torch.stack([corrected.importance_weights, corrected.keep_mask.double(), corrected.token_scale])


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_numbers_do_not_depend_on_the_cuts(name, monkeypatch):
    """Sums are added in another order: equal to the rounding of float64. Empty sequences, NaN and tokens without version included."""
    batch, target = random_batch(3, sequences=40, longest=30)
    offsets = torch.cat([batch.offsets[:5], batch.offsets[4:5], batch.offsets[5:], batch.offsets[-1:]])
    mu, versions = batch.behavior_logprobs.clone(), batch.weight_versions.clone()
    mu[::17], versions[::5] = torch.nan, -1
    group_ids = torch.cat([batch.group_ids, batch.group_ids[-2:]])
    batch = replace(batch, behavior_logprobs=mu, weight_versions=versions, offsets=offsets, group_ids=group_ids).validate()
    config = CorrectionConfig(preset=name)
    whole, tensors = everything(batch, target, config)
    monkeypatch.setattr(batches, "CPU_TOKENS", 50)
    for module in ("diagnostics.diagnose", "terms.divergence"):
        monkeypatch.setattr(f"evenkeel.correction.{module}.CPU_CHUNK", 33)
    cut, cut_tensors = everything(batch, target, config)
    assert set(cut) == set(whole)
    assert cut == pytest.approx(whole, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(cut_tensors, tensors, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 7, 50, 10**6])
def test_parts_are_whole_sequences_and_all_of_them(tokens, monkeypatch):
    monkeypatch.setattr(batches, "CPU_TOKENS", tokens)
    batch, _ = random_batch(4, sequences=20)
    cut = list(batches.batch_slices(batch))
    assert [part.tokens.start for part in cut] == [int(batch.offsets[part.sequences.start]) for part in cut]
    assert cut[0].tokens.start == 0 and cut[-1].tokens.stop == batch.num_tokens and cut[-1].sequences.stop == 20
    assert all(a.tokens.stop == b.tokens.start and a.sequences.stop == b.sequences.start for a, b in itertools.pairwise(cut))
    assert all(part.of_batch(batch).validate().num_tokens > 0 for part in cut)
    assert len(list(batches.batch_slices(batch, is_divisible=False))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_selection_on_bits_is_where(dtype):
    values = torch.tensor([1.5, -2.5, 0.0, 7.0]).to(dtype)
    if dtype.is_floating_point:
        values[1], values[3] = torch.nan, -torch.inf
    mask = torch.tensor([True, False, True, False])
    expected = torch.tensor([1.5, 0, 0, 0]).to(dtype)
    assert torch.equal(segments.masked(values, mask), expected)
    assert torch.equal(segments.masked(values[::2], mask[::2]), expected[::2])  # strided


def test_selection_keeps_the_gradient():
    values = torch.tensor([1.0, torch.inf], requires_grad=True)
    segments.masked(values, torch.tensor([True, False])).sum().backward()
    assert values.grad.tolist() == [1, 0]


def test_finite():
    """Also where the sum of finite numbers is not finite; and the very mask where nothing is to be taken out."""
    values, mask = torch.tensor([0.0, torch.nan, torch.inf, 3e38, 3e38, 1.0]), torch.tensor([True] * 5 + [False])
    assert segments.where_finite(mask, torch.ones(6), values).tolist() == [True, False, False, True, True, False]
    assert segments.where_finite(mask[3:], values[3:]).tolist() == [True, True, False]
    assert segments.where_finite(mask[:1], values[:1], torch.ones(1)).tolist() == [True]
