"""Facts that the doctor's rules are applied to. gather.py finds them on machines; tests make them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evenkeel.correction.errors import EvenkeelError, with_remedy
from evenkeel.plan.layouts import GPUS_PER_NODE
from evenkeel.plan.shape import ModelShape

Severity = Literal["fail", "warn", "note"]
"""Worst first."""
COMPILERS = ("gcc", "g++", "nvcc", "ninja")
"""What SGLang compiles kernels with when an engine on a GPU first wants them; nvcc calls g++."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """A finding of a rule."""

    severity: Severity
    """fail: the run can't work like this. warn: it would be slow, or might fail later. note: a number worth knowing."""
    sentence: str
    setting: str = ""
    """What to change, as KEY: VALUE or in words; empty: nothing."""

    @classmethod
    def refusal(cls, error: EvenkeelError) -> Complaint:
        """A failure, in the words of the error with which `train` would stop."""
        return cls("fail", error.reason, error.remedy)

    def __str__(self) -> str:
        """The text of that error as it is printed, to the letter."""
        return with_remedy(self.sentence, self.setting)


@dataclass(frozen=True, slots=True)
class PaperFacts:
    """Known without a cluster."""

    shape: ModelShape
    gpus: tuple[int, ...] = ()
    """Memory in bytes of each GPU that the run may get; empty: not known, or none is used. GPUs of a cluster's nodes are in NodeFacts."""
    architectures: tuple[str, ...] = ()
    """Architectures of these GPUs, such as sm_90; empty: not known, or in NodeFacts as well."""
    gpus_per_node: int = GPUS_PER_NODE
    """Number of GPUs of the largest node that the run may get."""
    disk_free: int | None = None
    """Free bytes on the disk of the run folder."""
    closed_folder: str = ""
    """Where the run folder would be made, if this process may not write there."""
    host_bytes: int | None = None
    """Memory of this machine or container, if the run is on it alone; None: it isn't, or not known."""
    taken_names: tuple[str, ...] = ()
    """Files where the run starts with the name of a module of evenkeel's or of the standard library, if a reward may import them."""
    stand_ins: tuple[str, ...] = ()
    """Files that PYTHONPATH puts before modules of these names of the standard library."""
    gives_rate: bool = True
    """The recipe has a learning rate."""
    refused: tuple[EvenkeelError, ...] = ()
    """Why `train` would not take the model's config, or settings that go with it (start_checks.py)."""
    lacking: tuple[EvenkeelError, ...] = ()
    """Why it would not take the weights, or other inputs (preparation.py)."""


@dataclass(frozen=True, slots=True)
class GpuFact:
    """One GPU, as torch sees it."""

    name: str
    bytes: int
    """0: not known."""
    free: int | None
    """Bytes; None: not known. Of a card that is divided (MIG) the driver doesn't tell what is free of a part."""
    architecture: str
    """Architecture, such as sm_90."""
    number: int = 0
    """The driver's number, by its place on the bus."""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as found by a small task on it."""

    name: str
    """Its address."""
    silence: str = ""
    """Why nothing is known of it but what Ray knows: resources and object store; empty: it has answered."""
    has_failed: bool = False
    """Whether the small task of a silent one has ended with an error; otherwise it was late."""
    is_drivers: bool = False
    """The process that asks is there; a run's driver and correction service would be, too."""
    offered_gpus: float = 0.0
    """GPUs that Ray offers there."""
    free_gpus: float = 0.0
    """GPUs of these that no actor holds."""
    gpus: tuple[GpuFact, ...] = ()
    """GPUs that torch sees, in its order."""
    driver_gpus: int = 0
    """Number of GPUs that the driver lists, whether torch sees them or not."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each of the driver's GPUs, or of those that CUDA_VISIBLE_DEVICES names; those of unknown memory are left out."""
    driver_architectures: tuple[str, ...] = ()
    """Architectures of the same GPUs, such as sm_90, also of those that are hidden from the torch of the small task."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES there; None: it isn't set."""
    architectures: tuple[str, ...] = ()
    """GPU architectures that torch is compiled for; empty where it sees no GPU."""
    has_cuda: bool = True
    """Torch is a build with CUDA."""
    rollout_units: float = 0.0
    held_units: float = 0.0
    """Units of these that actors hold."""
    cpus: float = 0.0
    free_cpus: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that have to be the same on all nodes; an empty one isn't installed."""
    has_plugin: bool = True
    """SGLang finds evenkeel's entry points there."""
    shared_memory: int = 1 << 40
    """Bytes of /dev/shm that are free."""
    open_files: int = 1 << 20
    """Files that a process may have open (ulimit -n)."""
    why_unreachable: str = ""
    """Why a free port of another node, where the learner's rank 0 may be, could not be reached; empty: it could, or way_not_known."""
    way_not_known: str = ""
    """Why it isn't known whether it could; empty: it is, or there is no other node."""
    memory: int = 1 << 50
    """Bytes of the host's memory, or of the container's limit."""
    model_obstacle: str = ""
    """Why a learner rank there could not read the model (hub.py); empty: it could."""
    reads_run_folder: bool = True
    """A file that the driver wrote into the run folder can be read on the node, and one written there by the driver."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment that may keep a run from working (surroundings.py)."""
    loopback_obstacle: str = ""
    """Why processes there don't reach each other at 127.0.0.1; empty: they do."""
    compilers: tuple[str, ...] = COMPILERS
    """Compilers of COMPILERS that are on the node's PATH."""


Nodes = Sequence[NodeFacts]
