"""What `evenkeel deploy --kuberay` prints: pods against Kubernetes' own schema, fields of KubeRay and of the Prometheus operator against
their sources, sizes against what the run asks for, and groups as Ray's own autoscaler reads them.

Kubernetes' schemas are those of the package kubernetes-validate, strict: unknown fields are refused. No package has the other two, so
FIELDS, REQUIRED and refused_by_kuberay are read off their sources, for the fields that our documents have; any other is refused:

* ray-project/kuberay: ray.io_rayclusters.yaml of its chart at 017710c (what an API server checks), apis/ray/v1/rayjob_types.go at 0057210
  (from which that of jobs is made), and what the operator refuses itself, controllers/ray/utils/validation.go at 0074504; with what
  raycluster_types.go and validation.go have got since 1.6 (bounds of replicas and of idle times).
* prometheus-operator/prometheus-operator: apis/monitoring/v1/podmonitor_types.go at 3ece7bb and prometheus_types.go at d9f7213,
  v1alpha1/scrapeconfig_types.go at 5ad8c5d.

Every set of values below stands in its schema as an enum; none is ours alone. `minReplicas` and `maxReplicas` are required there and have
defaults, which an API server fills in first; here they have to be given. Nothing here is applied: there is no Kubernetes where evenkeel is
tested.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.version import Version
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
DURATION = re.compile(r"0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# As in the schema, which has each of them with a capital, too.
ACTIONS = ("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep", "lowercase", "uppercase", "keepequal", "dropequal")
API = {
    "RayJob": "ray.io/v1",
    "RayCluster": "ray.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ScrapeConfig": "monitoring.coreos.com/v1alpha1",
}
# Kind -> field -> its type: another kind's name, "pod" (a PodTemplateSpec), "list of ...", values, a pattern, or Python's; int is an int32.
FIELDS: dict[str, dict[str, Any]] = {
    "RayJob": {
        "entrypoint": str,
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": "RayCluster",
    },
    "RayCluster": {
        "rayVersion": str,
        "authOptions": "AuthOptions",
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": "AutoscalerOptions",
        "headGroupSpec": "HeadGroup",
        "workerGroupSpecs": "list of WorkerGroup",
    },
    "AuthOptions": {"mode": ("disabled", "token")},
    "AutoscalerOptions": {"version": ("v1", "v2"), "idleTimeoutSeconds": int},
    "HeadGroup": {"rayStartParams": "strings", "template": "pod"},
    "WorkerGroup": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "rayStartParams": "strings",
        "template": "pod",
    },
    "PodMonitor": {"selector": "Selector", "podMetricsEndpoints": "list of PodEndpoint"},
    "Selector": {"matchLabels": "strings"},
    "PodEndpoint": {"port": str, "interval": DURATION, "relabelings": "list of Relabelling"},
    "ScrapeConfig": {"httpSDConfigs": "list of HttpDiscovery", "jobName": re.compile(".+"), "relabelings": "list of Relabelling"},
    "Relabelling": {"sourceLabels": "list of label", "regex": str, "action": ACTIONS, "targetLabel": str, "replacement": str},
    "HttpDiscovery": {"url": re.compile("https?://.+"), "refreshInterval": DURATION},
}
REQUIRED = {
    "RayJob": {"rayClusterSpec"},  # by validation.go: this, or a selector of clusters
    "RayCluster": {"headGroupSpec"},
    "HeadGroup": {"template"},
    "WorkerGroup": {"groupName", "minReplicas", "maxReplicas", "template"},
    "PodMonitor": {"selector"},
    "HttpDiscovery": {"url"},
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
    """Raises: ValueError or kubernetes_validate.ValidationError for what its API refuses."""
    kind = document["kind"]
    if kind not in API:
        kubernetes_validate.validate(document, "1.37", strict=True)
        return
    if set(document) != {"apiVersion", "kind", "metadata", "spec"} or document["apiVersion"] != API[kind]:
        raise ValueError(f"{kind}: {sorted(document)} of {document.get('apiVersion')}")
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}, "1.37", strict=True)
    _check(document["spec"], kind)
    if document["apiVersion"] == "ray.io/v1" and (said := list(refused_by_kuberay(document))):
        raise ValueError("; ".join(said))


def _check(value: Any, wanted: Any) -> None:
    if isinstance(wanted, str) and wanted.startswith("list of "):
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is no list")
        for one in value:
            _check(one, LABEL if wanted == "list of label" else wanted.removeprefix("list of "))
    elif wanted == "pod":
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": value}, "1.37", strict=True)
    elif wanted == "strings":
        if not all(isinstance(one, str) for pair in value.items() for one in pair):
            raise ValueError(f"not all strings: {value}")
    elif isinstance(wanted, str):
        if unknown := set(value) - set(FIELDS[wanted]):
            raise ValueError(f"{wanted} has no {unknown}")
        if missing := REQUIRED.get(wanted, set()) - set(value):
            raise ValueError(f"{wanted} needs {missing}")
        for name, inner in value.items():
            _check(inner, FIELDS[wanted][name])
    elif isinstance(wanted, tuple):
        if value not in wanted:
            raise ValueError(f"{value} is none of {wanted}")
    elif isinstance(wanted, re.Pattern):
        if not isinstance(value, str) or not wanted.fullmatch(value):
            raise ValueError(f"{value!r} isn't {wanted.pattern}")
    elif type(value) is not wanted or (wanted is int and abs(value) >= 1 << 31):
        raise ValueError(f"{value!r} is no {wanted.__name__}")


def refused_by_kuberay(document: Any) -> Iterator[str]:
    """What ValidateRayJobSpec, ValidateRayClusterSpec and those of names say against it, of what FIELDS lets pass."""
    spec, is_job = document["spec"], document["kind"] == "RayJob"
    name, longest = document["metadata"]["name"], 47 if is_job else 53  # the operator appends six characters to a job's
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        yield f"name {name}: no label of DNS, or longer than {longest}"
    if is_job:
        ttl = spec.get("ttlSecondsAfterFinished", 0)
        if ttl < 0 or (ttl > 0 and not spec.get("shutdownAfterJobFinishes")):
            yield "ttlSecondsAfterFinished is negative, or without shutdownAfterJobFinishes"
        if not isinstance(yaml.safe_load(spec.get("runtimeEnvYAML", "{}")), dict):
            yield "runtimeEnvYAML is no mapping"
        spec = spec["rayClusterSpec"]
    scaler, head = spec.get("autoscalerOptions", {}), spec["headGroupSpec"]
    if scaler.get("idleTimeoutSeconds", 0) < 0:
        yield "idleTimeoutSeconds is negative"
    if spec.get("authOptions", {}).get("mode") == "token" and Version(spec.get("rayVersion", "0")) < Version("2.52"):
        yield "authOptions.mode is 'token': rayVersion has to be 2.52 or newer"
    for group in [head, *spec.get("workerGroupSpecs", [])]:
        params, pod = group.get("rayStartParams", {}), group["template"]["spec"]
        if not pod["containers"] or {"labels", "redis-username"} & set(params):
            yield "a group has no container, or parameters of ray start that are fields of KubeRay's"
        if spec.get("enableInTreeAutoscaling") and scaler.get("version") == "v2" and pod.get("restartPolicy", "Never") != "Never":
            yield "restartPolicy has to be Never with autoscaler v2"
    if {"RAY_REDIS_ADDRESS", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"} & {
        one["name"] for container in head["template"]["spec"]["containers"][:1] for one in container.get("env", [])
    }:
        yield "the head's environment has what is a field of KubeRay's"
    for group in spec.get("workerGroupSpecs", []):
        if not 0 <= group["minReplicas"] <= group["maxReplicas"]:
            yield f"{group['groupName']}: not 0 <= minReplicas <= maxReplicas"


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_every_document_is_valid_and_says_all_of_the_recipe(recipe: str, overrides: tuple[str, ...]) -> None:
    found, config, _ = documents(recipe, *overrides)
    for document in found:
        check(document)
    assert [one["kind"] for one in found] == ["ConfigMap", "RayJob", "Service", "PodMonitor", "ScrapeConfig"]
    (text,) = of_kind(found, "ConfigMap")["data"].values()
    assert with_devices(RunConfig.model_validate(yaml.safe_load(text)), has_gpu=True) == config


ABSENT = object()
CLUSTER = ["spec", "rayClusterSpec"]
HEAD_POD, ROLLOUTS = [*CLUSTER, "headGroupSpec", "template", "spec"], [*CLUSTER, "workerGroupSpecs", 1]


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        # What no schema knows, at every depth.
        ("RayJob", ["spec", "entryPoint"], "1", "RayJob has no"),
        ("RayJob", [*CLUSTER, "autoscalerOption"], "1", "RayCluster has no"),
        ("RayJob", [*HEAD_POD, "containers", 0, "resource"], "1", "resource"),
        ("RayJob", [*ROLLOUTS, "minReplica"], "1", "WorkerGroup has no"),
        ("RayJob", [*ROLLOUTS, "template", "spec", "volumes", 1, "emptyDir", "sizelimit"], "1", "sizelimit"),
        ("Service", ["spec", "selectors"], "1", "selectors"),
        ("PodMonitor", ["spec", "podMetricsEndpoints", 0, "scrapeInterval"], "1s", "PodEndpoint has no"),
        ("ScrapeConfig", ["spec", "httpSDConfigs", 0, "uri"], "1", "HttpDiscovery has no"),
        # What has to be there.
        ("RayJob", CLUSTER, ABSENT, "RayJob needs"),
        ("RayJob", [*CLUSTER, "headGroupSpec"], ABSENT, "RayCluster needs"),
        ("RayJob", [*CLUSTER, "headGroupSpec", "template"], ABSENT, "HeadGroup needs"),
        ("RayJob", [*ROLLOUTS, "maxReplicas"], ABSENT, "WorkerGroup needs"),
        ("RayJob", [*HEAD_POD, "containers"], ABSENT, "containers"),
        ("PodMonitor", ["spec", "selector"], ABSENT, "PodMonitor needs"),
        ("ScrapeConfig", ["spec", "httpSDConfigs", 0, "url"], ABSENT, "HttpDiscovery needs"),
        # Types, and values out of a schema's sets and patterns.
        ("RayJob", ["apiVersion"], "ray.io/v1alpha1", "RayJob: "),
        ("RayJob", ["spec", "ttlSecondsAfterFinished"], "600", "no int"),
        ("RayJob", [*ROLLOUTS, "maxReplicas"], 1 << 31, "no int"),
        ("RayJob", [*ROLLOUTS, "replicas"], True, "no int"),
        ("RayJob", [*CLUSTER, "headGroupSpec", "rayStartParams", "num-gpus"], 0, "not all strings"),
        ("RayJob", [*CLUSTER, "autoscalerOptions", "version"], "v3", "none of"),
        ("RayJob", [*CLUSTER, "workerGroupSpecs"], {}, "no list"),
        ("PodMonitor", ["spec", "podMetricsEndpoints", 0, "interval"], "15 s", "isn't"),
        ("ScrapeConfig", ["spec", "relabelings", 0, "action"], "remove", "none of"),
        ("ScrapeConfig", ["spec", "relabelings", 0, "sourceLabels"], ["a-b"], "isn't"),
        ("ScrapeConfig", ["spec", "httpSDConfigs", 0, "url"], "run-metrics:9400/sd", "isn't"),
        # What the operator refuses itself.
        ("RayJob", ["metadata", "name"], "a" * 48, "name a"),
        ("RayJob", ["metadata", "name"], "7b", "name 7b"),
        ("RayJob", ["spec", "shutdownAfterJobFinishes"], False, "ttlSecondsAfterFinished"),
        ("RayJob", ["spec", "runtimeEnvYAML"], "- pip", "no mapping"),
        ("RayJob", [*CLUSTER, "rayVersion"], "2.51.1", "2.52"),
        ("RayJob", [*CLUSTER, "autoscalerOptions", "idleTimeoutSeconds"], -1, "negative"),
        ("RayJob", [*HEAD_POD, "restartPolicy"], "Always", "restartPolicy"),
        ("RayJob", [*ROLLOUTS, "template", "spec", "restartPolicy"], "OnFailure", "restartPolicy"),
        ("RayJob", [*HEAD_POD, "containers", 0, "env", 0, "name"], "RAY_enable_autoscaler_v2", "environment"),
        ("RayJob", [*ROLLOUTS, "rayStartParams", "labels"], "a=b", "ray start"),
        ("RayJob", [*ROLLOUTS, "template", "spec", "containers"], [], "no container"),
        ("RayJob", [*ROLLOUTS, "minReplicas"], 17, "minReplicas <= maxReplicas"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused(kind: str, path: list[Any], value: Any, said: str) -> None:
    """The check above means something."""
    document = copy.deepcopy(of_kind(documents("qwen3_8b_8gpu", *ELASTIC)[0], kind))
    section = document
    for name in path[:-1]:
        section = section[name]
    if value is ABSENT:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    with pytest.raises((ValueError, kubernetes_validate.ValidationError), match=re.escape(said)):
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
