"""What a step did with its tokens, against plain Python: clips by side, the preset's own factor, the improvement bound, mean rho."""

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean as mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction import CorrectionConfig, correct, defer, diagnose, loss_metrics, policy_loss
from evenkeel.correction.batch import FinalDecision
from evenkeel.correction.diagnostics.diagnose import clipped_tokens
from evenkeel.correction.diagnostics.quantities import LEAST_EFFECTIVE_TOKENS
from tests.correction.fixtures import random_batch

MODERATE = settings(max_examples=25, deadline=None)


def tokens_of(batch, target):
    """One dict a trained token, of floats; `sequence` is its number."""
    rows = []
    for sequence, (start, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
        for j in range(start, end):
            if batch.loss_mask[j]:
                mu, prox, theta = (float(values[j]) for values in (batch.behavior_logprobs, batch.proximal_logprobs, target))
                rows.append({"mu": mu, "prox": prox, "theta": theta, "a": float(batch.advantages[j]), "id": int(batch.token_ids[j]),
                             "sequence": sequence, "place": j, "age": batch.learner_version - int(batch.weight_versions[j])})  # fmt: skip
    return rows


def trained(batch, target, config, way=correct):
    corrected = way(batch, config)
    decided = policy_loss(corrected, target, config).decided
    return corrected, decided, diagnose(batch if way is correct else corrected.batch, corrected, target, decided=decided,
                                        entropy=target.abs(), detailed=True)  # fmt: skip


@MODERATE
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 0.3, 1.5]))
def test_the_gap_against_plain_python(seed, spread):
    batch, target = random_batch(seed, sequences=8, spread=spread)
    numbers = diagnose(batch, correct(batch, CorrectionConfig(preset="ppo")), target)
    rows = tokens_of(batch, target)
    for prefix, chosen in (("", rows), ("mismatch_", [r for r in rows if r["age"] == 0]), ("stale_", [r for r in rows if r["age"] > 0])):
        if not chosen:
            assert f"{prefix}rho_mean" not in numbers
            continue
        x = [r["prox"] - r["mu"] for r in chosen]
        rho = [math.exp(v) for v in x]
        n, average = len(rho), mean(rho)
        error = math.sqrt(mean((v - average) ** 2 for v in rho) / n)
        by_hand = {
            "log_ratio_abs_mean": mean(abs(v) for v in x),
            "rho_mean": average,
            "rho_mean_error": error,
            "inverse_rho_mean": mean(1 / v for v in rho),
            "total_variation": mean(abs(v - 1) / 2 for v in rho),
            "probability_proximal_mean": mean(math.exp(r["prox"]) for r in chosen),
        }
        for name, value in by_hand.items():
            assert numbers[prefix + name] == pytest.approx(value, rel=1e-9, abs=1e-12), prefix + name
        effective = sum(rho) ** 2 / sum(v * v for v in rho)
        assert (f"{prefix}rho_mean_deviation" in numbers) == (effective >= LEAST_EFFECTIVE_TOKENS)
        if effective >= LEAST_EFFECTIVE_TOKENS:
            deviation = abs(average - 1) / max(error, 0.002)  # of fewer than 2500 tokens
            assert numbers[f"{prefix}rho_mean_deviation"] == pytest.approx(deviation, rel=1e-6, abs=1e-9)


@MODERATE
@given(seed=st.integers(0, 10**6))
def test_buckets_by_both_policies_hold_every_token_once(seed):
    batch, target = random_batch(seed, sequences=20)
    numbers = diagnose(batch, correct(batch, CorrectionConfig(preset="ppo")), target, detailed=True)
    edges = (0.0, 0.1, 0.25, 0.5, 0.75, 1.01)
    for prefix, policy in (("bucket", "prox"), ("bucket_behavior", "mu")):
        for k in range(5):
            rho = [math.exp(r["prox"] - r["mu"]) for r in tokens_of(batch, target) if edges[k] <= math.exp(r[policy]) < edges[k + 1]]
            assert numbers[f"{prefix}_tokens_{k}"] == len(rho)
            if rho:
                assert numbers[f"{prefix}_rho_mean_{k}"] == pytest.approx(mean(rho), rel=1e-9)
                assert numbers[f"{prefix}_rho_std_{k}"] == pytest.approx(math.sqrt(mean((v - mean(rho)) ** 2 for v in rho)), abs=1e-7)
        assert sum(numbers[f"{prefix}_tokens_{k}"] for k in range(5)) == int(batch.loss_mask.sum())


def softmax_sample(tokens=40_000, vocabulary=64, noise=0.3):
    """Logprobs (mu, prox) of tokens drawn from mu, where both are softmaxes of logits that differ by noise alone."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    mu = logits.log_softmax(1)
    prox = (logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)).log_softmax(1)
    ids = torch.multinomial(mu.exp(), 1, generator=generator)
    return mu.gather(1, ids).squeeze(1), prox.gather(1, ids).squeeze(1)


def one_sequence(mu, prox):
    batch, _ = random_batch(0)
    n = len(mu)
    return replace(
        batch, token_ids=torch.zeros(n, dtype=torch.int64), offsets=torch.tensor([0, n]), loss_mask=torch.ones(n, dtype=torch.bool),
        behavior_logprobs=mu, proximal_logprobs=prox, advantages=torch.ones(n, dtype=torch.float64), group_ids=torch.zeros(1).long(),
        weight_versions=torch.full((n,), 5, dtype=torch.int32), reference_logprobs=None, at_sampling_logprobs=None, turn_ids=None,
    ).validate()  # fmt: skip


def test_mean_rho_is_one_if_the_tokens_come_from_mu_and_not_if_they_come_from_another_policy():
    """Both policies are normalised: the expectation of rho is 1 whatever their distance. Top-p or a shift by one breaks that."""
    mu, prox = softmax_sample()
    config = CorrectionConfig(preset="ppo")
    fine = one_sequence(mu, prox)
    numbers = diagnose(fine, correct(fine, config))
    assert abs(numbers["rho_mean"] - 1) < 4 * numbers["rho_mean_error"] and numbers["rho_mean_deviation"] < 5
    renormalised = one_sequence((mu - 0.05).clamp(max=0), prox)  # mu reported over a set of tokens with 95 % of the mass, or the reverse
    assert diagnose(renormalised, correct(renormalised, config))["rho_mean_deviation"] > 5
    shifted = one_sequence(mu, prox.roll(1))
    off = diagnose(shifted, correct(shifted, config))
    assert off.get("rho_mean_deviation", 99) > 5 or off["ess_token"] < 0.05


def test_a_deviation_counts_at_most_2500_tokens():
    """40,000 tokens with a rho of 1.02 and a spread of 1/3: 12 standard errors of their own, but 3 of those of 2500 tokens."""
    spread, n = 1 / 3, 40_000
    rho = 1.02 + spread * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    batch = one_sequence(torch.full((n,), -2.0, dtype=torch.float64), -2.0 + rho.log())
    numbers = diagnose(batch, correct(batch, CorrectionConfig(preset="ppo")))
    assert 0.02 / numbers["rho_mean_error"] == pytest.approx(12, rel=1e-6)
    assert numbers["rho_mean_deviation"] == pytest.approx(3, rel=1e-6)


def test_noise_alone_tilts_the_buckets_in_opposite_ways():
    """What a reader could take for survival bias: no training, no stale token, only logits with noise."""
    mu, prox = softmax_sample(noise=0.6)
    batch = one_sequence(mu, prox)
    numbers = diagnose(batch, correct(batch, CorrectionConfig(preset="ppo")), detailed=True)

    def deviation(prefix, index):
        error = numbers[f"{prefix}_rho_std_{index}"] / math.sqrt(numbers[f"{prefix}_tokens_{index}"])
        return (numbers[f"{prefix}_rho_mean_{index}"] - 1) / error

    assert numbers["rho_mean_deviation"] < 5
    assert deviation("bucket", 0) < -5 and deviation("bucket", 3) > 5
    assert deviation("bucket_behavior", 0) > 3 and deviation("bucket_behavior", 3) < -3


def coefficient(row, name):
    """(factor on A grad log pi, whether the trust region stopped the token, the loss's own r) of four presets, from their formulas."""
    r, q = math.exp(row["theta"] - row["prox"]), math.exp(row["theta"] - row["mu"])
    if name == "a-3po":  # rho PPO(r) with log prox = log mu / d + (1 - 1/d) log theta; mu itself at staleness d of 0 and 1
        share = 1 / max(row["age"], 1)
        prox = share * row["mu"] + (1 - share) * row["theta"]
        r, rho = math.exp(row["theta"] - prox), math.exp(prox - row["mu"])
        clipped = (row["a"] > 0 and r > 1.2) or (row["a"] < 0 and r < 0.8)
        return (0.0 if clipped else r) * rho, clipped, r
    if name == "tis-token":  # min(rho, 2) times PPO's clip 0.8 .. 1.2 on r
        clipped = (row["a"] > 0 and r > 1.2) or (row["a"] < 0 and r < 0.8)
        return (0.0 if clipped else r) * min(math.exp(row["prox"] - row["mu"]), 2.0), clipped, r
    if name == "bypass":  # PPO on q; pi_prox is mu
        clipped = (row["a"] > 0 and q > 1.2) or (row["a"] < 0 and q < 0.8)
        return (0.0 if clipped else q), clipped, q
    change = math.exp(row["theta"]) - math.exp(row["mu"])  # dppo-binary-tv: |theta - mu| > 0.15 and moving out
    clipped = abs(change) > 0.15 and change * row["a"] > 0
    return (0.0 if clipped else q), clipped, q


@MODERATE
@given(seed=st.integers(0, 10**6), name=st.sampled_from(["tis-token", "bypass", "dppo-binary-tv", "a-3po"]), has_proximal=st.booleans())
def test_clips_by_side_and_the_presets_own_factor(seed, name, has_proximal):
    """Whether or not the batch has proximal logprobs that its preset doesn't read."""
    batch, target = random_batch(seed, sequences=10, spread=0.4, staleness=4)
    rows = tokens_of(batch, target)
    if name != "tis-token" and not has_proximal:
        batch = replace(batch, proximal_logprobs=None)
    config = CorrectionConfig(preset=name)
    _, decided, numbers = trained(batch, target, config)
    found = [(row, *coefficient(row, name)) for row in rows]
    for row, c, clipped, _ in found:
        weight = float(decided.importance_weights[row["place"]] * decided.coefficients[row["place"]])
        assert weight == pytest.approx(c, rel=1e-9, abs=1e-12) and bool(decided.is_clipped[row["place"]]) == clipped
    for sign, of in (("positive", 1), ("negative", -1)):
        side = [(row, clipped) for row, _, clipped, _ in found if row["a"] * of > 0]
        stopped = [row for row, clipped in side if clipped]
        if side:
            assert numbers[f"clipped_{sign}_share"] == pytest.approx(len(stopped) / len(side))
        assert (f"clipped_{sign}_probability_mean" in numbers) == bool(stopped)
        if stopped:
            assert numbers[f"clipped_{sign}_probability_mean"] == pytest.approx(mean(math.exp(row["mu"]) for row in stopped))
            assert numbers[f"clipped_{sign}_entropy_mean"] == pytest.approx(mean(abs(row["theta"]) for row in stopped))
        counts = Counter(row["id"] for row in stopped)
        assert clipped_tokens(batch, decided)[sign] == sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:50]
    phi = [c / r for _, c, _, r in found]
    assert numbers["effective_factor_mean"] == pytest.approx(mean(phi))
    assert numbers["effective_factor_std"] == pytest.approx(math.sqrt(mean((v - mean(phi)) ** 2 for v in phi)), abs=1e-7)
    assert numbers["effective_objective"] == pytest.approx(sum(row["a"] * (v - 1) for (row, *_), v in zip(found, phi, strict=True)))
    q = [math.exp(row["theta"] - row["mu"]) for row in rows]
    assert numbers["effective_bias"] == pytest.approx(sum(row["a"] * (c - v) for (row, c, *_), v in zip(found, q, strict=True)), abs=1e-9)


def test_rejected_tokens_have_factor_0_and_are_not_clipped():
    batch, target = random_batch(4, sequences=20, spread=0.5)
    config = CorrectionConfig(preset="mis-token")
    _, decided, numbers = trained(batch, target, config)
    rejected = batch.loss_mask & ~decided.keep_mask
    assert int(rejected.sum()) > 3 and bool((decided.coefficients[rejected] != 0).any())
    stopped = int((decided.keep_mask & decided.is_clipped).sum())
    sides = {sign: int((batch.loss_mask & chosen).sum()) for sign, chosen in
             (("positive", batch.advantages > 0), ("negative", batch.advantages < 0))}  # fmt: skip
    assert sum(numbers[f"clipped_{sign}_share"] * n for sign, n in sides.items()) == pytest.approx(stopped)
    clip_share = loss_metrics(policy_loss(correct(batch, config), target, config).partials, config)["clip_share"]
    assert clip_share == pytest.approx(stopped / int(batch.loss_mask.sum()))  # of trained tokens: rejection doesn't change what it is of
    phi = [float(decided.importance_weights[j] * decided.coefficients[j] * (batch.proximal_logprobs[j] - target[j]).exp())
           if decided.keep_mask[j] else 0.0 for j in batch.loss_mask.nonzero().flatten().tolist()]  # fmt: skip
    assert numbers["effective_factor_mean"] == pytest.approx(mean(phi))


def test_no_correction_on_policy_has_factor_1_and_no_spurious_objective():
    """Deferred, one optimizer step: r = 1 on every token; nothing clips, nothing is weighted."""
    batch, _ = random_batch(2)
    batch = replace(batch, behavior_logprobs=batch.proximal_logprobs)
    _, _, numbers = trained(batch, batch.behavior_logprobs, CorrectionConfig(preset="ppo"), defer)
    assert (numbers["effective_factor_mean"], numbers["effective_factor_std"]) == (1, 0)
    assert (numbers["effective_objective"], numbers["effective_bias"]) == (0, 0)


def test_a_clipped_sequence_counts_once():
    """GSPO stops whole sequences: their share, not that of their tokens."""
    batch, target = random_batch(6, sequences=12, spread=0.4)
    _, decided, numbers = trained(batch, target, CorrectionConfig(preset="gspo"))
    stopped = {row["sequence"] for row in tokens_of(batch, target) if decided.is_clipped[row["place"]]}
    assert 0 < len(stopped) < 12 and numbers["clipped_sequence_share"] == pytest.approx(len(stopped) / 12)


@MODERATE
@given(seed=st.integers(0, 10**6))
def test_the_improvement_bound_against_plain_python(seed):
    batch, target = random_batch(seed, sequences=7)
    numbers = diagnose(batch, correct(batch, CorrectionConfig(preset="ppo")), target)
    rows = tokens_of(batch, target)
    distance = [abs(math.exp(r["theta"] - r["mu"]) - 1) / 2 for r in rows]
    lengths, largest = Counter(r["sequence"] for r in rows), max(abs(r["a"]) for r in rows)
    longest = max(lengths.values())
    assert numbers["target_total_variation"] == pytest.approx(mean(distance))
    assert numbers["improvement_bound_linear"] == pytest.approx(4 * largest * sum(distance) / len(lengths))
    assert numbers["improvement_bound_quadratic"] == pytest.approx(2 * largest * longest * (longest - 1) * mean(distance) ** 2)
    assert numbers["improvement_bound"] == min(numbers["improvement_bound_linear"], numbers["improvement_bound_quadratic"])


def test_in_bypass_mismatch_is_from_the_tokens_before_the_first_update():
    """Four optimizer steps: the later tokens' forwards hold what the earlier steps changed. That is drift, under another name."""
    batch, _ = random_batch(3, sequences=40, staleness=0)
    true_mismatch = torch.full_like(batch.behavior_logprobs, 0.05)
    before = torch.zeros_like(batch.loss_mask)
    before[: int(batch.offsets[10])] = True
    target = batch.behavior_logprobs + true_mismatch + torch.where(before, 0.0, 0.3)
    batch = replace(batch, proximal_logprobs=None)
    corrected = correct(batch, CorrectionConfig(preset="bypass"))
    decided = FinalDecision(corrected.keep_mask, corrected.importance_weights, corrected.counts, before_update=before)
    numbers = diagnose(batch, corrected, target, decided=decided, detailed=True)
    k3 = math.exp(0.05) - 1 - 0.05
    first = int((batch.loss_mask & before).sum())
    assert numbers["mismatch_k3_kl"] == pytest.approx(k3) and numbers["k3_kl"] == pytest.approx(k3)
    assert numbers["mismatch_tokens"] == first and sum(numbers[f"bucket_tokens_{k}"] for k in range(5)) == first
    total = int(batch.loss_mask.sum())
    moved = math.exp(0.35) - 1 - 0.35
    assert numbers["drift_from_behavior_k3_kl"] == pytest.approx((first * k3 + (total - first) * moved) / total)
    assert "drift_k3_kl" not in numbers  # nobody knows the policy from which the batch started, on those tokens
    one_step = diagnose(batch, corrected, target, decided=replace(decided, before_update=None))
    assert one_step["mismatch_tokens"] == total and "drift_from_behavior_k3_kl" not in one_step


@pytest.mark.parametrize(("preset", "prefix", "base"), [("ppo", "batch_drift", "prox"), ("bypass", "batch_drift_from_behavior", "mu"),
                                                        ("a-3po", "batch_drift_from_behavior", "mu")])  # fmt: skip
def test_the_losss_drift_is_named_by_the_policy_that_it_starts_from(preset, prefix, base):
    batch, target = random_batch(9)
    rows = tokens_of(batch, target)
    config = CorrectionConfig(preset=preset)
    if preset != "ppo":
        batch = replace(batch, proximal_logprobs=None)
    metrics = loss_metrics(policy_loss(correct(batch, config), target, config).partials, config)
    x = [r["theta"] - r[base] for r in rows]
    assert {name for name in metrics if "drift" in name} == {f"{prefix}_k1_kl", f"{prefix}_k3_kl"}
    assert metrics[f"{prefix}_k3_kl"] == pytest.approx(mean(math.expm1(v) - v for v in x))


def test_two_criteria_of_one_label_both_count():
    """The shares of either, in the config's order: the second one must not overwrite the first."""
    batch, target = random_batch(11, sequences=20)
    config = CorrectionConfig(preset="ppo", rejection=[{"upper": 1.05}, {"lower": 0.9}])
    _, _, numbers = trained(batch, target, config)
    rho = [math.exp(r["prox"] - r["mu"]) for r in tokens_of(batch, target)]
    assert numbers["rejected_by_ratio_token_rho"] == pytest.approx(mean(v > 1.05 for v in rho))
    assert numbers["rejected_by_ratio_token_rho_2"] == pytest.approx(mean(v < 0.9 for v in rho))


def test_injected_noise_is_new_at_every_step():
    """Independent over steps, as Eq. 21-22 of objective-level hacking need it; the same again where a step is repeated."""
    batch, _ = random_batch(1, sequences=60)
    config = CorrectionConfig(preset="ppo", modulation={"noise_std": 0.2, "noise_seed": 3})
    first, again, later = (correct(replace(batch, learner_version=v), config).importance_weights for v in (5, 5, 6))
    assert torch.equal(first, again)
    correlation = float(torch.corrcoef(torch.stack([first, later]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(len(first))  # five standard errors of independent noise


def test_the_coefficient_is_the_gradient_of_the_loss():
    """Whatever the objective: d loss / d log pi = -scale x weight x coefficient x A on kept tokens."""
    batch, target = random_batch(12, sequences=15)
    for preset in ("grpo", "gspo", "gmpo", "ctpo", "sapo", "cispo", "minirl", "vespo", "topr", "ppo-dual-clip", "luspo", "rollout-is"):
        config = CorrectionConfig(preset=preset)
        corrected = correct(batch, config)
        point = target.clone().requires_grad_()
        out = policy_loss(corrected, point, config)
        out.loss.backward()
        decided = out.decided
        expected = -corrected.token_scale * decided.importance_weights * decided.coefficients * batch.advantages * decided.keep_mask
        torch.testing.assert_close(point.grad, expected, rtol=1e-10, atol=1e-14, msg=preset)
