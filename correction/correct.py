"""The pass over a batch: proximal policy, ratios, weights, rejection, veto, normalisation, denominators.

`correct` is the staged way: everything on mu and pi_prox is settled before training. `defer` is the fused way: the parts on rho wait
for the training forward, where the proximal policy is the detached current one. Both give the same gradient (loss.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from correction.batch import CorrectedBatch, PackedBatch, batch_slices
from correction.choices import DenominatorKind, ProximalSource
from correction.config import CorrectionConfig
from correction.decision import BatchView, decide, needs_all_tokens, no_counts
from correction.denominators import sequence_scale
from correction.errors import ConfigError, DataError
from correction.importance import normalizer, weight_sums
from correction.ratios import Logprobs
from correction.schedule import Schedule, Stage, fold_obstacle, uses_proximal
from correction.segments import running_counts


def correct(batch: PackedBatch, config: CorrectionConfig) -> CorrectedBatch:
    """Settle all early parts. Parts on the target policy are left to `policy_loss`.

    Raises: DataError if the proximal policy is to be recomputed and batch.proximal_logprobs is missing.
    """
    return _prepare(batch, config, is_deferred=False)


def defer(batch: PackedBatch, config: CorrectionConfig) -> CorrectedBatch:
    """Leave the parts on rho to the training forward, for one optimizer step per batch without a proximal forward.

    Raises: ConfigError if a global quantity can't be folded in afterwards; `needs_proximal_forward` says so beforehand.
    """
    if config.proximal is not ProximalSource.RECOMPUTE:
        return correct(batch, config)  # nothing waits for a proximal policy
    obstacle = fold_obstacle(config, is_deferred=True)
    if obstacle is not None:
        raise ConfigError(f"defer: {obstacle}. Compute proximal_logprobs first and call correct().")
    return _prepare(replace(batch, proximal_logprobs=None), config, is_deferred=True)


def early_proximal(batch: PackedBatch, config: CorrectionConfig, schedule: Schedule) -> Tensor | None:
    """[N] the proximal logprobs as far as they are known before the training forward.

    Raises: DataError if they are to be recomputed, some part needs them, and the batch has none.
    """
    if config.proximal is ProximalSource.BEHAVIOR:
        return batch.behavior_logprobs
    if schedule.proximal is Stage.LATE:
        return None
    if batch.proximal_logprobs is None and uses_proximal(config):
        raise DataError(
            "correct: PackedBatch.proximal_logprobs is None, but proximal: recompute needs them. Have the learner compute them, "
            "use defer() with one optimizer step per batch, or set proximal: behavior."
        )
    return batch.proximal_logprobs


def _prepare(batch: PackedBatch, config: CorrectionConfig, *, is_deferred: bool) -> CorrectedBatch:
    schedule = Schedule.of(config, is_deferred=is_deferred)
    proximal = early_proximal(batch, config, schedule)
    is_normalized = schedule.normalization is Stage.EARLY
    weights, keep = torch.empty_like(batch.behavior_logprobs), torch.empty_like(batch.loss_mask)
    sums = torch.zeros(2, dtype=torch.float64, device=weights.device)
    counts = no_counts(config, weights.device)
    for piece in batch_slices(batch, is_divisible=not needs_all_tokens(config)):
        own = piece.of_batch(batch)
        view = BatchView.of(own, Logprobs(own.behavior_logprobs, piece.of_tokens(proximal), None))
        decision = decide(view, config, schedule, Stage.EARLY)
        counts += decision.counts
        weights[piece.tokens], keep[piece.tokens] = decision.weights, decision.keep
        if is_normalized and decision.by_unit is not None:
            sums += weight_sums(
                decision.by_unit.weights, view.mask, decision.keep, decision.by_unit.segments, config.normalize.population
            )
    if is_normalized:
        weights *= normalizer(*sums.tolist())
    if int(keep.count_nonzero()) == 0 and bool(batch.loss_mask.any()):
        warnings.warn("correction: every token of the batch was rejected; its policy loss is 0", stacklevel=3)
    corrected = CorrectedBatch(
        batch=batch,
        importance_weights=_modulate_early(weights, batch, proximal, config),
        keep_mask=keep,
        token_scale=torch.empty_like(weights),
        is_deferred=is_deferred,
        counts=counts,
    )
    return replace(corrected, token_scale=_batch_scale(corrected, config, schedule))


def for_step(corrected: CorrectedBatch, sequences: Sequence[int], config: CorrectionConfig) -> CorrectedBatch:
    """The share of one of several optimizer steps per batch, its denominator counted on that share.

    Weights, and a normaliser that was known before the step, stay those of the whole batch; one that is only known in the training forward
    (policy_scale) is that of this share.
    """
    share = corrected.select(sequences)
    return replace(share, token_scale=_batch_scale(share, config, Schedule.of(config, is_deferred=share.is_deferred)))


def _batch_scale(corrected: CorrectedBatch, config: CorrectionConfig, schedule: Schedule) -> Tensor:
    """[N] one over the denominator, counted on this batch as the global one."""
    batch = corrected.batch
    count_kept = schedule.kept_count is Stage.EARLY
    counted = corrected.keep_mask if count_kept else batch.loss_mask
    part = config.denominator
    if part.kind is DenominatorKind.TOKEN_MEAN and not count_kept:  # one number; where a sequence has no token, nothing is scaled
        return torch.full_like(corrected.importance_weights, 1 / max(int(counted.count_nonzero()), 1))
    tokens = running_counts(counted, batch.offsets).double()
    scale = sequence_scale(tokens, batch.group_ids, kind=part.kind, constant=part.constant)
    return torch.repeat_interleave(scale.to(batch.behavior_logprobs.dtype), batch.lengths, output_size=batch.num_tokens)


def _modulate_early(weights: Tensor, batch: PackedBatch, proximal: Tensor | None, config: CorrectionConfig) -> Tensor:
    """Put the injected distortions in: experiments only.

    Source: "Probing RLVR training instability through the lens of objective-level hacking".
    """
    part = config.modulation
    if part.noise_std > 0:
        seed = hash((part.noise_seed, batch.learner_version)) % 2**63  # of integers: the same in every process, new at every step
        generator = torch.Generator().manual_seed(seed)
        noise = 1 + part.noise_std * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
        weights = weights * noise.to(weights.device)
    if part.probability_below is not None and proximal is not None:
        view = BatchView.of(batch, Logprobs(batch.behavior_logprobs, proximal, None))
        weights = weights * probability_factor(view, config)
    return weights


def probability_factor(view: BatchView, config: CorrectionConfig) -> Tensor | float:
    """[N] the distortion's factor on tokens with a low proximal probability; 1.0 if there is none."""
    part = config.modulation
    if part.probability_below is None or view.logprobs.proximal is None:
        return 1.0
    is_low = view.mask & (view.logprobs.proximal.exp() < part.probability_below)
    return torch.where(is_low, part.factor, torch.ones_like(view.logprobs.behavior))
