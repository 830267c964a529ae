"""What the doctor's rules look at; nothing here asks the machine. gather.py does, and tests make facts up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from actors.plan.shape import ModelShape

Severity = Literal["fail", "warn", "note"]


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that a rule has found."""

    severity: Severity
    """fail: the run can't work so. warn: it would be slow, or fail later. note: a number worth knowing."""
    sentence: str
    setting: str = ""
    """What to change, as KEY: VALUE or in words; empty: nothing."""

    def __str__(self) -> str:
        return f"{self.sentence}. {self.setting}" if self.setting else self.sentence


@dataclass(frozen=True, slots=True)
class PaperFacts:
    """What is known without a cluster."""

    shape: ModelShape
    gpus: tuple[int, ...] = ()
    """Bytes of each GPU that could be given; empty: not known, or none is used. A cluster's nodes tell of their own (node_rules.py)."""
    disk_free: int | None = None
    """Bytes where the run folder will be."""
    host_bytes: int | None = None
    """Memory of the machine that keeps the object store; None: not known."""
    refused: tuple[str, ...] = ()
    """Why `train` would not take the model's folder or the task's file (start_checks.py)."""


@dataclass(frozen=True, slots=True)
class GpuFact:
    """One GPU, as torch sees it."""

    name: str
    bytes: int
    free: int
    architecture: str
    """Such as sm_90."""
    number: int = 0
    """The driver's, by its place on the bus."""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Between two GPUs of a node, by their numbers."""

    one: int
    other: int
    kind: str
    """As nvidia-smi has it: NV18 (18 NVLinks), PIX, PXB, PHB, NODE, SYS."""
    has_peer_access: bool = True
    """One reads the other's memory; else what they exchange goes through the host's."""

    @property
    def is_nvlink(self) -> bool:
        return self.kind.startswith("NV")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as a small task on it tells."""

    name: str
    """Its address."""
    offered_gpus: float = 0.0
    """That Ray offers there."""
    free_gpus: float = 0.0
    """Of these, that nobody holds."""
    gpus: tuple[GpuFact, ...] = ()
    """That torch sees, in its order."""
    driver_gpus: int = 0
    """That the kernel's driver knows, whatever torch sees."""
    gpu_bytes: tuple[int, ...] = ()
    """Of each of those that tells its memory: all of them, or those that CUDA_VISIBLE_DEVICES names."""
    links: tuple[Link, ...] = ()
    """Between the driver's GPUs; empty: not told."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES there; None: it isn't set."""
    architectures: tuple[str, ...] = ()
    """That torch is compiled for, where it sees a GPU."""
    has_cuda: bool = True
    """Torch is a build with CUDA."""
    rollout_units: float = 0.0
    cpus: float = 0.0
    free_cpus: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that have to be alike everywhere; empty where one isn't installed."""
    shared_memory: int = 1 << 40
    """Bytes of /dev/shm that are free."""
    open_files: int = 1 << 20
    """Limit of a process."""
    locked_memory: int = 1 << 50
    """Bytes that a process may lock (ulimit -l)."""
    has_rdma: bool = False
    """A card for InfiniBand or RoCE is there."""
    no_way: str = ""
    """Why a free port of another node, where the learner's rank 0 may be, could not be reached; empty: it could, or nobody tried."""
    memory: int = 1 << 50
    """Bytes of the host's memory."""
    object_store: int = 1 << 40
    """Bytes of Ray's object store there."""
    model_obstacle: str = ""
    """Why a learner rank there could not read the model (hub.py); empty: it could."""
    reads_run_folder: bool = True
    """It finds what the driver has just written into the run folder, and the driver what it has."""
    clock_ahead_s: float = 0.0
    """Of the driver's, give or take the way of the answer."""
    compilers: tuple[str, ...] = ("gcc", "nvcc", "ninja")
    """Of those, what it finds."""
