"""GPU memory for weights on their way, bytes: what the learner holds to send a version, and what an engine receives of a broadcast."""

from __future__ import annotations

from actors.config import RunConfig
from actors.plan.shape import ModelShape
from actors.plan.traffic import largest_tensor


def receiving_bytes(shape: ModelShape, config: RunConfig) -> int:
    """The most that each GPU of an engine holds beside its weights and KV cache while it receives a bucket of a broadcast; from the object
    store nothing. SGLang takes a bucket twice, and a tensor that is one by itself once (correction/engines/weight_spec.py, goes_whole)."""
    sync = config.weight_sync
    if sync.transport != "broadcast":
        return 0
    version = shape.weight_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)
    return max(2 * min(version, sync.bucket_bytes), largest_tensor(shape, config))
