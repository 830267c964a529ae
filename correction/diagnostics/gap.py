"""The gap between mu and pi_prox over sets of tokens: one pass in chunks that stay in the processor's cache.

Sums of chunks add up to those of a set of tokens, and sums of sets to those of the batch; quotients come last. quantities.GAP says what
each number is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..batch import PackedBatch
from ..terms.ratios import LOG_RATIO_LIMIT, bounded_exp
from ..terms.staleness import TokenSpans
from .limits import LEAST_EFFECTIVE_TOKENS, LEAST_MEAN_ERROR, MOST_MEAN_TOKENS
from .sums import DiagnosticSums

CPU_CHUNK = 2**17
OTHER_CHUNK = 2**22
"""Tokens of a chunk; on an accelerator it need only be small against its memory."""
_CONSTANT = 1e-28
"""Variance over squared mean under which a probability does not vary: the rounding of the mean in float64 is 1e-16."""


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


_FIELDS = tuple(field.name for field in fields(GapSums))
"""The last two are extremes, all others sums."""
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
