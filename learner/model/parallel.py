"""The learner's process group and Megatron's groups within it: who holds which part of the model and of the batch."""

from __future__ import annotations

import datetime
import gc
import os
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from evenkeel.correction.errors import ConfigError
from evenkeel.engines import matrix_products
from evenkeel.engines.machine import allocator_fraction
from evenkeel.engines.rendezvous import gloo_interface_towards, rendezvous_store
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.model.megatron import model_parallel_cuda_manual_seed, parallel_state

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process stands among the ranks, and on which device it computes."""

    rank: int
    world_size: int
    data_rank: int
    """Index of this rank's share of a batch."""
    data_parallel: int
    tensor_rank: int
    tensor_parallel: int
    device: torch.device
    pipeline_rank: int = 0
    """Stage of the model that this rank holds."""
    pipeline_parallel: int = 1
    expert_rank: int = 0
    """Index of this rank's share of the experts."""
    expert_parallel: int = 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the model's last stage, which has its output."""
        return self.pipeline_rank == self.pipeline_parallel - 1

    @property
    def is_in_first_pipeline(self) -> bool:
        """Whether the same sequences pass through this rank's stage and rank 0's."""
        return self.rank == 0 or (self.pipeline_parallel > 1 and 0 in dist.get_process_group_ranks(self.pipeline_group))

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the parallel groups, by name."""
        return {
            "data_parallel": self.data_parallel,
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "expert_parallel": self.expert_parallel,
        }

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model and different sequences."""
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Ranks that hold the parts of one matrix and the same sequences."""
        group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        return group

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Ranks that hold the stages through which the same sequences pass."""
        group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        return group

    def is_first_copy(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank is the first of those that hold the same copy of a parameter. Fewer ranks hold an expert; Megatron marks its
        parameters."""
        return self.data_rank == 0 if getattr(parameter, "allreduce", True) else parallel_state.get_expert_data_parallel_rank() == 0

    def from_stage(self, stage: int, value: T) -> T:
        """The `value` of one pipeline stage, sent to all stages."""
        if self.pipeline_parallel == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, group=self.pipeline_group, group_src=stage, device=self.device)
        return holder[0]

    def common_to_all(self, names: set[str]) -> set[str]:
        """The names that are in every rank's set; all ranks call."""
        if self.world_size == 1:
            return names
        every: list[set[str]] = [set()] * self.world_size
        dist.all_gather_object(every, names)
        return set.intersection(*every)

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """Ranks that hold different experts and different sequences; each sends its tokens to where their experts are."""
        group: dist.ProcessGroup = parallel_state.get_expert_model_parallel_group()
        return group

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """The tensor, summed in place over the ranks that share a batch."""
        if self.data_parallel > 1:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def sum_over_all(self, tensor: Tensor) -> Tensor:
        """The tensor, summed in place over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()


def choose_device(config: LearnerConfig, local_rank: int = 0) -> torch.device:
    """The device of a rank.

    Raises: ConfigError for cuda without a GPU, and for cpu where torch sees one (megatron-core then allocates on the GPU by itself).
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "learner.device = cuda: torch sees no GPU here. Set learner.device: auto or cpu, or install a CUDA build of torch."
        )
    if config.device == "cpu" and has_gpu:
        raise ConfigError(
            "learner.device = cpu: torch sees a GPU, and megatron-core would allocate on it. Hide it: CUDA_VISIBLE_DEVICES=''."
        )
    if config.resolved_device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def join(config: LearnerConfig, rank: int, world_size: int, master_addr: str, master_port: int) -> Placement:
    """Enter the process group (gloo on CPU, NCCL on GPU) and build Megatron's groups.

    A process has one group for life: a second call with the same sizes reuses it.
    Args:
        master_addr, master_port: where rank 0 listens; unused when world_size is 1.
    Raises: ConfigError if the sizes don't fit together or differ from those of the group that exists.
    """
    if world_size != config.world_size:
        raise ConfigError(
            f"learner: data_parallel {config.data_parallel} x tensor_parallel {config.tensor_parallel} x pipeline_parallel "
            f"{config.pipeline_parallel} are {config.world_size} ranks, but {world_size} were started"
        )
    device = choose_device(config, int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        _initialize(config, device, rank, world_size, master_addr, master_port)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ConfigError(
            f"learner: this process is rank {dist.get_rank()} of {dist.get_world_size()} already and can't become {rank} of {world_size}"
        )
    built = {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, size in built.items():
        if getattr(config, name) != size:
            raise ConfigError(f"learner.{name} = {getattr(config, name)}: this process was set up for {size}; use a fresh process")
    torch.set_num_threads(config.threads)
    if device.type == "cpu":
        matrix_products.use_fastest()
    model_parallel_cuda_manual_seed(config.seed)
    return Placement(
        rank=rank,
        world_size=world_size,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        device=device,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
    )


def leave() -> None:
    """Destroy the groups, so that the process can end or join new ones."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # models refer to groups in circles, and each group that is left has threads of gloo that poll until the process ends


def _initialize(config: LearnerConfig, device: torch.device, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(allocator_fraction(total, config.gpus_per_rank), device)
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with gloo_interface_towards(master_addr if world_size > 1 else None, psutil.net_if_addrs()):
        if world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)  # no port is opened
        else:
            store = rendezvous_store(master_addr, master_port, rank=rank, world_size=world_size, timeout=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,  # an expert is small: it is whole on one rank
        )
