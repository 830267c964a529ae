"""Facts: of this machine, and by a small task on each node of a cluster that is joined. Nothing here touches a GPU: nvidia-smi is asked."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from actors.config import RunConfig
from actors.devices import visible_gpus
from actors.doctor.facts import GpuFact, NodeFacts, PaperFacts
from actors.doctor.memory_rules import could_be_given
from actors.hub import config_folder, obstacle_here
from actors.plan.shape import ModelShape
from correction.errors import EngineError

_PACKAGES = (
    *("evenkeel", "torch", "sglang", "sglang-kernel", "flashinfer-python"),
    *("megatron-core", "transformer-engine", "ray", "transformers"),
)
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
_SMI_S = 10.0
_ANSWER_S = 60.0
_SIGN = ".seen_by_all_nodes"


def paper_facts(config: RunConfig, model: Path | None = None, *, gpu_bytes: int | None = None) -> PaperFacts:
    """Of the model folder and of this machine.

    Args:
        model: folder, if it isn't config.model.
        gpu_bytes: of each GPU that is meant, on machines of which nothing else is known; None: of those here, if the run is here.
    Raises: DataError if the folder has no config.json of a model that the learner trains.
    """
    shape = ModelShape.read(config_folder(model or config.model))
    if gpu_bytes is not None:
        return PaperFacts(shape, (gpu_bytes,))
    gpus: tuple[int, ...] = ()
    if config.ray.address is None and "cuda" in (config.learner.resolved_device, config.rollout.engine.resolved_device):
        gpus = could_be_given(_sizes(gpus_of_driver()), visible_gpus())
    host = psutil.virtual_memory().total if config.ray.address is None else None
    return PaperFacts(shape, gpus, shutil.disk_usage(_existing(config.run_dir or Path("runs"))).free, host)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def gpus_of_driver() -> list[GpuFact]:
    """Those that nvidia-smi tells of; none where there is no driver, or it doesn't answer."""
    if shutil.which(_SMI[0]) is None:
        return []
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [_gpu(line) for line in done.stdout.splitlines() if line.count(",") >= 3]


def _gpu(line: str) -> GpuFact:
    name, total, free, capability = (part.strip() for part in line.rsplit(",", 3))
    return GpuFact(name, _mib(total), _mib(free), "sm_" + capability.replace(".", ""))


def _sizes(gpus: Sequence[GpuFact]) -> tuple[int, ...]:
    """Bytes of each; without those that don't tell."""
    return tuple(gpu.bytes for gpu in gpus if gpu.bytes)


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0


def this_node(model: str, *, sign: str = "", token: str = "", answer: str = "", asked_at: float = 0.0) -> NodeFacts:
    """What the machine that calls this has; Ray's numbers aside.

    Args:
        model: folder that learner ranks read, or a name of the hub.
        sign, token: a file, and what the driver has written into it; empty: nothing is looked for.
        answer: file to which the token is copied, for the driver to find.
        asked_at: the driver's clock when it asked; 0: it asks itself.
    """
    import torch

    driver = gpus_of_driver()
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return NodeFacts(
        name="this machine",
        gpus=tuple(driver[:seen]),
        driver_gpus=len(driver),
        gpu_bytes=_sizes(driver),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        architectures=tuple(torch.cuda.get_arch_list()) if seen else (),
        has_cuda=torch.version.cuda is not None,
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        shared_memory=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        model_obstacle=obstacle_here(Path(model)),
        reads_run_folder=not sign or (_reads(Path(sign), token) and _writes(Path(answer), token)),
        clock_ahead_s=time.time() - asked_at if asked_at else 0.0,
        compilers=tuple(name for name in ("gcc", "nvcc", "ninja") if shutil.which(name)),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
    """The one node of a private cluster, before or after its start."""
    here = this_node(str(config.model))
    seen = float(visible_gpus())
    cpus = config.logical_cpus
    units = float(config.rollout.most_workers)
    return [
        replace(here, offered_gpus=seen, free_gpus=seen, cpus=float(cpus), free_cpus=float(cpus), rollout_units=units)
    ]


def nodes_of_cluster(config: RunConfig, folder: Path | None) -> list[NodeFacts]:
    """All nodes of the cluster that this process is connected to, each by a task on it.

    Args:
        folder: of the run, in which a file is left for a moment; None: there is none yet.
    Raises: EngineError naming the node that doesn't answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sign, token = (folder / _SIGN, uuid.uuid4().hex) if folder else (None, "")
    if sign is not None:
        sign.write_text(token)
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        look: Any = ray.remote(this_node)
        asked = {
            node["NodeID"]: look.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(str(config.model), sign=str(sign or ""), token=token, answer=_answer_file(sign, node), asked_at=time.time())
            for node in alive
        }
        free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
        unit, answers = config.ray.rollout_resource, [(_answer(asked[node["NodeID"]], node), node) for node in alive]
        whole = [(replace(one, reads_run_folder=_sees_both_ways(one, _answer_file(sign, node), token)), node) for one, node in answers]
        return [_with_resources(one, node, free.get(node["NodeID"], {}), unit) for one, node in whole]
    finally:
        for left in folder.glob(f"{_SIGN}*") if folder else ():
            left.unlink(missing_ok=True)


def _answer_file(sign: Path | None, node: Mapping[str, Any]) -> str:
    return f"{sign}.{node['NodeID']}" if sign else ""


def _sees_both_ways(facts: NodeFacts, answer: str, token: str) -> bool:
    """What the driver wrote was read there, and what was written there is read here."""
    return facts.reads_run_folder and (not answer or _reads(Path(answer), token))


def _answer(call: Any, node: Mapping[str, Any]) -> NodeFacts:
    import ray

    try:
        found: NodeFacts = ray.get(call, timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineError(
            f"node {node['NodeManagerAddress']} doesn't answer a small task ({type(error).__name__}: {reason}); is evenkeel installed "
            "there, with the same Python?"
        ) from error
    return found


def _with_resources(facts: NodeFacts, node: Mapping[str, Any], free: Mapping[str, float], unit: str) -> NodeFacts:
    offered = node["Resources"]
    return replace(
        facts,
        name=node["NodeManagerAddress"],
        offered_gpus=offered.get("GPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        cpus=offered.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        rollout_units=offered.get(unit, 0.0),
        object_store=int(offered.get("object_store_memory", 0)),
    )
