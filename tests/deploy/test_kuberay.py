"""What `evenkeel deploy --kuberay` prints: pods against Kubernetes' own schema, fields of KubeRay and of the Prometheus operator against
their API references, sizes against what the run asks for, and groups as Ray's own autoscaler reads them.

Source: KubeRay's API reference, ray.io/v1 (1.6); the Prometheus operator's, monitoring.coreos.com. Kubernetes' schemas are those of the
package kubernetes-validate, strict: unknown fields are refused. Nothing here is applied: there is no Kubernetes where evenkeel is tested.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import gpus_asked, room_for_engines, workers_with_a_unit
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError
from evenkeel.deploy_command import as_yaml
from evenkeel.deployment.kuberay import kuberay
from evenkeel.plan.hosts import hosts
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import as_recipe, load_config
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
SHAPES = {"qwen3_30b_a3b_4nodes": QWEN3_30B_A3B, "qwen3_8b_8gpu": QWEN3_8B}
ELASTIC = ("rollout.min_workers=1", "rollout.max_workers=16")
ON_VOLUME = ("model=/shared/models/m", "run_dir=/shared/runs/r", "ray.address=auto")
CASES = [("qwen3_30b_a3b_4nodes", ()), ("qwen3_8b_8gpu", ELASTIC)]
# Kind -> field -> its type: another kind's name, "pod" (a PodTemplateSpec), "list of ...", or Python's.
FIELDS: dict[str, dict[str, Any]] = {
    "RayJob": {
        "entrypoint": str,
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "backoffLimit": int,
        "submissionMode": str,
        "activeDeadlineSeconds": int,
        "submitterPodTemplate": "pod",
        "suspend": bool,
        "rayClusterSpec": "RayCluster",
    },
    "RayCluster": {
        "rayVersion": str,
        "authOptions": "AuthOptions",
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": "AutoscalerOptions",
        "headGroupSpec": "HeadGroup",
        "workerGroupSpecs": "list of WorkerGroup",
        "suspend": bool,
    },
    "AuthOptions": {"mode": ("token", "disabled"), "secretName": str},
    "AutoscalerOptions": {"version": ("v1", "v2"), "idleTimeoutSeconds": int, "upscalingMode": ("Default", "Aggressive", "Conservative")},
    "HeadGroup": {"rayStartParams": "strings", "template": "pod", "serviceType": str, "enableIngress": bool},
    "WorkerGroup": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "numOfHosts": int,
        "idleTimeoutSeconds": int,
        "rayStartParams": "strings",
        "template": "pod",
        "suspend": bool,
    },
    "PodMonitor": {"selector": "Selector", "podMetricsEndpoints": "list of PodEndpoint", "jobLabel": str},
    "Selector": {"matchLabels": "strings"},
    "PodEndpoint": {"port": str, "interval": str, "path": str, "relabelings": "list of Relabelling"},
    "ScrapeConfig": {"httpSDConfigs": "list of HttpDiscovery", "jobName": str, "scrapeInterval": str, "relabelings": "list of Relabelling"},
    "Relabelling": {"sourceLabels": list, "regex": str, "action": str, "targetLabel": str, "replacement": str},
    "HttpDiscovery": {"url": str, "refreshInterval": str},
}


def documents(recipe: str, *overrides: str, gpus: str = "H200x8") -> tuple[list[Any], RunConfig, ModelShape]:
    given = load_config(RunConfig, ROOT / "recipes" / f"{recipe}.yaml", [*ON_VOLUME, *overrides])
    config, shape = with_devices(given, has_gpu=True), ModelShape.of(SHAPES[recipe])
    made = kuberay(
        config, as_recipe(given), shape, Gpus.parse(gpus), image="REGISTRY/evenkeel:gpu", claim="shared", mount="/shared", namespace="runs"
    )
    return list(yaml.safe_load_all(as_yaml(made))), config, shape


def of_kind(found: list[Any], kind: str) -> Any:
    (one,) = (document for document in found if document["kind"] == kind)
    return one


def check(document: Any) -> None:
    """Raises: ValueError or kubernetes_validate.ValidationError for what its API doesn't know."""
    if document["kind"] not in FIELDS:
        kubernetes_validate.validate(document, "1.37", strict=True)
        return
    if set(document) != {"apiVersion", "kind", "metadata", "spec"}:
        raise ValueError(f"{document['kind']}: {sorted(document)}")
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}, "1.37", strict=True)
    _check(document["spec"], document["kind"])


def _check(value: Any, wanted: Any) -> None:
    if isinstance(wanted, str) and wanted.startswith("list of "):
        for one in value:
            _check(one, wanted.removeprefix("list of "))
    elif wanted == "pod":
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": value}, "1.37", strict=True)
    elif wanted == "strings":
        if not all(isinstance(one, str) for pair in value.items() for one in pair):
            raise ValueError(f"not all strings: {value}")
    elif isinstance(wanted, str):
        if unknown := set(value) - set(FIELDS[wanted]):
            raise ValueError(f"{wanted} has no {unknown}")
        for name, inner in value.items():
            _check(inner, FIELDS[wanted][name])
    elif isinstance(wanted, tuple):
        if value not in wanted:
            raise ValueError(f"{value} is none of {wanted}")
    elif type(value) is not wanted:
        raise ValueError(f"{value!r} is no {wanted.__name__}")


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_every_document_is_valid_and_says_all_of_the_recipe(recipe: str, overrides: tuple[str, ...]) -> None:
    found, config, _ = documents(recipe, *overrides)
    for document in found:
        check(document)
    assert [one["kind"] for one in found] == ["ConfigMap", "RayJob", "Service", "PodMonitor", "ScrapeConfig"]
    (text,) = of_kind(found, "ConfigMap")["data"].values()
    assert with_devices(RunConfig.model_validate(yaml.safe_load(text)), has_gpu=True) == config


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("RayJob", ["spec", "entryPoint"]),
        ("RayJob", ["spec", "rayClusterSpec", "autoscalerOption"]),
        ("RayJob", ["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "resource"]),
        ("RayJob", ["spec", "rayClusterSpec", "workerGroupSpecs", 1, "minReplica"]),
        ("RayJob", ["spec", "rayClusterSpec", "workerGroupSpecs", 1, "template", "spec", "volumes", 1, "emptyDir", "sizelimit"]),
        ("Service", ["spec", "selectors"]),
        ("ScrapeConfig", ["spec", "httpSDConfigs", 0, "uri"]),
    ],
)
def test_an_unknown_field_is_refused(kind: str, path: list[Any]) -> None:
    """The check above means something, at every depth."""
    document = copy.deepcopy(of_kind(documents("qwen3_8b_8gpu", *ELASTIC)[0], kind))
    section = document
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = "1"
    with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
        check(document)


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_rays_autoscaler_reads_groups_that_hold_what_the_run_asks_for(recipe: str, overrides: tuple[str, ...]) -> None:
    """By the function with which Ray's autoscaler reads a RayCluster of KubeRay's."""
    found, config, _ = documents(recipe, *overrides)
    cluster = {"metadata": {"name": "x", "namespace": "default"}, "spec": of_kind(found, "RayJob")["spec"]["rayClusterSpec"]}
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    head, learner, rollouts = types["headgroup"], types["learner"], types["rollouts"]
    assert (head["resources"]["GPU"], head["max_workers"]) == (0, 0)
    assert learner["min_workers"] == learner["max_workers"] and config.ray.rollout_resource not in learner["resources"]
    assert learner["max_workers"] * learner["resources"]["GPU"] == gpus_asked(config, workers=0)
    assert learner["resources"]["GPU"] % config.learner.tensor_parallel == 0, "a tensor-parallel group is in one pod"
    kinds = [one for one in (learner, rollouts) for _ in range(one["max_workers"])]
    nodes = [(one["resources"]["GPU"], one["resources"].get(config.ray.rollout_resource, 0)) for one in kinds]
    most = config.rollout.most_workers
    assert workers_with_a_unit([units for _, units in nodes], most) == most == room_for_engines(nodes, config)
    assert sum(gpus for gpus, _ in nodes) == gpus_asked(config, workers=most), "and no GPU more"
    assert rollouts["min_workers"] == (0 if config.rollout.is_elastic else rollouts["max_workers"])


def size(text: str) -> int:
    return int(re.fullmatch(r"(\d+)Gi", text)[1]) << 30  # type: ignore[index]


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_a_pod_has_the_memory_that_plan_counts_and_shared_memory_for_its_store_and_buckets(recipe: str, overrides: tuple[str, ...]) -> None:
    found, config, shape = documents(recipe, *overrides)
    cluster = of_kind(found, "RayJob")["spec"]["rayClusterSpec"]
    counted = hosts(shape, config, gpus_per_node=8, nodes=4)
    if config.rollout.is_elastic:  # a pod is one engine there
        counted[2] = hosts(shape, config, gpus_per_node=1, nodes=4)[2]
    for group, host in zip([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]], counted, strict=True):
        pod = group["template"]["spec"]
        store = int(group["rayStartParams"]["object-store-memory"])
        stored = sum(amount for what, amount in host.parts.items() if "object store" in what)
        shared = size(next(one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if "emptyDir" in one))
        assert store >= stored and shared >= store + host.parts.get("buckets in shared memory", 0)
        assert shared <= 1.2 * (stored + host.parts.get("buckets in shared memory", 0)) + (3 << 30), "not the whole pod"
        limits = pod["containers"][0]["resources"]["limits"]
        assert size(limits["memory"]) >= host.total and limits == pod["containers"][0]["resources"]["requests"]


@pytest.mark.parametrize(("drain_s", "drained_s"), [(20.0, 40), (4.0, 14), (90.5, 181)])
def test_a_pod_that_is_taken_away_has_the_time_to_hand_back_its_groups(drain_s: float, drained_s: int) -> None:
    """deadlines.drain_s for what is under way, then as long again, but at least 10 s (deploy/README.md); and 20 s for the engine's end."""
    found, config, _ = documents("qwen3_8b_8gpu", *ELASTIC, f"deadlines.drain_s={drain_s}")
    job = of_kind(found, "RayJob")["spec"]
    pod = job["rayClusterSpec"]["workerGroupSpecs"][1]["template"]["spec"]
    told = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert told["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(drained_s)
    assert pod["terminationGracePeriodSeconds"] == math.ceil(drain_s + max(10.0, drain_s) + 20.0)
    waits = yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    assert int(waits) >= config.deadlines.step_s + config.deadlines.checkpoint_s


def test_prometheus_finds_the_run_where_the_run_says_that_it_is() -> None:
    """From a pod in another namespace, where the name of a Service alone is none."""
    found, _, _ = documents("qwen3_8b_8gpu")
    (told,) = of_kind(found, "ScrapeConfig")["spec"]["httpSDConfigs"]
    service, job = of_kind(found, "Service"), of_kind(found, "RayJob")["spec"]
    port = re.search(r"metrics\.discovery_port=(\d+)", job["entrypoint"])
    assert port is not None and told["url"] == f"http://{service['metadata']['name']}.runs.svc:{port[1]}/sd"
    assert {document["metadata"]["namespace"] for document in found} == {"runs"}
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() - head["metadata"]["labels"].items() == {("ray.io/node-type", "head")}, "KubeRay's own label"
    assert int(port[1]) in [one["containerPort"] for one in head["spec"]["containers"][0]["ports"]]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run_dir=runs/here"], r"^run_dir = runs/here: not on the volume that all nodes see at /shared"),
        (["model=/models/x"], r"^model = /models/x: not on the volume"),
        (["learner.gpus_per_rank=0.5", "rollout.gpus_per_worker=0.5"], r"share no GPU\. Set both to 1"),
        (["rollout.engine.tensor_parallel=16"], r"H200x8: a tensor-parallel group of 16 has to fit into a node"),
    ],
)
def test_what_such_pods_cannot_run_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        documents("qwen3_8b_8gpu", *overrides)


def test_the_command_prints_one_file_for_a_model_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_tiny_model(save_tiny_tokenizer(tmp_path / "model"))
    words = ["deploy", str(ROOT / "recipes/qwen3_0.6b_1gpu.yaml"), f"model={model}", f"run_dir={tmp_path}/run", "ray.address=auto"]
    words += ["learner.gpus_per_rank=1", "rollout.gpus_per_worker=1", "rollout.engine.context_length=64", "rollout.sampling.max_tokens=16"]
    words += ["--kuberay", "--image", "R/evenkeel:gpu", "--volume", "c", "--mount", str(tmp_path)]
    answer = CliRunner().invoke(app, words, catch_exceptions=False)
    found = list(yaml.safe_load_all(answer.stdout))
    assert answer.exit_code == 0 and of_kind(found, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["groupName"] == "learner"
    alone = list(yaml.safe_load_all(CliRunner().invoke(app, [*words, "--cluster"], catch_exceptions=False).stdout))
    check(cluster := of_kind(alone, "RayCluster"))
    assert (
        cluster["spec"] == of_kind(found, "RayJob")["spec"]["rayClusterSpec"]
        and cluster["metadata"] == of_kind(found, "RayJob")["metadata"]
    )
    rest = [[one for one in documents if not one["kind"].startswith("Ray")] for documents in (alone, found)]
    assert rest[0] == rest[1] and len(alone) == len(found), "the recipe, and what Prometheus needs, as with a job"
    with pytest.raises(ConfigError, match="--kuberay and --aws need --image and --volume"):
        CliRunner().invoke(app, words[:-6], catch_exceptions=False)
