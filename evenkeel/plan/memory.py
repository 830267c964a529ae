"""Memory of the GPUs, in bytes: of a learner's rank, and of an engine.

A rank has what stays (weights, gradients, optimizer) and what a pass adds (activations, the head). Weights, gradients and optimizer are
counted, not estimated: Megatron's data parallelism holds float32 gradients of all parameters (learner/model/model.py,
grad_reduce_in_fp32); Adam has two float32 averages, and in half precision a float32 copy of the weights, shared by the data-parallel ranks
if the optimizer is distributed (Rajbhandari et al. 2020, ZeRO, section 3: K = 12 bytes a parameter and K / R). Activations are what
autograd keeps of a layer of learner/model/layers.py, tensor by tensor (after Korthikanti et al. 2022, section 4, whose layer has dropout
and no gate); the head is as in learner/training/logprobs.py.

A training pass has its peak in the head, forward or backward, or in the last layer: in its backward pass, which comes when the head's
memory is free again, or, of experts, in its forward pass. All layers' activations are kept in both. Weights of another version are loaded
for passes without gradients alone (LearnerRank.logprobs_with), which keep nothing from layer to layer. So a rank has at most, in addition
to its state, the larger of

    activations + max(what the last norm hands to the head + head, a layer's passes)
    other weights + max(what the last norm hands to the head + head, a layer), forward

A layer's backward pass has most beyond what is kept where the gate's product goes back: its gradient and those of its two factors, less
the product itself; with many experts on a GPU where their first product does, whose kernel wants their matrices, and gives their gradients,
in one piece; with a narrow feed-forward part in the norm before it, or in attention. Recomputed, the whole layer and its output are there
too, or, as it is computed, the gradient of that output. On the first of several stages the gradient of a large embedding may be more: it
comes last, when the layers' memory of its micro-batch is free again. Between stages each micro-batch on its way has a tensor that was
received or sent. A plan takes every token to be in the loss. Not in it: NCCL's buffers and the CUDA context, for which RESERVE is.

An engine has weights, and a cache whose size says how many tokens and requests it holds, as SGLang 0.5.21 divides a GPU. Both get a
fraction of what is free once the process has its CUDA context (mem_cache/kv_cache_configurator.py, _profile_available_bytes), and the cache
what the weights leave of it. Without a fraction given, handle_gpu_memory_settings (arg_groups/memory_hook.py) makes one of the GPU's size:
it leaves 512 MiB, 1.5 MiB for each token of a chunk of prefill, an eighth of a GiB for each rank, and what reserve_for_graph_mb there says
of graphs: 2 MiB for each request of the largest one of decoding, and 8 MiB for each one of prefill; on GPUs above 60 GiB 10 GiB at least.
Settings in rollout.engine.engine_args that change one of these, or the cache's type, are counted. An engine with a share of a GPU keeps to
the share (engines/machine.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evenkeel.engines.machine import CACHED, CONTEXT, LEAST_OF_CACHE, engine_budget, outside_cache
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import FEED_FORWARD_NORM_AFTER, INPUT_NORM
from evenkeel.plan.shape import BYTES_OF, ModelShape
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

RESERVE = 3 << 30
"""CUDA context, NCCL's buffers, kernels' workspaces and what the allocator can't use: an estimate. Compared with nothing: on the H200 what
torch had allocated was measured, of which none of this is a part, and no group of several GPUs was there."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """GPU memory of the rank that holds most, bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What all layers keep for their backward pass, between pipeline stages what is received and sent; and Megatron's table of angles."""
    head: int
    """What the last norm hands over, logits of a chunk of tokens and gradients of the vocabulary's matrix."""
    layer: int = 0
    """What a pass of one layer, or the backward pass of the embedding, takes beyond the head's memory, which isn't there then."""
    other: int = 0
    """Weights of another version in addition to the present ones, during a forward pass with them: of the reference, or earlier ones."""
    forward: int = 0
    """What that forward pass takes, where there are other weights: one layer, or the head. There is no gradient, and nothing is kept."""

    @property
    def state(self) -> int:
        """What stays. Gradients are one buffer, filled or not."""
        return self.weights + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        return self.activations + self.head + self.layer

    @property
    def has_peak_with_other_weights(self) -> bool:
        """A forward pass with other weights takes more than a training pass."""
        return self.other > 0 and self.other + self.forward > self.training

    @property
    def total(self) -> int:
        return self.state + (self.other + self.forward if self.has_peak_with_other_weights else self.training)

    @property
    def with_reserve(self) -> int:
        return self.total + RESERVE

    def fits(self, room: int) -> bool:
        """Args: room: bytes that a rank may take."""
        return self.with_reserve <= room


def rank_memory(
    shape: ModelShape, config: LearnerConfig, *, longest: int, loads_other: bool = False, has_entropy_loss: bool = False
) -> RankMemory:
    """GPU memory of the fullest rank.

    Args:
        config: with a dtype.
        longest: tokens of the longest sequence, which is a pass of its own where it is longer than tokens_per_microbatch.
        has_entropy_loss: entropy_coefficient is above 0.
    """
    options: dict[str, Any] = {"longest": longest, "loads_other": loads_other, "has_entropy_loss": has_entropy_loss}
    return max((stage_memory(shape, config, stage, **options) for stage in range(config.pipeline_parallel)), key=lambda one: one.total)


def pass_tokens(config: LearnerConfig, longest: int) -> int:
    """Tokens of the largest pass. Args: longest: tokens of the longest sequence."""
    return max(config.tokens_per_microbatch, longest)


def state_bytes(shape: ModelShape, config: LearnerConfig, stage: int = 0) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) of a rank of a stage."""
    shared, experts = shape.split(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)[stage]
    size, of_optimizer = BYTES_OF[config.resolved_dtype], 8 if config.resolved_dtype == "float32" else 12
    if config.distributed_optimizer:
        optimizer = of_optimizer * (-(-shared // config.data_parallel) + -(-experts // config.expert_copies))
    else:
        optimizer = of_optimizer * (shared + experts)
    return size * (shared + experts), 4 * (shared + experts), optimizer


def layer_activations(shape: ModelShape, config: LearnerConfig) -> float:
    """Bytes a token that autograd keeps of one layer on one rank."""
    size, ranks = BYTES_OF[config.resolved_dtype], config.tensor_parallel
    rows = 1 / ranks if config.sequence_parallel else 1.0
    if config.recompute_activations:
        return size * shape.hidden * rows
    queries = shape.heads / ranks * shape.head_width
    keys = max(shape.key_heads / ranks, 1) * shape.head_width
    # What two products read (under sequence parallelism gathered anew in the backward pass), and what each norm made of its input.
    kept = (size * (2 + shape.norms) * shape.hidden + 4 * shape.norms) * rows
    # Rotary tables; q, k; q with k and v as the product made them; the attention's output, and, unless the kernel's own is in one piece,
    # as the next product reads it.
    outputs = queries if _has_variable_length_kernel(config) else 2 * queries
    kept += size * (4 * shape.rotary_width + queries + keys + queries + 2 * keys + outputs) + 4 * shape.heads / ranks
    if shape.has_head_norms:
        normalised = shape.heads + shape.key_heads if shape.family.qk_norm == "head" else 2
        kept += size * (queries + keys) + 4 * normalised / ranks
    return kept + _feed_forward_activations(shape, config)


def _feed_forward_activations(shape: ModelShape, config: LearnerConfig) -> float:
    """The same of the gated feed-forward part, or of router and experts, without what their first product reads."""
    if shape.experts:
        return _expert_activations(shape, config)
    return BYTES_OF[config.resolved_dtype] * 5 * shape.feed_forward / config.tensor_parallel


def _expert_activations(shape: ModelShape, config: LearnerConfig) -> float:
    """Bytes a token of router and experts: it is there once for each expert that it is sent to, on average on as many ranks as send.

    For each expert its row, what the two products make of it and the gate between them, its number, place and weight; once its logits and
    the map of its experts.
    """
    size, rows = BYTES_OF[config.resolved_dtype], 1 / config.tensor_parallel if config.sequence_parallel else 1.0
    of_one = size * (shape.hidden + 5 * shape.feed_forward) + 24
    return rows * (shape.experts_per_token * of_one + 5 * shape.experts)


def layer_peak_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> int:
    """Peak of the last layer's two passes beyond what all layers keep, as the module's docstring says.

    Recomputed, all that the layer would have kept is there as well; in its forward pass the gradient of its output, in its backward pass
    that output. Otherwise Megatron's callers hold what came into the first layer and into this one, during its forward pass.
    """
    hidden = _hidden_bytes(shape, config, tokens)
    backward = hidden + max(_gate_backward_bytes(shape, config, tokens), _after_gate_bytes(shape, config, tokens))
    forward = _kept_forward_bytes(shape, config, tokens)
    if config.recompute_activations:
        whole = layer_activations(shape, config.model_copy(update={"recompute_activations": False})) * tokens
        if not shape.family.has(INPUT_NORM):
            whole -= hidden  # the first product reads what is kept of a layer that is recomputed
        return round(whole + hidden + max(backward, forward))
    return round(max(backward, forward + 2 * hidden + _angle_bytes(shape, tokens)))


def _hidden_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> float:
    """The residual of a rank's rows, its gradient, or any other tensor of its size."""
    return BYTES_OF[config.resolved_dtype] * shape.hidden * tokens / (config.tensor_parallel if config.sequence_parallel else 1)


def _angle_bytes(shape: ModelShape, tokens: int) -> int:
    """Rotary angles in float32, which all layers of a pass are handed; recomputed ones keep them."""
    return 4 * shape.rotary_width * tokens


def _gate_backward_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> float:
    """Bytes where the gate's product goes back, beyond what the layer keeps and the gradient of its output; of experts also their first
    product.

    The product after the gate gives its weight's gradient, too, which is the larger one where tokens are few. Experts' rows are weighed in
    float32: in half precision the gradient, those of both factors in float32 and one rounded, less what was kept rounded.
    """
    size, ranks = BYTES_OF[config.resolved_dtype], config.tensor_parallel
    if shape.experts:
        sent = shape.experts_per_token * tokens / (ranks if config.sequence_parallel else 1)
        return max((8 if size == 4 else 12) * shape.feed_forward * sent, _grouped_product_bytes(shape, config, sent))
    peak = size * shape.feed_forward / ranks * (tokens + max(tokens, shape.hidden))
    return peak + (size * shape.hidden * tokens if config.sequence_parallel else 0)  # the output's gradient, gathered


def _after_gate_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> float:
    """The same of norms and attention. It is more where attention is much of a layer: the feed-forward part is free by then, or nearly.

    A norm goes back in float32 (learner/model/layers.py; torch's kernel for it on a GPU takes less than is counted): the gradient times
    its weight, what it had normalised, which float32 has kept, and their product. One before the feed-forward part also has the gradient
    that it was given, and its own output is free. One after it is the first of the layer to go back. Attention has the gradients of what
    it gave and of what it was given, and the residual's twice; free are the norm and the copy of its output that the product after it had
    read. The variable-length kernel makes no such copy, and adds up the queries' gradient in float32.
    """
    size, ranks = BYTES_OF[config.resolved_dtype], config.tensor_parallel
    hidden, freed = _hidden_bytes(shape, config, tokens), tokens * _feed_forward_activations(shape, config)
    in_norm = hidden * (2 if size == 4 else 6)
    queries, keys = shape.heads / ranks * shape.head_width, max(shape.key_heads / ranks, 1) * shape.head_width
    in_attention = tokens * size * (queries + 2 * keys) - freed - hidden
    if _has_variable_length_kernel(config):  # it sums the queries' gradient in float32, and there is no copy of its output to be free
        in_attention += tokens * (4 + size) * queries
    return max(in_norm - freed, in_norm if shape.family.has(FEED_FORWARD_NORM_AFTER) else 0.0, in_attention)


def _kept_forward_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> float:
    """The forward pass of a layer that keeps its activations, beyond these.

    At its end there are the residual, the last product and their sum. Experts have more where the second product's parts become one piece,
    or the kernel wants matrices so: then the rows that were picked for them, and received from other ranks, are there, too.
    """
    hidden = _hidden_bytes(shape, config, tokens)
    if not shape.experts:
        return 3 * hidden
    size, copies = BYTES_OF[config.resolved_dtype], 1 + (config.expert_parallel > 1)
    rows = shape.experts_per_token * hidden
    if not _has_grouped_kernel(config):
        return hidden + (copies + 2) * rows
    matrices = size * shape.experts / config.expert_parallel * shape.feed_forward * shape.hidden
    return hidden + copies * rows + max(2 * matrices - 3 * shape.feed_forward / shape.hidden * rows, matrices + rows)


def layer_forward_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> int:
    """Peak of a layer's forward pass without gradients. Megatron's callers hold what came into the first layer and into this one.

    Attention has most where queries are normalised (in half precision in float32, before and after it) or turned (before, the cosine's
    part, the sine's, and their sum). The feed-forward part where the gate is multiplied, experts also where their rows are weighed in
    float32, where a product is copied into one piece, or where the kernel wants their matrices so.
    """
    size, ranks = BYTES_OF[config.resolved_dtype], config.tensor_parallel
    rows = 1 / ranks if config.sequence_parallel else 1.0
    gathered = shape.hidden if config.sequence_parallel else 0  # of all ranks' rows, in a buffer that Megatron keeps
    queries, keys = shape.heads / ranks * shape.head_width, max(shape.key_heads / ranks, 1) * shape.head_width
    turned = 4 * queries + (keys if shape.has_head_norms else 0) + 2 * shape.head_width
    normalised = (6 if size == 2 else 3) * queries if shape.has_head_norms else 0.0
    attention = tokens * (size * (3 * shape.hidden * rows + gathered + queries + 2 * keys + max(turned, normalised)))
    attention += tokens * 4 * shape.head_width  # angles, copied for each call
    outside = size * tokens * (4 * shape.hidden * rows + gathered)
    if not shape.experts:
        peak = outside + size * tokens * 5 * shape.feed_forward / ranks
    else:
        sent = shape.experts_per_token * rows * tokens
        copies = 2 + (config.expert_parallel > 1)  # as picked for the experts, as received from other ranks, and sorted by expert
        outside += 5 * shape.experts * rows * tokens + sent * (size * copies * shape.hidden + 24)
        peak = outside + _experts_forward_bytes(shape, config, sent)
    return round(max(peak, attention) + tokens * 4 * shape.head_width)


def _experts_forward_bytes(shape: ModelShape, config: LearnerConfig, rows: float) -> float:
    """Peak of a layer's experts beyond the rows that they are sent. Args: rows: of all experts of the rank."""
    size, width = BYTES_OF[config.resolved_dtype], shape.feed_forward
    gate = (4 if size == 4 else 6) * width * size * rows
    if not _has_grouped_kernel(config):
        return max(gate, rows * size * (3 * width + 2 * shape.hidden))
    matrices = size * shape.experts / config.expert_parallel * width * shape.hidden
    first, second = 2 * matrices + rows * size * 2 * width, matrices + rows * size * (3 * width + shape.hidden)
    return max(gate, first, second)


def _has_grouped_kernel(config: LearnerConfig) -> bool:
    return config.resolved_device == "cuda" and config.resolved_dtype == "bfloat16"


def _has_variable_length_kernel(config: LearnerConfig) -> bool:
    """Whether attention is one kernel over all sequences (learner/model/attention.py)."""
    return config.resolved_device == "cuda" and config.resolved_dtype != "float32"


def _grouped_product_bytes(shape: ModelShape, config: LearnerConfig, rows: float) -> float:
    """The backward pass of the experts' first product (learner/model/layers.py): gradients of what goes out and in, and the matrices of
    all experts of a rank in one piece, or their gradients; less what the gate had kept, which is free again. 0 where it is a loop.

    Args: rows: of all experts of the rank.
    """
    if not _has_grouped_kernel(config):
        return 0.0
    matrices = shape.experts / config.expert_parallel * 2 * shape.feed_forward * shape.hidden
    return 2 * ((2 * shape.feed_forward + shape.hidden - 5 * shape.feed_forward) * rows + matrices)


def handed_over_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> int:
    """What the last norm keeps, its output in float32 (Megatron's half-precision wrapper widens it) and the rows that the head picks."""
    size = BYTES_OF[config.resolved_dtype]
    rows = 1 / config.tensor_parallel if config.sequence_parallel else 1.0
    picked = 0 if config.float32_head and size < 4 else size  # head_bytes has them among its copies
    return round((size * rows + 4 + picked) * shape.hidden * tokens)


def head_bytes(shape: ModelShape, config: LearnerConfig, tokens: int, *, has_entropy_loss: bool) -> int:
    """Peak of the head's two passes, as the head of learner/training/logprobs.py says, and the copies that a float32_head works with.

    Without entropy in the loss the backward pass has one table of a chunk's logits in float32 where else it has two: the forward pass with
    its two may be the larger one then.
    """
    rows = -(-shape.vocabulary // config.tensor_parallel)
    chunk = min(config.logprob_chunk_tokens, tokens)
    table, results = chunk * rows, 12 * tokens
    both = 4 * (table + _second_table(config, table))
    if config.resolved_dtype == "float32" or config.float32_head:
        gradients = 4 * (rows + tokens) * shape.hidden
        copies = gradients if config.resolved_dtype != "float32" else 0  # of the matrix and of what goes in
        return max(both, (both if has_entropy_loss else 4 * table) + gradients) + copies + results
    # A chunk's gradient in float32 and rounded; then the rounded one and its part of the matrix's gradient.
    slopes = max(both, 6 * table) if has_entropy_loss else 6 * table
    backward = max(slopes + 4 * rows * shape.hidden, 2 * table + 6 * rows * shape.hidden)
    return max(both, backward + 2 * tokens * shape.hidden) + results


def _second_table(config: LearnerConfig, table: int) -> int:
    """Numbers of the second table of a chunk that are there at a time: on a CPU a part of it."""
    return min(table, CACHED) if config.device == "cpu" and config.tensor_parallel == 1 else table


def head_forward_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> int:
    """Peak of the head's forward pass: the hidden states in float32, the rows of them that it picks, the two tables of a chunk; or these
    rows before they are rounded again."""
    rows, hidden = -(-shape.vocabulary // config.tensor_parallel), shape.hidden * tokens
    table = min(config.logprob_chunk_tokens, tokens) * rows
    tables = 4 * (table + _second_table(config, table)) + 12 * tokens
    if config.resolved_dtype == "float32" or config.float32_head:
        matrix = 4 * rows * shape.hidden if config.resolved_dtype != "float32" else 0
        return 8 * hidden + matrix + tables
    return max(6 * hidden + tables, 10 * hidden)


def stage_memory(
    shape: ModelShape, config: LearnerConfig, stage: int, *, longest: int, loads_other: bool = False, has_entropy_loss: bool = False
) -> RankMemory:
    """GPU memory of a rank of one pipeline stage; arguments as of rank_memory."""
    weights, gradients, optimizer = state_bytes(shape, config, stage)
    tokens = pass_tokens(config, longest)
    layers = shape.layers / config.pipeline_parallel
    of_a_chunk = layer_activations(shape, config) * layers / config.virtual_pipeline * tokens
    chunks = _passes(config, stage) * config.virtual_pipeline
    of_a_chunk += _angle_bytes(shape, tokens) if config.recompute_activations else 0
    activations = round(chunks * of_a_chunk + _between_stages_bytes(shape, config, tokens, chunks) + _angle_bytes(shape, longest))
    head = 0
    if stage == config.pipeline_parallel - 1:
        head = handed_over_bytes(shape, config, tokens) + head_bytes(shape, config, tokens, has_entropy_loss=has_entropy_loss)
    peak = layer_peak_bytes(shape, config, tokens)
    if stage == 0:
        peak = max(peak, round(_embedding_backward_bytes(shape, config, tokens) - of_a_chunk))
    layer = max(0, peak - head)
    found = RankMemory(weights, gradients, optimizer, activations, head, layer)
    if not loads_other:
        return found
    forward = layer_forward_bytes(shape, config, tokens)
    if stage == config.pipeline_parallel - 1:
        forward = max(forward, head_forward_bytes(shape, config, tokens))
    return replace(found, other=weights, forward=forward)


def _between_stages_bytes(shape: ModelShape, config: LearnerConfig, tokens: int, chunks: float) -> float:
    """What a stage got from the one before, or has handed to the next, of each micro-batch on its way; and a gradient that comes or goes.

    Args: chunks: of layers, as many times as their activations are kept.
    """
    if config.pipeline_parallel == 1:
        return 0.0
    rows = 1 / config.tensor_parallel if config.sequence_parallel else 1.0
    return BYTES_OF[config.resolved_dtype] * shape.hidden * rows * tokens * (chunks + 1)


def _embedding_backward_bytes(shape: ModelShape, config: LearnerConfig, tokens: int) -> float:
    """The gradient of the embedding, and that of its output, gathered."""
    rows = -(-shape.vocabulary // config.tensor_parallel)
    return BYTES_OF[config.resolved_dtype] * shape.hidden * (rows + tokens)


def _passes(config: LearnerConfig, stage: int) -> float:
    """Most micro-batches of which a stage keeps all its layers' activations: those whose backward pass is still to come.

    1F1B: one for each stage from this one on. Interleaved, of V chunks a stage, it is a number of chunks, each a V-th of the layers:
    two for each later stage, (V - 1) P before the first backward pass, and the one at work (Megatron's get_pp_rank_microbatches).
    """
    later, chunks = config.pipeline_parallel - stage - 1, config.virtual_pipeline
    if chunks == 1:
        return later + 1
    return (2 * later + (chunks - 1) * config.pipeline_parallel + 1) / chunks


_MIB = 1 << 20
# GPUs below so many GiB: tokens of a chunk of prefill, requests of the largest graph, and those with _MANY_RANKS.
_GRAPHS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512), (10**6, 16384, 512, 512))
_MANY_RANKS = 4
# Requests; above it SGLang leaves half as much again for groups of ranks.
_LARGE_GRAPH = 300
# Graphs of prefill: up to so many tokens, one every so many.
_PREFILL_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
# Tokens, above these.
_LAST_PREFILL_STEP = 512
# Of a chunk for which room is left, at least; and without chunks (chunked_prefill_size: -1), if max_prefill_tokens doesn't say.
_FEWEST_TOKENS, _UNCHUNKED = 2048, 16_384
# Of an entry of the cache, by engine_args.kv_cache_dtype. Others (auto, and those in blocks of four bits) count as the weights' type.
_CACHE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """GPU memory of one engine; of one with several GPUs, on each of them."""

    weights: int
    """Bytes."""
    cache: int
    """Bytes of the KV cache; below 0 if the weights don't leave any room."""
    token_bytes: int
    """Bytes of the cache for one token. An engine with more GPUs than key heads has some heads on several of them."""
    request_tokens: int
    """Tokens of the longest request: the context length, prompt and answer together."""
    outside_cache: int
    """Bytes in addition to weights and cache: CUDA context, activations, graphs, sampler."""
    groups: int = 1
    """Number of groups of the engine's ranks (attention_data_parallel); each has requests of its own."""

    @property
    def tokens(self) -> int:
        """Tokens that the caches of all groups hold together."""
        return self.groups * max(0, self.cache // self.token_bytes)

    @property
    def longest_requests(self) -> int:
        """Requests of the greatest length that fit at the same time; of others more."""
        return self.groups * (self.tokens // self.groups // self.request_tokens)


def engine_memory(shape: ModelShape, rollout: RolloutConfig, gpu_bytes: int) -> EngineMemory:
    """Args: gpu_bytes: of the whole GPU, of which the worker may have a share."""
    engine = rollout.engine
    dtype, context, ranks = engine.resolved_dtype, engine.resolved_context, engine.tensor_parallel
    groups = engine.attention_data_parallel
    weights = shape.weight_bytes(dtype, ranks, float8=engine.has_float8, attention_groups=groups)
    token_bytes = cache_token_bytes(shape, engine)
    if (fraction := engine.memory_fraction) is None:
        fraction = default_fraction(gpu_bytes, ranks, groups, engine.engine_args, engine.max_total_tokens)
    static = int((gpu_bytes - CONTEXT) * fraction)
    outside = gpu_bytes - static
    if (share := min(rollout.gpus_per_worker, engine.gpu_share)) < 1:
        static = engine_budget(gpu_bytes, share, engine.memory_fraction, engine.max_running_requests, shape.vocabulary)
        outside = outside_cache(engine.max_running_requests, shape.vocabulary)
    cache = static - weights
    if engine.max_total_tokens is not None:
        cache = min(cache, engine.max_total_tokens * token_bytes)
    return EngineMemory(weights, cache, token_bytes, context, outside, groups)


def least_at_start(shape: ModelShape, rollout: RolloutConfig, gpu_bytes: int) -> int:
    """Bytes that have to be free on each of an engine's GPUs when it starts. With fewer it ends itself, as there is no room for a cache.
    The CUDA context, an estimate, is no part of them.

    Args: gpu_bytes: of the whole GPU.
    """
    memory = engine_memory(shape, rollout, gpu_bytes)
    if min(rollout.gpus_per_worker, rollout.engine.gpu_share) < 1:
        return memory.weights + memory.outside_cache - CONTEXT + int(LEAST_OF_CACHE * max(0, memory.cache))
    static = gpu_bytes - memory.outside_cache
    if static <= 0 or gpu_bytes <= CONTEXT:  # too small for any engine, which other rules say
        return gpu_bytes
    return int(memory.weights * (gpu_bytes - CONTEXT) / static)


def cache_token_bytes(shape: ModelShape, engine: EngineConfig) -> int:
    """Bytes of one token in the cache of each of the engine's ranks."""
    of_weights = BYTES_OF[engine.resolved_dtype]
    of_cache = _CACHE_BYTES.get(str(engine.engine_args.get("kv_cache_dtype")), of_weights)
    ranks = engine.tensor_parallel // engine.attention_data_parallel
    return shape.key_value_bytes(engine.resolved_dtype, ranks) * of_cache // of_weights


def default_fraction(
    gpu_bytes: int, ranks: int = 1, groups: int = 1, arguments: Mapping[str, Any] | None = None, max_total_tokens: int | None = None
) -> float:
    """SGLang's share of what is free, for weights and cache.

    Args:
        arguments: engine_args.
        max_total_tokens: of the cache, where it is limited: the largest graph of prefill has no more.
    """
    mib, given = gpu_bytes / _MIB, arguments or {}
    chunk, few, many = next(sizes for below, *sizes in _GRAPHS if mib < below * 1024)
    chunk = _given(given, "chunked_prefill_size", chunk)
    graph = _given(given, "cuda_graph_max_bs_decode", few if ranks < _MANY_RANKS else many)
    if sizes := given.get("cuda_graph_bs_decode"):
        graph = max(sizes)
    tokens = chunk if chunk > 0 else _given(given, "max_prefill_tokens", _UNCHUNKED)
    reserved = 512 + 1.5 * max(tokens, _FEWEST_TOKENS) + ranks * 1024 / 8
    if not (given.get("disable_cuda_graph") or given.get("disable_decode_cuda_graph")):
        reserved += 2 * graph
    if not (given.get("disable_cuda_graph") or given.get("disable_prefill_cuda_graph")):
        largest = given.get("cuda_graph_max_bs_prefill") or min(chunk, max_total_tokens or chunk)
        reserved += 8 * (len(given.get("cuda_graph_bs_prefill") or ()) or prefill_graphs(largest))
    if groups > 1:
        reserved += (3 if graph <= _LARGE_GRAPH else 4.5) * groups * graph
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((mib - reserved) / mib, 3)


def _given(arguments: Mapping[str, Any], name: str, otherwise: int) -> int:
    found = arguments.get(name)
    return otherwise if found is None else int(found)


def prefill_graphs(chunk: int) -> int:
    """Number of graphs of prefill that SGLang captures (arg_groups/cuda_graph_hook.py, generate_prefill_cuda_graph_batch_sizes).

    Args: chunk: tokens of the largest.
    """
    found = below = 0
    for up_to, step in (*_PREFILL_STEPS, (chunk, _LAST_PREFILL_STEP)):
        found += max(0, min(up_to, chunk) - below) // step
        below = up_to
    return found
