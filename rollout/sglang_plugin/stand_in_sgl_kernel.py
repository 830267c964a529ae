"""Stand-in for `sgl_kernel`, whose CPU build is on no package index.

SGLang's CPU platform imports a few index helpers from it by name. All numerical work (attention, norms, rotary, experts, sampling) has a
pure torch path in SGLang, taken when these kernels are absent. Helpers that only speculative decoding or KV offload need raise when called.
"""

from __future__ import annotations

from typing import Any

import torch
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


WORD = 0xFFFFFFFF


def _multiply(a: Tensor, constant: int) -> Tensor:
    """a x constant modulo 2^32 in int64, in two halves so that nothing overflows."""
    return ((a & 0xFFFF) * constant + ((((a >> 16) * constant) & 0xFFFF) << 16)) & WORD


def _rotate(a: Tensor, bits: int) -> Tensor:
    return ((a << bits) | (a >> (32 - bits))) & WORD


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit) of (seed low, seed high, position, column): the random numbers of SGLang's deterministic sampling.

    Args:
        seed: [B] int64. positions: [B]. col_indices: [V].
    Returns: [B, V] uint32.
    Source: A. Appleby, MurmurHash3; the same as SGLang's Triton kernel sglang/kernels/ops/sampling/murmur_hash.py.
    """
    seed = seed.to(torch.int64)[:, None]
    words = (seed & WORD, (seed >> 32) & WORD, positions.to(torch.int64)[:, None] & WORD, col_indices.to(torch.int64)[None] & WORD)
    state = torch.zeros_like(seed)
    for word in words:
        mixed = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
        state = (_multiply(_rotate(state ^ mixed, 13), 5) + 0xE6546B64) & WORD
    state = state ^ (4 * len(words))                                # length in bytes
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


torch.library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
torch.library.impl("sgl_kernel::murmur_hash32_cpu", "cpu", murmur_hash32)
