"""Arguments of SGLang that are refused, because they would break what evenkeel relies on: that a token's logprob is of the distribution
that it was drawn from, and that an engine computes with the weights that were sent.

Arguments that only change rounding (kv_cache_dtype, quantised sums over ranks) are handed on: that is mismatch, which the correction
handles. A test requires every field of SGLang's ServerArgs to be in one of three lists, so that somebody looks at each new one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

# ----------------------------------------------------------------------------------------------------------------------
# SGLang 0.5.21's arguments that evenkeel hands on as they are, each looked at: none of them draws tokens otherwise, spreads the model over
# ranks, or brings weights from elsewhere. Some act only together with one that is refused; some concern servers, which an engine here is
# not.

_NAMES = """
_radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set _swa_full_tokens_ratio_explicitly_set
abort_on_priority_when_disabled admin_api_key allow_auto_truncate allowed_media_domains api_key asr_max_buffer_seconds
asr_max_concurrent_sessions batch_notify_size bf16_gemm_backend boundary_reduction bucket_e2e_request_latency bucket_inter_token_latency
bucket_time_to_first_token c128_page_size chat_template chunked_prefill_size completion_template constrained_json_disable_any_whitespace
constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern crash_dump_folder cuda_graph_backend_decode
cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context cuda_graph_tc_compiler debug_cuda_graph debug_tensor_dump_layers
debug_tensor_dump_output_folder decode_attention_backend decode_log_interval deepep_config deepep_dispatcher_output_dtype deepep_mode
deepep_v2_mode default_chat_template_kwargs default_priority_value disable_aiter_allreduce_fusion_in_decode
disable_aiter_allreduce_fusion_in_prefill disable_chunked_prefix_cache disable_cuda_graph disable_cuda_graph_padding
disable_custom_all_reduce disable_decode_cuda_graph disable_fast_image_processor disable_flashinfer_autotune
disable_flashinfer_cutlass_moe_fp4_allgather disable_hybrid_swa_memory disable_outlines_disk_cache disable_overlap_schedule
disable_prefill_cuda_graph disable_priority_preemption disable_tokenizer_batch_decode disaggregation_bootstrap_port
disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache disaggregation_decode_extra_slots
disaggregation_decode_host_receive_threshold disaggregation_decode_polling_interval disaggregation_decode_retraction_backup
disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_transfer_backend dist_timeout dsa_decode_backend
dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend dsv4_attn_backend dsv4_prefill_backend
dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout elastic_ep_scale_timeout enable_adaptive_dispatch_to_encoder
enable_aiter_allreduce_fusion enable_broadcast_mm_inputs_process enable_cache_report enable_cudagraph_gc enable_custom_logit_processor
enable_decoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer enable_deterministic_inference enable_dynamic_batch_tokenizer
enable_dynamic_chunking enable_encoder_swa_bounded_replay enable_flashinfer_allreduce_fusion enable_forward_pass_metrics
enable_fp32_lm_head enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope enable_http2 enable_int8_mamba_checkpoint
enable_layerwise_nvtx_marker enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec enable_linker_mla_dedup
enable_mamba_cache_stochastic_rounding enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics enable_mis enable_mixed_chunk
enable_mm_global_cache enable_mscclpp enable_multimodal enable_nccl_nvls enable_p2p_check enable_page_major_kv_layout
enable_pd_role_switch enable_precise_embedding_interpolation enable_prefill_delayer enable_prefix_mm_cache enable_priority_scheduling
enable_profile_cuda_graph enable_quant_communications enable_request_time_stats_logging enable_response_store enable_return_hidden_states
enable_return_indexer_topk enable_session_radix_cache enable_ssl_refresh enable_streaming_session enable_strict_thinking enable_symm_mem
enable_tf32_matmul enable_tokenizer_batch_encode enable_torch_compile enable_torch_compile_debug_mode enable_torch_symm_mem enable_trace
enable_unified_memory enable_w4a4_mxfp4_megamoe enable_waterfill encoder_bootstrap_port encoder_register_urls encoder_transfer_backend
encoder_urls enforce_disable_flashinfer_allreduce_fusion engine_info_bootstrap_port ep_dispatch_algorithm eplb_algorithm
eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations expert_balancedness_report_mode
expert_distribution_recorder_buffer_size expert_distribution_recorder_mode export_metrics_to_file export_metrics_to_file_dir
extra_metric_labels fastapi_root_path file_storage_path flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend
flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged flashinfer_mxfp4_moe_precision
forward_pass_metrics_worker_id fp4_gemm_runner_backend fp8_gemm_runner_backend fuseep_mode gc_threshold
gc_warning_threshold_secs generation_tokens_buckets grammar_backend grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads
hf_chat_template_name http2_initial_connection_window_size http2_max_concurrent_streams image_processor_backend
incremental_streaming_output int8_mamba_ckpt_size kv_cache_dtype kv_canary kv_canary_real_data
kv_canary_sweep_interval language_model_only limit_mm_data_per_request linear_attn_backend linear_attn_decode_backend
linear_attn_prefill_backend linear_attn_verify_backend linear_replayssm_cache_len load_snapshot_publish_interval
log_level_http log_requests log_requests_format log_requests_level log_requests_target mamba_backend mamba_cache_philox_rounds
mamba_full_memory_ratio mamba_max_states_per_path mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval max_mamba_cache_size
max_prefill_tokens max_queued_requests media_url_max_file_size_mb min_free_slots_delay mlx_enable_sampling mm_attention_backend
mm_enable_dp_encoder mm_feature_transport mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb mm_process_config
mm_processor_worker_num model_config_parser moe_runner_backend mooncake_ib_device msprobe_dump_config
num_continuous_decode_steps num_reserved_decode_tokens optimistic_prefill_attempts otlp_service_name otlp_traces_endpoint page_size
pdmux_config_path pre_warm_nccl prefill_attention_backend prefill_decode_interval prefill_delayer_forward_passes_buckets
prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark
prefill_delayer_wait_seconds_buckets prefill_kv_cache_dequant_dtype prefill_max_requests priority_scheduling_preemption_threshold
prompt_tokens_buckets quantization_param_path radix_eviction_policy radix_eviction_policy_config reasoning_parser retraction_policy
return_hidden_states_mode return_input_ids return_output_ids revision rl_on_policy_target sampling_defaults
schedule_conservativeness schedule_low_priority_values_first schedule_policy scheduler_recv_interval served_model_name show_time_cost
sidecar sidecar_args skip_server_warmup sleep_on_idle sm_group_num smg_grpc_mode smg_http_sidecar_port soft_watchdog_timeout ssl_ca_certs
ssl_certfile ssl_keyfile ssl_keyfile_password stat_loggers stream_interval stream_response_default_include_usage strip_thinking_cache
swa_full_tokens_ratio swa_prefix_tails tokenizer_backend tokenizer_metrics_allowed_custom_labels tokenizer_metrics_custom_labels_header
tokenizer_mode tokenizer_path tool_call_parser tool_server torch_compile_max_bs trace_modules triton_attention_num_kv_splits
triton_attention_reduce_in_fp32 triton_attention_split_tile_size trust_mm_content_hashes trust_request_chat_template
uses_mamba_radix_cache uvicorn_access_log_exclude_prefixes warmups watchdog_timeout weight_loader_disable_mmap
weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
"""
HANDED_ON = frozenset(_NAMES.split())
"""A test compares it with the installed SGLang, without which `evenkeel plan` has to know it."""
_BACKENDS = """
triton torch_native flex_attention dsa nsa qsa dsv4 compressed fa3 fa4 flashinfer flashmla trtllm_mla cutedsl_mla tokenspeed_mla
trtllm_mha hpc_ops minicpm_flashattn minicpm_flashinfer aiter wave intel_amx ascend intel_xpu
"""
ATTENTION_BACKENDS = frozenset(_BACKENDS.split())
"""SGLang's names (its arg_groups/choices.py); not each computes on each device."""


# Prefixes of argument names, why they are refused, and what to set instead.
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
