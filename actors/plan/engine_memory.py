"""Memory of an engine's GPU, or of each of its GPUs, in bytes: weights, and how many tokens and requests the rest holds.

As SGLang 0.5.21 divides it. Weights and KV cache get a fraction of what is free once the process has its CUDA context
(mem_cache/kv_cache_configurator.py, _profile_available_bytes), and the cache what the weights leave of it. Without a fraction given,
handle_gpu_memory_settings (arg_groups/memory_hook.py) makes one of the GPU's size: it leaves 512 MiB, 1.5 MiB for each token of a chunk of
prefill, an eighth of a GiB for each rank, and what reserve_for_graph_mb there says of graphs: 2 MiB for each request of the largest one of
decoding, and 8 MiB for each one of prefill; on GPUs above 60 GiB 10 GiB at least. Settings in rollout.engine.engine_args that change one of
these, or the cache's type, are counted. An engine with a share of a GPU keeps to the share (correction/engines/gpu_share.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.plan.shape import BYTES_OF, ModelShape
from correction.engines.gpu_share import CONTEXT, LEAST_OF_CACHE, engine_budget, outside_cache
from rollout.config import RolloutConfig
from rollout.engine_settings.engine_config import EngineConfig

_MIB = 1 << 20
_GRAPHS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512), (10**6, 16384, 512, 512))
"""GPUs below so many GiB: tokens of a chunk of prefill, requests of the largest graph, and those with _MANY_RANKS."""
_MANY_RANKS = 4
_LARGE_GRAPH = 300
"""Requests; above it SGLang leaves half as much again for groups of ranks."""
_PREFILL_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
"""Graphs of prefill: up to so many tokens, one every so many."""
_LAST_PREFILL_STEP = 512
"""Tokens, above these."""
_FEWEST_TOKENS, _UNCHUNKED = 2048, 16_384
"""Of a chunk for which room is left, at least; and without chunks (chunked_prefill_size: -1), if max_prefill_tokens doesn't say."""
_CACHE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}
"""Of an entry of the cache, by engine_args.kv_cache_dtype. Others (auto, and those in blocks of four bits) count as the weights' type."""


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
