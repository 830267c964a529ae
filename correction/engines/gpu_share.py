"""How learner and engine divide a GPU that they share: each takes its share of the whole memory, whichever starts first.

Left alone, SGLang 0.5.21 takes a fraction of what is free when it starts, less what anybody else has taken by the time its weights are
loaded (mem_cache/kv_cache_configurator.py, _profile_available_bytes): its cache would depend on how far the GPU's learner has come. An
engine with a share counts its own bytes instead (rollout/sglang_plugin/gpu_share.py), and torch's limit keeps a rank within its own
(learner/model/parallel.py).
"""

from __future__ import annotations

CONTEXT = 768 << 20
"""Bytes that each process on the GPU takes for the CUDA context, kernels and workspaces, which no allocator counts. An estimate, compared
with a GPU only in the sum of `outside_cache`."""
LEAST_OF_CACHE = 0.1
"""Smallest part of the KV cache that the share should hold with which an engine still starts. A lack up to that can come from estimates of
the memory outside the cache; beyond it other processes have taken the memory."""
PREFILL_TOKENS = 2048
"""Chunk of a prefill of an engine with a share; SGLang's own sizes are for whole GPUs."""
_PREFILL_TOKEN = 256 << 10
"""Bytes of a token's activations: twice what the widest layer of a model of 8B has at the same time. An estimate."""
_GRAPH = 2 << 20
"""Bytes of the graphs of decoding for each request that runs: SGLang's own estimate (arg_groups/memory_hook.py, reserve_for_graph_mb). An
engine with a share captures none of prefill (rollout/engine_settings/engine_config.py)."""
_SAMPLER = 16
"""Bytes for each request and word of the vocabulary while tokens are drawn: logits, logprobs and probabilities in float32, and a sorted
copy (rollout/sglang_plugin/seeded_sampler.py)."""
SUMMED = 1 << 15
"""Words of the vocabulary whose probabilities are summed at one time."""
_SUMS = 20
"""Bytes for each request and each of these: the word's number, its probability and, in float64, the sum."""


def outside_cache(requests: int, vocabulary: int) -> int:
    """Bytes that an engine takes in addition to weights and KV cache.

    Compared on an H200, where the cache takes all that this leaves of the share: an engine of Qwen3-0.6B with 128 requests held 22 MiB less
    than its share in the end, of 1,913 MiB here, and engines of the nano model 543 and 877 MiB less, of 2,309 (docs/gpu.md).
    Args: requests: how many run at the same time.
    """
    return CONTEXT + PREFILL_TOKENS * _PREFILL_TOKEN + requests * (_GRAPH + _SAMPLER * vocabulary + _SUMS * min(SUMMED, vocabulary))


def engine_budget(total: int, share: float, fraction: float | None, requests: int, vocabulary: int) -> int:
    """Bytes of weights and KV cache of an engine with a share of a GPU; below 0 if the share doesn't even hold the rest.

    Args:
        total: bytes of the whole GPU.
        fraction: of the whole, at most; None: all that the share leaves.
    """
    room = int(total * share) - outside_cache(requests, vocabulary)
    return room if fraction is None else min(room, int(total * fraction))


def allocator_fraction(total: int, share: float) -> float:
    """Share of the whole GPU that torch's allocator may hold in a process with this share, so that its context fits into it, too."""
    return share if share == 1 else max(0.0, share - CONTEXT / total)
