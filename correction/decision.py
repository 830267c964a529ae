"""What the parts decide about a batch: importance weights and who stays. One set of functions for service and training forward.

A `Scene` is a batch with the policies that are known at this point. `decide` runs either the early parts (those on mu and pi_prox)
or the late ones (those that need pi_theta); both together decide everything exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from correction.batch import PackedBatch
from correction.config import CorrectionConfig
from correction.errors import DataError
from correction.importance import WeightMode, bounded_weights, staleness_bound
from correction.ratios import Logprobs, Ratio, aggregate_log_ratio, bounded_exp
from correction.rejection import (
    TOPK_STATISTICS,
    Side,
    Statistic,
    log_bound,
    on_side,
    second_moment_keep,
    token_statistic,
    topk_statistic,
    unit_statistic,
    veto_keep,
    within,
)
from correction.schedule import effective_ratio, importance_is_late, is_late, veto_is_late
from correction.segments import Level, Levels, Segments, masked, where_finite
from correction.settings import CriterionConfig, ImportanceConfig, VetoConfig
from correction.staleness import token_staleness

Bound = Tensor | float | None
"""One bound for all units, one for each, or none."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A batch and the policies known at this point."""

    batch: PackedBatch
    logprobs: Logprobs
    mask: Tensor
    """[N] bool: tokens of the loss mask whose advantage and known logprobs are finite."""
    levels: Levels
    target_topk_logprobs: Tensor | None = None
    """[N, K] log pi_theta of batch.topk_ids, for top-K divergences."""
    _log_ratios: dict[Ratio, Tensor] = field(default_factory=dict)

    def log_ratio(self, ratio: Ratio) -> Tensor:
        """[N] log of a ratio, 0 outside the mask; made when first asked for."""
        if ratio not in self._log_ratios:
            self._log_ratios[ratio] = self.logprobs.log_ratio(ratio, self.mask)
        return self._log_ratios[ratio]

    @property
    def broken(self) -> Tensor:
        """[N] bool: tokens of the loss mask with a value that is not finite."""
        return self.batch.loss_mask & ~self.mask


def make_scene(batch: PackedBatch, logprobs: Logprobs, target_topk_logprobs: Tensor | None = None) -> Scene:
    """The scene, with tokens that are not finite taken out of its mask."""
    looked_at = (batch.advantages, logprobs.behavior, logprobs.proximal, logprobs.target)
    mask = where_finite(batch.loss_mask, *(values for values in looked_at if values is not None))
    return Scene(batch, logprobs, mask, Levels(batch), target_topk_logprobs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one criterion or the veto decided."""

    label: str
    keep: Tensor
    """[N] bool; what is outside the scene's mask means nothing."""
    units: Segments
    """What one decision covers."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that one pass decided."""

    weights: Tensor
    """[N] importance weights before batch normalisation; 1 where the pass has none."""
    unit_weights: Tensor | None
    """[U] the same for the units of their level; None where the pass has none."""
    unit_ratios: Tensor | None
    """[U] the units' ratios, before any bound but that of exp; None as above."""
    keep: Tensor
    """[N] bool, inside the loss mask."""
    verdicts: tuple[Verdict, ...]
    """One for each criterion, and the veto's at the end if there is one."""


PASSED = "passed:"
"""Prefix of the counts of tokens that one criterion lets pass."""


def decision_sums(scene: Scene, decision: Decision, config: CorrectionConfig, *, late: bool) -> dict[str, float]:
    """Tokens that each criterion lets pass, and units whose weight is not their ratio: sums that add up over the parts of a batch."""
    sums: dict[str, float] = {}
    for number, verdict in enumerate(decision.verdicts):
        sums[f"{PASSED}{number + 100 * late}:{verdict.label}"] = int((verdict.keep & scene.mask).count_nonzero())
    if decision.unit_weights is None or decision.unit_ratios is None:
        return sums
    segments = scene.levels.at(config.importance.level)
    counted = segments.any(scene.mask)
    advantages = scene.batch.advantages if segments.offsets is None else unit_advantages(scene, segments)
    is_zero = counted & ~decision.unit_weights.bool()
    is_other = counted & (decision.unit_weights - decision.unit_ratios).bool()  # both are finite
    if config.importance.only_negative:
        is_other &= advantages < 0  # the others have weight 1 whatever their ratio: no bound was met
    sums["units"] = int(counted.count_nonzero())
    for name, chosen in (("truncated", is_other & ~is_zero), ("masked", is_zero)):
        index = chosen.nonzero().squeeze(1)  # few
        side = advantages[index]
        sums |= {name: index.numel(), f"{name}_positive": int((side > 0).sum()), f"{name}_negative": int((side < 0).sum())}
    return sums


def needs_all_tokens(config: CorrectionConfig) -> bool:
    """True if some decision looks at all tokens of the batch together, beyond sums."""
    return any(criterion.statistic is Statistic.SECOND_MOMENT for criterion in config.rejection)


def decide(scene: Scene, config: CorrectionConfig, *, late: bool, is_deferred: bool) -> Decision:
    """Run the parts that belong to this pass.

    Args:
        late: False in the correction service, True in the training forward.
        is_deferred: the batch's proximal policy is the detached target.
    """
    verdicts = []
    for criterion in config.rejection:
        if is_late(criterion.ratio, config, is_deferred=is_deferred) == late:
            verdicts.append(_judge(scene, criterion, config))
    if config.veto is not None and veto_is_late(config, is_deferred=is_deferred) == late:
        verdicts.append(_veto(scene, config.veto, config))
    keep = scene.mask
    units = [verdict.units for verdict in verdicts]
    ratios = by_unit = None
    weights = None
    if config.importance.mode is not WeightMode.OFF and importance_is_late(config, is_deferred=is_deferred) == late:
        segments = scene.levels.at(config.importance.level)
        units.append(segments)
        ratios = _unit_ratios(scene, config)
        by_unit = _bounded(scene, ratios, config)
        weights = segments.spread(by_unit).to(scene.logprobs.behavior.dtype)
    for verdict in verdicts:
        keep = keep & verdict.keep
    weights = torch.ones_like(scene.logprobs.behavior) if weights is None else weights
    return Decision(weights, by_unit, ratios, drop_broken_units(scene, keep, units), tuple(verdicts))


def drop_broken_units(scene: Scene, keep: Tensor, units: list[Segments]) -> Tensor:
    """Drop each unit with a token that is not finite: its product or sum is unknown. Token decisions lose that token alone."""
    coarse = [segments for segments in units if segments.offsets is not None]
    if not coarse or scene.mask is scene.batch.loss_mask:
        return keep
    broken = scene.broken
    for segments in coarse:
        keep = keep & ~segments.spread(segments.any(broken))
    return keep


def unit_weights(scene: Scene, config: CorrectionConfig) -> Tensor:
    """[U] importance weights of the units of their level, before batch normalisation."""
    return _bounded(scene, _unit_ratios(scene, config), config)


def _unit_ratios(scene: Scene, config: CorrectionConfig) -> Tensor:
    """[U] ratios of the importance weights' units."""
    part = config.importance
    log_ratio = scene.log_ratio(effective_ratio(part.ratio, config))
    return bounded_exp(aggregate_log_ratio(log_ratio, scene.mask, scene.levels.at(part.level), level=part.level))


def _bounded(scene: Scene, ratios: Tensor, config: CorrectionConfig) -> Tensor:
    """[U] weights of units, from their ratios."""
    part = config.importance
    segments = scene.levels.at(part.level)
    lower, upper = _bounds(scene, part, segments)
    weights = bounded_weights(ratios, mode=part.mode, lower=lower, upper=upper)
    if part.only_negative:
        weights = torch.where(unit_advantages(scene, segments) < 0, weights, 1)
    return weights


def unit_advantages(scene: Scene, segments: Segments) -> Tensor:
    """[U] advantage of each unit: the mean over its tokens, which is their common value if it is constant."""
    if segments.offsets is None:
        return masked(scene.batch.advantages, scene.mask)
    return segments.mean(scene.batch.advantages, scene.mask)


def _bounds(scene: Scene, part: ImportanceConfig | CriterionConfig, segments: Segments) -> tuple[Bound, Bound]:
    """Lower and upper bound of the units; by the staleness of a unit's oldest token where the part has tables."""
    lower: Bound = part.lower
    upper: Bound = part.upper
    if part.lower_by_staleness or part.upper_by_staleness:
        staleness = masked(token_staleness(scene.batch), scene.mask)
        oldest = segments.maximum(staleness.double()).clamp(min=0).long()
        if part.lower_by_staleness:
            lower = staleness_bound(part.lower_by_staleness, oldest)
        if part.upper_by_staleness:
            upper = staleness_bound(part.upper_by_staleness, oldest)
    return lower, upper


def _judge(scene: Scene, criterion: CriterionConfig, config: CorrectionConfig) -> Verdict:
    """What one criterion keeps."""
    segments = scene.levels.at(criterion.level.unit)
    values = divergence_of_tokens(scene, criterion.statistic, effective_ratio(criterion.ratio, config))
    if criterion.statistic is Statistic.SECOND_MOMENT:
        assert criterion.upper is not None  # CriterionConfig refuses it otherwise
        return Verdict(criterion.label, second_moment_keep(values, scene.mask, budget=criterion.upper), segments)
    lower, upper = _bounds(scene, criterion, segments)
    if criterion.statistic is Statistic.RATIO:
        lower, upper = log_bound(lower), log_bound(upper)
    units = unit_statistic(values, scene.mask, segments, criterion.level)
    keep = within(units, lower=lower, upper=upper, is_open=criterion.is_open)
    if criterion.side is not Side.ANY:
        keep = keep | ~on_side(unit_advantages(scene, segments), criterion.side)
    return Verdict(criterion.label, segments.spread(keep), segments)


def divergence_of_tokens(scene: Scene, statistic: Statistic, ratio: Ratio) -> Tensor:
    """[N] a criterion's statistic of each token, 0 outside the mask.

    Raises: DataError if a top-K statistic is asked for and the top-K logprobs are missing.
    """
    if statistic in (Statistic.RATIO, Statistic.SECOND_MOMENT):
        return scene.log_ratio(ratio)
    numerator, denominator = scene.logprobs.pair(ratio)
    if statistic not in TOPK_STATISTICS:
        return token_statistic(statistic, numerator, denominator, scene.mask)
    batch = scene.batch
    if batch.topk_ids is None or batch.topk_logprobs is None or scene.target_topk_logprobs is None:
        raise DataError(
            f"{statistic}: the batch has no top-K logprobs of behaviour and target. Have the engine return them "
            "(PackedBatch.topk_ids, topk_logprobs) and give policy_loss target_topk_logprobs, or take the binary form."
        )
    behavior, target = (batch.topk_logprobs, denominator), (scene.target_topk_logprobs, numerator)
    return topk_statistic(
        statistic, token_ids=batch.token_ids, topk_ids=batch.topk_ids, behavior=behavior, target=target, mask=scene.mask
    )


def _veto(scene: Scene, veto: VetoConfig, config: CorrectionConfig) -> Verdict:
    """What the veto keeps."""
    segments = scene.levels.at(Level.SEQUENCE)
    if veto.quantity == "ratio":
        values = scene.log_ratio(effective_ratio(veto.ratio, config))
    else:
        values = scene.logprobs.behavior if scene.logprobs.proximal is None else scene.logprobs.proximal
    return Verdict("veto", veto_keep(values, scene.mask, segments, lower=veto.lower, upper=veto.upper), segments)
