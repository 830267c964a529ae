"""Bytes that a run moves and keeps outside its GPUs: a version of the weights, a checkpoint, a batch."""

from __future__ import annotations

from dataclasses import dataclass

from actors.config import RunConfig
from actors.plan.learner_memory import state_bytes
from actors.plan.shape import ModelShape

PACKED = 8 + 1 + 4 + 4 + 4 + 4  # ids, loss mask, behaviour logprobs, advantages, versions, proximal logprobs
"""Bytes of a PackedBatch for each token, by the types of its fields (correction/batch.py); it says only where its wide fields are."""
STORED_VERSIONS = 2
"""The most versions of the weights that rank 0's object store holds at a time: one is read while the next is written, by broadcast while an
engine joins."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one version of the weights, one checkpoint, one batch."""

    version: int
    """Bytes of the weights as they are sent."""
    checkpoint: int
    """Bytes on disk, with the Hugging Face folder."""
    batch: int
    """Bytes of a packed batch of the longest answers, without its wide fields."""
    store: int
    """Bytes in the object store of the learner's rank 0: STORED_VERSIONS of the weights, and two batches."""


def traffic(shape: ModelShape, config: RunConfig) -> Traffic:
    version = shape.weight_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)
    batch = batch_tokens(config) * PACKED + key_bytes(shape, config)
    return Traffic(version, checkpoint_bytes(shape, config), batch, STORED_VERSIONS * version + 2 * batch)


def fetched_versions(engines: int) -> int:
    """The most versions of the weights that a node of rollout workers holds at a time. Engines are updated one by one: where there are
    several, one may be reading a version when another fetches the next. A single one has let go of the older by then, whose copy Ray drops
    when it wants the room.

    Args: engines: on the node.
    """
    return 2 if engines > 1 else 1


def largest_bucket(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of the largest bucket of weights as it is sent. No tensor is cut: a larger one than weight_sync.bucket_bytes is a bucket of its
    own (learner/weights/export.py, in_pieces)."""
    version = shape.weight_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)
    return min(version, max(config.weight_sync.bucket_bytes, largest_tensor(shape, config)))


def largest_tensor(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of the largest tensor as it is sent: the smallest size of a bucket."""
    return shape.largest_tensor_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)


def checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Weights and the optimizer's state once, however many ranks hold copies, and the Hugging Face folder."""
    whole = config.learner.model_copy(
        update={"data_parallel": 1, "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "distributed_optimizer": False}
    )
    weights, _, optimizer = state_bytes(shape, whole)
    return weights + optimizer + weights


def wide_bytes(shape: ModelShape, config: RunConfig, *, id_bytes: int = 4) -> int:
    """Bytes of a token's wide fields (correction/wide.py), its most likely alternatives and its experts, where the run wants them.

    Args: id_bytes: of a token's id: 4 in the object store, 8 where a rank computes with it.
    """
    from correction.settings.schedule import needs_topk

    routes = shape.layers * shape.experts_per_token * (1 if shape.experts <= 256 else 2)
    return needs_topk(config.correction) * (id_bytes + 4) + (routes if config.learner.routing_replay != "none" else 0)


def batch_tokens(config: RunConfig) -> int:
    """Tokens of a batch of the longest answers that are allowed, each with a prompt as long as the context leaves room for. The model's own
    context says nothing of prompts: then they are no longer than the answers."""
    sampling, engine = config.rollout.sampling, config.rollout.engine
    longest = engine.resolved_context
    if not engine.is_given("context_length"):
        longest = min(longest, 2 * sampling.max_tokens)
    return config.groups_per_step * sampling.samples_per_group * longest


def prompt_tokens(config: RunConfig) -> int:
    """Prompt tokens of such a batch: what the longest answers leave."""
    sampling = config.rollout.sampling
    return max(0, batch_tokens(config) - config.groups_per_step * sampling.samples_per_group * sampling.max_tokens)


def key_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of a batch's route keys: one a token of a prompt, where its experts are replayed (correction/wide.py)."""
    return 0 if config.learner.routing_replay == "none" or not shape.experts else 4 * prompt_tokens(config)


