"""Every number about the gap between the policies, of a whole batch: true extremes, sums reduced once, float64 with expm1.

Behaviour to proximal on all tokens is mismatch and staleness together; names that begin with `mismatch_` are from tokens of
staleness 0 alone. Where the batch has no proximal logprobs (deferred, bypass, interpolate) the target's stand in for them: with
one optimizer step per batch they are the same policy. What has no tokens is absent, not 0. `DIAGNOSTICS` says what each number is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.batch import CorrectedBatch, PackedBatch
from correction.config import CorrectionConfig
from correction.decision import Scene, Verdict, decide, make_scene, unit_weights
from correction.errors import DataError
from correction.importance import WeightMode
from correction.loss import training_scene
from correction.ratios import LOG_RATIO_LIMIT, Logprobs, aggregate_log_ratio, bounded_exp
from correction.segments import Level, Levels, Segments
from correction.sense import effective_ratio, importance_is_late
from correction.staleness import is_mixed, split_staleness, token_staleness

BUCKET_EDGES = (0.1, 0.25, 0.5, 0.75)
"""Edges of the proximal probability in `bucket_`; the paper prints its own only in a figure."""
PERCENTS = (1, 10, 50, 90, 99)
BAD_UPDATE = 0.5
"""mu - pi of a token with negative advantage from which an update is called bad: Trust Region (arXiv 2602.04879), sec. 5.3."""

GAP = {
    "k1_kl": "KL(behaviour || proximal), estimator -log rho (nats)",
    "k2_kl": "KL(behaviour || proximal), estimator (log rho)^2 / 2 (nats)",
    "k3_kl": "KL(behaviour || proximal), estimator rho - 1 - log rho (nats)",
    "chi2_token": "mean of rho^2, minus 1",
    "log_ratio_mean": "mean of log rho (nats)",
    "log_ratio_std": "standard deviation of log rho (nats)",
    "log_ratio_abs_max": "largest |log rho| (nats)",
    "rho_std": "standard deviation of rho: 'mismatch' in the paper on objective-level hacking",
    "rho_max": "largest rho",
    "rho_min": "smallest rho",
    "probability_gap_mean": "mean |pi_prox - mu| of the sampled token",
    "pearson": "correlation of pi_prox and mu over sampled tokens",
    "ess_token": "effective sample size of the raw rho, share of the tokens",
    "tokens": "tokens that these numbers are from",
}
"""Numbers of one set of tokens: all; `mismatch_`, staleness 0; `stale_`, older."""

DIAGNOSTICS = {
    **GAP,
    **{f"mismatch_{name}": f"{text}; tokens of staleness 0" for name, text in GAP.items()},
    **{f"stale_{name}": f"{text}; tokens of staleness 1 and more" for name, text in GAP.items()},
    "chi2_sequence": "mean of the squared product of rho over a sequence, minus 1",
    "ess_sequence": "effective sample size of the products of rho, share of the sequences, each counted once",
    "perplexity_behavior": "mean over sequences of exp(-mean log mu)",
    "perplexity_proximal": "mean over sequences of exp(-mean log pi_prox)",
    "perplexity_ratio": "mean over sequences of perplexity under pi_prox / under mu",
    "target_k1_kl": "KL(behaviour || target), estimator k1 (nats)",
    "target_k3_kl": "KL(behaviour || target), estimator k3 (nats)",
    "target_rho_max": "largest target / behaviour",
    "drift_k3_kl": "KL(proximal || target), estimator k3 (nats); needs recomputed proximal logprobs",
    "bad_update_fraction": "tokens with negative advantage and mu - pi >= 0.5",
    "broken_tokens": "tokens of the loss mask with a value that is not finite",
    "kept_fraction": "tokens that rejection and veto left",
    "rejected_fraction": "tokens dropped by rejection, veto or not being finite",
    "rejected_fraction_positive": "the same, among tokens of positive advantage",
    "rejected_fraction_negative": "the same, among tokens of negative advantage",
    "rejected_sequence_fraction": "sequences of which no token is left",
    "rejected_probability_mean": "mean pi_prox of the dropped tokens",
    "rejected_entropy_mean": "mean entropy of the target at the dropped tokens (nats)",
    "truncated_fraction": "units whose importance weight was cut to a bound",
    "masked_fraction": "units whose importance weight was set to 0",
    "importance_weight_mean": "mean importance weight of the kept tokens, normalised",
    "importance_weight_max": "largest importance weight of the kept tokens",
    "importance_weight_ess": "effective sample size of these weights, share of the kept tokens",
    "staleness_mean": "mean staleness of the trained tokens (versions)",
    "staleness_max": "largest staleness (versions)",
    "staleness_in_flight_mean": "updates while the rest of the sequence was sampled (versions)",
    "staleness_in_queue_mean": "updates between the last token and this step (versions)",
    "mixed_version_fraction": "sequences with tokens of more than one version",
    "spurious_objective": "J: sum of A (phi - 1) with phi = 2 under pi_prox 0.1 (objective-level hacking, Eq. 23)",
}
"""Name and meaning of each number. `diagnose` also gives the families in DIAGNOSTIC_FAMILIES."""

DIAGNOSTIC_FAMILIES = {
    "rejected_by_": "tokens outside one criterion, by its label, or `veto`",
    "staleness_fraction_": "trained tokens of this staleness",
    "staleness_in_flight_fraction_": "trained tokens with so many updates in flight",
    "staleness_in_queue_fraction_": "trained tokens with so many updates in the queue",
    "log_ratio_quantile_": "quantile of log rho (nats)",
    "bucket_rho_mean_": "mean rho of tokens in a bucket of pi_prox",
    "bucket_rho_std_": "standard deviation of rho of tokens in a bucket of pi_prox",
}


@dataclass(frozen=True, slots=True)
class _Gap:
    """Log ratio and probabilities of a set of n tokens."""

    log_ratio: Tensor
    """[n] float64, cut to +-20."""
    behavior: Tensor
    """[n] float64 probabilities."""
    proximal: Tensor
    """[n] float64 probabilities."""

    def pick(self, chosen: Tensor) -> _Gap:
        return _Gap(self.log_ratio[chosen], self.behavior[chosen], self.proximal[chosen])


def diagnose(
    batch: PackedBatch,
    corrected: CorrectedBatch,
    target_logprobs: Tensor | None = None,
    *,
    config: CorrectionConfig | None = None,
    entropy: Tensor | None = None,
    detailed: bool = False,
) -> dict[str, float]:
    """The numbers of a batch; run it after the step, off the learner's path.

    Args:
        corrected: of this batch, from correct() or defer().
        target_logprobs: [N] the learner's logprobs of the step; None leaves what needs them out.
        config: gives fractions by criterion and the truncated share; with target_logprobs also those of the late parts.
        entropy: [N] of the target policy, for the entropy of dropped tokens.
        detailed: quantiles, buckets and the spurious objective as well.
    """
    target = None if target_logprobs is None else target_logprobs.detach().to(batch.behavior_logprobs.dtype)
    proximal = target if batch.proximal_logprobs is None else batch.proximal_logprobs
    known = make_scene(batch, Logprobs(batch.behavior_logprobs, proximal, target))
    sequences = known.levels.at(Level.SEQUENCE)
    numbers: dict[str, float] = {"broken_tokens": float(known.broken.sum())}
    numbers |= _staleness_numbers(batch, sequences)
    if proximal is not None:
        numbers |= _gap_family(known, proximal) | _sequence_numbers(known, proximal, sequences)
    if target is not None:
        numbers |= _target_numbers(known, target)
    numbers |= _rejection_numbers(known, corrected, target, config, entropy)
    if detailed and proximal is not None:
        numbers |= _detailed_numbers(known, proximal)
    return numbers


def _gap_family(scene: Scene, proximal: Tensor) -> dict[str, float]:
    behavior, proximal = scene.batch.behavior_logprobs[scene.mask].double(), proximal[scene.mask].double()
    gap = _Gap((proximal - behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), behavior.exp(), proximal.exp())
    is_fresh = token_staleness(scene.batch)[scene.mask] == 0
    numbers = _gap_numbers(gap)
    for prefix, chosen in (("mismatch_", is_fresh), ("stale_", ~is_fresh)):
        part = gap if bool(chosen.all()) else gap.pick(chosen)
        numbers |= {prefix + name: value for name, value in _gap_numbers(part).items()}
    return numbers


def _gap_numbers(gap: _Gap) -> dict[str, float]:
    """The numbers of GAP; empty for no tokens."""
    if gap.log_ratio.numel() == 0:
        return {}
    x, excess = gap.log_ratio, torch.expm1(gap.log_ratio)
    rho = excess + 1
    mean, mean_excess, mean_square = float(x.mean()), float(excess.mean()), float(excess.square().mean())
    low, high = float(x.min()), float(x.max())
    numbers = {
        "k1_kl": -mean,
        "k2_kl": 0.5 * float(x.square().mean()),
        "k3_kl": float((excess - x).mean()),
        "chi2_token": mean_square + 2 * mean_excess,  # rho^2 - 1 = (rho - 1)^2 + 2 (rho - 1), without cancellation
        "log_ratio_mean": mean,
        "log_ratio_std": float(x.std(correction=0)),
        "log_ratio_abs_max": max(-low, high),
        "rho_std": float(excess.std(correction=0)),
        "rho_max": float(torch.tensor(high).double().exp()),
        "rho_min": float(torch.tensor(low).double().exp()),
        "probability_gap_mean": float((gap.proximal - gap.behavior).abs().mean()),
        "ess_token": float(rho.mean()) ** 2 / float(rho.square().mean()),
        "tokens": float(x.numel()),
    }
    pearson = _pearson(gap.behavior, gap.proximal)
    return numbers if pearson is None else {**numbers, "pearson": pearson}


def _pearson(first: Tensor, second: Tensor) -> float | None:
    """Correlation; None if one of the two does not vary."""
    a, b = first - first.mean(), second - second.mean()
    norm = float(a.norm() * b.norm())
    return float((a * b).sum()) / norm if norm > 0 else None


def _sequence_numbers(scene: Scene, proximal: Tensor, sequences: Segments) -> dict[str, float]:
    counted = sequences.any(scene.mask)
    if not bool(counted.any()):
        return {}
    log_mu = sequences.mean(scene.batch.behavior_logprobs, scene.mask)[counted]
    log_prox = sequences.mean(proximal, scene.mask)[counted]
    product = sequences.sum(torch.where(scene.mask, proximal - scene.batch.behavior_logprobs, 0))[counted]
    rho = bounded_exp(product)
    square = float(rho.square().mean())
    return {
        "chi2_sequence": square - 1,
        "ess_sequence": float(rho.mean()) ** 2 / square,
        "perplexity_behavior": float((-log_mu).exp().mean()),
        "perplexity_proximal": float((-log_prox).exp().mean()),
        "perplexity_ratio": float((log_mu - log_prox).exp().mean()),
    }


def _target_numbers(scene: Scene, target: Tensor) -> dict[str, float]:
    batch, mask = scene.batch, scene.mask
    if not bool(mask.any()):
        return {}
    behavior, chosen = batch.behavior_logprobs[mask].double(), target[mask].double()
    x = (chosen - behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    is_bad = (batch.advantages[mask] < 0) & (behavior.exp() - chosen.exp() >= BAD_UPDATE)
    numbers = {
        "target_k1_kl": -float(x.mean()),
        "target_k3_kl": float((torch.expm1(x) - x).mean()),
        "target_rho_max": float(x.max().exp()),
        "bad_update_fraction": float(is_bad.double().mean()),
    }
    if batch.proximal_logprobs is not None:
        drift = (chosen - batch.proximal_logprobs[mask].double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        numbers["drift_k3_kl"] = float((torch.expm1(drift) - drift).mean())
    return numbers


def _staleness_numbers(batch: PackedBatch, sequences: Segments) -> dict[str, float]:
    sampled = batch.loss_mask & (batch.weight_versions >= 0)
    if not bool(sampled.any()):
        return {}
    in_flight, in_queue = (part[sampled] for part in split_staleness(batch, sequences))
    total = in_flight + in_queue
    trained = sequences.any(sampled)
    numbers = {
        "staleness_mean": float(total.double().mean()),
        "staleness_max": float(total.max()),
        "staleness_in_flight_mean": float(in_flight.double().mean()),
        "staleness_in_queue_mean": float(in_queue.double().mean()),
        "mixed_version_fraction": float(is_mixed(batch, sequences)[trained].double().mean()),
    }
    for name, values in (("staleness", total), ("staleness_in_flight", in_flight), ("staleness_in_queue", in_queue)):
        shares = torch.bincount(values).double() / values.numel()
        numbers |= {f"{name}_fraction_{versions}": share for versions, share in enumerate(shares.tolist())}
    return numbers


def _rejection_numbers(
    known: Scene, corrected: CorrectedBatch, target: Tensor | None, config: CorrectionConfig | None, entropy: Tensor | None
) -> dict[str, float]:
    loss_mask, advantages = known.batch.loss_mask, known.batch.advantages
    keep, verdicts, numbers = _final_decision(corrected, target, config)
    if not bool(loss_mask.any()):
        return {}
    dropped = loss_mask & ~keep
    numbers |= {"kept_fraction": _share(keep, loss_mask), "rejected_fraction": _share(dropped, loss_mask)}
    for name, side in (("positive", loss_mask & (advantages > 0)), ("negative", loss_mask & (advantages < 0))):
        if bool(side.any()):
            numbers[f"rejected_fraction_{name}"] = _share(dropped, side)
    sequences = known.levels.at(Level.SEQUENCE)
    counted = sequences.any(loss_mask)
    numbers["rejected_sequence_fraction"] = _share(~sequences.any(keep), counted)
    for verdict in verdicts:
        numbers[f"rejected_by_{verdict.label}"] = _share(~verdict.keep, known.mask) if bool(known.mask.any()) else 0.0
    finite_dropped = dropped & known.mask
    if bool(finite_dropped.any()):
        if known.logprobs.proximal is not None:
            numbers["rejected_probability_mean"] = float(known.logprobs.proximal[finite_dropped].double().exp().mean())
        if entropy is not None:
            numbers["rejected_entropy_mean"] = float(entropy.detach()[finite_dropped].double().mean())
    return numbers


def _final_decision(
    corrected: CorrectedBatch, target: Tensor | None, config: CorrectionConfig | None
) -> tuple[Tensor, tuple[Verdict, ...], dict[str, float]]:
    """(keep [N], verdicts, numbers of the weights), late parts included if the target is known and they need no top-K table."""
    weights, keep = corrected.importance_weights, corrected.keep_mask
    if config is None:
        return keep, (), _weight_numbers(weights, keep)
    batch = corrected.batch
    scene = make_scene(batch, Logprobs(batch.behavior_logprobs, batch.proximal_logprobs, None))
    numbers: dict[str, float] = {}
    passes = [False] if target is None else [False, True]
    if target is not None:
        scene = training_scene(corrected, target, config)
    elif config.proximal.value == "behavior":
        scene = Scene(batch, Logprobs(batch.behavior_logprobs, batch.behavior_logprobs, None), scene.mask, Levels(batch))
    verdicts: tuple[Verdict, ...] = ()
    for late in passes:
        try:
            decision = decide(scene, config, late=late, is_deferred=corrected.is_deferred)
        except DataError:
            continue  # top-K criteria: their tables stay with the learner
        keep = keep & decision.keep
        verdicts += decision.verdicts
        weights = weights * decision.weights if late else weights
        if config.importance.mode is not WeightMode.OFF and importance_is_late(config, is_deferred=corrected.is_deferred) == late:
            numbers |= _bound_numbers(scene, config)
    return keep, verdicts, numbers | _weight_numbers(weights, keep)


def _bound_numbers(scene: Scene, config: CorrectionConfig) -> dict[str, float]:
    """Shares of units whose weight is not their ratio."""
    part = config.importance
    segments = scene.levels.at(part.level)
    counted = segments.any(scene.mask)
    if not bool(counted.any()):
        return {}
    log_ratio = scene.logprobs.log_ratio(effective_ratio(part.ratio, config), scene.mask)
    raw = bounded_exp(aggregate_log_ratio(log_ratio, scene.mask, segments, level=part.level))
    weights = unit_weights(scene, config)
    return {
        "truncated_fraction": _share((weights != raw) & (weights > 0), counted),
        "masked_fraction": _share(weights == 0, counted),
    }


def _weight_numbers(weights: Tensor, keep: Tensor) -> dict[str, float]:
    kept = weights[keep].double()
    if kept.numel() == 0:
        return {}
    numbers = {"importance_weight_mean": float(kept.mean()), "importance_weight_max": float(kept.max())}
    square = float(kept.square().mean())
    return {**numbers, "importance_weight_ess": float(kept.mean()) ** 2 / square} if square > 0 else numbers


def _detailed_numbers(scene: Scene, proximal: Tensor) -> dict[str, float]:
    behavior, chosen = scene.batch.behavior_logprobs[scene.mask].double(), proximal[scene.mask].double()
    x = (chosen - behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if x.numel() == 0:
        return {}
    ordered = x.sort().values
    numbers = {f"log_ratio_quantile_{percent:02d}": float(ordered[round((x.numel() - 1) * percent / 100)]) for percent in PERCENTS}
    probability, rho = chosen.exp(), x.exp()
    edges = torch.tensor(BUCKET_EDGES, dtype=probability.dtype, device=probability.device)
    bucket = torch.bucketize(probability, edges, right=True)
    for index in range(len(BUCKET_EDGES) + 1):
        inside = rho[bucket == index]
        if inside.numel() > 0:
            numbers[f"bucket_rho_mean_{index}"] = float(inside.mean())
            numbers[f"bucket_rho_std_{index}"] = float(inside.std(correction=0))
    numbers["spurious_objective"] = float(scene.batch.advantages[scene.mask].double()[probability < 0.1].sum())
    return numbers


def _share(chosen: Tensor, among: Tensor) -> float:
    return float((chosen & among).sum()) / float(among.sum())
