"""Every number about the policies, of a whole batch: true extremes, sums reduced once, float64 with expm1.

Behaviour to proximal on all tokens is mismatch and staleness together; names that begin with `mismatch_` are from tokens of
staleness 0 alone. `proximal_of` says which logprobs are the proximal policy's. What has no tokens is absent, not 0. quantities.py says
what each number is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from ..batch import CorrectedBatch, DecisionCounts, FinalDecision, PackedBatch, batch_slices
from ..decision import BatchView
from ..settings.choices import Level, Ratio
from ..terms.divergence import CPU_CHUNK, Estimator, estimate
from ..terms.ratios import LOG_RATIO_LIMIT, Logprobs, bounded_exp
from ..terms.segments import Levels, masked
from ..terms.staleness import TokenSpans, count_staleness, token_spans
from .batch_numbers import kept_numbers, staleness_numbers
from .quantities import BAD_UPDATE, BUCKET_EDGES, LEAST_EFFECTIVE_TOKENS, LEAST_MEAN_ERROR, MOST_MEAN_TOKENS, PERCENTS, SPURIOUS_BELOW
from .sums import DiagnosticSums

# ----------------------------------------------------------------------------------------------------------------------
# The gap between mu and pi_prox over sets of tokens: one pass in chunks that stay in the processor's cache.
#
# Sums of chunks add up to those of a set of tokens, and sums of sets to those of the batch; quotients come last. quantities.GAP says what
# each number is.

OTHER_CHUNK = 2**22
"""Tokens of a chunk on an accelerator, where it need only be small against its memory."""
# Variance over squared mean under which a probability does not vary: the rounding of the mean in float64 is 1e-16.
_CONSTANT = 1e-28


@dataclass(frozen=True, slots=True)
class GapSums:
    """Sums over one set of tokens: x = log rho, e = rho - 1, r = rho, m = mu minus a constant near its mean, g = pi_prox - mu."""

    n: float
    x: float
    xx: float
    x_abs: float
    e: float
    ee: float
    e_abs: float
    rr: float
    inverse: float
    """Sum of 1 / rho."""
    k3: float
    distance: float
    """Sum of |pi_prox - mu|."""
    prox: float
    """Sum of pi_prox."""
    m: float
    mm: float
    g: float
    gg: float
    mg: float
    high: float
    """Largest x."""
    low: float
    """Smallest x."""


# The last two are extremes, all others sums.
_FIELDS = tuple(field.name for field in fields(GapSums))
_PERPLEXITIES = ("perplexity_behavior", "perplexity_proximal", "perplexity_ratio")


def gap_sums(batch: PackedBatch, proximal: Tensor, spans: TokenSpans, shift: float | None) -> DiagnosticSums:
    """Sums over the spans' tokens of staleness 0 ("fresh"), over the older ones ("stale"), and over whole sequences.

    Args:
        proximal: [N] logprobs, nats, finite inside the spans, as the batch's own are.
        shift: what is taken off mu before it is squared; None: a mean of these tokens, which keeps the most digits. Sums add up only where
            all have the same.
    """
    sets = {"fresh": spans.staleness == 0, "stale": spans.staleness > 0}
    rows, by_sequence = _set_sums(batch.behavior_logprobs, proximal, spans, list(sets.values()), batch.num_sequences, shift)
    found = DiagnosticSums({}, {}, {})
    for name, row in zip(sets, rows, strict=True):
        *added, high, low = zip(_FIELDS, row, strict=True)
        found.added.update({f"{name}/{field}": value for field, value in added})
        found.largest.update({f"{name}/high": high[1], f"{name}/minus_low": -low[1]})
    found.added.update(_sequence_sums(by_sequence))
    return found


def _set_sums(
    behavior: Tensor, proximal: Tensor, spans: TokenSpans, sets: Sequence[Tensor], num_sequences: int, shift_by: float | None
) -> tuple[list[list[float]], Tensor]:
    """The fields of GapSums for each of several disjoint sets of tokens, each as [R] bool: the spans that are in it.

    Returns: also [S, 3] float64 of each sequence: tokens, sum of log mu, sum of log rho.
    """
    shift = None if shift_by is None else torch.tensor(shift_by, dtype=torch.float64, device=behavior.device)
    empty = torch.zeros(len(_FIELDS), dtype=torch.float64, device=behavior.device)
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
    return torch.stack(per_set).tolist(), by_sequence


def gap_family(sums: DiagnosticSums) -> dict[str, float]:
    """The numbers of all tokens, of those of staleness 0, of the older ones, and of whole sequences; empty without `gap_sums`."""
    if "fresh/n" not in sums.added:
        return {}
    fresh, stale = (_set_of(sums, name) for name in ("fresh", "stale"))
    both = [a + b for a, b in zip(fresh[:-2], stale[:-2], strict=True)]
    whole = GapSums(*[*both, max(fresh[-2], stale[-2]), min(fresh[-1], stale[-1])])
    numbers = gap_numbers(whole)
    numbers |= {f"mismatch_{name}": value for name, value in gap_numbers(GapSums(*fresh)).items()}
    numbers |= {f"stale_{name}": value for name, value in gap_numbers(GapSums(*stale)).items()}
    return numbers | _sequence_numbers(sums)


def _set_of(sums: DiagnosticSums, name: str) -> list[float]:
    added = [sums.added[f"{name}/{field}"] for field in _FIELDS[:-2]]
    return [*added, sums.largest[f"{name}/high"], -sums.largest[f"{name}/minus_low"]]


def _chunk_tokens(device: torch.device) -> int:
    """Tokens that are best looked at together on a device."""
    return CPU_CHUNK if device.type == "cpu" else OTHER_CHUNK


def _chunk_sums(log_mu: Tensor, x: Tensor, mu: Tensor, shift: Tensor) -> Tensor:
    """[fields of GapSums] float64, of log mu, log rho and mu of n > 0 tokens, each [n] float64; mu is overwritten."""
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
    n, m_sum, gap_sum = torch.full_like(shift, x.numel()), m.sum(), gap.sum()
    sums = [n, x.sum(), x.dot(x), x.abs().sum(), e.sum(), e.dot(e), e.abs().sum(), rho.dot(rho), rho.reciprocal_().sum(), (e - x).sum()]
    sums += [gap.abs().sum(), n * shift + m_sum + gap_sum, m_sum, m.dot(m), gap_sum, gap.dot(gap), m.dot(gap), high, low]
    return torch.stack(sums)


def _add_up(rows: Tensor) -> Tensor:
    """[fields of GapSums] of all rows together: the last two columns are extremes."""
    return torch.cat([rows[:, :-2].sum(0), rows[:, -2:-1].amax(0), rows[:, -1:].amin(0)])


def gap_numbers(s: GapSums) -> dict[str, float]:
    """The numbers of quantities.GAP; empty for no tokens."""
    if s.n == 0:
        return {}
    rho_std = math.sqrt(_variance(s.ee, s.e, s.n))
    error = rho_std / math.sqrt(s.n)
    numbers = {
        "k1_kl": -s.x / s.n,
        "k2_kl": 0.5 * s.xx / s.n,
        "k3_kl": s.k3 / s.n,
        "chi2_token": s.ee / s.n + 2 * s.e / s.n,  # rho^2 - 1 = (rho - 1)^2 + 2 (rho - 1), without cancellation
        "log_ratio_mean": s.x / s.n,
        "log_ratio_std": math.sqrt(_variance(s.xx, s.x, s.n)),
        "log_ratio_abs_mean": s.x_abs / s.n,
        "log_ratio_abs_max": max(-s.low, s.high),
        "rho_mean": 1 + s.e / s.n,
        "rho_mean_error": error,
        "rho_std": rho_std,
        "rho_max": math.exp(s.high),
        "rho_min": math.exp(s.low),
        "inverse_rho_mean": s.inverse / s.n,
        "total_variation": 0.5 * s.e_abs / s.n,
        "probability_gap_mean": s.distance / s.n,
        "probability_proximal_mean": s.prox / s.n,
        "ess_token": (s.n + s.e) ** 2 / (s.n * s.rr),
        "tokens": s.n,
    }
    if s.n * numbers["ess_token"] >= LEAST_EFFECTIVE_TOKENS:
        numbers["rho_mean_deviation"] = abs(s.e / s.n) / max(error, rho_std / math.sqrt(MOST_MEAN_TOKENS), LEAST_MEAN_ERROR)
    mean_m, mean_g = s.m / s.n, s.g / s.n
    variance_m, with_gap = _variance(s.mm, s.m, s.n), s.mg / s.n - mean_m * mean_g
    variance_p = variance_m + 2 * with_gap + _variance(s.gg, s.g, s.n)
    if min(variance_m, variance_p) > _CONSTANT:
        numbers["pearson"] = max(-1.0, min(1.0, (variance_m + with_gap) / math.sqrt(variance_m * variance_p)))
    return numbers


def _variance(square: float, total: float, n: float) -> float:
    return max(square / n - (total / n) ** 2, 0.0)


def _sequence_sums(by_sequence: Tensor) -> dict[str, float]:
    """Sums over sequences of what follows from by_sequence [S, 3]: number of tokens, sum of log mu, sum of log rho."""
    tokens, sum_mu, sum_rho = by_sequence[by_sequence[:, 0] > 0].unbind(1)
    log_mu, log_rho, rho = sum_mu / tokens, sum_rho / tokens, bounded_exp(sum_rho)
    perplexities = ((-log_mu).exp(), (-log_mu - log_rho).exp(), (-log_rho).exp())
    values = torch.stack([of.sum() for of in (torch.ones_like(rho), rho, rho.square(), *perplexities)]).tolist()
    return {f"sequence/{name}": value for name, value in zip(("n", "rho", "rho_square", *_PERPLEXITIES), values, strict=True)}


def _sequence_numbers(sums: DiagnosticSums) -> dict[str, float]:
    n = sums.added["sequence/n"]
    if n == 0:
        return {}
    mean, square = sums.added["sequence/rho"] / n, sums.added["sequence/rho_square"] / n
    perplexities = {name: sums.added[f"sequence/{name}"] / n for name in _PERPLEXITIES}
    return {"chi2_sequence": square - 1, "ess_sequence": mean**2 / square, **perplexities}


T = TypeVar("T", bound=Tensor | None)

# Taken off probabilities whose squares are added up over shards: one for all.
_SHIFT = 0.5
# Signs of the advantage that the clip's numbers are split by.
_SIDES = ("positive", "negative")


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
        entropy: [N] nats, of the target policy, for that of rejected and of clipped tokens.
        detailed: quantiles, buckets and the spurious objective as well; they sort the tokens, which takes longer than all the rest.
    """
    sums, known = _collect(batch, corrected, target_logprobs, decided, entropy, detailed=detailed, shift=None)
    numbers = diagnostics_of(sums)
    if detailed and known is not None:
        numbers |= _quantiles(batch, *known)
    return numbers


def diagnostic_sums(
    batch: PackedBatch,
    corrected: CorrectedBatch,
    target_logprobs: Tensor | None = None,
    *,
    decided: FinalDecision | None = None,
    entropy: Tensor | None = None,
    detailed: bool = False,
) -> DiagnosticSums:
    """The part of one shard of a batch. `diagnostics_of(sum(parts))` is `diagnose` of the whole, but for the quantiles, which are no sums.

    Args: as for `diagnose`, of this shard; every shard gives the same ones.
    """
    return _collect(batch, corrected, target_logprobs, decided, entropy, detailed=detailed, shift=_SHIFT)[0]


def diagnostics_of(sums: DiagnosticSums) -> dict[str, float]:
    """The numbers of a batch, from the sums of all its shards."""
    added = sums.added
    numbers = kept_numbers(tokens=added["tokens"], kept=added["kept"], broken=added["broken"])
    if added["tokens"] > 0:
        numbers["missing_share"] = added["missing"] / added["tokens"]
    numbers |= _staleness_numbers(sums) | gap_family(sums) | _target_numbers(sums) | _rejection_numbers(sums)
    for name in ("bucket", "bucket_behavior"):
        numbers |= _bucket_numbers(name, sums)
    if "spurious_objective" in added and added["fresh/n"] + added["stale/n"] > 0:
        numbers["spurious_objective"] = added["spurious_objective"]
    return numbers


def _collect(
    batch: PackedBatch,
    corrected: CorrectedBatch,
    target_logprobs: Tensor | None,
    decided: FinalDecision | None,
    entropy: Tensor | None,
    *,
    detailed: bool,
    shift: float | None,
) -> tuple[DiagnosticSums, tuple[Tensor, Tensor] | None]:
    """The sums; and, if log pi_prox is known, its values [N] with the mask [N] of the tokens for which they hold."""
    target = None if target_logprobs is None else target_logprobs.detach().to(batch.behavior_logprobs.dtype)
    proximal, before_update = proximal_of(batch, target, None if decided is None else decided.before_update)
    keep = corrected.keep_mask if decided is None else decided.keep_mask
    weights = corrected.importance_weights if decided is None else decided.importance_weights
    mask = torch.empty_like(batch.loss_mask)
    counts = corrected.counts
    if counts is not None and decided is not None:
        counts += decided.counts
    sums = DiagnosticSums({}, {}, {}, counts)
    for piece in batch_slices(batch):
        own = piece.of_batch(batch)
        view = BatchView.of_all(own, Logprobs(own.behavior_logprobs, piece.of_tokens(proximal), piece.of_tokens(target)))
        mask[piece.tokens] = view.mask
        its_keep = keep[piece.tokens]
        kept_weights = masked(weights[piece.tokens], its_keep)
        added = _rejection_sums(view, its_keep, kept_weights, piece.of_tokens(entropy))
        if decided is not None and target is not None:
            its = decided.of_slice(piece)
            added |= _clip_sums(view, its, piece.of_tokens(entropy)) | _factor_sums(view, its)
        largest = float(kept_weights.max()) if its_keep.numel() else 0.0
        sums += DiagnosticSums(added, {"weight": largest}, {})
    spans = token_spans(batch, batch.loss_mask)
    left_out = batch.loss_mask & ~mask
    missing = int((left_out & batch.behavior_logprobs.isnan()).count_nonzero())
    broken = int(left_out.count_nonzero()) - missing
    sums += DiagnosticSums({"broken": broken, "missing": missing}, {}, {}) + _staleness_sums(spans, batch.num_sequences)
    equal = mask if before_update is None else mask & before_update
    if proximal is not None:
        is_whole = before_update is None and broken + missing == 0
        sums += gap_sums(batch, proximal, spans if is_whole else token_spans(batch, equal), shift)
    if target is not None:
        sums += _target_sums(batch, target, mask, has_moved=before_update is not None)
    if detailed and proximal is not None:
        sums += _detailed_sums(batch, proximal, equal)
    return sums, None if proximal is None else (proximal, equal)


def proximal_of(batch: PackedBatch, target: T, before_update: Tensor | None) -> tuple[Tensor | T, Tensor | None]:
    """What is known of log pi_prox once a batch is trained: [N] logprobs, and [N] bool for which tokens; None: for all of the loss mask.

    Where the batch has none (deferred, bypass, interpolate) the target's stand in for them, of tokens whose first forward pass came before
    the batch's first update: there they are the same policy.
    Args:
        target: [N] logprobs, each of the first forward pass that its token was in.
        before_update: FinalDecision's.
    """
    return (target, before_update) if batch.proximal_logprobs is None else (batch.proximal_logprobs, None)


def reference_kl(target: Tensor, reference: Tensor, mask: Tensor) -> float:
    """KL(target || reference) a token, nats: the mean of k3 over the mask, as the penalty's usual estimator has it.

    Args:
        target, reference: [N] float32. mask: [N] bool.
    """
    inside = mask & reference.isfinite() & target.isfinite()
    return float(estimate(torch.where(inside, reference - target, 0), Estimator.K3).sum() / inside.sum().clamp(min=1))


def clipped_tokens(batch: PackedBatch, decided: FinalDecision) -> dict[str, list[tuple[int, int]]]:
    """Ids of the 50 kept tokens that the objective clipped most often, and how often, by "positive" and "negative" advantage.

    Of ids that are equally frequent the smaller one comes first. Empty where the decision doesn't say what was clipped.
    Source: Trust Region (arXiv 2602.04879), App. E, which has 50.
    """
    if decided.is_clipped is None:
        return {}
    clipped, found = decided.keep_mask & decided.is_clipped, {}
    for name, chosen in (("positive", batch.advantages > 0), ("negative", batch.advantages < 0)):
        ids, counts = torch.unique(batch.token_ids[clipped & chosen], return_counts=True)  # in rising order
        first = counts.sort(descending=True, stable=True).indices[:50]
        found[name] = list(zip(ids[first].tolist(), counts[first].tolist(), strict=True))
    return found


def _rejection_sums(view: BatchView, keep: Tensor, weights: Tensor, entropy: Tensor | None) -> dict[str, float]:
    """Sums over whole sequences. keep, weights (0 where not kept), entropy: [N]."""
    loss_mask, advantages = view.batch.loss_mask, view.batch.advantages
    kept_weights = weights.double()
    sequences = view.levels.at(Level.SEQUENCE)
    sums = {
        "tokens": int(loss_mask.count_nonzero()),
        "kept": int(keep.count_nonzero()),
        "sequences": int(sequences.any(loss_mask).count_nonzero()),
        "kept_sequences": int(sequences.any(keep).count_nonzero()),
        "weight": float(kept_weights.sum()),
        "weight_square": float(kept_weights.dot(kept_weights)),
    }
    for name, chosen in (("positive", advantages > 0), ("negative", advantages < 0)):
        sums |= {name: int((chosen & loss_mask).count_nonzero()), f"kept_{name}": int((chosen & keep).count_nonzero())}
    dropped = (loss_mask & ~keep & view.mask).nonzero().squeeze(1)  # few
    sums["dropped"] = dropped.numel()
    if view.logprobs.proximal is not None:
        sums["dropped_probability"] = float(view.logprobs.proximal[dropped].exp().sum(dtype=torch.float64))
    if entropy is not None:
        sums["dropped_entropy"] = float(entropy.detach()[dropped].double().sum())
    return sums


def _rejection_numbers(all_sums: DiagnosticSums) -> dict[str, float]:
    """About weights and rejection."""
    sums, counts = all_sums.added, all_sums.counts
    tokens, kept = sums["tokens"], sums["kept"]
    if tokens == 0:
        return {}
    numbers = {
        "rejected_share": (tokens - kept) / tokens,
        "rejected_sequence_share": 1 - sums["kept_sequences"] / sums["sequences"],
    }
    for sign in _SIDES:
        if sums[sign] > 0:
            numbers[f"rejected_{sign}_share"] = (sums[sign] - sums[f"kept_{sign}"]) / sums[sign]
    if counts is not None:
        numbers |= _count_numbers(counts)
    for name in ("probability", "entropy"):
        if f"dropped_{name}" in sums and sums["dropped"] > 0:
            numbers[f"rejected_{name}_mean"] = sums[f"dropped_{name}"] / sums["dropped"]
    numbers |= _loss_numbers(sums)
    if kept > 0:
        mean, square = sums["weight"] / kept, sums["weight_square"] / kept
        numbers |= {"importance_weight_mean": mean, "importance_weight_max": all_sums.largest["weight"]}
        if square > 0:
            numbers["importance_weight_ess"] = mean**2 / square
    return numbers


def _loss_numbers(sums: dict[str, float]) -> dict[str, float]:
    """About clipped tokens and the factors that tokens were trained with, from the sums of the batch."""
    numbers = {}
    if "clipped_sequences" in sums:
        numbers["clipped_sequence_share"] = sums["clipped_sequences"] / sums["sequences"]
    for sign in _SIDES:
        clipped = sums.get(f"clipped_{sign}", 0)
        if f"clipped_{sign}" in sums and sums[sign] > 0:
            numbers[f"clipped_{sign}_share"] = clipped / sums[sign]
        for name, count in (("probability", sums.get(f"reported_{sign}", 0)), ("entropy", clipped)):
            if count > 0 and f"clipped_{sign}_{name}" in sums:
                numbers[f"clipped_{sign}_{name}_mean"] = sums[f"clipped_{sign}_{name}"] / count
    if n := sums.get("factors"):
        mean = sums["factor"] / n
        numbers |= {"effective_factor_mean": mean, "effective_factor_std": math.sqrt(max(sums["factor_square"] / n - mean**2, 0))}
        numbers |= {"effective_objective": sums["factor_objective"], "effective_bias": sums["factor_bias"]}
    return numbers


def _count_numbers(counts: DecisionCounts) -> dict[str, float]:
    numbers = {f"rejected_by_{label}": dropped / looked_at for label, (looked_at, dropped) in counts.by_criterion().items()}
    by_unit = counts.by_unit()
    if by_unit["units"] > 0:
        for name, sign in itertools.product(("truncated", "masked"), ("", "positive", "negative")):
            share = by_unit[f"{name}_{sign}"] if sign else by_unit[name]
            numbers["_".join(filter(None, (name, sign, "share")))] = share / by_unit["units"]
    return numbers


def _clip_sums(view: BatchView, decided: FinalDecision, entropy: Tensor | None) -> dict[str, float]:
    """Sums over the kept tokens that the objective clipped, by the sign of the advantage; empty if that isn't known."""
    if decided.is_clipped is None:
        return {}
    clipped = decided.keep_mask & decided.is_clipped
    sequences = view.levels.at(Level.SEQUENCE)
    still = sequences.any(decided.keep_mask & ~clipped)
    sums: dict[str, float] = {"clipped_sequences": int((sequences.any(clipped) & ~still).count_nonzero())}
    for name, chosen in (("positive", view.batch.advantages > 0), ("negative", view.batch.advantages < 0)):
        few = (clipped & chosen).nonzero().squeeze(1)
        sums[f"clipped_{name}"] = few.numel()
        reported = few[view.mask[few]]
        sums[f"reported_{name}"] = reported.numel()
        sums[f"clipped_{name}_probability"] = float(view.logprobs.behavior[reported].double().exp().sum())
        if entropy is not None:
            sums[f"clipped_{name}_entropy"] = float(entropy.detach()[few].double().sum())
    return sums


def _factor_sums(view: BatchView, decided: FinalDecision) -> dict[str, float]:
    """Sums of c, the factor on A grad log pi that a token was trained with, and phi = c / r with the loss's own r; empty if c or r isn't
    known."""
    if decided.coefficients is None or decided.proximal_logprobs is None:
        return {}
    counted = view.mask & (view.batch.advantages != 0)
    advantages = masked(view.batch.advantages, counted).double()
    c = masked(decided.importance_weights * decided.coefficients, counted & decided.keep_mask).double()
    assert view.logprobs.target is not None  # the caller has it, or there would be no coefficients
    phi = c * bounded_exp(masked(decided.proximal_logprobs - view.logprobs.target, counted).double())
    q = bounded_exp(view.log_ratio(Ratio.Q).double())
    return {
        "factors": int(counted.count_nonzero()),
        "factor": float(phi.sum()),
        "factor_square": float(phi.dot(phi)),
        "factor_objective": float(advantages.dot(phi - 1)),
        "factor_bias": float(advantages.dot(c - q)),
    }


def _target_sums(batch: PackedBatch, target: Tensor, mask: Tensor, *, has_moved: bool) -> DiagnosticSums:
    """Args: has_moved: the target stands for log pi_prox too, and some of its tokens came after the batch's first update."""
    counts = Levels(batch).sequences.sum(mask)
    behavior, chosen = masked(batch.behavior_logprobs, mask), masked(target, mask)
    x = (chosen.double() - behavior).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # 0 outside the mask, and so are k1 and k3
    e = torch.expm1(x)
    is_bad = (batch.advantages < 0) & (behavior.exp() - chosen.exp() >= BAD_UPDATE)
    sums = {"tokens": counts.sum(), "sequences": counts.count_nonzero(), "x": x.sum(), "xx": x.dot(x), "k3": (e - x).sum()}
    sums |= {"distance": 0.5 * e.abs().sum(), "bad": is_bad.sum()}
    if has_moved:
        sums["drift_from_behavior_k3"] = sums["k3"]
    if batch.proximal_logprobs is not None:
        drift = (chosen.double() - masked(batch.proximal_logprobs, mask)).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sums["drift_k3"] = (torch.expm1(drift) - drift).sum()
    inside = x + (mask.double() - 1) * 1e3
    largest = {"target/longest": counts, "target/advantage": masked(batch.advantages, mask).abs(), "target/x": inside}
    return DiagnosticSums(
        {f"target/{name}": float(value) for name, value in sums.items()},
        {name: float(values.max()) for name, values in largest.items() if values.numel()},
        {},
    )


def _target_numbers(sums: DiagnosticSums) -> dict[str, float]:
    added = sums.added
    tokens = added.get("target/tokens", 0)
    if tokens == 0:
        return {}
    longest, largest, distance = sums.largest["target/longest"], sums.largest["target/advantage"], added["target/distance"]
    bounds = [2 * largest * longest * (longest - 1) * (distance / tokens) ** 2, 4 * largest * distance / added["target/sequences"]]
    numbers = {
        "target_k1_kl": -added["target/x"] / tokens,
        "target_k2_kl": 0.5 * added["target/xx"] / tokens,
        "target_k3_kl": added["target/k3"] / tokens,
        "target_rho_max": math.exp(sums.largest["target/x"]),
        "target_total_variation": distance / tokens,
        "improvement_bound_quadratic": bounds[0],
        "improvement_bound_linear": bounds[1],
        "improvement_bound": min(bounds),
        "bad_update_share": added["target/bad"] / tokens,
    }
    if "target/drift_k3" in added:
        numbers["drift_k3_kl"] = added["target/drift_k3"] / tokens
    if "target/drift_from_behavior_k3" in added:
        numbers["drift_from_behavior_k3_kl"] = added["target/drift_from_behavior_k3"] / tokens
    return numbers


def _staleness_sums(spans: TokenSpans, num_sequences: int) -> DiagnosticSums:
    counts = count_staleness(spans, num_sequences)
    if counts is None:
        return DiagnosticSums({}, {}, {})
    shares = {"staleness": counts.total, "staleness_in_flight": counts.in_flight, "staleness_in_queue": counts.in_queue}
    sequences = {"sampled_sequences": float(counts.sequences), "mixed_sequences": float(counts.mixed_sequences)}
    return DiagnosticSums(sequences, {}, {name: tuple(histogram.tolist()) for name, histogram in shares.items()})


def _staleness_numbers(sums: DiagnosticSums) -> dict[str, float]:
    if "staleness" not in sums.histograms:
        return {}
    added, by_age = sums.added, {float(age): n for age, n in enumerate(sums.histograms["staleness"])}
    tokens = sum(by_age.values())
    numbers = staleness_numbers(by_age, sequences=added["sampled_sequences"], mixed=added["mixed_sequences"])
    for name in ("staleness", "staleness_in_flight", "staleness_in_queue"):
        by_version = [count / tokens for count in sums.histograms[name]]
        if name != "staleness":
            numbers[f"{name}_mean"] = sum(versions * share for versions, share in enumerate(by_version))
        numbers |= {f"{name}_share_{versions}": share for versions, share in enumerate(by_version)}
    return numbers


def _quantiles(batch: PackedBatch, proximal: Tensor, mask: Tensor) -> dict[str, float]:
    ordered = (proximal[mask].double() - batch.behavior_logprobs[mask].double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).sort().values
    if ordered.numel() == 0:
        return {}
    return {f"log_ratio_quantile_{percent:02d}": float(ordered[round((ordered.numel() - 1) * percent / 100)]) for percent in PERCENTS}


def _detailed_sums(batch: PackedBatch, proximal: Tensor, mask: Tensor) -> DiagnosticSums:
    """Sums of rho = 1 + e by the probability of its token, and the spurious objective."""
    behavior, chosen = batch.behavior_logprobs[mask].double(), proximal[mask].double()
    e = torch.expm1((chosen - behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    edges = torch.tensor(BUCKET_EDGES, dtype=e.dtype, device=e.device)
    found = DiagnosticSums({"spurious_objective": float(batch.advantages[mask].double()[chosen.exp() < SPURIOUS_BELOW].sum())}, {}, {})
    for name, probability in (("bucket", chosen.exp()), ("bucket_behavior", behavior.exp())):
        bucket = torch.bucketize(probability, edges, right=True)
        for sort, values in (("tokens", torch.ones_like(e)), ("e", e), ("ee", e * e)):
            found.histograms[f"{name}/{sort}"] = tuple(torch.bincount(bucket, values, minlength=len(BUCKET_EDGES) + 1).tolist())
    return found


def _bucket_numbers(name: str, sums: DiagnosticSums) -> dict[str, float]:
    numbers: dict[str, float] = {}
    columns = [sums.histograms.get(f"{name}/{sort}", ()) for sort in ("tokens", "e", "ee")]
    if sum(columns[0]) == 0:
        return {}
    for index, (n, total, square) in enumerate(zip(*columns, strict=True)):
        numbers[f"{name}_tokens_{index}"] = n
        if n > 0:
            numbers[f"{name}_rho_mean_{index}"] = 1 + total / n
            numbers[f"{name}_rho_std_{index}"] = math.sqrt(max(square / n - (total / n) ** 2, 0.0))
    return numbers
