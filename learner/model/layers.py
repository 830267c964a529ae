"""Which layers the learner's model is made of: Megatron's local ones, the batch-invariant ones, or TransformerEngine's.

All three are the same tree of modules with the same parameters under the same names, so that convert.py, checkpoints and export know one
model. That is why TransformerEngine's fused norm-and-product stays out: it would own the norm's weight, under another name.

Attention is ours in all three. It knows packed sequences and prompts that several answers share, and in half precision on a GPU it is
torch's variable-length FlashAttention already (attention.py); TransformerEngine's would bring no kernel that is missing.

Experts are ours in all three, too (experts.py): Megatron's modules and parameters with products of our own grouping, because the
parameters of TransformerEngine's grouped product have other names (weight0, weight1, ...) and other places.

TransformerEngine's modules add `_extra_state` to a state_dict, for float8. Nothing here reads or writes a state_dict of the model.
Whether what they compute is right isn't tested at start-up: the weight sync compares a prompt's logprobs with the engine's after every
version and warns, and the monitor watches the same difference on every batch.
"""

from __future__ import annotations

from typing import Literal

import torch

from correction.errors import ConfigError
from learner.config import LearnerConfig
from learner.hf.model_family import ATTENTION_NORM_AFTER, INPUT_NORM, ModelFamily
from learner.model import megatron
from learner.model.attention import PackedAttention
from learner.model.batch_invariant import BatchInvariantAttention, BatchInvariantColumnLinear, BatchInvariantRowLinear
from learner.model.experts import GroupedExperts
from learner.model.megatron import (
    ColumnParallelLinear,
    IdentityOp,
    ModuleSpec,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
)
from learner.model.norm import AllHeadsNorm, HFRMSNorm, with_norm_after

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
        # Where its norms round: norm.py.
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
