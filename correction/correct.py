"""The pass over a batch: proximal policy, ratios, weights, rejection, veto, normalisation, denominators.

`correct` is the staged way: everything on mu and pi_prox is settled before training. `defer` is the fused way: the parts on rho wait
for the training forward, where the proximal policy is the detached current one. Both give the same gradient (loss.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import CorrectedBatch, DecisionCounts, PackedBatch, batch_slices
from .checks import check_same_settings, check_settings
from .config import CorrectionConfig
from .decision import BatchView, apply_stage, needs_all_tokens, no_counts
from .errors import ConfigError, DataError
from .settings.choices import DenominatorKind, ProximalSource, Ratio
from .settings.parts import AdvantageConfig
from .settings.schedule import Schedule, Stage, fold_obstacle, needs_logprobs_at_sampling, policies_read, second_moments
from .shards import TOTALS, Reduce, check_sharded, moment_limits, prompt_index
from .terms.denominators import batch_counts, sequence_scale
from .terms.importance import normalizer, weight_sums
from .terms.rejection import MOST, narrow_bounds
from .terms.segments import running_counts
from .terms.staleness import token_staleness

# Index of the denominator's first entry in the shard sums.
_COUNTED = TOTALS.index("counted_tokens")


def correct(
    batch: PackedBatch,
    config: CorrectionConfig,
    *,
    totals: Tensor | None = None,
    reduce: Reduce | None = None,
    num_prompts: int | None = None,
) -> CorrectedBatch:
    """Settle all early parts. Parts on the target policy are left to `policy_loss`.

    A batch that is one of several shards needs to know the whole: give it `totals` or `reduce`. Then the shards together are what one
    process would make of the whole batch, however it is split.
    Args:
        totals: `shard_sums` of this batch, added up over all shards.
        reduce: called with a float64 tensor, gives its sum over all shards (`all_reduce_sum`).
        num_prompts: prompts of the whole batch, which group_ids number from 0; read in shards, by denominator prompt_mean alone.
    Raises: DataError if the proximal policy is to be recomputed and batch.proximal_logprobs is missing, and what PackedBatch.validate
        raises; ConfigError if the batch's advantages are not those of the config, or the config can't be settled in shards.
    """
    return _prepare(batch, config, is_deferred=False, reduce=_reduce_of(totals, reduce, config, num_prompts), num_prompts=num_prompts)


def defer(
    batch: PackedBatch,
    config: CorrectionConfig,
    *,
    totals: Tensor | None = None,
    reduce: Reduce | None = None,
    num_prompts: int | None = None,
) -> CorrectedBatch:
    """Leave the parts on rho to the training forward, for one optimizer step per batch without a proximal forward.

    Args: as for `correct`; totals are `shard_sums(..., is_deferred=True)`.
    Raises: ConfigError if a global quantity can't be folded in afterwards; `needs_proximal_forward` says so beforehand.
    """
    check_settings("defer", config)
    if config.proximal is not ProximalSource.RECOMPUTE:  # nothing waits for a proximal policy
        return correct(batch, config, totals=totals, reduce=reduce, num_prompts=num_prompts)
    obstacle = fold_obstacle(config, is_deferred=True)
    if obstacle is not None:
        raise ConfigError(f"defer: {obstacle}. Compute proximal_logprobs first and call correct().")
    own = replace(batch, proximal_logprobs=None)
    return _prepare(own, config, is_deferred=True, reduce=_reduce_of(totals, reduce, config, num_prompts), num_prompts=num_prompts)


def shard_sums(batch: PackedBatch, config: CorrectionConfig, *, is_deferred: bool = False, num_prompts: int | None = None) -> Tensor:
    """[len(TOTALS)] float64, more under denominator prompt_mean: what the whole batch has to know of this shard.

    Add these tensors up over all shards, by any means, and give `correct` (or `defer`, with is_deferred) the result as `totals`.
    Raises: ConfigError if sums are not enough for the config; what `correct` raises.
    """
    _check_given("shard_sums", batch, config)
    check_sharded(config, num_prompts, has_reduce=False)
    own = replace(batch, proximal_logprobs=None) if is_deferred else batch
    return _decide_early(own, config, Schedule.of(config, is_deferred=is_deferred), None, num_prompts).sums


@dataclass(frozen=True, slots=True)
class _Early:
    """What the early parts decided on a shard, before it knows the whole batch."""

    weights: Tensor
    """[N] before batch normalisation."""
    keep: Tensor
    counts: DecisionCounts
    counted: Tensor | None
    """`_counted` of the shard."""
    sums: Tensor
    """[len(TOTALS) + prompts] float64."""
    holes: Tensor
    """[2] float64: tokens of this shard without a logprob of the sampler that the config reads; tokens left out as a number that it reads
    is not finite."""


def _check_given(where: str, batch: PackedBatch, config: CorrectionConfig) -> None:
    """Raises: ConfigError or DataError with the remedy."""
    check_settings(where, config)
    if not isinstance(batch, PackedBatch):
        raise DataError(f"{where}: batch is a {type(batch).__name__}, not a PackedBatch. Make one with from_padded or from_lists")
    batch.validate()


def _reduce_of(totals: Tensor | None, reduce: Reduce | None, config: CorrectionConfig, num_prompts: int | None) -> Reduce | None:
    """How sums of this shard become those of the whole batch; None if the batch is not sharded."""
    if totals is None and reduce is None:
        return None
    if totals is not None and reduce is not None:
        raise ConfigError("correct: both totals and reduce are given. Give the sums of all shards, or the way to get them.")
    check_settings("correct", config)
    check_sharded(config, num_prompts, has_reduce=reduce is not None)
    return reduce if totals is None else lambda sums: totals.to(sums)


def _prepare(
    batch: PackedBatch, config: CorrectionConfig, *, is_deferred: bool, reduce: Reduce | None, num_prompts: int | None
) -> CorrectedBatch:
    _check_given("correct", batch, config)
    _check_advantages(batch, config)
    schedule = Schedule.of(config, is_deferred=is_deferred)
    early = _decide_early(batch, config, schedule, reduce, num_prompts)
    totals = early.sums if reduce is None else _checked(reduce(early.sums), early.sums)
    *numbers, missing, broken = torch.cat([totals[: len(TOTALS)], early.holes]).tolist()
    value = dict(zip(TOTALS, numbers, strict=True))
    weights = early.weights
    if schedule.normalization is Stage.EARLY:
        weights *= normalizer(value["weight"], value["units"])
    if missing or broken:
        _warn_of_holes(batch, config, int(missing), int(broken))
    if needs_logprobs_at_sampling(config):
        _warn_of_unknown_weights(batch)
    if value["kept_tokens"] == 0 and value["tokens"] > 0:
        why = "was rejected" if not broken else "was rejected or left out, as a number of it is not finite"
        warnings.warn(f"correction: every token of the batch {why}; its policy loss is 0", stacklevel=3)
    if reduce is None:  # a shard's counts say nothing of the batch
        _warn_of_narrow_bounds(early, batch, config, schedule)
    modulated = _modulate_early(weights, batch, config, schedule)
    corrected = CorrectedBatch(
        batch=batch,
        importance_weights=modulated,
        keep_mask=early.keep,
        token_scale=torch.empty_like(weights),
        is_deferred=is_deferred,
        counts=early.counts,
        plain_weights=weights if modulated is not weights and schedule.normalization is Stage.LATE else None,
        config=config,
    )
    return replace(corrected, token_scale=_batch_scale(corrected, early.counted, config, totals[_COUNTED:], num_prompts))


def _warn_of_unknown_weights(batch: PackedBatch) -> None:
    """Warn of tokens of earlier weights without log pi_v, with their share."""
    assert batch.at_sampling_logprobs is not None  # or it had been refused
    stale = batch.loss_mask & (token_staleness(batch) > 0)
    if unknown := int((stale & batch.at_sampling_logprobs.isnan()).count_nonzero()):
        warnings.warn(
            f"correction: of {unknown} of {int(stale.count_nonzero())} stale tokens the learner has no copy of the weights that sampled "
            "them, as after a resume, or where a batch is prepared a second time; all of their rho counts as mismatch, and their staleness "
            "as 1",
            stacklevel=4,
        )


def _warn_of_holes(batch: PackedBatch, config: CorrectionConfig, missing: int, broken: int) -> None:
    """Warn of tokens without a logprob of the sampler, and of tokens that are left out, with their share and the fields at fault."""
    tokens = int(batch.loss_mask.count_nonzero())
    if missing:
        neutral = config.missing == "neutral"
        what = "their ratios count as 1" if neutral else "they are left out, and so are turns and sequences that are judged as a whole"
        warnings.warn(
            f"correction: the sampler reported no logprob (NaN) for {missing} of {tokens} trained tokens ({missing / tokens:.1%}); {what} "
            f"(missing: {config.missing})",
            stacklevel=4,
        )
    if broken > (missing if config.missing == "drop" else 0):
        names = ["advantages", *(f"{policy}_logprobs" for policy in sorted(policies_read(config) - {"target"}))]
        known = {name: values for name in names if (values := getattr(batch, name)) is not None}
        counts = {name: int((batch.loss_mask & ~values.isfinite()).count_nonzero()) for name, values in known.items()}
        if "at_sampling_logprobs" in known:  # in which a hole is none
            counts["at_sampling_logprobs"] = int((batch.loss_mask & known["at_sampling_logprobs"].isinf()).count_nonzero())
        at_fault = ", ".join(f"{name} at {count}" for name, count in counts.items() if count)
        warnings.warn(
            f"correction: {broken} of {tokens} trained tokens ({broken / tokens:.1%}) are left out, since a number of theirs is not finite "
            f"({at_fault})",
            stacklevel=4,
        )


def _warn_of_narrow_bounds(early: _Early, batch: PackedBatch, config: CorrectionConfig, schedule: Schedule) -> None:
    """Warn of each criterion that rejects most of the batch, and of the mean log ratio."""
    criteria = dict(zip(early.counts.labels, config.rejection, strict=False))  # the veto, at the end, is none
    for label, (looked_at, dropped) in early.counts.by_criterion().items():
        if dropped > MOST * looked_at and (view := BatchView.of(batch, config, schedule)).logprobs.proximal is not None:
            criterion = criteria.get(label)
            level, ratio = (None, Ratio.RHO) if criterion is None else (criterion.level, criterion.ratio)
            mean = float(view.log_ratio(ratio).sum(dtype=torch.float64)) / looked_at
            warnings.warn(narrow_bounds(label, level, dropped / looked_at, mean), stacklevel=4)


def _checked(totals: Tensor, sums: Tensor) -> Tensor:
    if totals.shape != sums.shape:
        raise DataError(f"correct: totals have shape {tuple(totals.shape)}, but shard_sums of this config {tuple(sums.shape)}")
    return totals


def _decide_early(
    batch: PackedBatch, config: CorrectionConfig, schedule: Schedule, reduce: Reduce | None, num_prompts: int | None
) -> _Early:
    limits = None
    if reduce is not None and (moments := second_moments(config, schedule, Stage.EARLY)):
        limits = moment_limits(BatchView.of(batch, config, schedule), moments, config, reduce)
    weights, keep = torch.empty_like(batch.behavior_logprobs), torch.empty_like(batch.loss_mask)
    sums = torch.zeros(_COUNTED, dtype=torch.float64, device=weights.device)
    holes = sums.new_zeros(2)
    counts = no_counts(config, weights.device)
    for piece in batch_slices(batch, is_divisible=not needs_all_tokens(config)):
        own = piece.of_batch(batch)
        view = BatchView.of(own, config, schedule, moment_limits=limits)
        decision = apply_stage(view, config, schedule, Stage.EARLY)
        if view.missing is not None:
            holes[0] += view.missing.count_nonzero()
        if view.mask is not own.loss_mask:
            holes[1] += view.broken.count_nonzero()
        counts += decision.counts
        weights[piece.tokens], keep[piece.tokens] = decision.weights, decision.keep
        if schedule.normalization is Stage.EARLY and decision.by_unit is not None:
            sums[:2] += weight_sums(
                decision.by_unit.weights, view.mask, decision.keep, decision.by_unit.segments, config.normalize.population
            )
    sums[2], sums[3] = batch.loss_mask.count_nonzero(), keep.count_nonzero()
    counted = _counted(batch, keep, config, schedule)
    return _Early(weights, keep, counts, counted, torch.cat([sums, _counts(batch, counted, config, num_prompts)]), holes)


def for_step(
    corrected: CorrectedBatch,
    sequences: Sequence[int],
    config: CorrectionConfig,
    *,
    reduce: Reduce | None = None,
    num_prompts: int | None = None,
) -> CorrectedBatch:
    """The share of one of several optimizer steps per batch, its denominator counted on that share.

    Weights, and a normaliser that was known before the step, stay those of the whole batch; one that is only known in the training forward
    (policy_scale) is that of this share.
    Args:
        sequences: of this shard.
        reduce, num_prompts: as for `correct`: the denominator is counted on the shares of all shards together.
    Raises: ConfigError if the batch was corrected by other settings.
    """
    check_same_settings("for_step", corrected.config, config)
    if reduce is not None:
        check_sharded(config, num_prompts, has_reduce=True)
    share = corrected.select(sequences)
    counted = _counted(share.batch, share.keep_mask, config, Schedule.of(config, is_deferred=share.is_deferred))
    counts = _counts(share.batch, counted, config, num_prompts)
    totals = counts if reduce is None else _checked(reduce(counts), counts)
    return replace(share, token_scale=_batch_scale(share, counted, config, totals, num_prompts))


def _counted(batch: PackedBatch, keep: Tensor, config: CorrectionConfig, schedule: Schedule) -> Tensor | None:
    """[S] float64: each sequence's tokens that the denominator counts, as far as that is known before the training forward; None where all
    tokens of the batch have one scale."""
    is_kept = schedule.kept_count is Stage.EARLY
    if config.denominator.kind is DenominatorKind.TOKEN_MEAN and not is_kept:
        return None
    return running_counts(keep if is_kept else batch.loss_mask, batch.offsets).double()


def _counts(batch: PackedBatch, counted: Tensor | None, config: CorrectionConfig, num_prompts: int | None) -> Tensor:
    """[2 + prompts] float64: `batch_counts` of this shard. Where all tokens have one scale, sequences are not counted (0)."""
    if counted is None:
        tokens = batch.loss_mask.count_nonzero()
        return torch.stack([tokens, torch.zeros_like(tokens)]).double()
    prompts, count = prompt_index(batch, config, num_prompts)
    return batch_counts(counted, prompts, count, _rollouts(batch, config))


def _rollouts(batch: PackedBatch, config: CorrectionConfig) -> Tensor | None:
    """[S] the rollout of each sequence, where the denominator counts rollouts and some have several sequences."""
    return batch.rollout_ids if config.denominator.kind is DenominatorKind.ROLLOUT_MEAN else None


def _batch_scale(
    corrected: CorrectedBatch, counted: Tensor | None, config: CorrectionConfig, whole: Tensor, num_prompts: int | None
) -> Tensor:
    """[N] one over the denominator; counted is `_counted` of this shard, whole are the `batch_counts` of the global batch."""
    batch = corrected.batch
    if counted is None:
        return torch.full_like(corrected.importance_weights, 1 / max(float(whole[0]), 1.0))
    part = config.denominator
    prompts, _ = prompt_index(batch, config, num_prompts)
    scale = sequence_scale(counted, prompts, whole, kind=part.kind, constant=part.constant, rollouts=_rollouts(batch, config))
    return torch.repeat_interleave(scale.to(batch.behavior_logprobs.dtype), batch.lengths, output_size=batch.num_tokens)


def _check_advantages(batch: PackedBatch, config: CorrectionConfig) -> None:
    """Check that the advantages were made as the config says, or are marked as made otherwise on purpose: they are part of a method.

    Warns if the batch doesn't say how its advantages were made. Raises: ConfigError if they were made by other settings than the config's.
    """
    part, made_by = config.advantage, batch.advantages_by
    if made_by is None and part != AdvantageConfig():
        warnings.warn(
            f"correction: preset {config.preset or 'of your own'} has advantages of its own ({part.estimator}, ddof {part.ddof}), and the "
            "batch does not say how its advantages were made. Give from_padded rewards and advantages_by=config.advantage, or say "
            'advantages_by="own" if others are meant.',
            stacklevel=4,
        )
    elif isinstance(made_by, AdvantageConfig) and made_by != part:
        names = [name for name in AdvantageConfig.model_fields if getattr(made_by, name) != getattr(part, name)]
        there, here = (", ".join(f"{name} = {getattr(one, name)}" for name in names) for one in (made_by, part))
        raise ConfigError(
            f"PackedBatch.advantages_by: the advantages were made with {there}, but the config has {here}. Make them with "
            "config.advantage, or set advantage in the config."
        )


def _modulate_early(weights: Tensor, batch: PackedBatch, config: CorrectionConfig, schedule: Schedule) -> Tensor:
    """Multiply the weights by the distortions of config.modulation, which are for experiments only.

    Source: "Probing RLVR training instability through the lens of objective-level hacking".
    """
    part = config.modulation
    if part.noise_std > 0:
        seed = hash((part.noise_seed, batch.learner_version)) % 2**63  # of integers: the same in every process, new at every step
        generator = torch.Generator().manual_seed(seed)
        noise = 1 + part.noise_std * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
        weights = weights * noise.to(weights.device)
    if part.probability_below is not None:
        view = BatchView.of(batch, config, schedule)
        weights = weights * probability_factor(view, config)
    return weights


def probability_factor(view: BatchView, config: CorrectionConfig) -> Tensor | float:
    """[N] the distortion's factor on tokens with a low proximal probability; 1.0 if there is none."""
    part = config.modulation
    if part.probability_below is None or view.logprobs.proximal is None:
        return 1.0
    is_low = view.mask & (view.logprobs.proximal.exp() < part.probability_below)
    return torch.where(is_low, part.factor, torch.ones_like(view.logprobs.behavior))
