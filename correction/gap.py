"""The numbers of the gap between mu and pi_prox, from one pass over the tokens: sums in float64, true extremes.

The pass goes in chunks that stay in the processor's cache, so that its memory doesn't grow with the batch; sums of chunks add up to
those of a set, and sums of sets to those of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from correction.ratios import LOG_RATIO_LIMIT
from correction.staleness import TokenSpans

CPU_CHUNK = 2**17
OTHER_CHUNK = 2**22
"""Tokens of a chunk; on an accelerator it need only be small against its memory."""
_CONSTANT = 1e-28
"""Variance over squared mean under which a probability does not vary: the rounding of the mean in float64 is 1e-16."""


@dataclass(frozen=True, slots=True)
class _Sums:
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


def chunk_tokens(device: torch.device) -> int:
    """Tokens that are best looked at together on a device."""
    return CPU_CHUNK if device.type == "cpu" else OTHER_CHUNK


def gap_numbers(
    behavior: Tensor, proximal: Tensor, spans: TokenSpans, sets: Sequence[Tensor], num_sequences: int
) -> tuple[list[dict[str, float]], Tensor]:
    """The numbers of diagnostics.GAP, for each of several disjoint sets of tokens and at the end for all of them together.

    Args:
        behavior, proximal: [N] logprobs, nats, finite inside the spans.
        sets: each as [R] bool, the spans that are in it. A set without tokens has no numbers.
    Returns: these numbers, and [S, 3] float64 of each sequence: tokens, sum of log mu, sum of log rho.
    """
    shift: Tensor | None = None
    empty = torch.zeros(len(fields(_Sums)), dtype=torch.float64, device=behavior.device)
    empty[-2], empty[-1] = -torch.inf, torch.inf
    by_sequence = empty.new_zeros(num_sequences, 3)
    per_set = []
    for chosen in sets:
        rows = [empty]
        for index, chunk in spans.token_index(chosen, chunk=chunk_tokens(behavior.device)):
            mu, prox = behavior.index_select(0, index), proximal.index_select(0, index).double()
            probability, log_mu = mu.exp().double(), mu.double()
            shift = probability.mean() if shift is None else shift
            x = prox.sub_(log_mu)
            lengths = spans.lengths[chunk]
            sums = [lengths.double(), *(torch.segment_reduce(values, "sum", lengths=lengths) for values in (log_mu, x))]
            by_sequence.index_add_(0, spans.sequences[chunk], torch.stack(sums, 1))
            rows.append(_chunk_sums(log_mu, x, probability, shift))
        per_set.append(_added(torch.stack(rows)))
    whole = _added(torch.stack(per_set))
    return [_numbers(_Sums(*row)) for row in torch.stack([*per_set, whole]).tolist()], by_sequence


def _chunk_sums(log_mu: Tensor, x: Tensor, mu: Tensor, shift: Tensor) -> Tensor:
    """[fields of _Sums] float64, of log mu, log rho and mu of n > 0 tokens, each [n] float64; mu is overwritten."""
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


def _added(rows: Tensor) -> Tensor:
    """[fields of _Sums] of all rows together: the last two columns are extremes."""
    return torch.cat([rows[:, :-2].sum(0), rows[:, -2:-1].amax(0), rows[:, -1:].amin(0)])


def _numbers(s: _Sums) -> dict[str, float]:
    """The numbers of diagnostics.GAP; empty for no tokens."""
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
