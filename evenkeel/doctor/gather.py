"""Gathers the facts of this machine, and of each node of a joined cluster by a small task there. No GPU is used for this, and Ray isn't
imported for this machine: that takes half a second."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from evenkeel.actors.cluster.hub import config_folder, obstacle_here
from evenkeel.actors.config import RunConfig
from evenkeel.actors.processes.disk import DaemonThreads, by_disk_at_start
from evenkeel.actors.settings.devices import visible_gpus
from evenkeel.correction.errors import one_line
from evenkeel.doctor.facts import COMPILERS, GpuFact, NodeFacts, Nodes, PaperFacts
from evenkeel.doctor.memory_rules import could_be_given, gpus_have_room
from evenkeel.doctor.surroundings import loopback_obstacle, variables_here
from evenkeel.engines.machine import has_cuda
from evenkeel.plan.layouts import GPUS_PER_NODE, Gpus
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.config import EnvironmentConfig, FunctionReward
from evenkeel.rollout.engine_settings.engine_capabilities import has_plugin
from evenkeel.rollout.module_path import taken_names

_ROOT = Path("/sys/fs/cgroup")
# Files of control groups, version 1 and 2.
_LIMITS = ("memory/memory.limit_in_bytes", "memory.max")


def memory_bytes() -> int:
    """Bytes of the machine's memory, or of the container's limit, as Ray 2.60 counts it (ray._common.utils.get_system_memory)."""
    there = psutil.virtual_memory().total
    limit = next((path.read_text().strip() for name in _LIMITS if (path := _ROOT / name).exists()), "max")
    return min(int(limit), there) if limit.isdigit() else there


def shared_memory_bytes() -> int:
    """Bytes of /dev/shm that are free."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


_SMI = "nvidia-smi"
_LIST = ("--query-gpu=index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current", "--format=csv,noheader,nounits")
_SMI_S = 10.0


def gpus_of_driver() -> list[GpuFact]:
    """GPUs that nvidia-smi lists; none where there is no driver, or it doesn't answer."""
    if shutil.which(_SMI) is None:
        return []
    try:
        said = subprocess.run((_SMI, *_LIST), capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [_gpu(line) for line in said.splitlines() if line.count(",") >= 6]


def seen_by_torch(gpus: Sequence[GpuFact], visible: str | None, count: int) -> tuple[GpuFact, ...]:
    """The driver's GPUs that torch sees.

    Args:
        gpus: of the driver, numbered by their places on the bus, as CUDA numbers GPUs that are alike.
        visible: CUDA_VISIBLE_DEVICES, numbers or the beginnings of UUIDs; None: it isn't set.
        count: that torch sees. Where the variable names others than so many (parts of a GPU), the first ones are taken,
            and what is free of them isn't known.
    """
    named = [_gpu_named(gpus, word.strip()) for word in visible.split(",")] if visible else list(gpus)
    known = [gpu for gpu in named if gpu is not None]
    if len(known) == count:
        return tuple(known)
    return tuple(replace(gpu, free=None) for gpu in gpus[:count])


def _gpu_named(gpus: Sequence[GpuFact], word: str) -> GpuFact | None:
    found = [gpu for gpu in gpus if (gpu.number == int(word) if word.isdigit() else word and gpu.uuid.startswith(word))]
    return found[0] if len(found) == 1 else None


def _gpu(line: str) -> GpuFact:
    number, uuid, rest = (part.strip() for part in line.split(",", 2))
    name, total, free, capability, divided = (part.strip() for part in rest.rsplit(",", 4))
    free_bytes = None if divided == "Enabled" else _mib(free)
    return GpuFact(name, _mib(total) or 0, free_bytes, "sm_" + capability.replace(".", ""), int(number), uuid)


def _mib(text: str) -> int | None:
    """Bytes; None where the driver says [N/A]."""
    return int(text) << 20 if text.isdigit() else None


_CONNECT_S = 3.0
_GREETING = b"."


class PortListener:
    """Listens on a free port, and accepts connections. Used as a Ray actor."""

    def open(self) -> tuple[str, int]:
        from evenkeel.actors.metrics.exporter import node_address

        self._socket = socket.create_server((node_address(), 0))
        threading.Thread(target=self._answer, daemon=True).start()
        host, port = self._socket.getsockname()[:2]
        return host, port

    def _answer(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            with caller, contextlib.suppress(OSError):
                caller.sendall(_GREETING)


class OpenPort:
    """A free port of a node, with a PortListener."""

    def __init__(self, listener: Any, address: tuple[str, int]) -> None:
        self._listener, self.address = listener, address

    @classmethod
    def on(cls, node_id: str, *, within_s: float) -> OpenPort | None:
        """None if the listener can't be started on the node, or not in time; the node's facts say why."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        listener: Any = ray.remote(PortListener).options(num_cpus=0, scheduling_strategy=there).remote()
        try:
            address: tuple[str, int] = ray.get(listener.open.remote(), timeout=within_s)
            return cls(listener, address)
        except ray.exceptions.RayError:
            ray.kill(listener)
            return None

    def close(self) -> None:
        import ray

        ray.kill(self._listener)


def why_unreachable(address: tuple[str, int]) -> str:
    """Why a PortListener could not be reached; empty: it could."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S) as there:
            there.settimeout(_CONNECT_S)
            found = there.recv(1)
    except OSError as error:
        return f"{address[0]}:{address[1]}: {error}"
    return "" if found == _GREETING else f"{address[0]}:{address[1]}: something else answers there"


_PACKAGES = (
    *("evenkeel", "torch", "sglang", "sglang-kernel", "flashinfer-python"),
    *("megatron-core", "transformer-engine", "ray", "transformers"),
)
_OWN = ("actors", "correction", "engines", "learner", "rollout")
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Longest time for all nodes together, from the first request on: a person waits for it.
_ANSWER_S = 15.0
# How long, and how often, other processes are waited for.
_LEAVE_S, _AGAIN_S = 30.0, 2.0
_REMOVAL_S = 2.0
_NO_LISTENER = "no listener could be started there in time"
_SIGN = ".seen_by_all_nodes"


def paper_facts(
    config: RunConfig, model: Path | None = None, *, meant: Sequence[Gpus] | None = None, is_resumed: bool = False
) -> PaperFacts:
    """Facts about the model folder and this machine.

    Args:
        model: folder, if it isn't config.model.
        meant: GPUs of machines that aren't here and of which nothing else is known; None: those here, if the run is here.
        is_resumed: the model folder is that of a checkpoint, in the run's folder.
    Raises: DataError if the folder has no config.json of a model that the learner trains.
    """
    shape = ModelShape.read(config_folder(model or config.model))
    if meant is not None:
        sizes, architectures = tuple(kind.memory for kind in meant), tuple(kind.architecture for kind in meant)
        return PaperFacts(shape, sizes, architectures, max((kind.per_node for kind in meant), default=GPUS_PER_NODE))
    gpus: tuple[int, ...] = ()
    if config.ray.address is None and "cuda" in (config.learner.resolved_device, config.rollout.engine.resolved_device):
        gpus = could_be_given(_sizes(_named(gpus_of_driver(), visible_gpus())), visible_gpus())
    host = memory_bytes() if config.ray.address is None else None
    there = model if is_resumed and model is not None else home_of_run(config)
    closed = "" if is_resumed or os.access(there, os.W_OK) else str(there)
    largest, free = len(gpus) or GPUS_PER_NODE, shutil.disk_usage(there).free
    known = PaperFacts(shape, gpus, gpus_per_node=largest, disk_free=free, closed_folder=closed, host_bytes=host)
    own_code = [entry.environment or entry.reward for entry in config.rollout.entries]
    starts = dict.fromkeys(one.folder or Path.cwd() for one in own_code if isinstance(one, EnvironmentConfig | FunctionReward))
    first = {Path(folder).absolute() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    taken = [str(start / name) for start in starts if start not in first for name in taken_names(start)]
    before = [folder / name for folder in sorted(first) for name in taken_names(folder)]
    stand_ins = [str(path) for path in before if path.stem in sys.stdlib_module_names]
    return replace(known, taken_names=tuple(taken), stand_ins=tuple(stand_ins))


def home_of_run(config: RunConfig) -> Path:
    """The run folder, or its nearest existing parent, in which it would be made."""
    folder = (config.run_dir or Path("runs")).absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _named(gpus: Sequence[GpuFact], count: int) -> Sequence[GpuFact]:
    """GPUs that CUDA_VISIBLE_DEVICES names; all, if it isn't set. Args: count: number of GPUs that torch sees."""
    visible = os.environ.get(VISIBLE, "")
    return seen_by_torch(gpus, visible, count) if visible and count else gpus


def _sizes(gpus: Sequence[GpuFact]) -> tuple[int, ...]:
    """Memory in bytes of each; GPUs of unknown memory are left out."""
    return tuple(gpu.bytes for gpu in gpus if gpu.bytes)


def this_node(model: str, *, sign: str = "", token: str = "", answer: str = "") -> NodeFacts:
    """Facts of the machine that calls this, without those that Ray knows.

    Args:
        model: folder that learner ranks read, or a name of the hub.
        sign, token: a file, and what the driver has written into it; empty: nothing is looked for.
        answer: file to which the token is copied, for the driver to find.
    """
    driver, seen = gpus_of_driver(), visible_gpus()
    named = _named(driver, seen)
    return NodeFacts(
        name="this machine",
        gpus=seen_by_torch(driver, os.environ.get(VISIBLE), seen),
        driver_gpus=len(driver),
        gpu_bytes=_sizes(named),
        driver_architectures=tuple(gpu.architecture for gpu in named),
        visible_devices=os.environ.get(VISIBLE),
        architectures=_compiled_for() if seen else (),
        has_cuda=has_cuda(),
        versions={name: found for name in _PACKAGES if (found := _version(name))} | {"evenkeel's own files": _own_files()},
        has_plugin=has_plugin(),
        shared_memory=shared_memory_bytes(),
        memory=memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        model_obstacle=obstacle_here(Path(model)),
        reads_run_folder=not sign or (_reads(Path(sign), token) and _writes(Path(answer), token)),
        variables=variables_here(),
        loopback_obstacle=loopback_obstacle(),
        compilers=tuple(name for name in COMPILERS if shutil.which(name)),
    )


def _compiled_for() -> tuple[str, ...]:
    """Architectures of GPUs that torch has kernels for."""
    import torch

    return tuple(torch.cuda.get_arch_list())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _own_files() -> str:
    """A checksum of evenkeel's sources: checkouts of different commits have the same version."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    folders = [root, *(root / package for package in _OWN)]  # links in a checkout, which rglob doesn't follow by itself
    for path in sorted({path for folder in folders for kind in ("*.py", "*.c") for path in folder.rglob(kind)}):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _reads(sign: Path, token: str) -> bool:
    try:
        return sign.read_text() == token
    except OSError:
        return False


def _writes(answer: Path, token: str) -> bool:
    try:
        answer.write_text(token)
    except OSError:
        return False
    return True


def own_machine(config: RunConfig) -> list[NodeFacts]:
    """Facts of the only node of a private cluster, which need not have started."""
    here = this_node(str(config.model))
    seen = float(visible_gpus())
    cpus = config.logical_cpus
    units = float(config.rollout.most_workers)
    return [replace(here, is_drivers=True, offered_gpus=seen, free_gpus=seen, cpus=float(cpus), free_cpus=float(cpus), rollout_units=units)]


def when_others_have_left(look: Callable[[], Nodes], config: RunConfig, shape: ModelShape, say: Callable[[str], object]) -> Nodes:
    """Facts of a run's own machine. While other processes hold memory of GPUs that the run can't do without, it is looked at again, for
    half a minute at most: they may be engines of an attempt that was killed, which take some seconds to end.

    Args: look: finds the facts. say: takes what is waited for, once.
    """
    nodes, until, has_said = look(), time.monotonic() + _LEAVE_S, False
    while short := next((one.sentence for one in gpus_have_room(nodes, config, shape) if one.severity == "fail"), ""):
        if time.monotonic() >= until:
            break
        if not has_said:
            say(f"{short}. Waiting up to {_LEAVE_S:.0f} s for its end")
            has_said = True
        time.sleep(_AGAIN_S)
        nodes = look()
    return nodes


def nodes_of_cluster(
    config: RunConfig, folder: Path | None, *, within_s: float = _ANSWER_S, by_disk: Callable[..., Any] = by_disk_at_start
) -> list[NodeFacts]:
    """Facts of all nodes of the cluster that this process is connected to, found by a task on each. A node that doesn't answer has the
    facts that Ray knows, and the reason for its silence.

    Args:
        folder: the run's, or where it will be made (home_of_run). A file is put there for a moment, to see whether nodes share the folder;
            None: that isn't checked.
        within_s: seconds for all nodes together.
        by_disk: by_disk_at_start, or that with more of its arguments; only the disk's work is done in its threads, none of Ray's.
    Raises: DiskLate.
    """
    import ray

    until = time.monotonic() + within_s
    port: OpenPort | None = None
    token = uuid.uuid4().hex if folder else ""
    sign = folder / f"{_SIGN}.{token}" if folder else None  # another doctor may use the folder now
    if sign is not None:
        by_disk(partial(sign.write_text, token), "a file for the nodes to read")
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        asked = {
            node["NodeID"]: _task(this_node, node).remote(
                str(config.model), sign=str(sign or ""), token=token, answer=_answer_file(sign, node)
            )
            for node in alive
        }
        free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
        drivers = ray.get_runtime_context().get_node_id()
        behind, port = _port_of(alive, config, until) if len(alive) > 1 else ("", None)  # while they answer: it may take all the time
        others = [node for node in alive if node["NodeID"] != behind] if len(alive) > 1 else []
        ways = {node["NodeID"]: _task(why_unreachable, node).remote(port.address) if port is not None else None for node in others}
        found = []
        for node in alive:
            facts = _answer(asked[node["NodeID"]], until, within_s)
            if node["NodeID"] in ways:
                facts = _with_way(facts, ways[node["NodeID"]], until, within_s)
            if not facts.silence:
                look = partial(_sees_both_ways, facts, _answer_file(sign, node), token)
                facts = replace(facts, reads_run_folder=by_disk(look, "a file that a node has written"))
            found.append(_with_resources(facts, node, free.get(node["NodeID"], {}), config.ray.rollout_resource, drivers))
        return found
    finally:
        if port is not None:
            port.close()
        if sign is not None:
            with contextlib.suppress(TimeoutError, RuntimeError):  # a disk that hangs, no thread left: the files stay
                DaemonThreads().submit(_remove, sign).result(_REMOVAL_S)


def _remove(sign: Path) -> None:
    for left in sign.parent.glob(f"{sign.name}*"):
        left.unlink(missing_ok=True)


def _task(function: Callable[..., object], node: Mapping[str, Any]) -> Any:
    """The function as a Ray task on this node, without resources."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)


def _port_of(nodes: Sequence[Mapping[str, Any]], config: RunConfig, until: float) -> tuple[str, OpenPort | None]:
    """The node with the most of what a rank asks for, where rank 0 may be, and a listening port there; None: none could be opened."""
    kind = "GPU" if config.learner.resolved_device == "cuda" else "CPU"
    likely = max(nodes, key=lambda node: node["Resources"].get(kind, 0.0))["NodeID"]
    return likely, OpenPort.on(likely, within_s=_left_s(until))


def _answer_file(sign: Path | None, node: Mapping[str, Any]) -> str:
    return f"{sign}.{node['NodeID']}" if sign else ""


def _sees_both_ways(facts: NodeFacts, answer: str, token: str) -> bool:
    """Whether the node has read the driver's file, and the driver can read the node's."""
    return facts.reads_run_folder and (not answer or _reads(Path(answer), token))


def _left_s(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _answer(call: Any, until: float, within_s: float) -> NodeFacts:
    """A node's answer; if it gives none, facts that hold only the reason."""
    import ray

    try:
        found: NodeFacts = ray.get(call, timeout=_left_s(until))
    except ray.exceptions.GetTimeoutError:
        return NodeFacts(name="", silence=_late(within_s))
    except ray.exceptions.RayError as error:
        return NodeFacts(name="", silence=one_line(error, last=True, named=True), has_failed=True)
    return found


def _with_way(facts: NodeFacts, call: Any, until: float, within_s: float) -> NodeFacts:
    """The facts, with whether the node can connect to the listening port, or why that isn't known. Args: call: None: nothing listens."""
    import ray

    if facts.silence:
        return facts
    if call is None:
        return replace(facts, way_not_known=_NO_LISTENER)
    try:
        return replace(facts, why_unreachable=str(ray.get(call, timeout=_left_s(until))))
    except ray.exceptions.GetTimeoutError:
        return replace(facts, way_not_known=_late(within_s))
    except ray.exceptions.RayError as error:
        return replace(facts, way_not_known=one_line(error, last=True, named=True))


def _late(within_s: float) -> str:
    return f"no answer in {within_s:g} s"


def _with_resources(facts: NodeFacts, node: Mapping[str, Any], free: Mapping[str, float], unit: str, drivers: str) -> NodeFacts:
    """The facts, with what Ray knows of the node. Args: drivers: the id of the node where this process is."""
    offered = node["Resources"]
    return replace(
        facts,
        name=node["NodeManagerAddress"],
        is_drivers=node["NodeID"] == drivers,
        offered_gpus=offered.get("GPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        held_units=offered.get(unit, 0.0) - free.get(unit, 0.0),
        cpus=offered.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        rollout_units=offered.get(unit, 0.0),
    )
