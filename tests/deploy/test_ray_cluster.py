"""The cluster files of deploy/ against Ray's own schema, and against what the recipe of their README asks of Ray."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import gpus_asked, room_for_engines, workers_with_a_unit
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.plan.hosts import BATCHES, FOR_CHECKPOINTS, hosts
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import load_config
from tests.actors.known_models import QWEN3_30B_A3B

ROOT = Path(__file__).parents[2]
CLOUD, LOCAL, IMAGE = (ROOT / "deploy" / f"ray-cluster{name}.yaml" for name in ("", "-local", "-gpu"))
RECIPE, LARGE = (ROOT / "recipes" / f"{name}.yaml" for name in ("qwen3_8b_8gpu", "qwen3_30b_a3b_4nodes"))
ASKED = {CLOUD: ("rollout.min_workers=1", "rollout.max_workers=16"), LOCAL: ("rollout.workers=12",)}
"""What the README starts on the first two, next to the smaller recipe's four ranks; on the third the larger recipe as it is."""


def content(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", [CLOUD, LOCAL, IMAGE], ids=["cloud", "local", "image"])
def test_ray_takes_it(path: Path) -> None:
    validate_config(prepare_config(content(path)))


@pytest.mark.parametrize(
    ("path", "mistyped"),
    [
        (CLOUD, ("idle_timeout_minuts",)),
        (CLOUD, ("available_node_types", "rollout", "min_worker")),
        (CLOUD, ("provider", "kind")),
        (LOCAL, ("min_worker",)),
        (IMAGE, ("docker", "images")),
    ],
)
def test_a_mistyped_key_is_refused(path: Path, mistyped: tuple[str, ...]) -> None:
    """The check above means something: Ray's schema does refuse. `provider` alone is open, but must keep its type."""
    cluster = content(path)
    section = cluster
    for name in mistyped[:-1]:
        section = section[name]
    section[mistyped[-1]] = section.pop("type") if mistyped[0] == "provider" else 1
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validate_config(prepare_config(copy.deepcopy(cluster)))


def offered(path: Path) -> list[tuple[float, float]]:
    """(GPUs, units of the rollout resource) of each node that may be there."""
    cluster = content(path)
    if "available_node_types" in cluster:
        types = cluster["available_node_types"].items()
        nodes = [(kind["resources"], 1 if name == cluster["head_node_type"] else kind["max_workers"]) for name, kind in types]
        assert cluster["max_workers"] >= sum(most for _, most in nodes) - 1, "of all types together, the head aside"
        return [(each.get("GPU", 0), each.get("rollout", 0)) for each, most in nodes for _ in range(most)]
    starts = [cluster[f"{role}_start_ray_commands"][-1] for role in ("head", "worker")]
    found = [(float(one.partition("--num-gpus=")[2].split()[0]), float(one.partition('"rollout": ')[2].split("}")[0])) for one in starts]
    return [found[0], *found[1:] * len(cluster["provider"]["worker_ips"])]


@pytest.mark.parametrize(("path", "recipe"), [(CLOUD, RECIPE), (LOCAL, RECIPE), (IMAGE, LARGE)], ids=["cloud", "local", "image"])
def test_it_has_the_gpus_and_units_that_the_recipe_asks_for(path: Path, recipe: Path) -> None:
    config, nodes = with_devices(load_config(RunConfig, recipe, ["ray.address=auto", *ASKED.get(path, ())]), has_gpu=True), offered(path)
    workers = config.rollout.most_workers
    assert sum(gpus for gpus, _ in nodes) >= gpus_asked(config, workers=workers)
    assert workers_with_a_unit([units for _, units in nodes], workers) == workers
    assert room_for_engines([(int(gpus), int(units)) for gpus, units in nodes], config) >= workers
    starts = [c for role in ("head", "worker") for c in content(path)[f"{role}_start_ray_commands"] if "ray start" in c]
    assert all("RAY_AUTH_MODE=token" in one for one in starts), "a run refuses a cluster that lets everybody in"


@pytest.mark.parametrize("path", [CLOUD, IMAGE], ids=["cloud", "image"])
def test_what_asks_the_cloud_for_nodes_is_installed_where_ray_is(path: Path) -> None:
    """Ray's own default for the head is `pip install boto3`, by whatever pip is first there."""
    installed = [one.split()[0] for one in prepare_config(content(path))["head_setup_commands"] if "boto3" in one]
    started = next(word for word in content(path)["head_start_ray_commands"][-1].split() if word.endswith("/ray"))
    assert installed == [str(Path(started).with_name("pip"))]


def test_the_image_is_that_of_the_dockerfile_and_has_what_ray_wants() -> None:
    """Ray copies files into a container by the container's own rsync; a head in one reaches its workers by its own ssh."""
    cluster, dockerfile = content(IMAGE), (ROOT / "deploy" / "Dockerfile").read_text()
    assert cluster["docker"]["image"].endswith("/evenkeel:gpu") and "docker build -f deploy/Dockerfile -t evenkeel:gpu" in dockerfile
    assert {"openssh-client", "rsync"} <= set(dockerfile.split())
    folder = next(line.split()[1] for line in dockerfile.splitlines() if line.startswith("WORKDIR"))
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"] + cluster["head_setup_commands"]
    assert all(f"{folder}/.venv/bin/" in one for one in commands), "a login shell has no PATH of the image"


def test_what_the_recipe_keeps_is_on_the_file_system_of_all_nodes() -> None:
    """Mounted on each machine before its container starts, and into the container under the same path."""
    cluster, config = content(IMAGE), load_config(RunConfig, LARGE)
    mounted = {one.split()[-1] for one in cluster["initialization_commands"] if "mount -t nfs4" in one}
    shown = [one.removeprefix("--volume=").split(":") for one in cluster["docker"]["run_options"] if one.startswith("--volume=")]
    assert shown == [[folder, folder] for folder in mounted] and len(mounted) == 1
    (folder,) = map(Path, mounted)
    cache = next(one for one in cluster["docker"]["run_options"] if one.startswith("--env=HF_HOME=")).rpartition("=")[2]
    for kept in (config.run_dir, config.model, getattr(config.rollout.task, "path", None), Path(cache)):
        assert kept is not None and Path(kept).is_relative_to(folder)


def test_its_shared_memory_holds_what_a_node_keeps_there() -> None:
    """The object store's versions, batches and answers, and the engines' buckets, as `plan` counts them: Docker gives 64 MB by itself, of
    which Ray's object store takes 95 %."""
    cluster, config = content(IMAGE), with_devices(load_config(RunConfig, LARGE), has_gpu=True)
    driver, learner, engines = hosts(ModelShape.of(QWEN3_30B_A3B), config, gpus_per_node=8, nodes=4)
    of_head, of_worker = (
        next(int(one[len("--shm-size=") : -1]) << 30 for one in cluster["docker"][f"{role}_run_options"] if one.startswith("--shm-size="))
        for role in ("head", "worker")
    )
    shared = {name: size for one in (driver, learner, engines) for name, size in one.parts.items() if "store" in name or "shared" in name}
    assert 0.95 * of_head > driver.parts[BATCHES] + driver.parts[FOR_CHECKPOINTS]
    assert of_worker > sum(shared.values()) - driver.parts[BATCHES] - learner.parts["versions in the object store"]


def test_the_autoscaled_type_grows() -> None:
    kind = content(CLOUD)["available_node_types"]["rollout"]
    assert 0 < kind["min_workers"] < kind["max_workers"]
