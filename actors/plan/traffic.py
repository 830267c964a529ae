"""Bytes that a run moves and keeps outside its GPUs: a version of the weights, a checkpoint, a batch; and estimates of the seconds."""

from __future__ import annotations

from dataclasses import dataclass

from actors.config import RunConfig
from actors.plan.learner_memory import state_bytes
from actors.plan.shape import BYTES_OF, ModelShape
from learner.config import LearnerConfig
from rollout.engine_settings.engine_config import EngineConfig

HOST_COPY = 5e9
"""Bytes a second that one thread copies from memory to memory: an assumption. On an H200 1.19 GB, by one thread and from pageable memory
then, took pauses of 0.25 to 0.33 s, for which a plan said 0.2 (docs/gpu.md)."""
BUS = 20e9
"""Bytes a second between a GPU and page-locked memory of its host (PCIe 4 x16 and better): an assumption."""
NETWORK = 10e9
"""Bytes a second between nodes (100 Gb/s with Ray's overhead): an assumption."""
PREFILL = 30_000.0
"""Tokens a second that an engine reads on each of its GPUs, for a model of 8B on an H100; taken to fall as the parameters grow: an
assumption."""
PREFILL_PARAMETERS = 8e9
PACKED = 8 + 1 + 4 + 4 + 4 + 4  # ids, loss mask, behaviour logprobs, advantages, versions, proximal logprobs
"""Bytes of a PackedBatch for each token, by the types of its fields (correction/batch.py); it says only where its wide fields are."""
STORED_VERSIONS = 2
"""The most versions of the weights that rank 0's object store holds at a time: one is read while the next is written, by broadcast while an
engine joins."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and estimated seconds of one version of the weights, one checkpoint, one batch."""

    version: int
    """Bytes of the weights as they are sent."""
    export_s: float
    """Seconds in which the learner brings its stages together and copies the weights out or broadcasts them, and can't train."""
    fetch_s: float
    """Seconds on the way to another node, before the engine's pause; 0 on one machine, and for a broadcast, whose way is part of the
    pause."""
    pause_s: float
    """Seconds in which an engine loads the weights and can't sample. The first bucket is there before; of the others the slower of copying
    and loading counts. With a broadcast: the whole way."""
    recomputed_tokens: int
    """Tokens that an engine has to read again after an update with its cache full of requests; 0 if the cache is kept."""
    recompute_s: float
    checkpoint: int
    """Bytes on disk, with the Hugging Face folder."""
    batch: int
    """Bytes of a packed batch of the longest answers, without its wide fields."""
    store: int
    """Bytes in the object store of the learner's rank 0: STORED_VERSIONS of the weights, and two batches."""


def traffic(shape: ModelShape, config: RunConfig, *, cache_tokens: int = 0) -> Traffic:
    """Args: cache_tokens: that an engine's KV cache holds."""
    learner, rollout = config.learner, config.rollout
    version = shape.weight_bytes(learner.resolved_dtype, float8=rollout.engine.has_float8)
    engine = rollout.engine
    way_of = _broadcast_s if config.weight_sync.transport == "broadcast" else _store_s
    export_s, fetch_s, pause_s = way_of(version, exchanged_bytes(shape, learner), config)
    longest = engine.resolved_context
    retracts = engine.weight_update_mode == "retract"
    again = min(cache_tokens, engine.max_running_requests * longest // 2) if retracts else 0
    rate = PREFILL * PREFILL_PARAMETERS / active_parameters(shape) * engine.tensor_parallel
    one_batch = batch_bytes(shape, config)
    return Traffic(
        version=version,
        export_s=export_s,
        fetch_s=fetch_s,
        pause_s=pause_s,
        recomputed_tokens=again,
        recompute_s=again / rate if engine.resolved_device == "cuda" else 0.0,
        checkpoint=checkpoint_bytes(shape, config),
        batch=one_batch,
        store=STORED_VERSIONS * version + 2 * one_batch,
    )


def stores_versions(config: RunConfig) -> bool:
    """Whether rank 0 copies each version that it sends into its object store (actors/weights/weight_sync.py): by broadcast only if engines
    that join may have to wait some steps for the next one."""
    return config.weight_sync.transport == "object_store" or config.weight_sync.every_steps > 1


def fetched_versions(engines: int) -> int:
    """The most versions of the weights that a node of rollout workers holds at a time. Engines are updated one by one: where there are
    several, one may be reading a version when another fetches the next. A single one has let go of the older by then, whose copy Ray drops
    when it wants the room.

    Args: engines: on the node.
    """
    return 2 if engines > 1 else 1


def exchanged_bytes(shape: ModelShape, learner: LearnerConfig) -> int:
    """Bytes of a version that rank 0 receives from the other stages of its pipeline (learner/weights/export.py, of_all_stages), before any
    of them is in float8."""
    own = sum(shape.split(1, learner.pipeline_parallel, 1)[0])
    return (shape.parameters - own) * BYTES_OF[learner.resolved_dtype]


def largest_bucket(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of the largest bucket of weights as it is sent. No tensor is cut: a larger one than weight_sync.bucket_bytes is a bucket of its
    own (learner/weights/export.py, in_pieces)."""
    version = shape.weight_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)
    return min(version, max(config.weight_sync.bucket_bytes, largest_tensor(shape, config)))


def largest_tensor(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of the largest tensor as it is sent: the smallest size of a bucket."""
    return shape.largest_tensor_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)


def _store_s(version: int, exchanged: int, config: RunConfig) -> tuple[float, float, float]:
    """(export, way to another node, pause) through the object store, seconds. Args: exchanged: bytes, as exchanged_bytes."""
    pause_s = _pause_s(version, min(version, config.weight_sync.bucket_bytes), config.rollout.engine)
    export_s = _storing_s(version, config) + exchanged / _between_devices(config)
    return export_s, version / NETWORK if config.ray.address is not None else 0.0, pause_s


def _storing_s(version: int, config: RunConfig) -> float:
    """A copy from the GPU to the host, and one into the object store."""
    return (version / BUS if config.learner.resolved_device == "cuda" else 0.0) + version / HOST_COPY


def _between_devices(config: RunConfig) -> float:
    """Bytes a second from one rank's or engine's device to another's; in a cluster they may be on different nodes."""
    rate = BUS if config.learner.resolved_device == "cuda" else HOST_COPY
    return min(rate, NETWORK) if config.ray.address is not None else rate


def _broadcast_s(version: int, exchanged: int, config: RunConfig) -> tuple[float, float, float]:
    """(export, way to another node, pause) by broadcast, seconds: the learner sends while the engines receive, from device to device. A
    bucket is on its way while the next comes from its stage and, where versions are stored, too, while it is copied: all wait for the
    slower.

    Args: exchanged: bytes, as exchanged_bytes.
    """
    rate = _between_devices(config)
    meanwhile_s = exchanged / rate + (_storing_s(version, config) if stores_versions(config) else 0.0)
    sent_s = max(version / rate, meanwhile_s)
    return sent_s, 0.0, sent_s


def _pause_s(version: int, bucket: int, engine: EngineConfig) -> float:
    """A bucket is copied to shared memory while the engine loads the one before it, the first before the pause. Args: bucket: bytes."""
    loading = BUS if engine.resolved_device == "cuda" else HOST_COPY
    return bucket / loading + (version - bucket) / min(loading, engine.copy_threads * HOST_COPY)


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


def batch_bytes(shape: ModelShape, config: RunConfig) -> int:
    return batch_tokens(config) * PACKED + key_bytes(shape, config)


def active_parameters(shape: ModelShape) -> int:
    """Number of parameters that compute on a token: of the experts only as many as it is sent to."""
    shared, experts = shape.split(1, 1, 1)[0]
    return shared + (experts * shape.experts_per_token // shape.experts if shape.experts else 0)
