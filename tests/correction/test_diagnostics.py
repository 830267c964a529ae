"""The diagnostics of the worked example, against plain Python and the printed figures; and which tokens each number is from."""

import math
import statistics
from dataclasses import replace
from statistics import fmean as mean

import pytest
import torch

from evenkeel.correction import DIAGNOSTIC_FAMILIES, DIAGNOSTICS, CorrectionConfig, correct, defer, diagnose, policy_loss
from evenkeel.correction.errors import DataError
from tests.correction.fixtures import MU, PROX, THETA, flat_log, random_batch, worked_example

MU_FLAT, PROX_FLAT = [p for row in MU for p in row], [p for row in PROX for p in row]
RHO = [p / m for p, m in zip(PROX_FLAT, MU_FLAT, strict=True)]


def numbers(preset="tis-token", batch=None, target=None, way=correct, **overrides):
    config = CorrectionConfig(preset=preset, **overrides)
    batch = worked_example() if batch is None else batch
    corrected = way(batch, config)
    decided = None if target is None else policy_loss(corrected, target, config).decided
    return diagnose(batch, corrected, target, decided=decided, detailed=True)


def perplexities(rows):
    return [math.exp(-mean(math.log(p) for p in row)) for row in rows]


def test_figures_of_the_worked_example():
    products = [math.prod(p / m for p, m in zip(a, b, strict=True)) for a, b in zip(PROX, MU, strict=True)]
    ratio = mean(a / b for a, b in zip(perplexities(PROX), perplexities(MU), strict=True))
    expected = {
        "k1_kl": (mean(-math.log(x) for x in RHO), -0.052190),
        "k2_kl": (mean(math.log(x) ** 2 / 2 for x in RHO), 0.330172),
        "k3_kl": (mean(x - 1 - math.log(x) for x in RHO), 0.454477),
        "chi2_token": (mean(x * x for x in RHO) - 1, 3.879222),
        "chi2_sequence": (mean(x * x for x in products) - 1, 10.424307),
        "rho_std": (statistics.pstdev(RHO), 1.615295),
        "rho_max": (max(RHO), 6.0),
        "rho_min": (min(RHO), 0.2),
        "pearson": (statistics.correlation(MU_FLAT, PROX_FLAT), 0.922360),
        "ess_token": (sum(RHO) ** 2 / (9 * sum(x * x for x in RHO)), 0.465247),
        "ess_sequence": (sum(products) ** 2 / (3 * sum(x * x for x in products)), 0.482686),
        "perplexity_proximal": (mean(perplexities(PROX)), 2.700056),
        "perplexity_behavior": (mean(perplexities(MU)), 3.054080),
        "perplexity_ratio": (ratio, 0.977970),
        "importance_weight_ess": (None, 0.852417),
        "probability_gap_mean": (mean(abs(p - m) for p, m in zip(PROX_FLAT, MU_FLAT, strict=True)), None),
        "log_ratio_abs_max": (max(abs(math.log(x)) for x in RHO), None),
        "truncated_share": (1 / 9, None),
        "spurious_objective": (1.0, 1.0),
        "log_ratio_quantile_50": (statistics.median(math.log(x) for x in RHO), None),
    }
    measured = numbers()
    for name, (by_hand, figure) in expected.items():
        assert figure is None or by_hand is None or by_hand == pytest.approx(figure, abs=1.5e-6), name
        assert measured[name] == pytest.approx(figure if by_hand is None else by_hand, abs=1.5e-6), name


def test_buckets_by_proximal_probability():
    measured = numbers()
    means = [0.2, 1.2, 6.0, mean(RHO[k] for k in (0, 1, 4, 7, 8)), 1.1]
    assert [measured[f"bucket_rho_mean_{k}"] for k in range(5)] == pytest.approx(means)
    assert means[3] == pytest.approx(1.012)


def test_shares_by_criterion_and_sign():
    measured = numbers("mis-full")
    assert measured["kept_share"] == pytest.approx(7 / 9)
    assert measured["rejected_by_ratio_token_rho"] == pytest.approx(2 / 9)
    assert measured["rejected_by_veto"] == 0
    assert measured["rejected_positive_share"] == pytest.approx(1 / 6) and measured["rejected_negative_share"] == pytest.approx(1 / 3)
    assert measured["rejected_probability_mean"] == pytest.approx((0.02 + 0.30) / 2)
    masked = numbers("icepop")  # A3, of positive advantage, and B3, of negative
    assert masked["masked_share"] == pytest.approx(2 / 9)
    assert masked["masked_positive_share"] == masked["masked_negative_share"] == pytest.approx(1 / 9)
    truncated = numbers("tis-token")  # B3 alone
    assert (truncated["truncated_positive_share"], truncated["truncated_negative_share"]) == (0, pytest.approx(1 / 9))
    assert numbers("tis-sequence")["truncated_negative_share"] == pytest.approx(1 / 3)  # B, by its product of 5.76
    assert numbers("mis-sequence")["rejected_sequence_share"] == pytest.approx(2 / 3)


def test_late_parts_are_counted_once_the_target_is_known():
    target = flat_log(THETA)
    assert numbers("rollout-is")["rejected_share"] == 0
    assert numbers("rollout-is", target=target)["rejected_share"] == pytest.approx(4 / 9)
    deferred = numbers("mis-token", worked_example(proximal_logprobs=None), flat_log(PROX), defer)
    staged = numbers("mis-token", target=flat_log(PROX))
    assert deferred["rejected_share"] == staged["rejected_share"] == pytest.approx(2 / 9)
    assert deferred["truncated_share"] == staged["truncated_share"]
    assert deferred["k3_kl"] == pytest.approx(staged["k3_kl"]) and "drift_k3_kl" not in deferred


def test_target_and_bad_updates():
    target = flat_log(THETA)
    measured = numbers(target=target)
    q = [t / m for a, b in zip(THETA, MU, strict=True) for t, m in zip(a, b, strict=True)]
    r = [t / p for a, b in zip(THETA, PROX, strict=True) for t, p in zip(a, b, strict=True)]
    assert measured["target_k2_kl"] == pytest.approx(mean(math.log(x) ** 2 / 2 for x in q))
    assert measured["target_k3_kl"] == pytest.approx(mean(x - 1 - math.log(x) for x in q))
    assert measured["drift_k3_kl"] == pytest.approx(mean(x - 1 - math.log(x) for x in r))
    assert measured["bad_update_share"] == 0
    target[4] = math.log(0.3)  # B1: mu 0.9, A < 0
    assert numbers(target=target)["bad_update_share"] == pytest.approx(1 / 9)


def test_mismatch_is_from_fresh_tokens_and_stale_from_the_others():
    versions = torch.tensor([3, 3, 2, 2, 3, 3, 3, 1, 1], dtype=torch.int32)
    measured = numbers(batch=worked_example(weight_versions=versions, learner_version=3))
    fresh = [x for x, v in zip(RHO, versions.tolist(), strict=True) if v == 3]
    stale = [x for x, v in zip(RHO, versions.tolist(), strict=True) if v < 3]
    assert measured["mismatch_k3_kl"] == pytest.approx(mean(x - 1 - math.log(x) for x in fresh))
    assert measured["stale_k3_kl"] == pytest.approx(mean(x - 1 - math.log(x) for x in stale))
    assert (measured["mismatch_tokens"], measured["stale_tokens"], measured["tokens"]) == (5, 4, 9)
    all_stale = numbers(batch=worked_example(learner_version=3))
    assert not any(name.startswith("mismatch_") for name in all_stale)  # absent, not 0


def test_tokens_of_weights_that_the_learner_has_not_made_are_refused():
    """They would count as fresh. The prompt's tokens, which no weights sampled, are of version -1."""
    versions = torch.tensor([-1, -1, 2, 2, 3, 3, 3, 4, 1], dtype=torch.int32)
    assert worked_example(weight_versions=versions, learner_version=4).num_tokens == 9
    with pytest.raises(DataError, match=r"weight_versions reach 4, and learner_version is 3: .* Set learner_version"):
        worked_example(weight_versions=versions, learner_version=3)


def test_staleness_is_in_flight_plus_in_queue():
    """Sequence A: versions 1 1 2 3, trained at 5: in the queue 2, in flight 2 2 1 0. B waited 1 update, C none."""
    versions = torch.tensor([1, 1, 2, 3, 4, 4, 4, 5, 5], dtype=torch.int32)
    measured = numbers(batch=worked_example(weight_versions=versions, learner_version=5))
    assert measured["staleness_mean"] == pytest.approx((4 + 4 + 3 + 2 + 1 + 1 + 1) / 9)
    assert measured["staleness_max"] == 4
    assert measured["staleness_in_queue_mean"] == pytest.approx((2 * 4 + 3) / 9)
    assert measured["staleness_in_flight_mean"] == pytest.approx((2 + 2 + 1) / 9)
    assert [measured[f"staleness_share_{k}"] for k in range(5)] == pytest.approx([2 / 9, 3 / 9, 1 / 9, 1 / 9, 2 / 9])
    assert measured["mixed_version_share"] == pytest.approx(1 / 3)


def test_small_gaps_keep_their_digits():
    """Log ratios of 1e-6: k3 is 5e-13, which 1 - x arithmetic in float32 would lose."""
    batch = worked_example()
    batch = replace(batch, proximal_logprobs=batch.behavior_logprobs + 1e-6)
    assert numbers(batch=batch)["k3_kl"] == pytest.approx(5e-13, rel=1e-5)


def test_every_number_is_documented():
    batch, target = random_batch(1)
    names = set()
    for preset in ("mis-full", "icepop", "bypass", "rollout-is"):
        names |= set(numbers(preset, batch, target))
    known = {n for n in names if n in DIAGNOSTICS or any(n.startswith(family) for family in DIAGNOSTIC_FAMILIES)}
    assert names == known
    assert set(diagnose(batch, correct(batch, CorrectionConfig()))) <= names


def test_what_a_top_k_criterion_drops_is_what_the_loss_dropped():
    """The target's top-K table never leaves the learner; its decision does."""
    batch, target = random_batch(5, topk=4)
    table = batch.topk_logprobs + 0.8 * torch.randn(batch.topk_logprobs.shape, generator=torch.Generator().manual_seed(6)).double()
    config = CorrectionConfig(preset="bypass", topk=4, rejection=[{"statistic": "topk_tv", "ratio": "q", "upper": 0.1}])
    corrected = correct(batch, config)
    early = diagnose(batch, corrected, target)
    trained = policy_loss(corrected, target, config, target_topk_logprobs=table)
    seen = diagnose(batch, corrected, target, decided=trained.decided)
    kept = int(trained.decided.keep_mask.sum()) / int(batch.loss_mask.sum())
    assert 0.1 < kept < 0.9 and early["rejected_share"] == 0
    assert seen["kept_share"] == kept and seen["rejected_by_topk_tv_token_q"] == pytest.approx(1 - kept)


def test_numbers_of_a_batch_are_those_of_its_micro_batches_put_together():
    """What each micro-batch decided, added up: an early criterion, a late one, the veto and late weights."""
    batch, target = random_batch(8, sequences=20)
    config = CorrectionConfig(
        objective={"kind": "score", "ratio": None},
        importance={"mode": "truncate", "ratio": "q", "upper": 1.2},
        rejection=[{"lower": 0.7, "upper": 1.4}, {"statistic": "k3", "ratio": "q", "level": "sequence", "upper": 0.6}],
        veto={"ratio": "q", "lower": 0.5},
    )
    corrected = correct(batch, config)
    whole = policy_loss(corrected, target, config).decided
    split = [[3, 0, 7], list(range(8, 20)), [1, 2], [4, 5, 6]]
    parts = [policy_loss(corrected.select(part), target[batch.token_index(part)], config).decided for part in split]
    keep, weights = torch.zeros_like(whole.keep_mask), torch.zeros_like(whole.importance_weights)
    for sequences, decided in zip(split, parts, strict=True):
        index = batch.token_index(sequences)
        keep[index], weights[index] = decided.keep_mask, decided.importance_weights
    counts = parts[0].counts + parts[1].counts + parts[2].counts + parts[3].counts
    assert torch.equal(counts.values, whole.counts.values)
    joined = diagnose(batch, corrected, target, decided=replace(whole, keep_mask=keep, importance_weights=weights, counts=counts))
    assert joined == diagnose(batch, corrected, target, decided=whole)
    labels = ("ratio_token_rho", "k3_sequence_q", "veto")
    assert all(0 < joined[f"rejected_by_{label}"] < 1 for label in labels) and joined["truncated_share"] > 0


def test_each_criterion_is_decided_in_one_stage():
    """The early count is the service's, the late one the learner's: no stage counts what the other did, and their sum is all."""
    batch, target = random_batch(8, sequences=20)
    criteria = [{"upper": 1.4}, {"statistic": "k3", "ratio": "q", "upper": 0.1}]
    config = CorrectionConfig(preset="bypass", proximal="recompute", rejection=criteria)
    corrected = correct(batch, config)
    late = policy_loss(corrected, target, config).decided.counts
    tokens = int(batch.loss_mask.sum())
    assert corrected.counts.by_criterion().keys() == {"ratio_token_rho"} and late.by_criterion().keys() == {"k3_token_q"}
    rho = (batch.proximal_logprobs - batch.behavior_logprobs).exp()[batch.loss_mask]
    assert (corrected.counts + late).by_criterion()["ratio_token_rho"] == (tokens, int((rho > 1.4).sum()))
