"""Why a token was trained as it was: against counts that other code makes, and against plain Python where criteria overlap."""

import math
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import PRESETS, CorrectionConfig, correct, defer, policy_loss, settle
from evenkeel.correction.diagnostics.reasons import NOT_FINITE, OTHER, token_reasons
from tests.correction.fixtures import random_batch

NAMES = sorted(name for name in PRESETS if "topk" not in name)


def reasons_of(batch, target, config, way=correct):
    corrected = settle(way(batch, config), target, config)
    decided = policy_loss(corrected, target, config).decided
    return token_reasons(corrected, target, decided), corrected, decided


@pytest.mark.parametrize("preset", NAMES)
def test_each_dropped_token_has_a_reason_and_no_other_has_one(preset):
    batch, target = random_batch(5, sequences=40, spread=0.8)
    config = CorrectionConfig(preset=preset)
    reasons, corrected, decided = reasons_of(batch, target, config)
    dropped = batch.loss_mask & ~decided.keep_mask
    assert torch.equal(reasons.dropped_by > 0, dropped)
    named = {reasons.labels[k - 1]: int((reasons.dropped_by == k).sum()) for k in reasons.dropped_by[dropped].unique().tolist()}
    counts = (corrected.counts + decided.counts).by_criterion()
    if len(counts) == 1 and config.covariance is None:
        ((label, (_, by_it)),) = counts.items()
        assert named == ({label: by_it} if by_it else {}), "one criterion has dropped them all"
    assert NOT_FINITE not in named and (OTHER not in named or config.covariance is not None)
    if config.importance.level == "token":
        units = (corrected.counts + decided.counts).by_unit()
        assert int(reasons.is_cut.sum()) == units["truncated"] + units["masked"]


def test_of_several_criteria_the_first_in_the_settings_order_is_named():
    """rho of single tokens above 2 or below 1/2, and then products of sequences above 3: by hand, from the same logprobs."""
    criteria = [{"upper": 2.0, "lower": 0.5}, {"level": "sequence", "upper": 3.0}]
    config = CorrectionConfig.model_validate({"rejection": criteria, "importance": {"mode": "truncate", "upper": 1.5}})
    batch, target = random_batch(11, sequences=40, spread=0.6)
    reasons, *_ = reasons_of(batch, target, config)
    assert reasons.labels == ("ratio_token_rho", "ratio_sequence_rho", NOT_FINITE, OTHER)
    seen = set()
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        x = [float(batch.proximal_logprobs[j] - batch.behavior_logprobs[j]) for j in range(start, end)]
        trained = batch.loss_mask[start:end].tolist()
        product = math.exp(sum(v for v, is_trained in zip(x, trained, strict=True) if is_trained))
        for j, v, is_trained in zip(range(start, end), x, trained, strict=True):
            expected = 0 if not is_trained else 1 if not 0.5 <= math.exp(v) <= 2 else 2 if product > 3 else 0
            assert int(reasons.dropped_by[j]) == expected
            assert bool(reasons.is_cut[j]) == (is_trained and math.exp(v) > 1.5)
            seen.add(expected)
    assert seen == {0, 1, 2}


def test_weights_of_sequences_are_cut_by_the_sequence_s_advantage():
    """only_negative with advantages by turn: a token of a good turn has its sequence's weight, too, cut where the mean is negative."""
    part = {"mode": "truncate", "level": "sequence", "upper": 1.1, "only_negative": True}
    config = CorrectionConfig.model_validate({"importance": part})
    batch, target = random_batch(5, sequences=40, spread=0.8)
    batch = replace(batch, advantages=torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)), advantages_by="own")
    reasons, corrected, decided = reasons_of(batch, target, config)
    cut = 0
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        of_sequence = reasons.is_cut[start:end][batch.loss_mask[start:end]]
        assert bool(of_sequence.all()) == bool(of_sequence.any())
        cut += bool(of_sequence.any())
    assert cut == (corrected.counts + decided.counts).by_unit()["truncated"] > 0


def test_some_sequences_have_the_reasons_that_they_have_in_the_whole_batch():
    """What people look at is a part of the batch."""
    batch, target = random_batch(3, sequences=30, spread=0.8)
    config = CorrectionConfig(preset="mis-full")
    reasons, corrected, decided = reasons_of(batch, target, config, defer)
    picked = [4, 9, 20]
    index = batch.token_index(picked)
    share = replace(decided, keep_mask=decided.keep_mask[index], importance_weights=decided.importance_weights[index])
    of_part = token_reasons(corrected.select(picked), target[index], share)
    assert torch.equal(of_part.dropped_by, reasons.dropped_by[index]) and torch.equal(of_part.is_cut, reasons.is_cut[index])
    assert int((reasons.dropped_by > 0).sum()) > 10


def test_a_number_that_is_not_finite_takes_its_sequence_along_where_that_is_judged_as_a_whole():
    batch, target = random_batch(3, sequences=6, spread=0.01)
    first = int(batch.loss_mask.nonzero()[0])
    logprobs = batch.behavior_logprobs.clone()
    logprobs[first] = -math.inf
    broken = replace(batch, behavior_logprobs=logprobs)
    end = int(batch.offsets[1])
    for level, expected in (("token", 1), ("sequence", int(batch.loss_mask[:end].sum()))):
        config = CorrectionConfig.model_validate({"rejection": [{"level": level, "upper": 50.0}]})
        with pytest.warns(UserWarning, match="not finite"):
            reasons, *_ = reasons_of(broken, target, config)
        assert int((reasons.dropped_by > 0).sum()) == expected
        assert {reasons.labels[k - 1] for k in reasons.dropped_by.unique().tolist() if k} == {NOT_FINITE}
    config = CorrectionConfig.model_validate({"rejection": [{"level": "sequence", "upper": 0.5}]})  # every sequence is outside
    with pytest.warns(UserWarning, match="not finite"):
        reasons, *_ = reasons_of(broken, target, config)
    named = [reasons.labels[k - 1] for k in reasons.dropped_by[:end][batch.loss_mask[:end]].tolist()]
    assert named == [NOT_FINITE] + ["ratio_sequence_rho"] * (len(named) - 1), "what is wrong with itself comes before what takes it along"
