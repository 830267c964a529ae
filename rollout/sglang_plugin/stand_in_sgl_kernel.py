"""Stand-in for `sgl_kernel`, whose CPU build is on no package index.

SGLang's CPU platform imports a few index helpers from it by name. All numerical work (attention, norms, rotary, experts, sampling) has a
pure torch path in SGLang, taken when these kernels are absent. Helpers that only speculative decoding or KV offload need raise when called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__version__ = "0.0.0+evenkeel.stand.in"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, _pool_len: int
) -> None:
    """Write each request's new cache slots into its row: req_to_token[r, start:end] = the next (end - start) of out_cache_loc."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def _absent(name: str) -> Any:
    def raise_absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: only speculative decoding and KV offload call it. Turn them off")

    return raise_absent


copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
build_draft_decode_metadata_cpu = _absent("build_draft_decode_metadata_cpu")
