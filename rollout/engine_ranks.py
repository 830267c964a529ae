"""SGLang's ways to spread an engine over several GPUs or nodes that are refused, and what to set instead."""

from __future__ import annotations

from collections.abc import Mapping

_WHOLE = "an engine has one GPU, and what it holds is compared with whole tensors"
_REPLICAS = "the parts of an engine with data parallelism would take weights and requests by themselves, as workers do"
_EXPERTS = "experts are not spread over ranks here, nor moved between them"
_ONE_NODE = "a rollout worker is one actor on one node, and asks Ray for one GPU"
_ALONE = "an engine here reads its prompts and samples by itself"
_MORE = "rollout.workers for more GPUs"
REFUSED_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            *("tp_size", "pp_size", "pp_max_micro_batch_size", "pp_async_batch_depth", "ep_size", "moe_dp_size", "moe_dense_tp_size"),
            *("dwdp_size", "shared_experts_tp_size", "enable_shared_experts_attn_tp", "dcp_size", "attn_cp_size", "enable_prefill_cp"),
            *("cp_strategy", "enable_cp_decode_attn_tp"),
        ),
        (_WHOLE, _MORE),
    ),
    **dict.fromkeys(
        ("dp_size", "enable_dp_attention", "enable_dp_lm_head", "enable_dp_attention_local_control_broadcast", "load_balance_method"),
        (_REPLICAS, _MORE),
    ),
    **dict.fromkeys(
        (
            *("enable_eplb", "ep_num_redundant_experts", "init_expert_location", "moe_a2a_backend", "elastic_ep_backend"),
            *("ep_join_mode", "ep_join_rank_offset", "elastic_ep_initial_size", "max_ep_size", "enable_elastic_expert_backup"),
        ),
        (_EXPERTS, _MORE),
    ),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "use_ray"), (_ONE_NODE, _MORE)),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step", "numa_node"), ("Ray says which GPU a worker has", "rollout.gpus_per_worker")),
    **dict.fromkeys(("disaggregation_mode", "enable_pdmux", "decoupled_spec_role", "encoder_only", "language_only"), (_ALONE, _MORE)),
}
"""Of SGLang: argument -> (why not, what to set instead). What concerns only how ranks talk to each other is handed on."""
