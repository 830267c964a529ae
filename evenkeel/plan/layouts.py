"""GPUs by name, for plans on machines that have none; which layouts of the learner divide a model, and what a rank of each holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from evenkeel.correction.errors import ConfigError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.model_fit import layout_obstacles
from evenkeel.plan.memory import RankMemory, rank_memory
from evenkeel.plan.shape import ModelShape

GPUS = {
    "A100": (81_920, "sm_80"),
    "A100-40": (40_960, "sm_80"),
    "A100-40G": (40_960, "sm_80"),
    "A100-80G": (81_920, "sm_80"),
    "A10": (23_028, "sm_86"),
    "A10G": (23_028, "sm_86"),
    "A6000": (49_140, "sm_86"),
    "B200": (183_359, "sm_100"),
    "B300": (275_040, "sm_103"),
    "H100": (81_559, "sm_90"),
    "H20": (97_871, "sm_90"),
    "H200": (143_771, "sm_90"),
    "L4": (23_034, "sm_89"),
    "L40": (46_068, "sm_89"),
    "L40S": (46_068, "sm_89"),
    "RTX3090": (24_576, "sm_86"),
    "RTX4090": (24_564, "sm_89"),
    "RTX5090": (32_607, "sm_120"),
    "T4": (15_360, "sm_75"),
}
"""MiB of memory, as nvidia-smi has it, and architecture, of NVIDIA's table of compute capabilities (developer.nvidia.com/cuda-gpus)."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one kind, in nodes with equally many each."""

    name: str
    memory: int
    """Bytes of one."""
    per_node: int
    nodes: int = 1

    @property
    def count(self) -> int:
        return self.per_node * self.nodes

    @property
    def architecture(self) -> str:
        """The GPUs' architecture; empty if they are given by their memory."""
        return GPUS[self.name][1] if self.name in GPUS else ""

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """NAMExGPUS or NAMExGPUSxNODES; instead of a name GiB of memory, as in 24GBx1. Raises: ConfigError."""
        match = re.fullmatch(rf"({'|'.join(GPUS)}|\d+GI?B)(?:x(\d+))?(?:x(\d+))?", text, re.IGNORECASE)
        name = match[1].upper() if match else ""
        size = re.fullmatch(r"(\d+)GI?B", name)
        memory = int(size[1]) << 30 if size else GPUS.get(name, (0, ""))[0] << 20
        per_node, nodes = (int(match[2] or 1), int(match[3] or 1)) if match else (0, 0)
        if match is None or not memory or not per_node or not nodes:
            raise ConfigError(
                f"--gpus {text}: write NAMExGPUS or NAMExGPUSxNODES, such as H100x8 or H100x8x4. NAME is one of "
                f"{', '.join(GPUS)}, or a GPU's memory, as in 24GBx1"
            )
        return cls(name, memory, per_node, nodes)

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.name} ({self.memory / 2**30:.0f} GiB)"


# Settings in which layouts differ.
_VARIED = (
    *("tensor_parallel", "sequence_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel", "data_parallel"),
    *("distributed_optimizer", "recompute_activations"),
)
GPUS_PER_NODE = 8
"""GPUs of a node where nothing is known of the nodes."""
# A tensor-parallel group stays inside a node.
_LARGEST_TENSOR_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to spread the model over the ranks."""

    config: LearnerConfig
    memory: RankMemory
    room: int
    """Bytes that a rank may take."""

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.room)

    def __str__(self) -> str:
        config = self.config
        parts = {
            "tensor_parallel": config.tensor_parallel,
            "pipeline_parallel": config.pipeline_parallel,
            "expert_parallel": config.expert_parallel,
            "data_parallel": config.data_parallel,
        }
        named = " ".join(f"{name}={size}" for name, size in parts.items() if size > 1 or name == "data_parallel")
        return named + (" recompute_activations=true" if config.recompute_activations else "")

    def changes(self, config: LearnerConfig) -> str:
        """The overrides (KEY=VALUE) that turn a recipe's learner into this layout."""
        values = {name: getattr(self.config, name) for name in _VARIED if getattr(self.config, name) != getattr(config, name)}
        return " ".join(f"{name}={str(value).lower()}" for name, value in values.items())


def layouts(
    shape: ModelShape,
    config: LearnerConfig,
    ranks: int,
    gpu_bytes: int,
    *,
    longest: int,
    loads_other: bool,
    has_entropy_loss: bool = False,
    gpus_per_node: int = GPUS_PER_NODE,
) -> list[Layout]:
    """All layouts with this number of ranks: first those that fit into memory, and of these first those with the least communication.

    Args:
        gpu_bytes: that a rank may take.
        longest, loads_other, has_entropy_loss: as of rank_memory.
    """
    found = []
    for one in _possible(shape, config, ranks, gpus_per_node):
        memory = rank_memory(shape, one, longest=longest, loads_other=loads_other, has_entropy_loss=has_entropy_loss)
        found.append(Layout(one, memory, gpu_bytes))
    return sorted(found, key=lambda layout: (not layout.fits, *_cost(layout.config)))


def _possible(shape: ModelShape, config: LearnerConfig, ranks: int, gpus_per_node: int) -> Iterator[LearnerConfig]:
    sizes = [2**power for power in range(ranks.bit_length())]
    most = min(_LARGEST_TENSOR_PARALLEL, gpus_per_node) if config.gpus_per_rank == 1 else 1  # a group's ranks have whole GPUs
    for tensor in (size for size in sizes if size <= most):
        for pipeline in (size for size in sizes if tensor * size <= ranks and ranks % (tensor * size) == 0):
            data = ranks // (tensor * pipeline)
            for expert in (size for size in sizes if size == 1 or (shape.experts and data * tensor % size == 0)):
                for recompute in (False, True):
                    values = {
                        "tensor_parallel": tensor,
                        "sequence_parallel": tensor > 1,
                        "pipeline_parallel": pipeline,
                        "virtual_pipeline": 1,
                        "expert_parallel": expert,
                        "data_parallel": data,
                        "recompute_activations": recompute,
                    }
                    try:
                        one = LearnerConfig.model_validate(dict(config) | values)
                    except ValidationError:
                        continue
                    if not any(layout_obstacles(one, shape.sizes)):
                        yield one.model_copy(update={"distributed_optimizer": one.has_copies(has_experts=shape.experts > 0)})


def _cost(config: LearnerConfig) -> tuple[int, ...]:
    """What a layout costs apart from memory, the dearest first: a second forward pass, stages that wait, ranks that talk in every layer."""
    return (config.recompute_activations, config.pipeline_parallel, config.tensor_parallel, config.expert_parallel)
