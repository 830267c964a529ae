"""Arguments of SGLang that are refused, because they would break what evenkeel relies on: that a token's logprob is of the distribution
that it was drawn from, and that an engine computes with the weights that were sent.

Arguments that only change rounding (kv_cache_dtype, quantised sums over ranks) are handed on: that is mismatch, which the correction
handles. A test requires every field of SGLang's ServerArgs to be in one of three lists, so that somebody looks at each new one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.engine_settings.sglang_arguments import ATTENTION_BACKENDS, HANDED_ON

_REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("speculative_", "decoupled_spec_", "spec_trace_dir", "enable_multi_layer_eagle", "dllm_"),
        "its tokens are not drawn by evenkeel's sampler, whose logprobs every ratio rests on",
        "rollout.engine.max_running_requests for more tokens a second",
    ),
    (
        ("preferred_sampling_params",),
        "tokens would be drawn from another distribution than rollout.sampling says and the learner computes",
        "rollout.sampling",
    ),
    (
        ("enable_lora", "lora_", "max_lora", "max_loaded_loras", "experts_shared_outer_loras", "uno_lora_path"),
        "the learner trains and sends whole weights, and knows no adapter",
        "model: a folder with the adapter merged",
    ),
    (
        (
            *("custom_weight_loader", "model_loader_extra_config", "model_impl", "startup_weight_load_mode", "weight_cache_"),
            *("remote_instance_weight_loader_", "modelexpress_config", "checkpoint_engine_", "delete_ckpt_after_loading", "decrypted_"),
            *("modelopt_", "quantize_and_serve", "rl_quant_profile", "download_dir", "model_checksum"),
        ),
        "an engine's weights come from the learner, through SGLang's own models and loaders",
        "model, and rollout.engine.quantization",
    ),
    (
        ("cpu_offload_gb", "offload_", "ple_offload_", "kt_", "enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights"),
        "weights that are elsewhere for a time would not be those that an update writes to",
        "rollout.engine.tensor_parallel for models that one GPU doesn't hold",
    ),
    (
        (
            *("enable_hierarchical_cache", "hicache_", "enable_lmcache", "lmcache_", "enable_flexkv", "flexkv_", "radix_cache_backend"),
            *("enable_unified_cache_external_linker", "unified_cache_external_linker_backend", "enable_hisparse", "hisparse_config"),
        ),
        "keys and values kept outside the GPU could outlive the weights that made them",
        "rollout.engine.prefix_cache, which begins anew with each version",
    ),
    (
        (
            *("enable_attn_tp_input_scattered", "enable_dense_mlp_attn_tp", "enable_layernorm_sp", "disable_attn_tp_gather"),
            *("enable_tp_lm_head_all_to_all", "enable_scattered_sconv", "enable_two_batch_overlap", "enable_single_batch_overlap"),
            *("tbo_", "dcp_", "enable_dsa_cache_layer_split", "disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
        ),
        "what an engine computes and holds so has not been compared with the learner",
        "rollout.engine.tensor_parallel",
    ),
    (
        ("json_model_override_args",),
        "it changes the model's config (rope, layers, types) in the engine alone, and the learner trains what the folder's says",
        "a model folder with that config.json, and rollout.engine.quantization for float8",
    ),
    (
        ("forward_hooks", "debug_tensor_dump_input_file", "is_embedding", "prefill_only_disable_kv_cache"),
        "an engine here computes the learner's model, and samples from it",
        "rollout.engine's own settings",
    ),
    (
        ("trust_remote_code",),
        "code in a model folder is never run, and the learner would not know such a model",
        "a model of a family that it knows",
    ),
    (
        ("tokenizer_worker_num", "detokenizer_worker_num", "custom_sigquit_handler"),
        "an engine's processes are started and watched by evenkeel, and work on token ids",
        "rollout.workers",
    ),
)
"""Prefixes of argument names, why they are refused, and what to set instead."""
_WHOLE = "weights are sent to, and compared with, ranks that each have a part of every tensor"
_EXPERTS = "rollout.engine.expert_parallel"
_ONE_NODE = "a rollout worker is one actor on one node, and asks Ray for a GPU for each of rollout.engine.tensor_parallel ranks"
REFUSED_OF_RANKS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("pp_size", "pp_max_micro_batch_size", "pp_async_batch_depth"), (_WHOLE, "rollout.engine.tensor_parallel")),
    "load_balance_method": ("a prompt and all of its answers go to one group of ranks", "rollout.engine.attention_data_parallel"),
    **dict.fromkeys(
        ("enable_dp_lm_head", "enable_dp_attention_local_control_broadcast"),
        ("what an engine computes so has not been compared with the learner", "rollout.engine.attention_data_parallel"),
    ),
    **dict.fromkeys(
        ("moe_dp_size", "moe_dense_tp_size", "dwdp_size", "shared_experts_tp_size", "enable_shared_experts_attn_tp"),
        (_WHOLE, _EXPERTS),
    ),
    **dict.fromkeys(
        (
            *("enable_eplb", "ep_num_redundant_experts", "init_expert_location", "elastic_ep_backend"),
            *("ep_join_mode", "ep_join_rank_offset", "elastic_ep_initial_size", "max_ep_size", "enable_elastic_expert_backup"),
        ),
        ("an expert's weights, and its number in what is replayed, are known by the rank it was given at the start", _EXPERTS),
    ),
    "moe_a2a_backend": ("ranks add what their experts make by an all-reduce; other ways were not compared with the learner", _EXPERTS),
    **dict.fromkeys(
        ("dcp_size", "attn_cp_size", "enable_prefill_cp", "cp_strategy", "enable_cp_decode_attn_tp"),
        ("parts of a sequence on several ranks have not been compared with the learner", "rollout.engine.tensor_parallel"),
    ),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "use_ray"), (_ONE_NODE, "rollout.workers for more nodes")),
    **dict.fromkeys(
        (
            *("nccl_port", "port", "host", "gated_launch_port"),
            *("kv_events_config", "load_publish_endpoint", "forward_pass_metrics_ipc_name"),
        ),
        ("every engine would take this address, and of several on a node only one can", "nothing: each engine draws free ports of its own"),
    ),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step", "numa_node"), ("Ray says which GPUs a worker has", "rollout.gpus_per_worker")),
    **dict.fromkeys(
        ("disaggregation_mode", "enable_pdmux", "decoupled_spec_role", "encoder_only", "language_only"),
        ("an engine here reads its prompts and samples by itself", "rollout.workers"),
    ),
}
"""Arguments about the ranks and addresses of an engine, each -> (why not, what to set instead). What concerns only how ranks talk is
handed on."""


def refusal(name: str) -> tuple[str, str] | None:
    """Why this argument of SGLang is not handed on, and what to set instead; None if it is."""
    if name in REFUSED_OF_RANKS:
        return REFUSED_OF_RANKS[name]
    return next(((reason, remedy) for beginnings, reason, remedy in _REFUSED if name.startswith(beginnings)), None)


def unknown(attention_backend: str | None, arguments: Mapping[str, Any], *, on_cpu: bool) -> Iterator[tuple[str, str]]:
    """Names that SGLang doesn't know and would refuse at its start. Yields (which one, what may be meant).

    Args:
        attention_backend, arguments: rollout.engine's attention_backend and engine_args.
        on_cpu: the engine computes on a CPU, where attention_backend may be "stock" as well.
    """
    for name in arguments:
        if name not in HANDED_ON:
            yield f"rollout.engine.engine_args.{name}: SGLang has no such argument", _nearest(name, HANDED_ON)
    backends = {"attention_backend": attention_backend}
    names = ("prefill_attention_backend", "decode_attention_backend")
    backends |= {f"engine_args.{name}": arguments[name] for name in names if name in arguments}
    for name, value in backends.items():
        if value is not None and value not in ATTENTION_BACKENDS and not (on_cpu and value == "stock"):
            yield f"rollout.engine.{name} = {value}: SGLang has no such backend", _nearest(str(value), ATTENTION_BACKENDS)


def _nearest(name: str, known: frozenset[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), 1)
    return f"Did you mean {found[0]}?" if found else "Leave it out"
