"""Every number about the gap between the policies, of a whole batch: true extremes, sums reduced once, float64 with expm1.

Behaviour to proximal on all tokens is mismatch and staleness together; names that begin with `mismatch_` are from tokens of
staleness 0 alone. Where the batch has no proximal logprobs (deferred, bypass, interpolate) the target's stand in for them: with
one optimizer step per batch they are the same policy. What has no tokens is absent, not 0. `DIAGNOSTICS` says what each number is.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from correction.batch import CorrectedBatch, DecisionCounts, FinalDecision, PackedBatch, batch_slices
from correction.decision import BatchView
from correction.gap import gap_numbers
from correction.ratios import LOG_RATIO_LIMIT, Logprobs, bounded_exp
from correction.segments import Level, masked
from correction.staleness import TokenSpans, count_staleness, token_spans

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
    "target_k2_kl": "KL(behaviour || target), estimator k2 (nats)",
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
    "truncated_fraction_positive": "those of positive advantage, also as a share of all units",
    "truncated_fraction_negative": "those of negative advantage, also as a share of all units",
    "masked_fraction": "units whose importance weight was set to 0",
    "masked_fraction_positive": "those of positive advantage, also as a share of all units",
    "masked_fraction_negative": "those of negative advantage, also as a share of all units",
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


def diagnose(
    batch: PackedBatch,
    corrected: CorrectedBatch,
    target_logprobs: Tensor | None = None,
    *,
    decided: FinalDecision | None = None,
    entropy: Tensor | None = None,
    detailed: bool = False,
) -> dict[str, float]:
    """The numbers of a batch; run it after the step, off the learner's path.

    Args:
        corrected: of this batch, from correct() or defer().
        target_logprobs: [N] the learner's logprobs of the step; None leaves what needs them out.
        decided: of the step, from `policy_loss`, for the whole batch; None: rejection and weights are those of the early parts alone.
        entropy: [N] of the target policy, for the entropy of dropped tokens.
        detailed: quantiles, buckets and the spurious objective as well; they sort the tokens, which takes longer than all the rest.
    """
    target = None if target_logprobs is None else target_logprobs.detach().to(batch.behavior_logprobs.dtype)
    proximal = target if batch.proximal_logprobs is None else batch.proximal_logprobs
    keep = corrected.keep_mask if decided is None else decided.keep_mask
    weights = corrected.importance_weights if decided is None else decided.importance_weights
    mask = torch.empty_like(batch.loss_mask)
    sums = []
    for piece in batch_slices(batch):
        own = piece.of_batch(batch)
        view = BatchView.of(own, Logprobs(own.behavior_logprobs, piece.of_tokens(proximal), piece.of_tokens(target)))
        mask[piece.tokens] = view.mask
        sums.append(_rejection_sums(view, keep[piece.tokens], weights[piece.tokens], piece.of_tokens(entropy)))
    spans = token_spans(batch, batch.loss_mask)
    numbers = {"broken_tokens": float(int(batch.loss_mask.count_nonzero()) - int(mask.count_nonzero()))}
    numbers |= _staleness_numbers(spans, batch.num_sequences)
    if proximal is not None:
        numbers |= _gap_family(batch, proximal, token_spans(batch, mask) if numbers["broken_tokens"] > 0 else spans)
    if target is not None:
        numbers |= _target_numbers(batch, target, mask)
    counts = corrected.counts
    if counts is not None and decided is not None:
        counts += decided.counts
    numbers |= _rejection_numbers(sums, counts)
    if detailed and proximal is not None:
        numbers |= _detailed_numbers(batch, proximal, mask)
    return numbers


def _rejection_sums(view: BatchView, keep: Tensor, weights: Tensor, entropy: Tensor | None) -> dict[str, float]:
    """Sums over whole sequences, but for the largest weight. keep, weights, entropy: [N]."""
    loss_mask, advantages = view.batch.loss_mask, view.batch.advantages
    kept_weights = masked(weights, keep)
    largest, kept_weights = kept_weights.max() if keep.numel() else 0.0, kept_weights.double()
    sequences = view.levels.at(Level.SEQUENCE)
    sums = {
        "tokens": int(loss_mask.count_nonzero()),
        "kept": int(keep.count_nonzero()),
        "sequences": int(sequences.any(loss_mask).count_nonzero()),
        "kept_sequences": int(sequences.any(keep).count_nonzero()),
        "weight": float(kept_weights.sum()),
        "weight_square": float(kept_weights.dot(kept_weights)),
        "largest_weight": float(largest),
    }
    for name, chosen in (("positive", advantages > 0), ("negative", advantages < 0)):
        sums |= {name: int((chosen & loss_mask).count_nonzero()), f"kept_{name}": int((chosen & keep).count_nonzero())}
    dropped = (loss_mask & ~keep & view.mask).nonzero().squeeze(1)  # few
    sums["dropped"] = dropped.numel()
    if view.logprobs.proximal is not None:
        sums["dropped_probability"] = float(view.logprobs.proximal[dropped].double().exp().sum())
    if entropy is not None:
        sums["dropped_entropy"] = float(entropy.detach()[dropped].double().sum())
    return sums


def _rejection_numbers(pieces: list[dict[str, float]], counts: DecisionCounts | None) -> dict[str, float]:
    """About weights and rejection, from the sums of all pieces of the batch."""
    sums = {name: sum(piece[name] for piece in pieces) for name in pieces[0]}
    tokens, kept = sums["tokens"], sums["kept"]
    if tokens == 0:
        return {}
    numbers = {
        "kept_fraction": kept / tokens,
        "rejected_fraction": (tokens - kept) / tokens,
        "rejected_sequence_fraction": 1 - sums["kept_sequences"] / sums["sequences"],
    }
    for sign in ("positive", "negative"):
        if sums[sign] > 0:
            numbers[f"rejected_fraction_{sign}"] = (sums[sign] - sums[f"kept_{sign}"]) / sums[sign]
    if counts is not None:
        numbers |= _count_numbers(counts)
    for name in ("probability", "entropy"):
        if f"dropped_{name}" in sums and sums["dropped"] > 0:
            numbers[f"rejected_{name}_mean"] = sums[f"dropped_{name}"] / sums["dropped"]
    if kept > 0:
        mean, square = sums["weight"] / kept, sums["weight_square"] / kept
        largest = max(piece["largest_weight"] for piece in pieces)
        numbers |= {"importance_weight_mean": mean, "importance_weight_max": largest}
        if square > 0:
            numbers["importance_weight_ess"] = mean**2 / square
    return numbers


def _count_numbers(counts: DecisionCounts) -> dict[str, float]:
    numbers = {f"rejected_by_{label}": dropped / looked_at for label, (looked_at, dropped) in counts.by_criterion().items()}
    by_unit = counts.by_unit()
    if by_unit["units"] > 0:
        for name, sign in itertools.product(("truncated", "masked"), ("", "_positive", "_negative")):
            numbers[f"{name}_fraction{sign}"] = by_unit[f"{name}{sign}"] / by_unit["units"]
    return numbers


def _gap_family(batch: PackedBatch, proximal: Tensor, spans: TokenSpans) -> dict[str, float]:
    """Of all tokens of the spans, of those of staleness 0, of the older ones, and of whole sequences."""
    sets = spans.staleness == 0, spans.staleness > 0
    (fresh, stale, whole), by_sequence = gap_numbers(batch.behavior_logprobs, proximal, spans, sets, batch.num_sequences)
    named = {f"mismatch_{name}": value for name, value in fresh.items()} | {f"stale_{name}": value for name, value in stale.items()}
    return whole | named | _sequence_numbers(by_sequence)


def _sequence_numbers(sums: Tensor) -> dict[str, float]:
    """From the tokens, sum of log mu and sum of log rho of each sequence [S, 3]."""
    tokens, sum_mu, sum_rho = sums[sums[:, 0] > 0].unbind(1)
    if tokens.numel() == 0:
        return {}
    log_mu, log_rho = sum_mu / tokens, sum_rho / tokens
    rho = bounded_exp(sum_rho)
    square = float(rho.square().mean())
    return {
        "chi2_sequence": square - 1,
        "ess_sequence": float(rho.mean()) ** 2 / square,
        "perplexity_behavior": float((-log_mu).exp().mean()),
        "perplexity_proximal": float((-log_mu - log_rho).exp().mean()),
        "perplexity_ratio": float((-log_rho).exp().mean()),
    }


def _target_numbers(batch: PackedBatch, target: Tensor, mask: Tensor) -> dict[str, float]:
    tokens = int(mask.sum())
    if tokens == 0:
        return {}
    behavior, chosen = masked(batch.behavior_logprobs, mask), masked(target, mask)
    x = (chosen.double() - behavior).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # 0 outside the mask, and so are k1 and k3
    is_bad = (batch.advantages < 0) & (behavior.exp() - chosen.exp() >= BAD_UPDATE)
    numbers = {
        "target_k1_kl": -float(x.sum()) / tokens,
        "target_k2_kl": 0.5 * float(x.dot(x)) / tokens,
        "target_k3_kl": _k3_mean(x, tokens),
        "target_rho_max": math.exp(float((x + (mask.double() - 1) * 1e3).max())),
        "bad_update_fraction": float(is_bad.sum()) / tokens,
    }
    if batch.proximal_logprobs is not None:
        drift = (chosen.double() - masked(batch.proximal_logprobs, mask)).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        numbers["drift_k3_kl"] = _k3_mean(drift, tokens)
    return numbers


def _k3_mean(log_ratio: Tensor, tokens: int) -> float:
    return float((torch.expm1(log_ratio) - log_ratio).sum()) / tokens


def _staleness_numbers(spans: TokenSpans, num_sequences: int) -> dict[str, float]:
    counts = count_staleness(spans, num_sequences)
    if counts is None:
        return {}
    shares = {"staleness": counts.total, "staleness_in_flight": counts.in_flight, "staleness_in_queue": counts.in_queue}
    tokens = float(counts.total.sum())
    numbers = {"staleness_max": float(counts.total.numel() - 1), "mixed_version_fraction": counts.mixed_sequences / counts.sequences}
    for name, histogram in shares.items():
        by_version = [count / tokens for count in histogram.tolist()]
        numbers[f"{name}_mean"] = sum(versions * share for versions, share in enumerate(by_version))
        numbers |= {f"{name}_fraction_{versions}": share for versions, share in enumerate(by_version)}
    return numbers


def _detailed_numbers(batch: PackedBatch, proximal: Tensor, mask: Tensor) -> dict[str, float]:
    behavior, chosen = batch.behavior_logprobs[mask].double(), proximal[mask].double()
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
    numbers["spurious_objective"] = float(batch.advantages[mask].double()[probability < 0.1].sum())
    return numbers
