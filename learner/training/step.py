"""A batch's training: its optimizer steps, and in each the passes over micro-batches and ranks, guard, clip, update, abort."""

from __future__ import annotations

import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import NO_VERSION, CorrectedBatch, DecisionCounts, FinalDecision, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import for_step
from evenkeel.correction.errors import ConfigError, DataError, DeadlineExceeded, StepAborted
from evenkeel.correction.loss import late_normalizer, policy_loss
from evenkeel.correction.settings.choices import ProximalSource
from evenkeel.correction.settings.schedule import fold_obstacle, needs_step_forward
from evenkeel.correction.settling import settle
from evenkeel.correction.wide import kept_rows
from evenkeel.engines import matrix_products
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.model import balance
from evenkeel.learner.model.attention import can_share_prompts, pack
from evenkeel.learner.model.inputs import ModelInputs, RowLayout, find_shared_prefixes
from evenkeel.learner.model.megatron import DistributedDataParallel, TransformerConfig, finalize_model_grads, get_forward_backward_func
from evenkeel.learner.model.model import unwrap
from evenkeel.learner.model.parallel import Placement
from evenkeel.learner.model.routing import Routes, gather_taken, mean_agreement
from evenkeel.learner.training.logprobs import head_logprobs
from evenkeel.learner.training.optimizer import GuardedOptimizer, Update

# ----------------------------------------------------------------------------------------------------------------------
# The loss of one micro-batch: the model's forward pass, the logprobs of the trained tokens, the objective.


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

    The batch's top-K ids are looked up in the same pass over the vocabulary. Of a token with a kept set all is of a softmax over that.
    """
    policy = unwrap(model)
    targets = batch.token_ids[inputs.predicted, None]
    if batch.topk_ids is not None:
        targets = torch.cat([targets, batch.topk_ids[inputs.predicted]], 1)
    kept = None
    if batch.kept_counts is not None and batch.kept_ids is not None:
        counts, ids = batch.kept_counts[inputs.predicted], batch.kept_ids
        if int(counts.sum()) < len(ids):  # else they lie in the order of the predictions already
            ids = kept_rows(batch.kept_counts, ids, inputs.predicted)
        kept = counts, ids
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
        kept=kept,
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
    return replace(corrected, batch=corrected.batch.with_wide_fields(has_topk=trains))


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


@dataclass(frozen=True, slots=True)
class _TokenRows:
    """What a pass gives for the tokens of a batch, each [N] float32. All are rows of one tensor, so that one collective adds them up."""

    logprobs: Tensor
    entropies: Tensor
    importance_weights: Tensor
    keep_mask: Tensor
    coefficients: Tensor
    is_clipped: Tensor
    proximal_logprobs: Tensor

    def fill(self, index: Tensor, output: PassResult) -> None:
        """Args: index: [M] of the tokens of a micro-batch; output: its own."""
        self.logprobs[index] = output.logprobs
        self.entropies[index] = output.entropies
        if output.decided is not None:
            self.importance_weights[index] = output.decided.importance_weights.float()
            self.keep_mask[index] = output.decided.keep_mask.float()
            coefficients, is_clipped, proximal = output.decided.of_loss()
            self.coefficients[index] = coefficients.float()
            self.is_clipped[index] = is_clipped.float()
            self.proximal_logprobs[index] = proximal.float()


def _gather(outputs: Sequence[PassResult], parts: Sequence[Sequence[int]], corrected: CorrectedBatch, placement: Placement) -> PassResult:
    """Each rank of the last stage fills in its own tokens; adding up completes the batch, exactly, because all others are 0."""
    values = torch.zeros(len(fields(_TokenRows)), corrected.batch.num_tokens, dtype=torch.float32, device=placement.device)
    sums = counts = labels = None
    if placement.is_last_stage:
        rows = _TokenRows(*values)
        for part, output in zip(parts, outputs, strict=True):
            if part:
                rows.fill(corrected.batch.token_index(part).to(placement.device), output)
        placement.sum_over_data(values)
        sums = _total([output.sums for output in outputs], placement)
        decided = [output.decided for output in outputs if output.decided is not None]
        counts = _total([one.counts.values for one in decided], placement)
        labels = decided[0].counts.labels if decided else None
    values, sums, counts, labels = placement.from_stage(placement.pipeline_parallel - 1, (values.cpu(), sums, counts, labels))
    whole = _TokenRows(*(row.clone() for row in values))  # a view would be sent with its storage
    final = None
    if counts is not None and labels is not None:
        final = FinalDecision(
            whole.keep_mask.bool(),
            whole.importance_weights,
            DecisionCounts(labels, counts),
            whole.coefficients,
            whole.is_clipped.bool(),
            whole.proximal_logprobs,
        )
    return PassResult(sums=sums, logprobs=whole.logprobs, entropies=whole.entropies, microbatches=len(parts), decided=final)


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
    rate_scale: Callable[[Tensor], float],
    loss_of: Callable[[Tensor], float],
    config: LearnerConfig,
    placement: Placement,
    abort: Abort,
) -> tuple[PassResult, float, Update]:
    """One optimizer step on a corrected batch.

    Args:
        gradient_scale: sums of the whole batch -> factor on its gradient.
        rate_scale: the same -> factor on the learning rate of this step.
        loss_of: sums of the whole batch -> its loss.
    Returns: the pass, the loss, and what became of the weights.
    Raises: StepAborted; the weights are as they were.
    """
    optimizer.zero_grad()
    done = run_microbatches(chunks, corrected, objective, config=config, placement=placement, abort=abort)
    assert done.sums is not None
    loss = loss_of(done.sums)
    abort.too_late()
    update = optimizer.finish(
        gradient_scale=gradient_scale(done.sums), rate_scale=rate_scale(done.sums), loss_is_finite=math.isfinite(loss)
    )
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


# ----------------------------------------------------------------------------------------------------------------------
# Splits a corrected batch into its optimizer steps, and collects what their passes computed for its tokens.


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


# ----------------------------------------------------------------------------------------------------------------------
# Aborts a pass over a batch before its next micro-batch, on all ranks before the same one.
#
# SIGTERM may leave a run less time than a step takes. The step's gradients are given up then: until the optimizer changes them, the weights
# are those of the last finished step. Ranks meet in collectives, so a rank that stopped just anywhere could let others wait for ever.
# The caller therefore asks every rank where it can stop (`hold`), and the rank waits there; then it gives all ranks the largest of these
# places (`release`). All ranks have equally many micro-batches, so a place means the same on each. That doesn't hold for pipeline stages: a
# stage waits for another one in the middle of a micro-batch.

# How long a held rank waits to be released. The caller may need that long: it asks ranks that it can't reach again.
_RELEASED_S = 180.0


class Abort:
    """Whether a rank's call goes on. `hold` and `release` are called by another thread than the one that computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Number of the abortable call that runs, or of the last one.
        self._call = 0
        # Number of micro-batches that the call has begun; None: the call is over, or has begun to change the weights.
        self._place: int | None = None
        # Numbers of the calls that were held last and released last, and the micro-batch before which the released one ends.
        self._held, self._released, self._end = 0, 0, 0

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """A call that may be aborted. Args: call: its number, larger than those of all calls before."""
        with self._changed:
            self._call, self._place = call, 0
        try:
            yield
        finally:
            self.too_late()

    def too_late(self) -> None:
        """Say that from here the call goes on to its end: what follows changes the weights."""
        with self._changed:
            self._place = None

    @property
    def is_undecided(self) -> bool:
        """Whether the present call is held and not yet released."""
        return self._held == self._call != self._released

    def before_microbatch(self) -> None:
        """Wait while the call is held. Raises: StepAborted if the call has to end here; DeadlineExceeded if nobody released it in time."""
        with self._changed:
            if self._place is None:
                return
            if not self._changed.wait_for(lambda: not self.is_undecided, timeout=_RELEASED_S):
                raise DeadlineExceeded(f"a step was held for an abort, and nobody released it in {_RELEASED_S:g} s")
            if self._released == self._call and self._place >= self._end:
                raise StepAborted("the step was aborted before its update")
            self._place += 1

    def hold(self, call: int) -> int | None:
        """Have a call wait before its next micro-batch. The call may not have begun yet.

        Returns: number of that micro-batch; None if it is too late to abort the call.
        """
        with self._changed:
            if call < self._call or (call == self._call and self._place is None):
                return None
            self._held = call
            return self._place if call == self._call else 0

    def release(self, call: int, before: int | None) -> None:
        """Let a held call go on. Args: before: the micro-batch before which it ends; None: it isn't aborted."""
        with self._changed:
            self._released, self._end = call, sys.maxsize if before is None else before
            self._changed.notify_all()
