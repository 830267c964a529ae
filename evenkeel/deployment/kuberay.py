"""What Kubernetes is asked for to run a recipe: a RayJob or a RayCluster for KubeRay (1.6 or newer), and what lets the Prometheus operator
find the run.

Ranks and engines get pods of their own. The learner's are there from the beginning, since no step is made without them; those of engines
come and go with the pool where it follows the load, down to none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import held_by
from evenkeel.deployment.sizes import (
    CPUS_OF_HEAD,
    DASHBOARD,
    DISCOVERY,
    GCS,
    JOINED,
    NOTICES_LOSS,
    cpus,
    drain_variable,
    hand_back_s,
    memory_gib,
    name_of,
    node_memory,
    ranks_of_node,
    refuse_elsewhere,
    refuse_narrow,
    refuse_shared_gpus,
    shared_gib,
    stop_wait_s,
    store_bytes,
)
from evenkeel.plan.hosts import HostMemory
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape

_RECIPE = PurePosixPath("/recipe/recipe.yaml")
_LABEL = "evenkeel-run"
_RAY_METRICS = 8080
_END_S = 20.0  # the end of an engine


def kuberay(
    config: RunConfig,
    recipe: Mapping[str, Any],
    shape: ModelShape,
    gpus: Gpus,
    *,
    image: str,
    claim: str,
    mount: str,
    namespace: str,
    with_job: bool = True,
) -> list[Any]:
    """Documents for `kubectl apply`: the recipe, the RayJob or RayCluster, and what Prometheus needs to find run and Ray.

    Args:
        config: with devices, types and deadlines.
        recipe: that the run reads, as plain data.
        gpus: of a pod of ranks or of engines.
        image: that deploy/Dockerfile builds.
        claim: PersistentVolumeClaim (ReadWriteMany) with the run folder and the model; mount: where all pods see it.
        namespace: of all that is asked for; Prometheus, which usually is in another, finds the run by it.
        with_job: the run is started, and its cluster ends with it; otherwise it is the cluster alone.
    Raises: ConfigError for a recipe that such pods can't run.
    """
    refuse_shared_gpus(config)
    refuse_narrow(config, gpus)
    refuse_elsewhere(config, mount)
    name = name_of(config)
    cluster = _cluster(config, shape, gpus, name, image, claim, mount)
    job = {
        "entrypoint": f"evenkeel train {_RECIPE} --retries 3 {JOINED}",
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s(config))}}),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": cluster,
    }
    of_run = {_LABEL: name}
    head = {**of_run, "ray.io/node-type": "head"}
    discovery = {"name": "discovery", "port": DISCOVERY, "targetPort": DISCOVERY}
    url = f"http://{name}-metrics.{namespace}.svc:{DISCOVERY}/sd"
    # Ray's numbers come by its pods, with the run's label, and not a second time by the driver's list.
    not_ray = {"sourceLabels": ["role"], "regex": "ray", "action": "drop"}
    scraped = {"httpSDConfigs": [{"url": url, "refreshInterval": "15s"}], "jobName": "evenkeel", "relabelings": [not_ray]}
    labels = {"run": PurePosixPath(str(config.run_dir)).name, "role": "ray"}
    labelled = [{"targetLabel": label, "replacement": value} for label, value in labels.items()]
    of_ray = {"selector": {"matchLabels": of_run}, "podMetricsEndpoints": [{"port": "metrics", "interval": "15s", "relabelings": labelled}]}
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)

    def document(api: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
        return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": dict(of_run)}, **rest}

    return [
        document("v1", "ConfigMap", f"{name}-recipe", data={_RECIPE.name: text}),
        document("ray.io/v1", "RayJob", name, spec=job) if with_job else document("ray.io/v1", "RayCluster", name, spec=cluster),
        document("v1", "Service", f"{name}-metrics", spec={"selector": head, "ports": [discovery]}),
        document("monitoring.coreos.com/v1", "PodMonitor", f"{name}-ray", spec=of_ray),
        document("monitoring.coreos.com/v1alpha1", "ScrapeConfig", name, spec=scraped),
    ]


def _cluster(config: RunConfig, shape: ModelShape, gpus: Gpus, name: str, image: str, claim: str, mount: str) -> dict[str, Any]:
    learner, rollout = config.learner, config.rollout
    on_gpus = learner.resolved_device == "cuda"
    in_pod = ranks_of_node(config, gpus)
    pods = math.ceil(learner.world_size / in_pod)
    # Where the pool follows the load a pod is an engine, so that none keeps seven others; a fixed pool shares what a pod can share.
    engines = 1 if rollout.is_elastic else min(rollout.workers, held_by(gpus.per_node, rollout.gpus_of_a_worker))
    most, fewest = math.ceil(rollout.most_workers / engines), 0 if rollout.is_elastic else math.ceil(rollout.workers / engines)
    engine_gpus = math.ceil(engines * rollout.gpus_of_a_worker) if rollout.engine.resolved_device == "cuda" else 0

    def template(memory: HostMemory, cpus: int, of_gpus: int, grace_s: int | None = None) -> dict[str, Any]:
        return _pod(memory, cpus, of_gpus, name=name, image=image, claim=claim, mount=mount, grace_s=grace_s)

    of_head = node_memory(shape, config, gpus, is_head=True)
    of_ranks = node_memory(shape, config, gpus, ranks=in_pod)
    of_workers = node_memory(shape, config, gpus, engines=engines)
    worker_parts = engines * rollout.engine.tensor_parallel
    return {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 600},  # longer than a weight sync and an engine's start
        "headGroupSpec": {
            "rayStartParams": {"num-gpus": "0", **_store(of_head)},
            "template": template(of_head, CPUS_OF_HEAD, 0),
        },
        "workerGroupSpecs": [
            {
                "groupName": "learner",
                "replicas": pods,
                "minReplicas": pods,
                "maxReplicas": pods,
                "rayStartParams": _store(of_ranks),
                "template": template(of_ranks, cpus(in_pod, in_pod if on_gpus else 0), in_pod if on_gpus else 0),
            },
            {
                "groupName": "rollouts",
                "replicas": fewest,
                "minReplicas": fewest,
                "maxReplicas": most,
                "rayStartParams": {"resources": json.dumps(json.dumps({config.ray.rollout_resource: engines})), **_store(of_workers)},
                "template": template(of_workers, cpus(worker_parts, engine_gpus), engine_gpus, hand_back_s(config)),
            },
        ],
    }


def _store(memory: HostMemory) -> dict[str, str]:
    return {"object-store-memory": str(store_bytes(memory))}


def _pod(memory: HostMemory, cpus: int, gpus: int, *, name: str, image: str, claim: str, mount: str, grace_s: int | None) -> dict[str, Any]:
    """Args: grace_s: that workers have to finish their groups and to hand back the rest; None: the pod has none."""
    amounts = {"cpu": str(cpus), "memory": f"{memory_gib(memory)}Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    variables = {"HF_HOME": f"{mount}/huggingface", **NOTICES_LOSS}
    ports = {"gcs-server": GCS, "dashboard": DASHBOARD, "client": 10001, "metrics": _RAY_METRICS, "discovery": DISCOVERY}
    is_head = memory.node == "head"
    rest: dict[str, Any] = {}
    if grace_s is not None:
        variables |= drain_variable(grace_s)
        rest["terminationGracePeriodSeconds"] = math.ceil(grace_s + _END_S)
    container = {
        "name": f"ray-{'head' if is_head else 'worker'}",
        "image": image,
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
        "ports": [{"name": port, "containerPort": n} for port, n in ports.items() if is_head or port == "metrics"],
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": [
            {"name": "shared", "mountPath": mount},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "recipe", "mountPath": str(_RECIPE.parent)},
        ],
    }
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_gib(memory)}Gi"}},
        {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
    ]
    labels = {_LABEL: name}
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes, **rest}}
