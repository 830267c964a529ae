"""The loss of one micro-batch, and the numbers that make micro-batches and ranks one batch.

loss = sum over kept tokens of token_scale * importance_weight * l(token), plus KL, minus entropy. Late parts are decided
here, on detached logprobs, by the functions that the service uses for early ones. What is late and global (mean weight,
kept counts) is one factor on the gradient: add up the partials of all micro-batches and ranks, then apply `policy_scale`
before the optimizer step.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .batch import CorrectedBatch, FinalDecision
from .checks import check_same_settings, check_training_values
from .config import CorrectionConfig
from .correct import probability_factor
from .decision import BatchView, Decision, apply_stage, divergence_of_tokens, drop_broken_units, settled_tokens, unit_advantages
from .errors import DataError
from .settings.choices import Level, ProximalSource, Ratio
from .settings.parts import BandConfig, ClipGate, DivergenceGate, KlConfig, RelaxConfig, ScoreObjective
from .settings.schedule import Schedule, Stage, effective_ratio, needs_reference_logprobs
from .terms.denominators import global_counts, kept_local_factor
from .terms.divergence import Estimator, estimate
from .terms.importance import normalizer, weight_sums
from .terms.objectives import (
    clip_gate,
    clipped_loss,
    delight_factor,
    divergence_band,
    divergence_gate,
    gamma_coefficient,
    geometric_clip_loss,
    leveled_log_ratio,
    prefix_clip,
    prefix_log_ratio,
    relaxed_clip,
    score_loss,
    soft_gate_loss,
)
from .terms.ratios import aggregate_log_ratio, bounded_exp
from .terms.rejection import has_sign
from .terms.segments import Segments, masked, where_finite


@dataclass(frozen=True, slots=True)
class LossSums:
    """What the entries of PolicyLoss.partials are; all are sums over tokens or units, and add up over any split of a batch."""

    policy_loss: float
    kl_loss: float
    entropy_loss: float
    tokens: float
    kept_tokens: float
    broken_tokens: float
    clipped_tokens: float
    bounded_tokens: float
    ratio: float
    drift_k1: float
    drift_k3: float
    weight: float
    entropy: float
    kl: float
    normalizer_weight: float
    normalizer_units: float
    original_count: float
    kept_count: float
    drift_tokens: float
    sequence_weight: float
    sequence_weight_square: float
    sequences: float

    @classmethod
    def of(cls, partials: Tensor) -> LossSums:
        """Args: partials: [len(PARTIALS)]."""
        return cls(*partials.tolist())


PARTIALS = tuple(field.name for field in fields(LossSums))
"""Names of the entries of PolicyLoss.partials, in order: the fields of LossSums."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of a micro-batch."""

    loss: Tensor
    """Scalar with gradient, in parts of the global batch's loss: sums over micro-batches and ranks add up to it."""
    partials: Tensor
    """[len(PARTIALS)] float64, detached: see PARTIALS."""
    decided: FinalDecision
    """What is in the loss, with which weight, and why."""
    token_losses: Tensor
    """[N] with gradient: each token's part of the loss, whose sum it is; KL penalty and entropy bonus are in it."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an objective gives for each token."""

    loss: Tensor
    """[N] with gradient."""
    is_clipped: Tensor
    """[N] bool: the trust region took the gradient away."""
    log_ratio: Tensor
    """[N] nats, detached: the ratio that it watched."""
    is_bounded: Tensor | None = None
    """[N] bool: the coefficient was cut to a bound, where the objective has any."""
    units: Segments | None = None
    """Segments that it sums over, if it works above the token."""


def policy_loss(
    corrected: CorrectedBatch,
    target_logprobs: Tensor,
    config: CorrectionConfig,
    entropy: Tensor | None = None,
    *,
    target_topk_logprobs: Tensor | None = None,
) -> PolicyLoss:
    """Loss and partial sums of whole sequences of a corrected batch.

    Args:
        target_logprobs: [N] log pi_theta of the sampled tokens, with gradient.
        entropy: [N] nats, with gradient if config.entropy_coefficient > 0; None: not reported.
        target_topk_logprobs: [N, K] of batch.topk_ids under pi_theta, for top-K divergences alone; no gradient goes through.
    Raises: DataError if something has another shape than the batch, a logprob is positive, or something that the config needs is missing;
        ConfigError if the batch was corrected by other settings.
    """
    given = {"target_logprobs": target_logprobs, "entropy": entropy, "target_topk_logprobs": target_topk_logprobs}
    check_training_values("policy_loss", corrected, **given)
    check_same_settings("policy_loss", corrected.config, config)
    batch = corrected.batch
    schedule = Schedule.of(config, is_deferred=corrected.is_deferred)
    target = at_least_float32(target_logprobs)
    listed = None if target_topk_logprobs is None else target_topk_logprobs.detach()
    trained_entropy = None if entropy is None or config.entropy_coefficient == 0 else entropy.detach()
    view = BatchView.of(
        batch, config, schedule, target.detach(), target_topk_logprobs=listed, entropy=trained_entropy, settled=corrected.settled
    )
    late = apply_stage(view, config, schedule, Stage.LATE)
    tokens, coefficients = _losses_and_coefficients(view, target, config)
    keep = corrected.keep_mask & late.keep
    if config.covariance is not None and config.covariance.action == "drop":
        keep = keep & settled_tokens(view, "covariance")
    if tokens.units is not None:
        keep = drop_broken_units(view, keep, [tokens.units])

    weights = corrected.importance_weights * late.weights
    if schedule.proximal is Stage.LATE:
        weights = weights * probability_factor(view, config)
    sequences = view.levels.at(Level.SEQUENCE)
    scale = corrected.token_scale
    if schedule.kept_count is Stage.LATE:
        scale = scale * kept_local_factor(batch.loss_mask, keep, sequences, kind=config.denominator.kind)

    policy = torch.where(keep, weights * tokens.loss, 0) * scale
    kl_tokens = _kl_tokens(view, target, config.kl, config)
    kl = config.kl.coefficient * kl_tokens * corrected.token_scale
    bonus = _entropy_bonus(view, entropy, corrected.token_scale, config)
    by_token = policy + kl - bonus
    sums = {
        "policy_loss": policy.detach().sum(),
        "kl_loss": kl.detach().sum(),
        "entropy_loss": -bonus.detach().sum(),
        "kl": kl_tokens.detach().sum(dtype=torch.float64),
        **_token_sums(view, keep, tokens, weights, entropy, _moved(config)),
        **_global_sums(view, corrected, late, keep, config, schedule),
        **_step_size_sums(view, config),
    }
    partials = torch.stack([torch.as_tensor(sums.get(name, 0.0), dtype=torch.float64, device=policy.device) for name in PARTIALS])
    decided = FinalDecision(keep, weights, late.counts, coefficients, tokens.is_clipped, view.logprobs.proximal)
    return PolicyLoss(by_token.sum(), partials, decided, by_token)


def policy_scale(partials: Tensor, config: CorrectionConfig) -> float:
    """Factor on the gradient of the whole batch, from the partials summed over its micro-batches and ranks.

    1.0 unless the mean weight or the kept count was only known inside the training forward. The config refuses KL and entropy terms
    together with such a factor, so it may multiply the whole gradient.
    """
    sums = LossSums.of(partials)
    factor = late_normalizer(partials)
    if sums.kept_count > 0:
        factor *= sums.original_count / sums.kept_count
    return factor


def step_size_factor(partials: Tensor, config: CorrectionConfig) -> float:
    """Factor on the learning rate of one optimizer step, from the partials summed over its micro-batches and ranks; in (0, 1].

    1.0 unless config.step_size asks for one: then the root of ESS / S, where S sequences with weights w (the products of q under the
    weights from which the step starts) are worth ESS = (sum w)^2 / sum w^2. It is no factor on the gradient: Adam would not feel it.
    Source: VCPO (arXiv 2602.17616) and its code (ess_scaling: sqrt, of unclipped weights).
    """
    sums = LossSums.of(partials)
    if config.step_size.by == "off" or sums.sequences == 0:
        return 1.0
    return math.sqrt(min(sums.sequence_weight**2 / (sums.sequences * sums.sequence_weight_square), 1.0))


def late_normalizer(partials: Tensor) -> float:
    """The part of `policy_scale` that is batch normalisation: factor on the importance weights; 1.0 where that was settled early."""
    sums = LossSums.of(partials)
    return normalizer(sums.normalizer_weight, sums.normalizer_units)


def broken_tokens(partials: Tensor) -> int:
    """Tokens of the loss mask with a value that is not finite, counted in each pass that the partials are of."""
    return int(LossSums.of(partials).broken_tokens)


def loss_metrics(partials: Tensor, config: CorrectionConfig) -> dict[str, float]:
    """The numbers of LOSS_METRICS, from the partials summed over a batch's micro-batches and ranks. What has no tokens is absent.

    A batch that is gone through several times counts in every pass; `diagnose` looks at the first one. Warns of tokens that are left out
    as broken, and of a batch of which nothing is left.
    """
    sums = LossSums.of(partials)
    scaled = sums.policy_loss * policy_scale(partials, config)
    metrics = {"loss": scaled + sums.kl_loss + sums.entropy_loss, "policy_loss": scaled}
    if config.kl.coefficient > 0:
        metrics["kl_loss"] = sums.kl_loss
    if sums.sequences > 0:
        metrics["step_size_factor"] = step_size_factor(partials, config)
    trained = sums.tokens + sums.broken_tokens
    if trained > 0:
        metrics["clip_share"] = sums.clipped_tokens / trained
        metrics |= {"batch_kept_share": sums.kept_tokens / trained, "batch_broken_tokens": sums.broken_tokens}
        _warn_of_what_is_left(sums)
    if sums.drift_tokens > 0:
        drift = "batch_drift" if _moved(config) is Ratio.R else "batch_drift_from_behavior"
        metrics |= {f"{drift}_k1_kl": sums.drift_k1 / sums.drift_tokens, f"{drift}_k3_kl": sums.drift_k3 / sums.drift_tokens}
    if sums.tokens > 0:
        metrics["ratio_mean"] = sums.ratio / sums.tokens
        if sums.entropy != 0:
            metrics["entropy"] = sums.entropy / sums.tokens
        if config.kl.coefficient > 0:
            metrics["penalty_kl" if needs_reference_logprobs(config) else "anchor_kl"] = sums.kl / sums.tokens
    if sums.kept_tokens > 0:
        if config.objective.kind == "score" and (config.objective.lower is not None or config.objective.upper is not None):
            metrics["bounded_share"] = sums.bounded_tokens / sums.kept_tokens
        metrics["importance_weight_raw_mean"] = sums.weight / sums.kept_tokens
    return metrics


def _warn_of_what_is_left(sums: LossSums) -> None:
    """Args: sums: of a batch with trained tokens."""
    broken = int(sums.broken_tokens)
    if broken:
        warnings.warn(
            f"correction: {broken} of {int(sums.tokens) + broken} trained tokens are left out of the loss, since a number of theirs is "
            "not finite: of the training forward, unless correct() has named another. The loss is finite all the same; look at the "
            "gradient's norm before the optimizer step",
            stacklevel=3,
        )
    if sums.kept_tokens == 0:
        why = "rejected, or left out as a number is not finite" if broken else "rejected"
        warnings.warn(f"correction: every token of the batch was {why}; its policy loss is 0. Skip the optimizer step", stacklevel=3)


def _losses_and_coefficients(view: BatchView, target: Tensor, config: CorrectionConfig) -> tuple[TokenLoss, Tensor]:
    """The objective on every token, and [N] its factor on A grad log pi, detached: from the gradient itself, whatever the objective."""
    point = target if target.requires_grad else target.detach().requires_grad_()
    with torch.enable_grad():
        tokens = token_losses(view, point, config)
        if config.covariance is not None and config.covariance.action == "penalty":
            tokens = replace(tokens, loss=tokens.loss + _covariance_penalty(view, point, config.covariance.coefficient, config))
        (slope,) = torch.autograd.grad(tokens.loss.sum(), point, retain_graph=True)
    if point is not target:
        tokens = replace(tokens, loss=tokens.loss.detach())
    counted = view.mask & (view.batch.advantages != 0)
    return tokens, torch.where(counted, -slope / view.batch.advantages, 0)


def _covariance_penalty(view: BatchView, target: Tensor, coefficient: float, config: CorrectionConfig) -> Tensor:
    """[N] with gradient: coefficient |log r| at the tokens that `settle` chose; without a slope where r = 1."""
    chosen = view.mask & ~settled_tokens(view, "covariance")
    return coefficient * torch.where(chosen, target - _anchor(view, Ratio.R, config), 0).abs()


def token_losses(view: BatchView, target: Tensor, config: CorrectionConfig) -> TokenLoss:
    """The objective of config on every token; target [N] has the gradient."""
    part = config.objective
    advantages = torch.where(view.mask, view.batch.advantages, 0)
    if part.kind == "score":
        return _score(view, target, advantages, part, config)
    if part.kind == "prefix_clip":
        segments = view.levels.at(Level.SEQUENCE)
        log_ratio = prefix_log_ratio(torch.where(view.mask, target - _anchor(view, part.ratio, config), 0), segments)
        bounds = prefix_clip(view.mask, segments, **part.model_dump(exclude={"kind", "ratio"}))
        least, largest, dual = (bound.to(log_ratio.dtype) for bound in bounds)
        loss, is_clipped = clipped_loss(log_ratio, advantages, clip_low=least, clip_high=largest, dual_clip=dual)
        return TokenLoss(loss, is_clipped, log_ratio.detach(), units=segments)
    segments = view.levels.at(part.level)
    log_ratio = leveled_log_ratio(target, _anchor(view, part.ratio, config), view.mask, segments, level=part.level)
    nothing = torch.zeros_like(view.mask)
    if part.kind == "clip":
        low, high = _clip_limits(view, part.clip_low, part.clip_high, part.relax)
        if part.band is not None:
            low, high = _band_limits(_anchor(view, part.ratio, config), part.clip_low, part.clip_high, part.band)
        loss, is_clipped = clipped_loss(log_ratio, advantages, clip_low=low, clip_high=high, dual_clip=part.dual_clip)
        return TokenLoss(loss, is_clipped, log_ratio.detach(), units=segments)
    if part.kind == "geometric_clip":
        segments = view.levels.at(Level.SEQUENCE)
        loss, is_clipped = geometric_clip_loss(log_ratio, advantages, view.mask, segments, log_clip=part.log_clip)
        return TokenLoss(loss, is_clipped, log_ratio.detach(), units=segments)
    if part.kind == "soft_gate":
        loss = soft_gate_loss(log_ratio, advantages, tau_positive=part.tau_positive, tau_negative=part.tau_negative)
        return TokenLoss(loss, nothing, log_ratio.detach())
    constants = part.model_dump(exclude={"kind", "ratio"})
    coefficient = gamma_coefficient(log_ratio.detach(), advantages, **constants)
    return TokenLoss(score_loss(target, advantages, coefficient), nothing, log_ratio.detach(), units=segments)


def _score(view: BatchView, target: Tensor, advantages: Tensor, part: ScoreObjective, config: CorrectionConfig) -> TokenLoss:
    coefficient = torch.ones_like(target)
    watched = torch.zeros_like(target)
    bounded = torch.zeros_like(view.mask)
    segments = view.levels.at(part.level)
    if part.ratio is not None:
        watched = view.logprobs.log_ratio(effective_ratio(part.ratio, config), view.mask).to(target.dtype)
        raw = bounded_exp(aggregate_log_ratio(watched, view.mask, segments, level=part.level))
        units = raw if part.lower is None and part.upper is None else raw.clamp(min=part.lower, max=part.upper)
        is_cut = units != raw
        if part.only_negative:
            is_negative = unit_advantages(view, segments) < 0
            units, is_cut = torch.where(is_negative, units, 1), is_cut & is_negative
        coefficient, bounded = segments.spread(units), segments.spread(is_cut)
    if part.delight is not None:
        surprise = torch.where(view.mask, target.detach(), 0)
        coefficient = coefficient * delight_factor(surprise, advantages, **part.delight.model_dump())
    blocked = torch.zeros_like(view.mask)
    if part.gate is not None:
        blocked = ~_gate(view, advantages, part.gate, config)
    loss = score_loss(target, advantages, torch.where(blocked, 0, coefficient))
    return TokenLoss(loss, blocked, watched, bounded, units=segments if part.ratio is not None else None)


def _gate(view: BatchView, advantages: Tensor, gate: ClipGate | DivergenceGate, config: CorrectionConfig) -> Tensor:
    """[N] bool: tokens that may move."""
    ratio = effective_ratio(gate.ratio, config)
    log_ratio = view.logprobs.log_ratio(ratio, view.mask)
    if isinstance(gate, ClipGate):
        low, high = _clip_limits(view, gate.low, gate.high, gate.relax)
        passes = clip_gate(log_ratio, advantages, low=low, high=high, is_open=gate.is_open)
    else:
        divergence = divergence_of_tokens(view, gate.divergence, ratio)
        passes = divergence_gate(divergence, log_ratio, advantages, threshold=gate.threshold, is_open=gate.is_open)
    return passes | ~has_sign(advantages, gate.side)


def _clip_limits(view: BatchView, low: float, high: float, relax: RelaxConfig | None) -> tuple[Tensor, Tensor] | tuple[float, float]:
    """Distances of the bounds from 1: of all tokens, or of each where rare ones have none."""
    if relax is None:
        return low, high
    return relaxed_clip(view.logprobs.behavior, low, high, below=relax.below, ends=relax.ends)


def _band_limits(anchor: Tensor, low: float, high: float, part: BandConfig) -> tuple[Tensor, Tensor]:
    """Distances of each token's bounds from 1: those of its band, at least low and high. Args: anchor: [N] log probabilities."""
    least, largest = divergence_band(anchor.exp(), divergence=part.divergence, delta=part.delta)
    upper = (largest - 1).clamp(min=high, max=part.largest - 1)
    return (1 - least).clamp(min=low).to(anchor.dtype), upper.to(anchor.dtype)


def _anchor(view: BatchView, ratio: Ratio, config: CorrectionConfig) -> Tensor:
    """[N] the policy below the target in a ratio."""
    return view.logprobs.pair(effective_ratio(ratio, config))[1]


def _kl_tokens(view: BatchView, target: Tensor, part: KlConfig, config: CorrectionConfig) -> Tensor:
    """[N] estimate of KL(target || anchor) at each token, with gradient; 0 outside the mask and when off."""
    if part.coefficient == 0:
        return torch.zeros_like(target)
    known = {
        "reference": view.batch.reference_logprobs,
        "behavior": view.logprobs.behavior,
        "proximal": view.logprobs.proximal,
    }
    anchor = known[part.anchor]
    if anchor is None:
        raise DataError(
            f"kl.anchor = {part.anchor}: the batch has no {part.anchor}_logprobs. Have the learner compute them, or set kl.coefficient: 0."
        )
    mask = view.mask
    if part.level == "sequence":
        return _squares_of_sequences(view, torch.where(mask, target - anchor, 0))
    estimator = Estimator.K3 if part.estimator == "unbiased_k3" else Estimator(part.estimator)
    values = estimate(torch.where(mask, anchor - target, 0), estimator)
    if part.estimator == "unbiased_k3":
        factor = torch.where(mask, target - _anchor(view, part.ratio, config), 0)
        values = bounded_exp(factor) * values  # differentiable factor: exactly the gradient of the reverse KL
    return torch.where(mask, values, 0).to(target.dtype)


def _squares_of_sequences(view: BatchView, log_ratio: Tensor) -> Tensor:
    """[N] parts of half the square of each sequence's log ratio, with its gradient; 0 where a token of the sequence is not finite.

    Args: log_ratio: [N] nats, with gradient, 0 outside the mask.
    """
    sequences, detached = view.levels.at(Level.SEQUENCE), log_ratio.detach()
    whole = masked(sequences.sum(detached), ~sequences.any(view.broken)).to(log_ratio.dtype)
    return sequences.spread(whole) * (log_ratio - detached / 2)


def _entropy_bonus(view: BatchView, entropy: Tensor | None, scale: Tensor, config: CorrectionConfig) -> Tensor:
    """[N] with gradient; one 0 when off."""
    if config.entropy_coefficient == 0:
        return torch.zeros((), device=scale.device)
    if entropy is None:
        raise DataError("entropy_coefficient > 0 needs the entropy of each token: give policy_loss `entropy`, or set it to 0.")
    return config.entropy_coefficient * torch.where(view.mask, entropy, 0) * scale


def _moved(config: CorrectionConfig) -> Ratio:
    """The ratio of the target to the policy that is taken for the one from which the update began."""
    return Ratio.R if config.proximal is ProximalSource.RECOMPUTE else Ratio.Q


def _token_sums(
    view: BatchView, keep: Tensor, tokens: TokenLoss, weights: Tensor, entropy: Tensor | None, moved: Ratio
) -> dict[str, Tensor]:
    """Args: moved: whose log is the drift."""
    after, before = view.logprobs.pair(moved)
    measured = where_finite(view.mask, after, before)  # neither has to be something that the loss reads
    if moved is Ratio.Q and view.missing is not None:
        measured = measured & ~view.missing
    drift = masked(after - before, measured)
    sums = {
        "tokens": view.mask.sum(),
        "kept_tokens": keep.sum(),
        "broken_tokens": view.broken.sum(),
        "clipped_tokens": (keep & tokens.is_clipped).sum(),
        "ratio": torch.where(view.mask, bounded_exp(tokens.log_ratio), 0).sum(dtype=torch.float64),
        "drift_k1": estimate(drift, Estimator.K1).sum(),
        "drift_k3": estimate(drift, Estimator.K3).sum(),
        "drift_tokens": measured.sum(),
        "weight": torch.where(keep, weights, 0).double().sum(),
    }
    if tokens.is_bounded is not None:
        sums["bounded_tokens"] = (keep & tokens.is_bounded).sum()
    if entropy is not None:
        sums["entropy"] = torch.where(view.mask, entropy.detach(), 0).sum(dtype=torch.float64)
    return sums


def _global_sums(
    view: BatchView, corrected: CorrectedBatch, late: Decision, keep: Tensor, config: CorrectionConfig, schedule: Schedule
) -> dict[str, Tensor]:
    """Sums behind policy_scale; absent where the service has settled it already."""
    sums: dict[str, Tensor] = {}
    if schedule.normalization is Stage.LATE:
        segments = view.levels.at(config.importance.level)
        if late.by_unit is not None:
            weights = late.by_unit.weights
        else:  # early weights: every token of a unit has the unit's weight, so the maximum recovers it
            weights = segments.maximum(corrected.importance_weights if corrected.plain_weights is None else corrected.plain_weights)
        units = weight_sums(weights, view.mask, keep, segments, config.normalize.population)
        sums["normalizer_weight"], sums["normalizer_units"] = units[0], units[1]
    if schedule.kept_count is Stage.LATE:
        sequences = view.levels.at(Level.SEQUENCE)
        counts = global_counts(view.batch.loss_mask, keep, sequences, kind=config.denominator.kind)
        sums["original_count"], sums["kept_count"] = counts[0], counts[1]
    return sums


def _step_size_sums(view: BatchView, config: CorrectionConfig) -> dict[str, Tensor]:
    """Sums behind step_size_factor: over the sequences all of whose trained tokens are finite, rejected ones too; absent when off."""
    if config.step_size.by == "off":
        return {}
    sequences = view.levels.at(Level.SEQUENCE)
    counted = sequences.any(view.mask) & ~sequences.any(view.broken)
    weights = masked(bounded_exp(sequences.sum(view.log_ratio(Ratio.Q))), counted)
    return {"sequence_weight": weights.sum(), "sequence_weight_square": weights.square().sum(), "sequences": counted.sum()}


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
