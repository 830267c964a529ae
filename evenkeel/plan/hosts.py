"""Bytes outside the GPUs, or on their way: a version of the weights, a checkpoint, a batch, and the memory of the hosts, role by role.

Counted: answers, batches, versions of the weights, copies for checkpoints, buckets. Measured: what a batch costs the correction service
while it is corrected and looked at, and what a process takes for its modules. Estimated: what CUDA takes of a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import held_by
from evenkeel.correction.errors import counted
from evenkeel.plan.memory import cache_token_bytes, engine_memory, state_bytes
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.config import SamplingConfig

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
    batch = batch_tokens(shape, config) * PACKED + key_bytes(shape, config)
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
    """Bytes of a token's wide fields (correction/wide.py), its most likely alternatives, its kept set and its experts, where the run wants
    them.

    Args: id_bytes: of a token's id: 4 in the object store, 8 where a rank computes with it.
    """
    from evenkeel.correction.settings.schedule import needs_topk

    routes = shape.layers * shape.experts_per_token * (1 if shape.experts <= 256 else 2)
    top = needs_topk(config.correction) * (id_bytes + 4)
    return top + kept_set_bytes(shape, config.rollout.sampling) + (routes if config.learner.routing_replay != "none" else 0)


def kept_set_bytes(shape: ModelShape, sampling: SamplingConfig) -> int:
    """Bytes of a token's kept set, 32-bit ids and their number: under top_k alone so many, else KEPT_SET at most; 0 where there is none."""
    if not sampling.is_partial:
        return 0
    largest = min(sampling.top_k or shape.vocabulary, shape.vocabulary)
    return 4 + 4 * (largest if set(sampling.request) == {"top_k"} else min(largest, KEPT_SET))


def batch_tokens(shape: ModelShape, config: RunConfig) -> int:
    """Tokens of a batch of the longest answers that are allowed, each with a prompt as long as the context leaves room for. The model's own
    context says nothing of prompts: then they are no longer than the answers."""
    sampling, engine = config.rollout.sampling, config.rollout.engine
    longest = engine.resolved_context
    if longest == shape.context:
        longest = min(longest, 2 * sampling.max_tokens)
    return config.groups_per_step * sampling.samples_per_group * longest


def prompt_tokens(shape: ModelShape, config: RunConfig) -> int:
    """Prompt tokens of such a batch: what the longest answers leave."""
    sampling = config.rollout.sampling
    return max(0, batch_tokens(shape, config) - config.groups_per_step * sampling.samples_per_group * sampling.max_tokens)


def key_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of a batch's route keys: one a token of a prompt, where its experts are replayed (correction/wide.py)."""
    return 0 if config.learner.routing_replay == "none" or not shape.experts else 4 * prompt_tokens(shape, config)


def receiving_bytes(shape: ModelShape, config: RunConfig) -> int:
    """The most that each GPU of an engine holds beside its weights and KV cache while it receives a bucket of a broadcast; from the object
    store nothing. SGLang takes a bucket twice, and a tensor that is one by itself once (engines/weights.py, goes_whole)."""
    sync = config.weight_sync
    if sync.transport != "broadcast":
        return 0
    version = shape.weight_bytes(config.learner.resolved_dtype, float8=config.rollout.engine.has_float8)
    return max(2 * min(version, sync.bucket_bytes), largest_tensor(shape, config))


KEPT_SET = 96
"""Tokens of a kept set, mean of a batch's tokens, where top_p or min_p bounds it: an assumption. SmolLM2-135M had 84 at top_p 0.95 before
training, 34 at 0.9 (`evenkeel train recipes/smollm2_sums.yaml rollout.sampling.top_p=0.95 steps=3`); larger models and trained ones have
fewer. A run's own are in length/kept_set_tokens."""
DIAGNOSED = 105
"""Bytes a token of a batch that the service takes for a while, besides what is counted: benchmarks/control_plane_actors.py found it 330 MiB
larger with two batches of 1.55 million tokens (223 bytes for each token of one of them), of which 118 are counted below."""
MODULES = 400 << 20
"""A process with torch and the modules of a rank or of the service: 375 MiB on a CPU."""
CUDA = 2 << 30
"""What CUDA, its libraries and NCCL take of the host's memory in a process with a GPU: an estimate."""
WIDE, FETCHED = "wide fields in the object store", "wide fields, fetched to the object store"
BATCHES, FOR_CHECKPOINTS = "batches in the object store", "answers, fetched to the object store for a checkpoint"
ANSWERS = "answers in the object store"
OF_LEARNER, OF_ENGINES = "weights, gradients and optimizer", "engines' weights"
"""Parts of sides that compute on the CPU, where they are all the time."""
EARLIER = "earlier weights"
"""Copies of versions by which stale tokens' mismatch and staleness are told apart, all the time, too."""
TRANSFERS = 2
"""Buckets of weights that an engine has in shared memory at the same time."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Main memory of one node, bytes by what takes it."""

    node: str
    parts: dict[str, int]
    """Bytes by what they are for."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """The largest first."""
        return ", ".join(f"{what} {size / 2**30:.3g} GiB" for what, size in sorted(self.parts.items(), key=lambda part: -part[1]) if size)


ANSWER = 4 + 4
"""Bytes of a token of an answer as the service has it (rollout/trajectory.py): id and logprob. Wide fields stay where it was sampled."""
CORRECTED = PACKED + 4 + 1 + 4
"""Bytes of a CorrectedBatch for each token: weight, mask and scale in addition to the batch."""


def hosts(shape: ModelShape, config: RunConfig, *, gpus_per_node: int, nodes: int, gpu_bytes: int = 0) -> list[HostMemory]:
    """Main memory of the fullest node of each role: one node with all of them, or the driver's, one with ranks, and one with engines.

    Args: gpu_bytes: of a GPU; 0: not known.
    """
    ranks = min(config.learner.world_size, held_by(gpus_per_node, config.learner.gpus_per_rank))
    engines = min(config.rollout.most_workers, held_by(gpus_per_node, config.rollout.gpus_of_a_worker))
    if nodes == 1:
        whole = of_driver(shape, config) | of_learner(shape, config, config.learner.world_size)
        del whole[FETCHED], whole[FOR_CHECKPOINTS]  # they are there
        its_engines = of_engines(shape, config, config.rollout.most_workers, gpu_bytes=gpu_bytes, has_the_store=True)
        return [HostMemory("the node", whole | its_engines)]
    return [
        HostMemory("the driver's node", of_driver(shape, config)),
        HostMemory(f"a node with {counted(ranks, 'rank')}", of_learner(shape, config, ranks)),
        HostMemory(f"a node with {counted(engines, 'engine')}", of_engines(shape, config, engines, gpu_bytes=gpu_bytes)),
    ]


def of_driver(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    """Driver and correction service. The driver holds references and facts alone, 2 to 4 MiB in that measurement; but for a checkpoint it
    fetches all answers that are finished and not trained, and puts them together with their wide fields.

    The service has the answers of two batches, one being packed and one drawn ahead, and three corrected: one in preparation, one in
    training and one that is being looked at. Two lie in the object store. None of them holds wide fields: what stands for them are keys.
    """
    tokens = batch_tokens(shape, config)
    keys = key_bytes(shape, config)
    waiting = (config.max_staleness + 1) * tokens * (ANSWER + wide_bytes(shape, config))
    return {
        "correction service": tokens * (2 * ANSWER + 3 * CORRECTED + DIAGNOSED) + 5 * keys,
        BATCHES: 2 * (tokens * CORRECTED + keys),
        FOR_CHECKPOINTS: waiting,
        "answers put together for a checkpoint": waiting,
        "driver and service themselves": 2 * MODULES,
    }


def of_learner(shape: ModelShape, config: RunConfig, ranks: int) -> dict[str, int]:
    """A group's wide fields are one object, and ranks of every node may read some of its sequences: a node fetches all of them at most.

    Args: ranks: on the node, rank 0 among them.
    """
    learner, moved = config.learner, traffic(shape, config)
    stages = range(learner.pipeline_parallel)
    weights = ranks * max(state_bytes(shape, learner, stage)[0] for stage in stages)
    # Each parameter is written once: by the ranks that share the optimizer, or by one of each group that have it alike.
    holders = learner.world_size if learner.distributed_optimizer else learner.tensor_parallel * learner.pipeline_parallel
    whole_folder = shape.weight_bytes(learner.resolved_dtype)
    copies = (checkpoint_bytes(shape, config) - whole_folder) * min(ranks, holders) // holders + whole_folder
    tokens = batch_tokens(shape, config)
    batch = tokens * CORRECTED + key_bytes(shape, config)
    on_cpu = learner.resolved_device == "cpu"
    return {
        OF_LEARNER: ranks * max(sum(state_bytes(shape, learner, stage)) for stage in stages) if on_cpu else 0,
        "copy for a checkpoint": copies,
        "reference policy": weights if config.needs_reference else 0,
        EARLIER: config.earlier_weights * weights,
        "versions in the object store": STORED_VERSIONS * moved.version,
        "page-locked bucket": page_locked(largest_bucket(shape, config)) if learner.resolved_device == "cuda" else 0,
        "batch, and the ranks' shares": batch + batch * ranks // learner.world_size,
        FETCHED: tokens * wide_bytes(shape, config),
        "wide fields, the ranks' shares": tokens * wide_bytes(shape, config, id_bytes=8) * ranks // learner.data_parallel,
        "ranks themselves": ranks * _process(learner.resolved_device),
    }


def of_engines(shape: ModelShape, config: RunConfig, engines: int, *, gpu_bytes: int = 0, has_the_store: bool = False) -> dict[str, int]:
    """
    Args:
        engines: on the node.
        gpu_bytes: of a GPU; 0: not known, and what goes by it isn't counted.
        has_the_store: the versions that rank 0 has stored lie on the same node.
    """
    engine, moved = config.rollout.engine, traffic(shape, config)
    outstanding = (config.max_staleness + 1) * batch_tokens(shape, config) * engines // config.rollout.most_workers
    on_cpu, dtype, ranks = engine.resolved_device == "cpu", engine.resolved_dtype, engines * engine.tensor_parallel
    weights = ranks * shape.weight_bytes(dtype, engine.tensor_parallel, float8=engine.has_float8)
    cache_tokens = engine.max_total_tokens or 0
    cache = ranks * cache_token_bytes(shape, engine) * cache_tokens
    if not on_cpu:  # of a group, each of whose ranks holds all tokens
        of_all = engine_memory(shape, config.rollout, gpu_bytes).tokens if gpu_bytes else 0
        cache_tokens = of_all // engine.attention_data_parallel
    tells_experts = config.learner.routing_replay == "rollout" and cache_tokens > 0
    routes = ranks * route_cache_bytes(shape, cache_tokens) if tells_experts else 0
    stored = 0 if has_the_store or config.weight_sync.transport != "object_store" else fetched_versions(engines) * moved.version
    return {
        OF_ENGINES: weights if on_cpu else 0,
        "engines' KV caches": cache if on_cpu else 0,
        "experts of the tokens in the KV caches": routes,
        "versions fetched to the object store": stored,
        "buckets in shared memory": shared_bucket_bytes(shape, config, engines),
        ANSWERS: outstanding * ANSWER,
        WIDE: outstanding * wide_bytes(shape, config),
        "workers and engines themselves": engines * (2 * MODULES + engine.tensor_parallel * _process(engine.resolved_device)),
    }


def shared_bucket_bytes(shape: ModelShape, config: RunConfig, engines: int) -> int:
    """Bytes of shared memory in which so many engines get their weights (rollout/engine/weight_transfer.py, SharedStaging)."""
    return engines * TRANSFERS * largest_bucket(shape, config)


def page_locked(size: int) -> int:
    """Bytes that torch takes of the host for so many page-locked ones: the next power of two (its CachingHostAllocator)."""
    return 1 << (size - 1).bit_length()


def route_cache_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of page-locked memory in which each rank of an engine keeps its tokens' experts (SGLang's state_capturer/base.py,
    BaseHostCache): int32, a row for each token of its KV cache, filled or not, and one page more, which is one token here."""
    return (tokens + 1) * shape.layers * shape.experts_per_token * 4


def _process(device: str) -> int:
    return MODULES + (CUDA if device == "cuda" else 0)
