"""Clusters that Ray's own launcher starts (`ray up`), on AWS and on hosts of one's own, and the job script of one on Slurm."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from evenkeel.actors.config import RunConfig
from evenkeel.deployment.sizes import (
    CPUS_OF_HEAD,
    DISCOVERY,
    GCS,
    NOTICES_LOSS,
    as_assignments,
    cpus,
    drain_variable,
    engines_of_node,
    hand_back_s,
    name_of,
    node_memory,
    ranks_of_node,
    refuse_elsewhere,
    refuse_few_hosts,
    refuse_narrow,
    refuse_shared_gpus,
    shared_gib,
    shared_nodes,
    stop_wait_s,
    store_bytes,
)
from evenkeel.plan.hosts import HostMemory
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape

_INSTANCES = {
    "A100x8": "p4de.24xlarge",
    "A100-40x8": "p4d.24xlarge",
    "H100x8": "p5.48xlarge",
    "H200x8": "p5en.48xlarge",
    "B200x8": "p6-b200.48xlarge",
    "L4x1": "g6.8xlarge",
    "L40Sx1": "g6e.8xlarge",
    "L40Sx8": "g6e.48xlarge",
}
# The cluster's token, without which Ray refuses every call: from the user's home to that of each node.
_TOKEN = {"~/.ray/auth_token": "~/.ray/auth_token"}
_HEAD = f"--head --port={GCS} --autoscaling-config=~/ray_bootstrap_config.yaml --dashboard-host=127.0.0.1 --disable-usage-stats"
_WORKER = f"--address=$RAY_HEAD_IP:{GCS}"


def aws(config: RunConfig, shape: ModelShape, gpus: Gpus, *, image: str, volume: str, mount: str) -> dict[str, Any]:
    """A cluster for `ray up` whose nodes are containers and mount an NFS server; AMI stands for a machine image with Docker, NVIDIA's
    container toolkit and its driver, which differs by region.

    A pool that follows the load has nodes of its own, from none on; where it is fixed ranks and engines are on equal nodes.
    Args: as of kuberay(); volume: the server's address.
    Raises: ConfigError for a recipe that such nodes can't run.
    """
    refuse_elsewhere(config, mount)
    rollout, resource = config.rollout, config.ray.rollout_resource
    ranks, engines = ranks_of_node(config, gpus), engines_of_node(config, gpus, 1)
    if rollout.is_elastic:
        refuse_shared_gpus(config)
        refuse_narrow(config, gpus)
        learners = math.ceil(config.learner.world_size / ranks)
        of_ranks, of_engines = node_memory(shape, config, gpus, ranks=ranks), node_memory(shape, config, gpus, engines=engines)
        types = {
            "learner": _aws_type(gpus, of_ranks, 0, resource, fewest=learners, most=learners),
            "rollouts": _aws_type(gpus, of_engines, engines, resource, fewest=0, most=math.ceil(rollout.most_workers / engines)),
        }
    else:
        nodes = shared_nodes(config, gpus)
        memory = node_memory(shape, config, gpus, ranks=ranks, engines=engines)
        types = {"gpus": _aws_type(gpus, memory, engines, resource, fewest=nodes, most=nodes)}
    head = node_memory(shape, config, gpus, is_head=True)
    bin = "/evenkeel/.venv/bin"
    drained = {**drain_variable(hand_back_s(config)), "RAY_AUTH_MODE": "token"}
    return {
        "cluster_name": f"evenkeel-{name_of(config)}",
        "max_workers": sum(kind["max_workers"] for kind in types.values()),
        "upscaling_speed": 4.0,  # a pool that grows should not double node by node
        "idle_timeout_minutes": 10,  # longer than a weight sync and an engine's start
        "provider": {"type": "aws", "region": "us-west-2", "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": image,
            "container_name": "evenkeel",
            "run_options": [f"--volume={mount}:{mount}", f"--env=HF_HOME={mount}/huggingface", "--ulimit=nofile=65536:65536"],
            "head_run_options": [f"--shm-size={shared_gib(head)}g"],
        },
        "available_node_types": {
            "head": {
                "resources": {"CPU": CPUS_OF_HEAD, "object_store_memory": store_bytes(head)},
                "node_config": _machine("r7i.4xlarge", 200),
            },
            **types,
        },
        "head_node_type": "head",
        "file_mounts": _TOKEN,
        # On the machine itself, before its container starts; all else runs in that.
        "initialization_commands": [
            f"sudo mkdir -p {mount}",
            f"mountpoint -q {mount} || sudo mount -t nfs4 -o nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600 {volume}:/ {mount}",
        ],
        "setup_commands": [],
        "head_setup_commands": [f"{bin}/pip install boto3"],  # Ray asks AWS for nodes from the head; its own default installs it elsewhere
        "head_start_ray_commands": [f"{bin}/ray stop", f"{as_assignments(NOTICES_LOSS)} RAY_AUTH_MODE=token {bin}/ray start {_HEAD}"],
        "worker_start_ray_commands": [f"{bin}/ray stop", f"{as_assignments(drained)} {bin}/ray start {_WORKER}"],
    }


def _aws_type(gpus: Gpus, memory: HostMemory, units: int, resource: str, *, fewest: int, most: int) -> dict[str, Any]:
    offered = {"CPU": cpus(0, gpus.per_node), "GPU": gpus.per_node, "object_store_memory": store_bytes(memory)}
    return {
        "min_workers": fewest,
        "max_workers": most,
        "resources": offered | ({resource: units} if units else {}),
        "node_config": _machine(_INSTANCES.get(f"{gpus.name}x{gpus.per_node}", "INSTANCE_TYPE"), 500),
        # --ulimit: NCCL registers its buffers with the network's card, where there is one for RDMA.
        "docker": {"worker_run_options": ["--gpus=all", f"--shm-size={shared_gib(memory)}g", "--ulimit=memlock=-1"]},
    }


def _machine(instance: str, disk_gb: int) -> dict[str, Any]:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": disk_gb, "VolumeType": "gp3"}}
    return {"InstanceType": instance, "ImageId": "AMI", "BlockDeviceMappings": [disk]}


def local(config: RunConfig, shape: ModelShape, gpus: Gpus, *, hosts: Sequence[str]) -> dict[str, Any]:
    """A cluster for `ray up` on hosts that are reached by ssh, which get the working tree from the folder in which that runs. Autoscaler v2
    counts the head as one of min_workers, and starts a host too few: RAY_UP_enable_autoscaler_v2=0 ray up.

    Args: hosts: addresses, the head's first; it has ranks and engines as the others.
    Raises: ConfigError if they are too few.
    """
    refuse_few_hosts(config, gpus, len(hosts))
    engines = engines_of_node(config, gpus, len(hosts))
    memory, of_head = (
        node_memory(shape, config, gpus, ranks=ranks_of_node(config, gpus), engines=engines, is_head=is_head) for is_head in (False, True)
    )
    on_gpus = "cuda" in {config.learner.resolved_device, config.rollout.engine.resolved_device}
    bin, more = "evenkeel/.venv/bin", len(hosts) - 1
    offer = f"--num-gpus={gpus.per_node} " if on_gpus else ""
    offer += f"--resources={shlex.quote(json.dumps({config.ray.rollout_resource: engines}))}"
    before = {**drain_variable(hand_back_s(config)), "RAY_AUTH_MODE": "token"}
    of_the_head = {"RAY_enable_autoscaler_v2": "0", **NOTICES_LOSS, **before}
    start = f"{bin}/ray start {offer} --object-store-memory="
    return {
        "cluster_name": f"evenkeel-{name_of(config)}",
        "provider": {"type": "local", "head_ip": hosts[0], "worker_ips": list(hosts[1:])},
        "min_workers": more,
        "max_workers": more,
        "idle_timeout_minutes": 60,
        "auth": {"ssh_user": "ubuntu", "ssh_private_key": "~/.ssh/id_ed25519"},
        "file_mounts": {"~/evenkeel": ".", **_TOKEN},
        "rsync_exclude": ["**/.git", "**/.venv", "**/.tools", "**/.mypy_cache", "**/runs", "**/models"],
        "setup_commands": ["cd evenkeel && python3 -m venv .venv && .venv/bin/pip install -c constraints-gpu.txt -e '.[gpu]'"],
        "head_start_ray_commands": [
            f"{bin}/ray stop",
            f"ulimit -n 65536; {as_assignments(of_the_head)} {start}{store_bytes(of_head)} {_HEAD}",
        ],
        "worker_start_ray_commands": [
            f"{bin}/ray stop",
            f"ulimit -n 65536; {as_assignments(before)} {start}{store_bytes(memory)} {_WORKER}",
        ],
    }


def slurm(config: RunConfig, shape: ModelShape, gpus: Gpus, words: Sequence[str]) -> str:
    """A job script for sbatch, which hands over to deploy/slurm.sh: to be put in from the root of the repository.

    Args: words: of `evenkeel train`, the recipe first.
    Raises: ConfigError as shared_nodes.
    """
    nodes = shared_nodes(config, gpus)
    engines = engines_of_node(config, gpus, nodes)
    memory = node_memory(shape, config, gpus, ranks=ranks_of_node(config, gpus), engines=engines, is_head=True)
    on_gpus = "cuda" in {config.learner.resolved_device, config.rollout.engine.resolved_device}
    variables = {
        "EVENKEEL_WORKERS_PER_NODE": str(engines),
        "EVENKEEL_RESOURCE": config.ray.rollout_resource,
        "EVENKEEL_STORE_BYTES": str(store_bytes(memory)),
        **drain_variable(hand_back_s(config)),
    }
    train = shlex.join([*words, "--retries", "3", "metrics.bind=node", f"metrics.discovery_port={DISCOVERY}"])
    options = [
        f"--job-name=evenkeel-{name_of(config)}",
        f"--nodes={nodes}",
        *([f"--gpus-per-node={gpus.per_node}"] if on_gpus else []),
        "--ntasks-per-node=1",
        "--exclusive",
        f"--signal=B:TERM@{stop_wait_s(config)}",
    ]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), f"export {as_assignments(variables)}"]
    return "\n".join([*lines, f"exec deploy/slurm.sh {train}"]) + "\n"
