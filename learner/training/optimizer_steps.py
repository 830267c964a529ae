"""Splits a corrected batch into its optimizer steps, and collects what their passes computed for its tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from correction.batch import NO_VERSION, CorrectedBatch, FinalDecision, PackedBatch
from correction.config import CorrectionConfig
from correction.correct import for_step
from correction.errors import ConfigError, DataError
from correction.loss import late_normalizer
from correction.settings.choices import ProximalSource
from correction.settings.schedule import fold_obstacle, needs_step_forward
from correction.settling import settle
from learner.config import LearnerConfig
from learner.model import balance
from learner.model.megatron import TransformerConfig
from learner.model.parallel import Placement
from learner.training.step import PassResult, microbatches_of_this_rank


def optimizer_steps(
    corrected: CorrectedBatch, correction: CorrectionConfig, config: LearnerConfig, *, step: int
) -> list[tuple[list[int], CorrectedBatch]]:
    """The optimizer steps of a batch, in order: the indices of their sequences, and what is trained on them.

    Args:
        step: number of the batch; with the seed it decides the split.
    Raises: ConfigError if a deferred batch is to have several, or a balancing loss would be scaled with the policy's.
    """
    count, epochs = config.optimizer_steps_per_batch, config.epochs_per_batch
    obstacle = fold_obstacle(correction, is_deferred=corrected.is_deferred, has_auxiliary_loss=True)
    if config.moe_aux_loss_coefficient > 0 and obstacle is not None:
        raise ConfigError(
            f"learner.moe_aux_loss_coefficient = {config.moe_aux_loss_coefficient} with this correction: {obstacle}. Compute "
            "proximal logprobs first (correct() instead of defer()), or turn batch normalisation and kept counts off"
        )
    if count * epochs == 1:
        return [(list(range(corrected.batch.num_sequences)), corrected)]
    if corrected.is_deferred:
        raise ConfigError(
            f"learner: optimizer_steps_per_batch {count} x epochs_per_batch {epochs} with a deferred batch: after the first optimizer "
            "step the current policy is not the proximal one. Compute proximal logprobs and call correct() instead of defer()."
        )
    shares = []
    for epoch in range(epochs):
        seed = hash((config.seed, step, epoch)) % 2**63  # of integers: the same in every process
        for sequences in balance.minibatches(corrected.batch.group_ids, count, seed=seed):
            shares.append((sequences, for_step(corrected, sequences, correction)))
    return shares


def settled(
    share: CorrectedBatch, correction: CorrectionConfig, forward: Callable[[PackedBatch], Tensor], *, is_first: bool
) -> CorrectedBatch:
    """The share of an optimizer step with what its own weights decide about all its tokens together.

    Args:
        forward: gives logprobs [N] under the present weights; is_first: of the batch's steps, which starts from the proximal weights.
    """
    if not needs_step_forward(correction):
        return share
    known = share.batch.proximal_logprobs if is_first and correction.proximal is ProximalSource.RECOMPUTE else None
    return settle(share, forward(share.batch) if known is None else known, correction)


def sequences_read(
    transformer: TransformerConfig,
    batch: PackedBatch | CorrectedBatch,
    correction: CorrectionConfig | None,
    config: LearnerConfig,
    placement: Placement,
    *,
    step: int,
) -> list[int]:
    """Indices of the sequences that this rank computes with, in a forward pass over a batch or in all optimizer steps of one."""
    corrected = uncorrected(batch) if isinstance(batch, PackedBatch) else batch
    shares = [(list(range(corrected.batch.num_sequences)), corrected)]
    if corrected.batch.num_tokens == 0:
        return []
    if correction is not None:
        shares = optimizer_steps(corrected, correction, config, step=step)
    read = set[int]()
    for sequences, share in shares:
        for part in microbatches_of_this_rank(transformer, share.batch, config, placement)[1]:
            read |= {sequences[i] for i in part}
    return sorted(read)


def first_values(
    corrected: CorrectedBatch, shares: list[tuple[list[int], CorrectedBatch]], passes: list[PassResult]
) -> tuple[Tensor, Tensor, FinalDecision]:
    """Logprobs [N], entropies [N] and what was decided about the trained tokens, each from the first pass that it was in."""
    batch = corrected.batch
    # sent separately
    logprobs, entropies, weights, coefficients, proximal = (torch.zeros(batch.num_tokens, dtype=torch.float32) for _ in range(5))
    keep, clipped, before_update = (torch.zeros(batch.num_tokens, dtype=torch.bool) for _ in range(3))
    counts = []
    for number, ((sequences, _), done) in enumerate(zip(shares, passes, strict=False)):
        assert done.decided is not None and done.sums is not None  # the correction's objective decides, on every token
        index = batch.token_index(sequences)
        logprobs[index], entropies[index] = done.logprobs, done.entropies
        keep[index], weights[index] = done.decided.keep_mask, done.decided.importance_weights * late_normalizer(done.sums)
        coefficients[index], clipped[index], proximal[index] = done.decided.of_loss()
        before_update[index] = number == 0
        counts.append(done.decided.counts)
    whole = FinalDecision(keep, weights, reduce(operator.add, counts), coefficients, clipped, proximal)
    return logprobs, entropies, whole if len(shares) == 1 else replace(whole, before_update=before_update)


def uncorrected(batch: PackedBatch) -> CorrectedBatch:
    """The batch without a correction: every weight 1, every token of the loss mask kept."""
    ones = torch.ones(batch.num_tokens)
    return CorrectedBatch(batch, importance_weights=ones, keep_mask=batch.loss_mask, token_scale=ones)


def demonstration_batch(token_ids: Tensor, offsets: Tensor, loss_mask: Tensor) -> CorrectedBatch:
    """Demonstrations as a batch whose token_scale makes a sum the mean over the tokens of the loss mask.

    Raises: DataError if the mask is False everywhere.
    """
    count = int(loss_mask.sum())
    if count == 0:
        raise DataError("supervised_step: loss_mask is False everywhere; there is nothing to learn from these sequences")
    batch = unsampled_batch(token_ids, offsets, loss_mask)
    return replace(uncorrected(batch), token_scale=torch.full((len(token_ids),), 1.0 / count))


def unsampled_batch(token_ids: Tensor, offsets: Tensor, loss_mask: Tensor) -> PackedBatch:
    """Tokens that no policy has sampled, each sequence a group of its own. Raises: DataError for what doesn't fit together."""
    zeros = torch.zeros(len(token_ids))
    return PackedBatch(
        token_ids=token_ids,
        offsets=offsets,
        loss_mask=loss_mask,
        behavior_logprobs=zeros,
        advantages=zeros,
        weight_versions=torch.full((len(token_ids),), NO_VERSION, dtype=torch.int32),
        group_ids=torch.arange(len(offsets) - 1),
    ).validate()
