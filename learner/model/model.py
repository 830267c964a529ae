"""Megatron's GPTModel in the shape that a Hugging Face config describes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evenkeel.engines.operators import silu
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import QKV_BIAS, ExpertOptions, HeadShape, family_of, rope_scaling
from evenkeel.learner.model import layers
from evenkeel.learner.model.layers import keep_no_routes
from evenkeel.learner.model.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    MoELayer,
    TransformerConfig,
    gather_from_sequence_parallel_region,
)
from evenkeel.learner.model.parallel import Placement
from evenkeel.learner.model.routing import RouterChoice, smallest_type
from evenkeel.learner.model_fit import check_model


class PolicyModel(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """GPTModel that hands out the last layer's hidden states, [1, N, hidden], and leaves its head to learner/training/logprobs.py.

    An earlier pipeline stage hands out its own, as Megatron passes them on.
    The logits of all tokens are by far the largest tensor of a step; nobody needs them at the same time.
    """

    real_vocab_size: int
    """Tokens of the Hugging Face model; the rows beyond are padding."""

    def _preprocess(self, *args: Any, position_ids: Tensor, **options: Any) -> tuple[Any, ...]:
        """Megatron's, with the rotary angles already picked for each packed token: it would cut and join the pack again in each layer."""
        embedding, angles, *rest = super()._preprocess(*args, position_ids=position_ids, **options)
        return embedding, angles.index_select(0, position_ids[0]), *rest

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:  # a head needs all rows; its gradient comes back complete (learner/training/logprobs.py)
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states.transpose(0, 1)

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary rows of this rank, hidden]: the output projection, which may be the embedding."""
        weight: Tensor = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        return weight


def build(hf_config: Any, config: LearnerConfig, placement: Placement) -> list[PolicyModel]:
    """This rank's part of the model of a Hugging Face config, weights not set: one chunk of layers, or virtual_pipeline of them.

    Raises: DataError if the architecture isn't supported; ConfigError if the settings don't go together with it (learner/model_fit.py).
    """
    check_model(config, hf_config)
    transformer = transformer_config(hf_config, config, placement)
    return [_chunk(hf_config, config, placement, transformer, number) for number in range(config.virtual_pipeline)]


def _chunk(hf_config: Any, config: LearnerConfig, placement: Placement, transformer: TransformerConfig, number: int) -> PolicyModel:
    vp_stage, scaling = number if config.virtual_pipeline > 1 else None, rope_scaling(hf_config)
    model = PolicyModel(
        transformer,
        layers.block_spec(transformer, family_of(hf_config), layers.choose(config, placement.device), vp_stage),
        vocab_size=-(-hf_config.vocab_size // placement.tensor_parallel) * placement.tensor_parallel,
        max_sequence_length=hf_config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_percent=hf_config.rope_parameters.get("partial_rotary_factor", 1.0),
        rotary_base=float(hf_config.rope_parameters["rope_theta"]),
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling or 1.0,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        pre_process=placement.pipeline_rank == 0 and number == 0,
        post_process=placement.is_last_stage and number == config.virtual_pipeline - 1,
        vp_stage=vp_stage,
    )
    model.real_vocab_size = hf_config.vocab_size
    model.to(placement.device)
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            keep_no_routes(layer.mlp)
    if config.routing_replay != "none":
        for layer in model.decoder.layers:
            RouterChoice(layer.layer_number - 1, smallest_type(hf_config.num_experts)).attach(layer)
    return model


def wrap(model: PolicyModel, config: LearnerConfig) -> DistributedDataParallel:
    """The model under Megatron's data parallelism, which *sums* gradients over ranks and accumulates them in float32."""
    inner = Float16Module(model.config, model) if model.config.bf16 or model.config.fp16 else model
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,
        use_distributed_optimizer=config.distributed_optimizer,
    )
    return DistributedDataParallel(model.config, settings, inner)


def unwrap(model: torch.nn.Module) -> PolicyModel:
    """The GPTModel inside its wrappers."""
    while not isinstance(model, PolicyModel):
        model = model.module  # type: ignore[assignment]
    return model


def transformer_config(hf_config: Any, config: LearnerConfig, placement: Placement) -> TransformerConfig:
    """Megatron's settings for a Hugging Face config."""
    family, heads, dtype = family_of(hf_config), HeadShape.of(hf_config), config.torch_dtype
    experts = _expert_settings(hf_config, family.experts, config) if family.experts else {}
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=heads.groups,
        kv_channels=heads.width,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=family.qk_norm != "none",
        add_qkv_bias=family.has(QKV_BIAS),
        rotary_interleaved=family.rotary_interleaved,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=silu if config.batch_invariant else F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=placement.tensor_parallel,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=placement.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        # Two stages send each other activations and gradients at the same time, whose sizes Megatron would confuse in one exchange.
        overlap_p2p_comm=config.virtual_pipeline > 1,
        recompute_granularity="full" if config.recompute_activations else None,
        recompute_method="uniform" if config.recompute_activations else None,
        recompute_num_layers=1 if config.recompute_activations else None,
        expert_model_parallel_size=placement.expert_parallel,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=placement.device.type == "cpu",
        perform_initialization=True,  # which also marks the parameters that are split over ranks
        init_method=leave_unset,
        output_layer_init_method=leave_unset,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # what variable_seq_lengths insists on, even without experts
        # The loss is a sum whose denominator is already in it: no averaging over micro-batches or ranks.
        calculate_per_token_loss=True,
        # Fused kernels come with TransformerEngine, Apex or Triton.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        cuda_graph_scope=[],  # its default warns that it is deprecated
        **experts,
    )


def leave_unset(weight: Tensor) -> Tensor:
    """Leaves weights as they are, in place of Megatron's random values, each of which convert.load overwrites: 8B of them take a CPU a
    minute."""
    return weight


def _expert_settings(hf_config: Any, options: ExpertOptions, config: LearnerConfig) -> dict[str, Any]:
    """Megatron's settings of a mixture of experts."""
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf_config, options.width),
        # Softmax over all experts and then the top k, or the other way round.
        "moe_router_pre_softmax": options.normalises is not None and not getattr(hf_config, options.normalises),
        # In half precision the engines weigh experts in float32, too; with float32 weights there is nothing to widen.
        "moe_router_dtype": None if config.torch_dtype is torch.float32 else "fp32",
        "moe_router_load_balancing_type": "aux_loss" if config.moe_aux_loss_coefficient else "none",
        "moe_aux_loss_coeff": config.moe_aux_loss_coefficient,
    }
