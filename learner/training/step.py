"""One training step: accumulate gradients over micro-batches and ranks, guard, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from correction.batch import CorrectedBatch, DecisionCounts, FinalDecision, PackedBatch
from correction.engines import matrix_products
from learner.config import LearnerConfig
from learner.model import balance
from learner.model.attention import can_share_prompts
from learner.model.inputs import ModelInputs, find_shared_prefixes
from learner.model.megatron import DistributedDataParallel, TransformerConfig, finalize_model_grads, get_forward_backward_func
from learner.model.parallel import Placement
from learner.model.routing import Routes, gather_taken, mean_agreement
from learner.training.abort import Abort
from learner.training.loss import MicrobatchLoss, TokenValues, forward_hidden, token_values, without_loss
from learner.training.optimizer import GuardedOptimizer, Update

ObjectiveFunction = Callable[[CorrectedBatch, TokenValues], MicrobatchLoss]
Microbatch = tuple[CorrectedBatch, ModelInputs]


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of one pass. From run_microbatches: whole batch, CPU, same on all ranks. Inside it: one micro-batch of this rank, on its
    device."""

    sums: Tensor | None
    """The objective's sums, over micro-batches and ranks; None without an objective."""
    logprobs: Tensor
    """[N] float32, detached."""
    entropies: Tensor
    """[N], likewise."""
    microbatches: int = 1
    decided: FinalDecision | None = None
    """What the tokens were trained with; None without an objective, or with one that decides nothing."""
    routed_experts: Tensor | None = None
    """[N, layers, k], CPU: where the tokens were sent, in a forward that keeps it."""
    routing_agreement: float | None = None
    """Share of tokens and layers in which the routers' own choice was the one taken."""

    @classmethod
    def of_microbatch(cls, values: TokenValues, loss: MicrobatchLoss | None) -> PassResult:
        """Args: loss: None without an objective."""
        sums, decided = (loss.sums, loss.decided) if loss else (None, None)
        return cls(sums, values.logprobs.detach(), values.entropies.detach(), decided=decided)


def run_microbatches(
    chunks: Sequence[DistributedDataParallel],
    corrected: CorrectedBatch,
    objective: ObjectiveFunction | None,
    *,
    config: LearnerConfig,
    placement: Placement,
    abort: Abort,
    keep_routes: bool = False,
) -> PassResult:
    """Forward passes of this rank's share through Megatron's schedule, and backward passes if there is an objective.

    Gradients are left in Megatron's buffer, summed over micro-batches and ranks: the objective's scales are those of the whole batch,
    so nothing is averaged. A batch's routed experts are replayed.
    Args:
        chunks: of layers, one after the other.
        keep_routes: return where tokens were sent.
    Raises: StepAborted.
    """
    batch = corrected.batch
    parts, microbatches = _share_of_this_rank(chunks[0].config, corrected, config, placement, trains=objective is not None)
    routes = [
        Routes.of(its.routed_experts, len(its.token_ids), placement, shares_rows=config.sequence_parallel, keeps_taken=keep_routes)
        for _, its in microbatches
    ]
    outputs: list[PassResult] = []

    def forward_step(data: Iterator[tuple[Microbatch, Routes]], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        abort.before_microbatch()
        (microbatch, inputs), its_routes = next(data)
        hidden = forward_hidden(model, inputs.token_ids, inputs.layout, its_routes, batch_invariant=config.batch_invariant)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            values = token_values(model, hidden, inputs, microbatch.batch, placement, config)
            result = objective(microbatch, values) if objective else None
            outputs.append(PassResult.of_microbatch(values, result))
            return result.loss if result else values.logprobs.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        return hidden, finish

    with torch.set_grad_enabled(objective is not None):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(list(zip(microbatches, routes, strict=True))) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=batch.num_tokens,
            micro_batch_size=1,
            forward_only=objective is None,
        )
    done = _gather(outputs, parts, corrected, placement)
    if config.routing_replay == "none":
        return done
    rows = [inputs.row_of_token for _, inputs in microbatches]
    taken = gather_taken(routes, rows, parts, batch, chunks[0].config.num_layers, placement) if keep_routes else None
    return replace(done, routed_experts=taken, routing_agreement=mean_agreement(routes, rows, parts, placement))


def microbatches_of_this_rank(
    transformer: TransformerConfig, batch: PackedBatch, config: LearnerConfig, placement: Placement
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]:
    """This rank's sequences of a batch, by micro-batch; and the sequences that it reads for each, which differ if a micro-batch has no
    tokens."""
    prefixes = find_shared_prefixes(batch, share_prompts=_shares_prompts(config, placement))
    multiple = placement.pipeline_parallel if config.virtual_pipeline > 1 else 1
    budget, ranks = config.tokens_per_microbatch, placement.data_parallel
    plan = balance.plan_microbatches(prefixes, ranks, budget, transformer.hidden_size, multiple=multiple)
    parts = plan.microbatches[placement.data_rank]
    lengths = batch.lengths.tolist()
    blank = tuple(i for i, length in enumerate(lengths) if length > 0)[:1]
    return parts, [part if any(lengths[i] for i in part) else blank for part in parts]


def _shares_prompts(config: LearnerConfig, placement: Placement) -> bool:
    return config.shared_prompts and can_share_prompts(placement.device.type, config.torch_dtype)


def _whole(corrected: CorrectedBatch, *, trains: bool) -> CorrectedBatch:
    """The batch with the wide fields that its pass reads."""
    return replace(corrected, batch=corrected.batch.with_wide_fields(routes_only=not trains))


def _share_of_this_rank(
    transformer: TransformerConfig, corrected: CorrectedBatch, config: LearnerConfig, placement: Placement, *, trains: bool
) -> tuple[tuple[tuple[int, ...], ...], list[Microbatch]]:
    """This rank's sequences, by micro-batch, and the same as inputs of the model.

    All ranks have equally many micro-batches; a rank that has nothing left computes a sequence without loss. So does every rank if the
    interleaved schedule wants the number of micro-batches to be a multiple of the number of stages: only one row of such a sequence is
    read, which costs less than smaller micro-batches.
    Args:
        trains: rows are padded so that few shapes occur. A forward alone meets each shape once, and gains nothing by that.
    """
    parts, read = microbatches_of_this_rank(transformer, corrected.batch, config, placement)
    chosen = [
        one if part == sequences else without_loss(one)
        for part, sequences, one in zip(parts, read, (_whole(corrected.select(one), trains=trains) for one in read), strict=True)
    ]
    shares = _shares_prompts(config, placement)
    row_parts = placement.tensor_parallel if config.sequence_parallel else 1
    fills = trains and placement.device.type == "cpu" and transformer.num_moe_experts is None  # experts would be sent the padding
    row_multiple = math.lcm(row_parts, matrix_products.TRAINED_ROW_MULTIPLE) if fills else row_parts
    inputs = [ModelInputs.of(one.batch, share_prompts=shares, row_multiple=row_multiple) for one in chosen]
    if config.moe_aux_loss_coefficient:
        # Megatron multiplies a micro-batch's balancing loss by the rows that a router sees, of which sequence-parallel ranks have a
        # part (row_parts): this makes the sum over micro-batches and ranks a mean over all rows that are computed.
        rows = placement.sum_over_data(torch.tensor(sum(len(its.token_ids) for its in inputs), device=placement.device))
        transformer.moe_aux_loss_coeff = config.moe_aux_loss_coefficient * row_parts / int(rows)
    return parts, [(one.to(placement.device), its.to(placement.device)) for one, its in zip(chosen, inputs, strict=True)]


def _gather(outputs: Sequence[PassResult], parts: Sequence[Sequence[int]], corrected: CorrectedBatch, placement: Placement) -> PassResult:
    """Each rank of the last stage fills in its own tokens; adding up completes the batch, exactly, because all others are 0."""
    values = torch.zeros(7, corrected.batch.num_tokens, dtype=torch.float32, device=placement.device)
    sums = counts = labels = None
    if placement.is_last_stage:
        for part, output in zip(parts, outputs, strict=True):
            if part:
                index = corrected.batch.token_index(part).to(placement.device)
                values[0, index], values[1, index] = output.logprobs, output.entropies
                if output.decided is not None:
                    values[2, index] = output.decided.importance_weights.float()
                    values[3, index] = output.decided.keep_mask.float()
                    coefficients, is_clipped, proximal = output.decided.of_loss()
                    values[4, index], values[5, index] = coefficients.float(), is_clipped.float()
                    values[6, index] = proximal.float()
        placement.sum_over_data(values)
        sums = _total([output.sums for output in outputs], placement)
        decided = [output.decided for output in outputs if output.decided is not None]
        counts = _total([one.counts.values for one in decided], placement)
        labels = decided[0].counts.labels if decided else None
    values, sums, counts, labels = placement.from_stage(placement.pipeline_parallel - 1, (values.cpu(), sums, counts, labels))
    # a view would be sent with its storage
    logprobs, entropies, weights, keep, coefficients, clipped, proximal = (row.clone() for row in values)
    final = None
    if counts is not None and labels is not None:
        final = FinalDecision(keep.bool(), weights, DecisionCounts(labels, counts), coefficients, clipped.bool(), proximal)
    return PassResult(sums=sums, logprobs=logprobs, entropies=entropies, microbatches=len(parts), decided=final)


def _total(rows: Sequence[Tensor | None], placement: Placement) -> Tensor | None:
    """Sum over micro-batches and ranks, on the CPU; None if there are no rows, which is so on all ranks or on none."""
    found = [row for row in rows if row is not None]
    return placement.sum_over_data(torch.stack(found).sum(0)).cpu() if found else None


def train_step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: GuardedOptimizer,
    corrected: CorrectedBatch,
    objective: ObjectiveFunction,
    *,
    gradient_scale: Callable[[Tensor], float],
    loss_of: Callable[[Tensor], float],
    config: LearnerConfig,
    placement: Placement,
    abort: Abort,
) -> tuple[PassResult, float, Update]:
    """One optimizer step on a corrected batch.

    Args:
        gradient_scale: sums of the whole batch -> factor on its gradient.
        loss_of: sums of the whole batch -> its loss.
    Returns: the pass, the loss, and what became of the weights.
    Raises: StepAborted; the weights are as they were.
    """
    optimizer.zero_grad()
    done = run_microbatches(chunks, corrected, objective, config=config, placement=placement, abort=abort)
    assert done.sums is not None
    loss = loss_of(done.sums)
    abort.too_late()
    update = optimizer.finish(gradient_scale=gradient_scale(done.sums), loss_is_finite=math.isfinite(loss))
    return done, loss, update


def attach_schedule(chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer) -> None:
    """Tell Megatron's schedule how to begin a backward pass (float16's loss scale) and how to end it: sum gradients over ranks, without a
    division."""

    def finalize(models: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        finalize_model_grads(models, None, **options)

    @contextmanager
    def no_sync() -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield

    chunks[0].config.finalize_model_grads_func = finalize  # the chunks have one config
    chunks[0].config.no_sync_func = no_sync
    chunks[0].config.grad_scale_func = optimizer.scale_loss if optimizer.loss_scale is not None else None
