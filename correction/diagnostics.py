"""Every number about the gap between the policies, of a whole batch: true extremes, sums reduced once, float64 with expm1.

Behaviour to proximal on all tokens is mismatch and staleness together; names that begin with `mismatch_` are from tokens of
staleness 0 alone. Where the batch has no proximal logprobs (deferred, bypass, interpolate) the target's stand in for them: with
one optimizer step per batch they are the same policy. What has no tokens is absent, not 0. quantities.py says what each is.

The numbers of the gap come from one pass over the tokens, in chunks that stay in the processor's cache: sums of chunks add up to
those of a set of tokens, and sums of sets to those of the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .batch import CorrectedBatch, DecisionCounts, FinalDecision, PackedBatch, batch_slices
from .choices import Level
from .decision import BatchView
from .quantities import BUCKET_EDGES, PERCENTS
from .ratios import LOG_RATIO_LIMIT, Logprobs, bounded_exp
from .segments import masked
from .staleness import TokenSpans, count_staleness, token_spans

BAD_UPDATE = 0.5
"""mu - pi of a token with negative advantage from which an update is called bad: Trust Region (arXiv 2602.04879), sec. 5.3."""
CPU_CHUNK = 2**17
OTHER_CHUNK = 2**22
"""Tokens of a chunk; on an accelerator it need only be small against its memory."""
_CONSTANT = 1e-28
"""Variance over squared mean under which a probability does not vary: the rounding of the mean in float64 is 1e-16."""


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
        "kept_share": kept / tokens,
        "rejected_share": (tokens - kept) / tokens,
        "rejected_sequence_share": 1 - sums["kept_sequences"] / sums["sequences"],
    }
    for sign in ("positive", "negative"):
        if sums[sign] > 0:
            numbers[f"rejected_{sign}_share"] = (sums[sign] - sums[f"kept_{sign}"]) / sums[sign]
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
        for name, sign in itertools.product(("truncated", "masked"), ("", "positive", "negative")):
            share = by_unit[f"{name}_{sign}"] if sign else by_unit[name]
            numbers["_".join(filter(None, (name, sign, "share")))] = share / by_unit["units"]
    return numbers


def _gap_family(batch: PackedBatch, proximal: Tensor, spans: TokenSpans) -> dict[str, float]:
    """Of all tokens of the spans, of those of staleness 0, of the older ones, and of whole sequences."""
    sets = spans.staleness == 0, spans.staleness > 0
    (fresh, stale, whole), by_sequence = _gap_numbers(batch.behavior_logprobs, proximal, spans, sets, batch.num_sequences)
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
        "bad_update_share": float(is_bad.sum()) / tokens,
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
    numbers = {"staleness_max": float(counts.total.numel() - 1), "mixed_version_share": counts.mixed_sequences / counts.sequences}
    for name, histogram in shares.items():
        by_version = [count / tokens for count in histogram.tolist()]
        numbers[f"{name}_mean"] = sum(versions * share for versions, share in enumerate(by_version))
        numbers |= {f"{name}_share_{versions}": share for versions, share in enumerate(by_version)}
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


# -- the gap between mu and pi_prox ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GapSums:
    """Sums over one set of tokens: x = log rho, e = rho - 1, r = rho, m = mu minus a constant near its mean, g = pi_prox - mu."""

    n: float
    x: float
    xx: float
    e: float
    ee: float
    rr: float
    k3: float
    distance: float
    m: float
    mm: float
    g: float
    gg: float
    mg: float
    high: float
    low: float


def _chunk_tokens(device: torch.device) -> int:
    """Tokens that are best looked at together on a device."""
    return CPU_CHUNK if device.type == "cpu" else OTHER_CHUNK


def _gap_numbers(
    behavior: Tensor, proximal: Tensor, spans: TokenSpans, sets: Sequence[Tensor], num_sequences: int
) -> tuple[list[dict[str, float]], Tensor]:
    """The numbers of quantities.GAP, for each of several disjoint sets of tokens and at the end for all of them together.

    Args:
        behavior, proximal: [N] logprobs, nats, finite inside the spans.
        sets: each as [R] bool, the spans that are in it. A set without tokens has no numbers.
    Returns: these numbers, and [S, 3] float64 of each sequence: tokens, sum of log mu, sum of log rho.
    """
    shift: Tensor | None = None
    empty = torch.zeros(len(fields(_GapSums)), dtype=torch.float64, device=behavior.device)
    empty[-2], empty[-1] = -torch.inf, torch.inf
    by_sequence = empty.new_zeros(num_sequences, 3)
    per_set = []
    for chosen in sets:
        rows = [empty]
        for index, chunk in spans.token_index(chosen, chunk=_chunk_tokens(behavior.device)):
            mu, prox = behavior.index_select(0, index), proximal.index_select(0, index).double()
            probability, log_mu = mu.exp().double(), mu.double()
            shift = probability.mean() if shift is None else shift
            x = prox.sub_(log_mu)
            lengths = spans.lengths[chunk]
            sums = [lengths.double(), *(torch.segment_reduce(values, "sum", lengths=lengths) for values in (log_mu, x))]
            by_sequence.index_add_(0, spans.sequences[chunk], torch.stack(sums, 1))
            rows.append(_chunk_sums(log_mu, x, probability, shift))
        per_set.append(_add_up(torch.stack(rows)))
    whole = _add_up(torch.stack(per_set))
    return [_gap_of(_GapSums(*row)) for row in torch.stack([*per_set, whole]).tolist()], by_sequence


def _chunk_sums(log_mu: Tensor, x: Tensor, mu: Tensor, shift: Tensor) -> Tensor:
    """[fields of _GapSums] float64, of log mu, log rho and mu of n > 0 tokens, each [n] float64; mu is overwritten."""
    low, high = x.aminmax()
    if bool((low < -LOG_RATIO_LIMIT) | (high > LOG_RATIO_LIMIT)):
        gap = (log_mu + x).exp() - mu
        x, low, high = (values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) for values in (x, low, high))
        e = torch.expm1(x)
    else:
        e = torch.expm1(x)
        gap = mu * e  # pi_prox - mu, without an exponential of its own
    rho = e + 1
    m = mu.sub_(shift)
    sums = [torch.full_like(shift, x.numel()), x.sum(), x.dot(x), e.sum(), e.dot(e), rho.dot(rho), (e - x).sum()]
    sums += [gap.abs().sum(), m.sum(), m.dot(m), gap.sum(), gap.dot(gap), m.dot(gap), high, low]
    return torch.stack(sums)


def _add_up(rows: Tensor) -> Tensor:
    """[fields of _GapSums] of all rows together: the last two columns are extremes."""
    return torch.cat([rows[:, :-2].sum(0), rows[:, -2:-1].amax(0), rows[:, -1:].amin(0)])


def _gap_of(s: _GapSums) -> dict[str, float]:
    """The numbers of quantities.GAP; empty for no tokens."""
    if s.n == 0:
        return {}
    numbers = {
        "k1_kl": -s.x / s.n,
        "k2_kl": 0.5 * s.xx / s.n,
        "k3_kl": s.k3 / s.n,
        "chi2_token": s.ee / s.n + 2 * s.e / s.n,  # rho^2 - 1 = (rho - 1)^2 + 2 (rho - 1), without cancellation
        "log_ratio_mean": s.x / s.n,
        "log_ratio_std": math.sqrt(_variance(s.xx, s.x, s.n)),
        "log_ratio_abs_max": max(-s.low, s.high),
        "rho_std": math.sqrt(_variance(s.ee, s.e, s.n)),
        "rho_max": math.exp(s.high),
        "rho_min": math.exp(s.low),
        "probability_gap_mean": s.distance / s.n,
        "ess_token": (s.n + s.e) ** 2 / (s.n * s.rr),
        "tokens": s.n,
    }
    mean_m, mean_g = s.m / s.n, s.g / s.n
    variance_m, with_gap = _variance(s.mm, s.m, s.n), s.mg / s.n - mean_m * mean_g
    variance_p = variance_m + 2 * with_gap + _variance(s.gg, s.g, s.n)
    if min(variance_m, variance_p) > _CONSTANT:
        numbers["pearson"] = max(-1.0, min(1.0, (variance_m + with_gap) / math.sqrt(variance_m * variance_p)))
    return numbers


def _variance(square: float, total: float, n: float) -> float:
    return max(square / n - (total / n) ** 2, 0.0)
