"""Objectives: token losses whose gradient moves the target policy. One function, one formula.

Two forms. Surrogate: -A x with a differentiable ratio x. Score: -c A log target with a detached coefficient c. Where c = x their
gradients agree and their values don't: compare gradients between frameworks. Masks, importance weights and
denominators are put on by loss.py, from outside.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..settings.choices import Level
from .ratios import LOG_RATIO_LIMIT, aggregate_log_ratio, bounded_exp
from .segments import Segments


def leveled_log_ratio(target: Tensor, anchor: Tensor, mask: Tensor, segments: Segments, *, level: Level) -> Tensor:
    """[N] log ratio of each token's unit, with the gradient of the token alone.

    Above the token: sg[log x of the unit] + log target - sg[log target]. Under a mean over the sequence's tokens and a constant
    advantage this has the gradient of the unit's own ratio (GSPO-token).
    Args:
        target: [N] log pi_theta, with gradient; anchor: [N] log pi_prox or log mu.
    Source: GSPO (arXiv 2507.18071).
    """
    log_ratio = torch.where(mask, target - anchor, 0)
    if level is Level.TOKEN:
        return log_ratio
    unit = aggregate_log_ratio(log_ratio.detach(), mask, segments, level=level)
    return segments.spread(unit) + (log_ratio - log_ratio.detach())


def prefix_log_ratio(log_ratio: Tensor, sequences: Segments) -> Tensor:
    """[N] log of the product of the ratios up to each token, with the gradient of the token's own alone.

    Args:
        log_ratio: [N] nats, with gradient, 0 outside the mask; each is cut to +-20 first.
    Source: CTPO (arXiv 2605.07331), in the form of its authors' code.
    """
    own = log_ratio.detach()
    prefix = sequences.running(own.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).to(own.dtype)
    return prefix + (log_ratio - own)


def prefix_clip(
    mask: Tensor, sequences: Segments, *, log_low: float, log_high: float, log_dual: float, power: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip of each token's prefix, ([N] low, [N] high) as distances from 1 and [N] largest ratio where A < 0, all float64.

    Of the answer's n-th trained token their logs are -log_low n^power, log_high n^power and log_dual n^power.
    Source: CTPO (arXiv 2605.07331): the log of a product of n ratios scatters as the root of n.
    """
    scale = sequences.running(mask).clamp(min=1).pow(power)
    return -(-log_low * scale).expm1(), (log_high * scale).expm1(), (log_dual * scale).exp()


def relaxed_clip(behavior: Tensor, low: float, high: float, *, below: float, ends: str) -> tuple[Tensor, Tensor]:
    """Clip of each token, ([N] low, [N] high) as distances from 1: infinite where the behaviour policy found the token rare.

    Args:
        behavior: [N] log mu; below: probability under which a token is rare, itself not; ends: low, high or both.
    Source: Trust Region (arXiv 2602.04879), sec. 6, with below = 0.1: Relax-low, Relax-high, Relax-both.
    """
    is_rare = behavior.exp() < below
    lower, upper = torch.full_like(behavior, low), torch.full_like(behavior, high)
    if ends != "high":
        lower = torch.where(is_rare, torch.inf, lower)
    if ends != "low":
        upper = torch.where(is_rare, torch.inf, upper)
    return lower, upper


def divergence_band(probability: Tensor, *, divergence: str, delta: float) -> tuple[Tensor, Tensor]:
    """Least and largest ratio [N] that keep a token of probability p within a ball of radius delta, the rest of the mass scaled evenly.

    They solve p f(x) + (1 - p) f((1 - x p) / (1 - p)) = delta, or are 0 and 1 / p where nothing does. kl: f(u) = u - 1 - log u, by
    bisection; tv: f(u) = |u - 1| / 2; chi2: f(u) = (u - 1)^2.
    Args:
        probability: [N]; cut to [1e-6, 1 - 1e-6], beyond which float32 knows no complement. divergence: kl, tv or chi2.
    Source: BandPO (arXiv 2603.04918), in the form of its authors' code.
    """
    p = probability.double().clamp(1e-6, 1 - 1e-6)
    if divergence != "kl":
        width = delta / p if divergence == "tv" else (delta * (1 - p) / p).sqrt()
        return (1 - width).clamp(min=0), torch.minimum(1 + width, 1 / p)
    ends = []
    for end in (torch.zeros_like(p), 1 / p):
        inside, outside = torch.ones_like(p), end
        for _ in range(_HALVINGS):
            x = (inside + outside) / 2
            is_inside = -p * x.log() - (1 - p) * ((1 - x * p) / (1 - p)).log() <= delta  # the linear parts of f cancel
            inside, outside = torch.where(is_inside, x, inside), torch.where(is_inside, outside, x)
        ends.append(inside)
    return ends[0], ends[1]


# Halvings of an interval up to 1e6 wide: to 1e-12, which is more than float64 keeps of the largest ratios.
_HALVINGS = 60


def clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: Tensor | float = 0.2,
    clip_high: Tensor | float = 0.2,
    dual_clip: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high)); with dual_clip never above -A dual_clip where A < 0.

    Args:
        log_ratio: [N] nats, with gradient; cut to +-20 first, where the gradient ends too.
        clip_low, clip_high: distances from 1, both numbers or both [N] (`relaxed_clip`); dual_clip: a number or [N].
    Returns: (loss [N], is_clipped [N]): clipped means that the bounded term is strictly larger, so zero advantage never counts.
    Source: PPO (arXiv 1707.06347); clip-higher: DAPO (2503.14476); dual clip: arXiv 1912.09729, whose constant is 3.
    """
    ratio = bounded_exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)  # type: ignore[arg-type]  # both numbers, or both tensors
    loss, is_clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        hits = (advantages < 0) & (loss > ceiling)
        loss, is_clipped = torch.where(hits, ceiling, loss), is_clipped | hits
    return loss, is_clipped


def geometric_clip_loss(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, sequences: Segments, *, log_clip: float = 0.4
) -> tuple[Tensor, Tensor]:
    """GMPO: each log ratio clipped on the side that its advantage pushes to, then -A exp(mean over the sequence).

    The clip comes before the mean. Zero advantage: ratio 1, no loss.
    Args:
        log_ratio: [N] nats, with gradient; log_clip: nats (0.4 is a ratio of 0.67 to 1.49).
    Source: GMPO (arXiv 2507.20673).
    """
    downward = torch.where(advantages < 0, log_ratio.clamp(min=-log_clip), 0)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=log_clip), downward)
    mean = sequences.spread(sequences.mean(clipped.detach(), mask)).to(log_ratio.dtype)
    return -advantages * bounded_exp(mean + clipped - clipped.detach()), (clipped != log_ratio) & (advantages != 0)


def soft_gate_loss(log_ratio: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """SAPO: -A sigmoid(tau (x - 1)) 4 / tau. Its gradient is that of -A x at x = 1 and fades on both sides.

    Source: SAPO (arXiv 2511.20347); temperatures as in verl, TRL, AReaL and SkyRL.
    """
    tau = torch.where(advantages > 0, tau_positive, torch.full_like(advantages, tau_negative))
    return -advantages * torch.sigmoid(tau * (bounded_exp(log_ratio) - 1)) * (4 / tau)


def score_loss(target: Tensor, advantages: Tensor, coefficient: Tensor) -> Tensor:
    """-sg[c] A log target: the policy gradient with a detached coefficient."""
    return -coefficient.detach() * advantages * target


def delight_factor(target: Tensor, advantages: Tensor, *, temperature: float, surprisal_limit: float, gain: float) -> Tensor:
    """[N] gain sigmoid(A l / temperature) with the surprisal l = min(-log target, surprisal_limit): gain / 2 where A = 0.

    Args:
        target: [N] log pi_theta, nats; a value over 0 by rounding is no surprise.
    Source: Delightful Policy Gradient (arXiv 2603.14608); limit and gain as in miles pull request 2348.
    """
    surprisal = (-target).clamp(0, surprisal_limit)
    return gain * torch.sigmoid(advantages * surprisal / temperature)


def gamma_coefficient(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """VESPO's e^l w^k e^(-l w), 1 at w = 1; computed in log space.

    Args:
        log_ratio: [N] log of the sequence's product, broadcast to its tokens; cut to [log 1e-8, 20].
    Source: VESPO (arXiv 2602.10693), constants of TRL.
    """
    log_w = log_ratio.clamp(math.log(1e-8), LOG_RATIO_LIMIT)
    k = torch.where(advantages >= 0, k_positive, torch.full_like(log_w, k_negative))
    decay = torch.where(advantages >= 0, lambda_positive, torch.full_like(log_w, lambda_negative))
    return (decay + k * log_w - decay * log_w.exp()).exp()


def clip_gate(
    log_ratio: Tensor, advantages: Tensor, *, low: Tensor | float = 0.2, high: Tensor | float = 0.2, is_open: bool = False
) -> Tensor:
    """[N] bool: tokens that PPO's clip would leave a gradient. Bounds themselves pass, unless is_open.

    Args:
        low, high: distances from 1, one or [N] each (`relaxed_clip`).
    Source: MiniRL (arXiv 2512.01374), with high = 0.27.
    """
    ratio = bounded_exp(log_ratio)
    above, under = (ratio >= 1 + high, ratio <= 1 - low) if is_open else (ratio > 1 + high, ratio < 1 - low)
    return ~(((advantages > 0) & above) | ((advantages < 0) & under))


def divergence_gate(divergence: Tensor, log_ratio: Tensor, advantages: Tensor, *, threshold: float, is_open: bool = False) -> Tensor:
    """[N] bool: all but the tokens over the threshold (is_open: or at it) whose update would move the sampled token further out.

    Args:
        divergence: [N] from the anchor to the target, no unit (TV) or nats (KL); log_ratio: [N] target over anchor.
    Source: DPPO in Trust Region (arXiv 2602.04879), Eq. 12; with is_open and on negative advantages alone its minimal mask, sec. 5.3.
    """
    moves_out = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    return ~(moves_out & (divergence >= threshold if is_open else divergence > threshold))
