"""What the parts decide about a batch: importance weights and who stays. One set of functions for service and training forward.

A `BatchView` is a batch with the policies that are known at this point. `apply_stage` runs the parts of one stage (schedule.py); both
stages together decide everything exactly once. What was decided is counted here as well, and travels with the batch: nobody decides it
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from .batch import UNIT_COUNTS, DecisionCounts, PackedBatch
from .errors import DataError
from .settings.choices import TOPK_STATISTICS, AdvantageSign, Level, ProximalSource, Ratio, Statistic
from .settings.parts import CorrectionSettings, CriterionConfig, ImportanceConfig, VetoConfig
from .settings.schedule import Schedule, Stage, effective_ratio, needs_topk, policies_read, second_moments
from .terms.importance import bounded_weights, staleness_bound
from .terms.ratios import Logprobs, aggregate_log_ratio, bounded_exp, interpolated_logprobs
from .terms.rejection import (
    allowing_for,
    has_sign,
    is_outward,
    log_bound,
    second_moment_keep,
    token_statistic,
    topk_statistic,
    unit_statistic,
    veto_keep,
    within,
)
from .terms.segments import Levels, Segments, all_finite, masked, where_finite
from .terms.staleness import token_staleness

Bound = Tensor | float | None
"""One bound for all units, one for each, or none."""


@dataclass(frozen=True)
class BatchView:
    """A batch and the policies known at this point; what is derived from them is computed once, on first use."""

    batch: PackedBatch
    logprobs: Logprobs
    mask: Tensor
    """[N] bool: tokens of the loss mask whose advantage and known logprobs are finite, as far as the config reads them."""
    missing: Tensor | None = None
    """[N] bool: `missing_tokens` of the batch."""
    target_topk_logprobs: Tensor | None = None
    """[N, K] log pi_theta of batch.topk_ids, for top-K divergences."""
    moment_limits: Mapping[CriterionConfig, Tensor] | None = None
    """Criterion of second_moment -> largest |log ratio| that is kept, if the batch is a shard of a larger one (shards.py)."""
    settled: Tensor | None = None
    """[N] bool: what the second_moment criterion on the target policy keeps of the optimizer step, or its tokens that weren't chosen by
    covariance (settling.py)."""

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        config: CorrectionSettings,
        schedule: Schedule,
        target: Tensor | None = None,
        *,
        target_topk_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        moment_limits: Mapping[CriterionConfig, Tensor] | None = None,
        settled: Tensor | None = None,
    ) -> BatchView:
        """A view of the batch before the training forward, or inside of it: with target [N], detached, entropy [N] being part of the loss.

        Of numbers that are not finite only those play a part that the config reads: a missing one of the sampler as config.missing says,
        any other leaves its token out.
        """
        read, mask = policies_read(config), batch.loss_mask
        missing = missing_tokens(batch, config)
        logprobs = _logprobs(batch, config, schedule, target, missing if config.missing == "neutral" else None)
        known = {field.name: getattr(logprobs, field.name) for field in fields(logprobs)} | {"reference": batch.reference_logprobs}
        looked_at = (batch.advantages, entropy, *(known[name] for name in sorted(read)))
        mask = where_finite(mask, *(values for values in looked_at if values is not None))
        if missing is not None and config.missing == "drop":
            mask = mask & ~missing
        return cls(batch, logprobs, mask, missing, target_topk_logprobs, moment_limits, settled)

    @classmethod
    def of_all(cls, batch: PackedBatch, logprobs: Logprobs) -> BatchView:
        """A view for measurements, whatever a config reads: of tokens all of whose known numbers are finite."""
        looked_at = (batch.advantages, logprobs.behavior, logprobs.proximal, logprobs.target)
        return cls(batch, logprobs, where_finite(batch.loss_mask, *(values for values in looked_at if values is not None)))

    @cached_property
    def levels(self) -> Levels:
        return Levels(self.batch)

    @cached_property
    def _log_ratios(self) -> dict[Ratio, Tensor]:
        return {}

    def log_ratio(self, ratio: Ratio) -> Tensor:
        """[N] log of a ratio (nats), 0 outside the mask."""
        if ratio not in self._log_ratios:
            self._log_ratios[ratio] = self.logprobs.log_ratio(ratio, self.mask)
        return self._log_ratios[ratio]

    @property
    def broken(self) -> Tensor:
        """[N] bool: tokens of the loss mask with a value that is not finite."""
        return self.batch.loss_mask & ~self.mask


def missing_tokens(batch: PackedBatch, config: CorrectionSettings) -> Tensor | None:
    """[N] bool: tokens of the loss mask for which the sampler reported no number (NaN) where the config reads one; None: there are none.

    An infinity is a number that can't be, of a token that was sampled: it isn't missing but broken.
    """
    found = None
    if "behavior" in policies_read(config) and not all_finite(batch.behavior_logprobs):
        found = batch.loss_mask & batch.behavior_logprobs.isnan()
    if needs_topk(config) and batch.topk_logprobs is not None:
        holes = batch.loss_mask & batch.topk_logprobs.isnan().any(1)
        found = holes if found is None else found | holes
    return found


def _logprobs(
    batch: PackedBatch, config: CorrectionSettings, schedule: Schedule, target: Tensor | None, neutral: Tensor | None
) -> Logprobs:
    """The policies as far as they are known. Where mu is missing and neutral [N] says so, it is the policy that it is compared with; where
    log pi_v is, pi_prox stands for it: of tokens of the present weights they are one, of older ones all of rho is then mismatch.

    Raises: DataError if the proximal policy is to be recomputed, or pi_v known, some part needs it, and the batch has none.
    """
    behavior, proximal, read = batch.behavior_logprobs, None, policies_read(config)
    if config.proximal is ProximalSource.RECOMPUTE and schedule.proximal is Stage.EARLY:
        proximal = batch.proximal_logprobs
        if proximal is None and "proximal" in read:
            raise DataError(
                "correct: PackedBatch.proximal_logprobs is None, but proximal: recompute needs them. Have the learner compute them, "
                "use defer() with one optimizer step per batch, or set proximal: behavior."
            )
    at_sampling = _at_sampling(batch, target if proximal is None else proximal) if "at_sampling" in read else None
    if neutral is not None:
        other = proximal if "proximal" in read and proximal is not None else target
        other = other if at_sampling is None else at_sampling
        # Before the training forward nothing may be known to compare mu with, and nothing but a veto on mu itself reads it.
        behavior = torch.where(neutral, 0.0 if other is None else other.to(behavior.dtype), behavior)
    if config.proximal is ProximalSource.BEHAVIOR:
        proximal = behavior
    elif proximal is None and target is not None:
        is_mixed = config.proximal is ProximalSource.INTERPOLATE
        proximal = interpolated_logprobs(behavior, target, token_staleness(batch)) if is_mixed else target
    return Logprobs(behavior, proximal, target, at_sampling)


def _at_sampling(batch: PackedBatch, proximal: Tensor | None) -> Tensor | None:
    """[N] log pi_v; None where pi_prox, which stands for it where it is missing, isn't known yet. Raises: DataError if there is none."""
    if batch.at_sampling_logprobs is None:
        raise DataError(
            "correct: PackedBatch.at_sampling_logprobs is None, but ratios of mismatch, staleness or since_sampling need them. Have the "
            "learner compute them with the weights that sampled each token (NaN: it has no copy of them), or name rho, r and q alone."
        )
    return None if proximal is None else torch.where(batch.at_sampling_logprobs.isnan(), proximal, batch.at_sampling_logprobs)


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """What one criterion or the veto keeps."""

    keep: Tensor
    """[N] bool; values outside the view's mask have no meaning."""
    units: Segments
    """What one decision covers."""


@dataclass(frozen=True, slots=True)
class UnitWeights:
    """Importance weights of the units of their level."""

    weights: Tensor
    """[U] after bounds, before batch normalisation."""
    ratios: Tensor
    """[U] before any bound but that of exp."""
    segments: Segments


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that the parts of one stage decided."""

    weights: Tensor
    """[N] importance weights before batch normalisation; 1 where the stage has none."""
    by_unit: UnitWeights | None
    """The same by unit; None where the stage has none."""
    keep: Tensor
    """[N] bool, inside the loss mask."""
    counts: DecisionCounts
    """Why: tokens and units by criterion and bound."""


def needs_all_tokens(config: CorrectionSettings) -> bool:
    """True if some decision before the training forward looks at all tokens of the batch together, beyond sums."""
    return bool(second_moments(config, Schedule.of(config, is_deferred=False), Stage.EARLY))


def apply_stage(view: BatchView, config: CorrectionSettings, schedule: Schedule, stage: Stage) -> Decision:
    """Run the parts of one stage."""
    results: dict[int, CriterionResult] = {}
    for number, criterion in enumerate(config.rejection):
        if schedule.criteria[number] is stage:
            is_settled = stage is Stage.LATE and criterion.statistic is Statistic.SECOND_MOMENT
            results[number] = _settled(view, criterion) if is_settled else apply_criterion(view, criterion, config)
    if config.veto is not None and schedule.veto is stage:
        results[len(config.rejection)] = apply_veto(view, config.veto, config)
    keep = view.mask
    units = [result.units for result in results.values()]
    by_unit = unit_weights(view, config) if schedule.importance is stage else None
    if by_unit is None:
        weights = torch.ones_like(view.logprobs.behavior)
    else:
        units.append(by_unit.segments)
        weights = by_unit.segments.spread(by_unit.weights).to(view.logprobs.behavior.dtype)
    for result in results.values():
        keep = keep & result.keep
    counts = _count(view, results, by_unit, config)
    return Decision(weights, by_unit, drop_broken_units(view, keep, units), counts)


def no_counts(config: CorrectionSettings, device: torch.device | str = "cpu") -> DecisionCounts:
    """Counts of zero for each criterion of the config, with their labels."""
    names = [criterion.label for criterion in config.rejection]
    earlier = [names[:number].count(name) for number, name in enumerate(names)]
    labels = tuple(name if n == 0 else f"{name}_{n + 1}" for name, n in zip(names, earlier, strict=True))  # two criteria may have one label
    labels += ("veto",) if config.veto is not None else ()
    return DecisionCounts(labels, torch.zeros(2 * len(labels) + len(UNIT_COUNTS), dtype=torch.float64, device=device))


def _count(view: BatchView, results: dict[int, CriterionResult], by_unit: UnitWeights | None, config: CorrectionSettings) -> DecisionCounts:
    """Count the tokens that each criterion drops, and the units whose weight differs from their ratio."""
    counts = no_counts(config, view.mask.device)
    criteria, looked_at = len(counts.labels), view.mask.count_nonzero()
    for number, result in results.items():
        counts.values[number] = looked_at
        counts.values[criteria + number] = looked_at - (view.mask & result.keep).count_nonzero()
    if by_unit is not None:
        counts.values[2 * criteria :] = _unit_counts(view, by_unit, config.importance)
    return counts


def _unit_counts(view: BatchView, by_unit: UnitWeights, part: ImportanceConfig) -> Tensor:
    """[len(UNIT_COUNTS)] float64."""
    counted = by_unit.segments.any(view.mask)
    counts = torch.zeros(len(UNIT_COUNTS), dtype=torch.float64, device=counted.device)
    counts[0] = counted.count_nonzero()
    if by_unit.weights is by_unit.ratios:  # nothing bounds them
        return counts
    advantages = view.batch.advantages if by_unit.segments.offsets is None else unit_advantages(view, by_unit.segments)
    is_zero = counted & ~by_unit.weights.bool()
    is_cut = counted & (by_unit.weights - by_unit.ratios).bool() & ~is_zero  # both are finite
    if part.only_negative:
        is_cut &= advantages < 0  # the others have weight 1 whatever their ratio: no bound was met
    signs = advantages > 0, advantages < 0
    found = [these.count_nonzero() for chosen in (is_cut, is_zero) for these in (chosen, *(chosen & sign for sign in signs))]
    counts[1:] = torch.stack(found)
    return counts


def drop_broken_units(view: BatchView, keep: Tensor, units: list[Segments]) -> Tensor:
    """Drop each unit with a token that is not finite: its product or sum is unknown. Token decisions lose that token alone."""
    coarse = [segments for segments in units if segments.offsets is not None]
    if not coarse or view.mask is view.batch.loss_mask:
        return keep
    broken = view.broken
    for segments in coarse:
        keep = keep & ~segments.spread(segments.any(broken))
    return keep


def unit_weights(view: BatchView, config: CorrectionSettings) -> UnitWeights:
    """Importance weights of the units of their level, before batch normalisation."""
    part = config.importance
    segments = view.levels.at(part.level)
    log_ratio = view.log_ratio(effective_ratio(part.ratio, config))
    ratios = bounded_exp(aggregate_log_ratio(log_ratio, view.mask, segments, level=part.level))
    lower, upper = _bounds(view, part, segments)
    weights = bounded_weights(ratios, mode=part.mode, lower=lower, upper=upper)
    if part.only_negative:
        weights = torch.where(unit_advantages(view, segments) < 0, weights, 1)
    return UnitWeights(weights, ratios, segments)


def unit_advantages(view: BatchView, segments: Segments) -> Tensor:
    """[U] advantage of each unit: the mean over its tokens, which is their common value if it is constant."""
    advantages = masked(view.batch.advantages, view.mask)
    return advantages if segments.offsets is None else segments.mean(advantages, view.mask)


def _bounds(view: BatchView, part: ImportanceConfig | CriterionConfig, segments: Segments) -> tuple[Bound, Bound]:
    """Lower and upper bound of the units; by the staleness of a unit's oldest token where the part has tables."""
    lower: Bound = part.lower
    upper: Bound = part.upper
    if part.lower_by_staleness or part.upper_by_staleness:
        staleness = masked(token_staleness(view.batch), view.mask)
        oldest = segments.maximum(staleness.double()).clamp(min=0).long()
        if part.lower_by_staleness:
            lower = staleness_bound(part.lower_by_staleness, oldest)
        if part.upper_by_staleness:
            upper = staleness_bound(part.upper_by_staleness, oldest)
    return lower, upper


def settled_tokens(view: BatchView, what: str) -> Tensor:
    """[N] bool: the tokens that `settle` left for the optimizer step. Args: what: asks for them. Raises: DataError if it wasn't called."""
    if view.settled is None:
        raise DataError(
            f"{what} looks at all tokens of an optimizer step under its target policy. Before the step's first "
            "micro-batch call settle(corrected, target_logprobs, config), with logprobs of the weights from which the step starts."
        )
    return view.settled


def _settled(view: BatchView, criterion: CriterionConfig) -> CriterionResult:
    return CriterionResult(settled_tokens(view, f"rejection by {criterion.label}"), view.levels.at(Level.TOKEN))


def moment_tokens(view: BatchView, criterion: CriterionConfig, config: CorrectionSettings) -> tuple[Tensor, Tensor]:
    """([N] log ratio, [N] bool: the tokens whose second moment is meant) of a second_moment criterion."""
    values = view.log_ratio(effective_ratio(criterion.ratio, config))
    return values, view.mask & is_outward(values, view.batch.advantages) if criterion.only_outward else view.mask


def _second_moment(view: BatchView, criterion: CriterionConfig, config: CorrectionSettings) -> Tensor:
    """[N] bool: what a second_moment criterion keeps; it never drops a token that isn't meant."""
    values, meant = moment_tokens(view, criterion, config)
    if view.moment_limits is not None:
        return (values.abs() <= view.moment_limits[criterion]) | ~meant
    assert criterion.upper is not None  # CriterionConfig refuses it otherwise
    return second_moment_keep(values, meant, budget=criterion.upper, is_open=criterion.is_open, least=criterion.least_tokens) | ~meant


def apply_criterion(view: BatchView, criterion: CriterionConfig, config: CorrectionSettings) -> CriterionResult:
    """What one criterion keeps."""
    segments = view.levels.at(criterion.level.unit)
    if criterion.statistic is Statistic.SECOND_MOMENT:
        return CriterionResult(_second_moment(view, criterion, config), segments)
    values = divergence_of_tokens(view, criterion.statistic, effective_ratio(criterion.ratio, config))
    lower, upper = _bounds(view, criterion, segments)
    if criterion.statistic is Statistic.RATIO:
        lower, upper = log_bound(lower), log_bound(upper)
    if criterion.usual_kl is not None:
        lower, upper = allowing_for(lower, upper, kl=criterion.usual_kl, tokens=segments.sum(view.mask.double()))
    units = unit_statistic(values, view.mask, segments, criterion.level)
    keep = within(units, lower=lower, upper=upper, is_open=criterion.is_open)
    if criterion.side is not AdvantageSign.ANY:
        keep = keep | ~has_sign(unit_advantages(view, segments), criterion.side)
    return CriterionResult(segments.spread(keep), segments)


def divergence_of_tokens(view: BatchView, statistic: Statistic, ratio: Ratio) -> Tensor:
    """[N] a criterion's statistic of each token, 0 outside the mask.

    Raises: DataError if a top-K statistic is asked for and the top-K logprobs are missing.
    """
    if statistic is Statistic.RATIO:
        return view.log_ratio(ratio)
    numerator, denominator = view.logprobs.pair(ratio)
    if statistic not in TOPK_STATISTICS:
        return token_statistic(statistic, numerator, denominator, view.mask)
    batch = view.batch
    if batch.topk_ids is None or batch.topk_logprobs is None or view.target_topk_logprobs is None:
        raise DataError(
            f"{statistic}: the batch has no top-K logprobs of behaviour and target. Have the engine return them "
            "(PackedBatch.topk_ids, topk_logprobs) and give policy_loss target_topk_logprobs, or take the binary form."
        )
    listed = batch.topk_logprobs
    if view.missing is not None:  # the sampler's table is the target's there: no divergence
        listed = torch.where(view.missing[:, None], view.target_topk_logprobs.to(listed.dtype), listed)
    behavior, target = (listed, denominator), (view.target_topk_logprobs, numerator)
    return topk_statistic(statistic, token_ids=batch.token_ids, topk_ids=batch.topk_ids, behavior=behavior, target=target, mask=view.mask)


def apply_veto(view: BatchView, veto: VetoConfig, config: CorrectionSettings) -> CriterionResult:
    """What the veto keeps."""
    segments, looked_at = view.levels.at(Level.SEQUENCE), view.mask
    if veto.quantity == "ratio":
        values = view.log_ratio(effective_ratio(veto.ratio, config))
    else:
        values = view.logprobs.behavior if view.logprobs.proximal is None else view.logprobs.proximal
        if view.missing is not None and values is view.logprobs.behavior:
            looked_at = looked_at & ~view.missing  # no probability, none that is too low or too high
    return CriterionResult(veto_keep(values, looked_at, segments, lower=veto.lower, upper=veto.upper), segments)
