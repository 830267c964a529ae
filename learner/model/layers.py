"""Which layers the learner's model is made of: Megatron's local ones, the batch-invariant ones, or TransformerEngine's.

All three are the same tree of modules with the same parameters under the same names, so that convert.py, checkpoints and export know one
model. That is why TransformerEngine's fused norm-and-product stays out: it would own the norm's weight, under another name.

Attention is ours in all three. It knows packed sequences and prompts that several answers share, and in half precision on a GPU it is
torch's variable-length FlashAttention already (attention.py); TransformerEngine's would bring no kernel that is missing.

Experts are ours in all three, too (GroupedExperts): Megatron's modules and parameters with products of our own grouping, because the
parameters of TransformerEngine's grouped product have other names (weight0, weight1, ...) and other places.

TransformerEngine's modules add `_extra_state` to a state_dict, for float8. Nothing here reads or writes a state_dict of the model.
Whether what they compute is right isn't tested at start-up: the weight sync compares a prompt's logprobs with the engine's after every
version and warns, and the monitor watches the same difference on every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evenkeel.correction.errors import ConfigError
from evenkeel.engines.operators import attention, key_bias, linear, product, rms_norm
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import ATTENTION_NORM_AFTER, INPUT_NORM, ModelFamily
from evenkeel.learner.model import megatron
from evenkeel.learner.model.attention import PackedAttention, PackedSequences, TileCall
from evenkeel.learner.model.megatron import (
    ColumnParallelLinear,
    IdentityOp,
    ModuleSpec,
    MoELayer,
    RowParallelLinear,
    SequentialMLP,
    TransformerBlockSubmodules,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
)

# ----------------------------------------------------------------------------------------------------------------------
# RMSNorm. On a CPU, and in float32, in Hugging Face's order: normalise in float32, round, multiply by the weight, which `true_on_policy`
# asks of both engines. In half precision on a GPU it rounds once, at the end, as SGLang does there, and on a CPU unless `true_on_policy` is
# on. And where some families have norms that Megatron's layers have no place for: over all heads of queries or keys, and after a product.


class HFRMSNorm(torch.nn.Module):
    """y = weight * (x / sqrt(mean(x^2) + eps)), the mean over the last dimension.

    x / sqrt(...) is rounded to the weights' type before it is multiplied: in half precision that shows. On a GPU half precision has torch's
    own kernel, which rounds once.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if rounds_once(x):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        output: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return output


def rounds_once(x: Tensor) -> bool:
    """Whether rows get torch's own kernel: those in half precision on a GPU."""
    return x.is_cuda and x.dtype != torch.float32


class AllHeadsNorm(HFRMSNorm):
    """Over the channels of all heads, for Megatron's `q_layernorm` and `k_layernorm`, which it hands one head's width. All heads have to be
    on this rank."""

    def __init__(self, config: Any, hidden_size: int, heads: int, **options: Any):
        super().__init__(config, hidden_size * heads, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., heads, width]."""
        return super().forward(x.flatten(-2)).view(x.shape)


def with_norm_after(linear: type, norm: type) -> type:
    """A class like `linear`, a row-parallel product of Megatron's, whose output goes through a norm. What is added to the residual is the
    product's output, and nothing stands between the two in Megatron's layer."""

    class LinearWithNorm(linear):  # type: ignore[misc]  # of any base
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any):
            super().__init__(input_size, output_size, config=config, **options)
            self.norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(x)
            return self.norm(output), bias

    return LinearWithNorm


class _RMSNorm(torch.autograd.Function):
    """With n = x / r, r = sqrt(mean(x^2) + eps) and g the gradient of y = w n:  dx = (g w - n mean(g w n)) / r,  dw = sum of g n.

    Autograd would go over the activations twice as often: norms are the largest part of a small model's step after its matrices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, normal, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(normal, scale, weight)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, scale, weight = ctx.saved_tensors
        (grad,) = grads
        weight_grad = (grad * normal).flatten(0, -2).sum(0)
        inner = (grad * weight).float()
        wide = normal.float()
        mean = torch.linalg.vecdot(inner, wide).div_(wide.shape[-1]).unsqueeze(-1)
        return inner.addcmul_(wide, mean, value=-1).mul_(scale).to(grad.dtype), weight_grad, None


# ----------------------------------------------------------------------------------------------------------------------
# Batch-invariant Megatron layers, for the layer spec: their result for a token does not depend on what it is packed with.
#
# The gradients are those of the usual layers; only the forward pass has to agree with the engine to the last bit.


class BatchInvariantColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron has no types
    """Megatron's ColumnParallelLinear, batch-invariant. A rank's columns have the same bits as in the whole product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, allreduce_dgrad: bool, **_: Any) -> Tensor:
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return linear(input, weight, bias)


class BatchInvariantRowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear, batch-invariant, without a bias: the ranks' products are added in the order of ranks, in float32, and
    the sum is rounded."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _SumOverRanks.apply(product(input_, self.weight), self.tp_group)  # type: ignore[no-untyped-call]
        return summed.to(input_.dtype), None


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, added in their order: an all-reduce would choose its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        if group.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return reduce(torch.add, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class BatchInvariantAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed texts, batch-invariant: an answer that goes on from a shared prompt gets the bits that it gets
    after a prompt of its own."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__()
        self.scale: float = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        attn_mask_type: Any = None,
        attention_bias: None = None,
    ) -> Tensor:
        """[N, heads * width], of query [N, heads, width] and key, value [N, groups, width]."""
        output: Tensor = _TiledAttention.apply(query, key, value, packed_seq_params, self.scale)  # type: ignore[no-untyped-call]
        return output.flatten(1)


class _TiledAttention(torch.autograd.Function):
    """Forward batch-invariant; the gradient by SDPA's own backward kernel, from the same intermediate values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
        found = [attention(*_gathered(call, query, key, value), key_bias(call.mask)[:, None], scale) for call in packed.tile_calls]
        ctx.save_for_backward(query, key, value, *(tensor for pair in found for tensor in pair))
        ctx.packed, ctx.scale = packed, scale
        in_tiles = torch.cat([output.permute(0, 3, 1, 2, 4).reshape(-1, *query.shape[1:]) for output, _ in found])
        return in_tiles.index_select(0, packed.row_in_tiles)  # type: ignore[arg-type]  # there are tiles

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in float32, in which SDPA's kernel is fastest. The heads of a group stand one below the other, as queries of one
        head."""
        query, key, value, *of_calls = ctx.saved_tensors
        dtype, calls, row_in_tiles = query.dtype, ctx.packed.tile_calls, ctx.packed.row_in_tiles
        query, key, value = query.float(), key.float(), value.float()
        sizes = [call.query_rows.numel() for call in calls]
        slopes = query.new_zeros(sum(sizes), *query.shape[1:]).index_copy_(0, row_in_tiles, grads[0].float()).split(sizes)  # 0 for padding
        query_grads, key_grad, value_grad = [], torch.zeros_like(key), torch.zeros_like(value)
        for call, slope, output, log_sums in zip(calls, slopes, of_calls[::2], of_calls[1::2], strict=True):
            q, k, v = _gathered(call, query, key, value)
            g = slope.view(*call.query_rows.shape, *q.shape[1:3], -1).permute(0, 2, 3, 1, 4)
            bias = key_bias(call.mask).expand(-1, q.shape[2], -1, -1).flatten(1, 2)[:, None]
            g, q, output, log_sums = (x.flatten(2, 3) for x in (g, q, output.float(), log_sums))
            of_query, *of_keys = _sdpa_backward(g, q, k, v, output, log_sums, 0.0, False, attn_mask=bias, scale=ctx.scale)
            query_grads.append(of_query.unflatten(2, (-1, call.query_rows.shape[1])).permute(0, 3, 1, 2, 4).reshape(slope.shape))
            for found, gradient in zip((key_grad, value_grad), of_keys, strict=True):
                found.index_add_(0, call.key_rows.flatten(), gradient.transpose(1, 2).flatten(0, 1))
        query_grad = torch.cat(query_grads).index_select(0, row_in_tiles)
        return query_grad.to(dtype), key_grad.to(dtype), value_grad.to(dtype), None, None


_sdpa_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _gathered(call: TileCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, G, R, Q, width] queries, R heads for each of G key heads, and [n, G, K, width] keys and values of the tiles."""
    groups = key.shape[1]
    q = query.index_select(0, call.query_rows.flatten()).view(*call.query_rows.shape, groups, -1, query.shape[-1])
    k, v = (x.index_select(0, call.key_rows.flatten()).view(*call.key_rows.shape, groups, -1).transpose(1, 2) for x in (key, value))
    return q.permute(0, 2, 3, 1, 4), k, v


# ----------------------------------------------------------------------------------------------------------------------
# The experts of a layer on one rank, all at once: Megatron's modules and parameters, one set for each expert, and two grouped products.
#
# Megatron computes its local experts one after the other, each with kernels of its own: with 32 small experts on a rank a GPU waits for
# launches most of the time. Its grouped layers want other libraries, and hold their parameters under other names and in other shapes.


def grouped_product(x: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    """[R, out]: each run of rows times the transpose of its own matrix.

    On a GPU in bfloat16 one kernel (torch's grouped_mm), elsewhere a loop. In each pass the matrices are stacked for the kernel: a copy at
    the speed of the GPU's memory, freed after the product.

    Args:
        x: [R, in], the runs one below the other.
        weights: a run's matrix each, [out, in].
        rows: [runs] int64, rows of each run; any may be 0.
    """
    return _by_kernel(x, weights, rows) if x.is_cuda and x.dtype == torch.bfloat16 and len(x) else _by_loop(x, weights, rows)


def _by_kernel(x: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    ends = rows.to(x.device).cumsum(0, dtype=torch.int32)
    product: Tensor = _GroupedProduct.apply(x, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedProduct(torch.autograd.Function):
    """The kernel with a gradient of its own. Autograd would keep the stack of every layer until its backward pass: a second copy of all
    experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        gradient, of_x = gradient.contiguous(), None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(gradient, torch.stack(weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return of_x, None, *(None for _ in weights)
        return of_x, None, *F.grouped_mm(gradient.t(), x, offs=ends).unbind()


def _by_loop(x: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.cat([F.linear(run, weight) for run, weight in zip(torch.split(x, rows.tolist()), weights, strict=True)])


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # Megatron has no types
    """SequentialMLP with its products grouped: gated feed-forward parts without biases, whole on their rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments: SequentialMLP's."""
        super().__init__(*args, **options)
        if self.config.tensor_model_parallel_size > 1:
            # Each tensor-parallel rank sends rows of its own to its experts, whose gradients are sums over these ranks, too. Megatron marks
            # experts as such where expert_parallel is above 1 alone; others it would take for matrices of one tensor-parallel rank.
            for parameter in self.parameters():
                parameter.allreduce = False

    def forward(self, rows: Tensor, rows_of_experts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """
        Args:
            rows: [R, hidden], those of an expert one below the other.
            rows_of_experts: [experts of this rank] int64.
            weights: [R], by which the router weighs each row's expert.
        """
        up = grouped_product(rows, [expert.linear_fc1.weight for expert in self.local_experts], rows_of_experts)
        gate, linear = up.chunk(2, dim=-1)
        inner = self.config.activation_func(gate) * linear
        inner = (inner * weights.unsqueeze(-1)).to(inner.dtype)
        return grouped_product(inner, [expert.linear_fc2.weight for expert in self.local_experts], rows_of_experts), None


def keep_no_routes(layer: MoELayer) -> None:
    """Have a layer forget the tokens' routes when it has used them.

    Megatron keeps them until its next pass. With recomputed activations they hold on to the layer's input and its gradient: two tensors
    [tokens, hidden] of each layer, 3 GB of Qwen3-30B-A3B's 48 with 8,192 tokens in bfloat16.
    """
    layer.register_forward_hook(_forget_routes)


def _forget_routes(layer: MoELayer, *_: Any) -> None:
    layer.token_dispatcher.probs = layer.token_dispatcher.routing_map = None


Layers = Literal["local", "batch_invariant", "transformer_engine"]


def choose(config: LearnerConfig, device: torch.device) -> Layers:
    """The layers of a rank.

    Raises: ConfigError if TransformerEngine's are asked for and can't be had.
    """
    obstacle = _obstacle(config, device)
    if config.layers == "transformer_engine" and obstacle is not None:
        raise ConfigError(f"learner.layers = transformer_engine: {obstacle}. Or set learner.layers: auto")
    if config.batch_invariant:
        return "batch_invariant"
    return "local" if config.layers == "local" or obstacle is not None else "transformer_engine"


def describe(config: LearnerConfig, device: torch.device) -> str:
    """Names the layers for people, with the reason why a rank on a GPU doesn't use TransformerEngine's."""
    chosen = choose(config, device)
    if chosen == "transformer_engine":
        return "layers of TransformerEngine"
    is_second_choice = config.layers != "local" and device.type == "cuda"
    return f"{chosen} layers" + (f", not TransformerEngine's: {_obstacle(config, device)}" if is_second_choice else "")


def block_spec(transformer: TransformerConfig, family: ModelFamily, layers: Layers, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's spec of a rank's layers.

    Args:
        family: where its norms are.
        vp_stage: which of the rank's chunks, if it has several.
    """
    norm, attention, column, row = {
        # HFRMSNorm says where its norms round.
        "local": (HFRMSNorm, PackedAttention, ColumnParallelLinear, RowParallelLinear),
        "batch_invariant": (HFRMSNorm, BatchInvariantAttention, BatchInvariantColumnLinear, BatchInvariantRowLinear),
        # Rounds once, at the end.
        "transformer_engine": (megatron.TENorm, PackedAttention, megatron.TEColumnParallelLinear, megatron.TERowParallelLinear),
    }[layers]
    layer = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts, qk_layernorm=transformer.qk_layernorm, normalization="RMSNorm"
    )
    parts, of_attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm if family.has(INPUT_NORM) else IdentityOp
    row = with_norm_after(row, norm) if family.has(ATTENTION_NORM_AFTER) else row
    of_attention.core_attention, of_attention.linear_qkv, of_attention.linear_proj = attention, column, row
    match family.qk_norm:
        case "head":
            of_attention.q_layernorm = of_attention.k_layernorm = norm
        case "all_heads":
            of_attention.q_layernorm = ModuleSpec(AllHeadsNorm, params={"heads": transformer.num_attention_heads})
            of_attention.k_layernorm = ModuleSpec(AllHeadsNorm, params={"heads": transformer.num_query_groups})
    if transformer.num_moe_experts is None:
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = column, row
    else:
        parts.mlp.submodules.experts.module = GroupedExperts
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(transformer, vp_stage), layer_norm=norm)


def _obstacle(config: LearnerConfig, device: torch.device) -> str | None:
    """Why a rank can't have TransformerEngine's layers, with the remedy; None if it can."""
    if setting := config.needs_local_layers:
        return setting
    if device.type != "cuda":
        return f"its kernels need a GPU, and this rank computes on device {device}"
    if not megatron.HAVE_TE:
        return (
            "the package transformer-engine isn't installed or can't be imported. Install what megatron-core 0.16 takes: "
            "pip install --no-build-isolation -c constraints-gpu.txt -e '.[transformer-engine]'"
        )
    return None
