"""GPU memory for weights on their way, bytes: what the learner holds to send a version, and what an engine receives of a broadcast."""

from __future__ import annotations

from actors.config import RunConfig
from actors.plan.shape import BYTES_OF, ModelShape
from actors.plan.traffic import largest_tensor

EXCHANGED, GATHERED = 2**28, 2**26
"""Bytes that a pipeline stage sends at a time, and of a rank's parameters that are gathered at a time (EXCHANGE_BYTES and GATHER_BYTES of
learner/weights)."""


def sending_bytes(shape: ModelShape, config: RunConfig) -> int:
    """The most that rank 0's GPU holds beside the model while a version leaves. No pass runs then, so the memory of passes is free for it.

    It is the sum of two buckets, of which one is copied or sent while the other is filled (if the rank has every tensor whole, only
    queries, keys and values are copies); of what a gather holds, which is the rank's own part, all parts, and those of the gather before;
    of what another pipeline stage sends at a time; of a bucket in float8; and, for a broadcast, of a bucket in one piece.
    """
    learner, sync, size = config.learner, config.weight_sync, BYTES_OF[config.learner.resolved_dtype]
    largest, version = shape.largest_tensor_bytes(learner.resolved_dtype), shape.weight_bytes(learner.resolved_dtype)
    bucket = min(version, max(sync.bucket_bytes, largest))
    ranks, experts = learner.tensor_parallel, learner.expert_parallel
    is_whole = ranks * experts * learner.pipeline_parallel == 1
    queries, keys, feed_forward = shape.channels(1, 1).values()
    of_heads = shape.hidden * (queries + 2 * keys) * size
    found = min(2 * bucket, shape.layers * of_heads if is_whole else version)
    # Megatron's parameters, each of which is gathered in one collective: gate and up are one, and so are queries, keys and values.
    gate_up = shape.hidden * 2 * feed_forward * size
    of_layer = of_heads if shape.experts else max(of_heads, gate_up)
    of_tensor = (1 + 2 * ranks) * max(GATHERED, max(largest, of_layer) // ranks) if ranks > 1 else 0
    of_experts = (1 + 2 * experts) * max(GATHERED, gate_up) if experts > 1 else 0
    found += max(of_tensor, of_experts)
    if learner.pipeline_parallel > 1:
        found += max(EXCHANGED, largest)
    if config.rollout.engine.has_float8:
        found += bucket
    if sync.transport == "broadcast":
        found += min(version, sync.bucket_bytes)
    return found


def receiving_bytes(shape: ModelShape, config: RunConfig) -> int:
    """The most that each GPU of an engine holds beside its weights and KV cache while it receives a bucket of a broadcast; from the object
    store nothing. SGLang takes a bucket twice, and a tensor that is one by itself once (correction/engines/weight_spec.py, goes_whole)."""
    sync = config.weight_sync
    if sync.transport != "broadcast":
        return 0
    version = shape.weight_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)
    return max(2 * min(version, sync.bucket_bytes), largest_tensor(shape, config))
