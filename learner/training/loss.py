"""The loss of one micro-batch: the model's forward pass, the logprobs of the trained tokens, the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from correction.batch import CorrectedBatch, FinalDecision, PackedBatch
from correction.config import CorrectionConfig
from correction.loss import policy_loss
from learner.config import LearnerConfig
from learner.model.attention import pack
from learner.model.inputs import ModelInputs, RowLayout
from learner.model.model import unwrap
from learner.model.parallel import Placement
from learner.model.routing import Routes
from learner.training.logprobs import head_logprobs


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Logprobs and entropies of a micro-batch's tokens under the model; 0 at tokens outside the loss mask."""

    logprobs: Tensor
    """[N] float32, nats, under the batch's temperature."""
    entropies: Tensor
    """[N] float32, nats: entropy of the distribution from which the token was drawn."""
    topk_logprobs: Tensor | None = None
    """[N, K] float32: those of batch.topk_ids, where the batch has them."""


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """Loss of a micro-batch: scalar with gradient, and sums that add up over micro-batches and ranks."""

    loss: Tensor
    sums: Tensor
    """1-D float64, detached."""
    decided: FinalDecision | None = None
    """What is in the loss, where the correction decides that."""


def forward_hidden(
    model: torch.nn.Module, token_ids: Tensor, layout: RowLayout, routes: Routes | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """[1, R, hidden] of packed rows; the layout says which of them attend to which."""
    positions, packed = pack(layout, token_ids.device, batch_invariant=batch_invariant)
    packed.routes = routes
    hidden: Tensor = model(token_ids[None], positions, None, packed_seq_params=packed)
    return hidden


def token_values(
    model: torch.nn.Module, hidden: Tensor, inputs: ModelInputs, batch: PackedBatch, placement: Placement, config: LearnerConfig
) -> TokenValues:
    """Logprobs and entropies of the tokens in the loss mask, from the hidden states of a batch's inputs.

    The batch's top-K ids are looked up in the same pass over the vocabulary.
    """
    policy = unwrap(model)
    targets = batch.token_ids[inputs.predicted, None]
    if batch.topk_ids is not None:
        targets = torch.cat([targets, batch.topk_ids[inputs.predicted]], 1)
    dtype = torch.float32 if config.float32_head else policy.head_weight.dtype
    logprobs, entropies = head_logprobs(
        # Megatron's half-precision wrapper widens its output.
        hidden[0].index_select(0, inputs.predicting_row).to(dtype),
        policy.head_weight.to(dtype),
        targets,
        temperature=batch.temperature,
        vocab_size=policy.real_vocab_size,
        group=placement.tensor_group,
        chunk_tokens=config.logprob_chunk_tokens,
        batch_invariant=config.batch_invariant,
    )
    blank = logprobs.new_zeros(batch.num_tokens)
    values = TokenValues(blank.index_copy(0, inputs.predicted, logprobs[:, 0]), blank.index_copy(0, inputs.predicted, entropies))
    if batch.topk_ids is None:
        return values
    listed = logprobs.new_zeros(batch.topk_ids.shape).index_copy(0, inputs.predicted, logprobs[:, 1:])
    return replace(values, topk_logprobs=listed)


def correction_objective(config: CorrectionConfig) -> Callable[[CorrectedBatch, TokenValues], MicrobatchLoss]:
    """The objective of reinforcement learning, as the correction settings describe it."""

    def objective(corrected: CorrectedBatch, values: TokenValues) -> MicrobatchLoss:
        result = policy_loss(corrected, values.logprobs, config, values.entropies, target_topk_logprobs=values.topk_logprobs)
        return MicrobatchLoss(result.loss, result.partials, result.decided)

    return objective


def supervised_objective(corrected: CorrectedBatch, values: TokenValues) -> MicrobatchLoss:
    """Cross-entropy of the tokens in the loss mask, scaled by token_scale. Sums: the loss."""
    loss = -(values.logprobs * corrected.token_scale).sum()
    return MicrobatchLoss(loss, loss.detach().double()[None])


def without_loss(corrected: CorrectedBatch) -> CorrectedBatch:
    """A copy whose loss mask is False everywhere, so that nothing is trained."""
    nothing = torch.zeros_like(corrected.keep_mask)
    return replace(corrected, batch=replace(corrected.batch, loss_mask=nothing), keep_mask=nothing)
