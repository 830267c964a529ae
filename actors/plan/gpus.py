"""GPUs by name, for plans on machines that have none."""

from __future__ import annotations

import re
from dataclasses import dataclass

from correction.errors import ConfigError

MEMORY_MIB = {
    "A100": 81_920,
    "A100-40": 40_960,
    "A100-40G": 40_960,
    "A100-80G": 81_920,
    "A10": 23_028,
    "A10G": 23_028,
    "A6000": 49_140,
    "B200": 183_359,
    "B300": 275_040,
    "H100": 81_559,
    "H20": 97_871,
    "H200": 143_771,
    "L4": 23_034,
    "L40": 46_068,
    "L40S": 46_068,
    "RTX3090": 24_576,
    "RTX4090": 24_564,
    "RTX5090": 32_607,
    "T4": 15_360,
}
"""As nvidia-smi has it."""
ARCHITECTURES = {
    "A100": "sm_80", "A100-40": "sm_80", "A100-40G": "sm_80", "A100-80G": "sm_80", "A10": "sm_86", "A10G": "sm_86", "A6000": "sm_86",
    "B200": "sm_100", "B300": "sm_103", "H100": "sm_90", "H20": "sm_90", "H200": "sm_90", "L4": "sm_89", "L40": "sm_89", "L40S": "sm_89",
    "RTX3090": "sm_86", "RTX4090": "sm_89", "RTX5090": "sm_120", "T4": "sm_75",
}  # fmt: skip
"""NVIDIA's table of compute capabilities (developer.nvidia.com/cuda-gpus)."""


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
        return ARCHITECTURES.get(self.name, "")

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """NAMExGPUS or NAMExGPUSxNODES; instead of a name GiB of memory, as in 24GBx1. Raises: ConfigError."""
        match = re.fullmatch(rf"({'|'.join(MEMORY_MIB)}|\d+GI?B)(?:x(\d+))?(?:x(\d+))?", text, re.IGNORECASE)
        name = match[1].upper() if match else ""
        size = re.fullmatch(r"(\d+)GI?B", name)
        memory = int(size[1]) << 30 if size else MEMORY_MIB.get(name, 0) << 20
        per_node, nodes = (int(match[2] or 1), int(match[3] or 1)) if match else (0, 0)
        if match is None or not memory or not per_node or not nodes:
            raise ConfigError(
                f"--gpus {text}: write NAMExGPUS or NAMExGPUSxNODES, such as H100x8 or H100x8x4. NAME is one of "
                f"{', '.join(MEMORY_MIB)}, or a GPU's memory, as in 24GBx1"
            )
        return cls(name, memory, per_node, nodes)

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.name} ({self.memory / 2**30:.0f} GiB)"
