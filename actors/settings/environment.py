"""Environment variables of the actors, by role: what NCCL and the allocator have to know before a process starts, and the user's own."""

from __future__ import annotations

from evenkeel.actors.config import RunConfig
from evenkeel.correction.settings.schedule import needs_topk
from evenkeel.engines.machine import ON_CPU

# For actors that compute on the CPU of a machine with GPUs: Ray 2.60 hides no GPU from an actor that asks for none.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

OF_BATCHES = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""Variables of processes that send packed batches: the tensors are stored in the object store as they are, and read in place. Without it
torch copies and checks each of them on both sides. Nobody writes to a batch once it is handed over."""

OF_SERVICE = OF_BATCHES | {
    "MALLOC_ARENA_MAX": "1",  # one heap for all threads: a thread's own heap would be returned whole
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Variables of the correction service, which allocates and frees arrays of a batch's length all the time. By default glibc returns each to
the kernel, and the next one gets zeroed pages with a page fault for each: up to half of the processor time of packing and diagnostics. With
these variables freed memory stays in the heap, and the process keeps its peak size."""

_OF_RANKS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron: kernels start in the order of the calls, communication before what hides it
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # packed batches have another length each: fixed segments would not fit the next one
}

# SGLang sets these in its processes; ranks and engines of one communicator have to agree on them.
_IN_ONE_GROUP = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}

# A collective that is late or fails ends its communicator, not the process: an engine that dies would take the others along.
#
# By default it ends the process in three ways: the watchdog throws; the default group's monitor sees the watchdog's signal, writes a trace,
# waits for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s) and ends the process; and so do those of all ranks, which see the signal in the store
# of the default group. The variables are of a process: training's own groups lose traces after a timeout, and the end of a process whose
# watchdog hangs. In its place a step has deadlines.step_s, and a rank that gives no sign deadlines.part_heartbeat_s.
_SURVIVES_A_GROUP = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def learner_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables of each learner rank; what the user has set in ray.env wins."""
    own = {"OMP_NUM_THREADS": str(config.learner.threads)} | OF_BATCHES
    if config.learner.resolved_device == "cpu":
        own |= _NO_GPU | ON_CPU
    else:
        own |= _OF_RANKS
        if config.weight_sync.transport == "broadcast":
            own |= _IN_ONE_GROUP | _SURVIVES_A_GROUP
    return own | config.ray.env


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables of each rollout worker and of its engine's processes."""
    own = {"OMP_NUM_THREADS": str(config.rollout.engine.threads)}
    if config.rollout.engine.return_routed_experts or config.rollout.sampling.is_partial or needs_topk(config.correction):
        own |= OF_BATCHES  # its groups have wide fields
    if config.rollout.engine.resolved_device == "cpu":
        own |= _NO_GPU
    elif config.weight_sync.transport == "broadcast":
        own |= _IN_ONE_GROUP | _SURVIVES_A_GROUP
    return own | config.ray.env
