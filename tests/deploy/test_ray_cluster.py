"""What `evenkeel deploy --aws`, `--local` and `--slurm` print: against Ray's own schema, and against what the recipe asks of Ray."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import gpus_asked, room_for_engines, workers_with_a_unit
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError
from evenkeel.deploy_command import as_yaml
from evenkeel.deployment.ray_clusters import aws, local, slurm
from evenkeel.deployment.sizes import name_of
from evenkeel.plan.hosts import hosts
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import load_config
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
SHAPES = {"qwen3_30b_a3b_4nodes": QWEN3_30B_A3B, "qwen3_8b_8gpu": QWEN3_8B}
ELASTIC = ("rollout.min_workers=1", "rollout.max_workers=16")
CASES = [("qwen3_30b_a3b_4nodes", (), 4), ("qwen3_8b_8gpu", ELASTIC, 3), ("qwen3_8b_8gpu", ("rollout.workers=12",), 2)]
"""Recipe, settings, and the nodes of 8 GPUs on which it has room: 16 ranks and 16 engines; 4 and 16 (20 GPUs); 4 and 12."""
FORMS = ("aws", "local")


def asked(recipe: str, *overrides: str) -> tuple[RunConfig, ModelShape]:
    settings = ["ray.address=auto", "run_dir=/shared/runs/r", *overrides]
    return with_devices(load_config(RunConfig, ROOT / "recipes" / f"{recipe}.yaml", settings), has_gpu=True), ModelShape.of(SHAPES[recipe])


def cluster(form: str, recipe: str, *overrides: str, hosts: int = 4) -> dict[str, Any]:
    """As it is read from what is printed."""
    config, shape = asked(recipe, *overrides)
    gpus = Gpus.parse("H200x8")
    if form == "aws":
        made = aws(config, shape, gpus, image="REGISTRY/evenkeel:gpu", volume="FILE_SERVER", mount="/shared")
    else:
        made = local(config, shape, gpus, hosts=[f"10.0.0.{i + 1}" for i in range(hosts)])
    return dict(yaml.safe_load(as_yaml([made])))


def script(recipe: str, *overrides: str) -> str:
    config, shape = asked(recipe, *overrides)
    return slurm(config, shape, Gpus.parse("H200x8"), [f"recipes/{recipe}.yaml", *overrides])


def commands(found: dict[str, Any], role: str) -> str:
    """How Ray is started there."""
    return str(found[f"{role}_start_ray_commands"][-1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("recipe", "overrides", "_nodes"), CASES)
def test_ray_takes_it(form: str, recipe: str, overrides: tuple[str, ...], _nodes: int) -> None:
    validate_config(prepare_config(cluster(form, recipe, *overrides)))


@pytest.mark.parametrize(
    ("form", "mistyped"),
    [
        ("aws", ("idle_timeout_minuts",)),
        ("aws", ("available_node_types", "rollouts", "min_worker")),
        ("aws", ("provider", "kind")),
        ("aws", ("docker", "images")),
        ("local", ("min_worker",)),
    ],
)
def test_a_mistyped_key_is_refused(form: str, mistyped: tuple[str, ...]) -> None:
    """The check above means something: Ray's schema does refuse. `provider` alone is open, but must keep its type."""
    found = cluster(form, "qwen3_8b_8gpu", *ELASTIC)
    section = found
    for name in mistyped[:-1]:
        section = section[name]
    section[mistyped[-1]] = section.pop("type") if mistyped[0] == "provider" else 1
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validate_config(prepare_config(copy.deepcopy(found)))


def offered(form: str, recipe: str, *overrides: str, hosts: int) -> list[tuple[float, float]]:
    """(GPUs, units of the rollout resource) of each node that may be there."""
    if form == "slurm":
        text = script(recipe, *overrides)
        per_node, nodes, units = (
            int(re.search(rf"{what}=(\d+)", text)[1])  # type: ignore[index]
            for what in ("--gpus-per-node", "--nodes", "EVENKEEL_WORKERS_PER_NODE")
        )
        return [(per_node, units)] * nodes
    found = cluster(form, recipe, *overrides, hosts=hosts)
    if form == "aws":
        kinds = [kind for name, kind in found["available_node_types"].items() if name != found["head_node_type"]]
        assert found["max_workers"] == sum(kind["max_workers"] for kind in kinds)
        offers = [(kind["resources"], kind["max_workers"]) for kind in kinds]
        return [(each["GPU"], each.get("rollout", 0)) for each, most in offers for _ in range(most)]
    starts = [commands(found, "head"), *[commands(found, "worker")] * len(found["provider"]["worker_ips"])]
    return [(int(one.partition("--num-gpus=")[2].split()[0]), int(one.partition('"rollout": ')[2].split("}")[0])) for one in starts]


@pytest.mark.parametrize("form", [*FORMS, "slurm"])
@pytest.mark.parametrize(("recipe", "overrides", "wanted"), CASES)
def test_it_has_the_gpus_and_units_that_the_recipe_asks_for(form: str, recipe: str, overrides: tuple[str, ...], wanted: int) -> None:
    (config, _), nodes = asked(recipe, *overrides), offered(form, recipe, *overrides, hosts=wanted)
    workers = config.rollout.most_workers
    assert len(nodes) == wanted and sum(gpus for gpus, _ in nodes) >= gpus_asked(config, workers=workers)
    assert workers_with_a_unit([units for _, units in nodes], workers) == workers
    assert room_for_engines([(int(gpus), int(units)) for gpus, units in nodes], config) >= workers


@pytest.mark.parametrize("form", FORMS)
def test_a_node_lets_in_who_has_the_token_and_is_left_the_time_that_its_workers_need(form: str) -> None:
    """deadlines.drain_s and as long again; a run refuses a cluster that lets everybody in. The head knows after 3 s that a node is gone."""
    found = cluster(form, "qwen3_8b_8gpu", *ELASTIC, "deadlines.drain_s=31")
    head, worker = commands(found, "head"), commands(found, "worker")
    assert "RAY_AUTH_MODE=token" in head and "RAY_AUTH_MODE=token" in worker and "~/.ray/auth_token" in found["file_mounts"]
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=62 " in worker and "RAY_health_check_period_ms=1000" in head
    assert "--port=6379" in head and "--address=$RAY_HEAD_IP:6379" in worker


def test_a_pool_that_follows_the_load_has_nodes_of_its_own_and_a_fixed_one_shares_equal_nodes() -> None:
    elastic = cluster("aws", "qwen3_8b_8gpu", *ELASTIC)["available_node_types"]
    bounds = {name: (kind["min_workers"], kind["max_workers"]) for name, kind in elastic.items() if name != "head"}
    assert bounds == {"learner": (1, 1), "rollouts": (0, 2)} and "rollout" not in elastic["learner"]["resources"]
    fixed = cluster("aws", "qwen3_30b_a3b_4nodes")["available_node_types"]
    assert (fixed["gpus"]["min_workers"], fixed["gpus"]["node_config"]["InstanceType"]) == (4, "p5en.48xlarge")


def test_a_container_is_that_of_the_dockerfile_and_sees_the_run_folder_and_the_hub() -> None:
    """Ray copies files into a container by the container's own rsync; a head in one reaches its workers by its own ssh. Ray's own default
    for the head is `pip install boto3`, by whatever pip is first there."""
    found, dockerfile = cluster("aws", "qwen3_30b_a3b_4nodes"), (ROOT / "deploy" / "Dockerfile").read_text()
    assert {"openssh-client", "rsync"} <= set(dockerfile.split())
    folder = next(line.split()[1] for line in dockerfile.splitlines() if line.startswith("WORKDIR"))
    started = found["head_start_ray_commands"] + found["worker_start_ray_commands"] + found["head_setup_commands"]
    assert all(f"{folder}/.venv/bin/" in one for one in started), "a login shell has no PATH of the image"
    assert [one.split()[0] for one in prepare_config(found)["head_setup_commands"] if "boto3" in one] == [f"{folder}/.venv/bin/pip"]
    assert any("FILE_SERVER:/ /shared" in one for one in found["initialization_commands"])
    assert {"--volume=/shared:/shared", "--env=HF_HOME=/shared/huggingface"} <= set(found["docker"]["run_options"])


def test_shared_memory_holds_what_a_node_keeps_there() -> None:
    """The object store's versions, batches and answers, and the engines' buckets, as `plan` counts them: Docker gives 64 MB by itself. The
    store gets no more than that of it."""
    config, shape = asked("qwen3_30b_a3b_4nodes")
    found = cluster("aws", "qwen3_30b_a3b_4nodes")
    driver, learner, engines = hosts(shape, config, gpus_per_node=8, nodes=4)
    types = found["available_node_types"]
    options = {"head": found["docker"]["head_run_options"], "gpus": types["gpus"]["docker"]["worker_run_options"]}
    for name, counted in (("head", [driver]), ("gpus", [learner, engines])):
        size = next(int(one[len("--shm-size=") : -1]) << 30 for one in options[name] if one.startswith("--shm-size="))
        store = types[name]["resources"]["object_store_memory"]
        for one in counted:
            stored = sum(amount for what, amount in one.parts.items() if "object store" in what)
            assert stored <= store and store + one.parts.get("buckets in shared memory", 0) <= size


def test_a_job_script_says_bash_and_sbatch_what_the_run_needs() -> None:
    """Slurm's warning comes as long before the end as a step and a checkpoint may take; the recipe's words are the user's."""
    text = script("qwen3_30b_a3b_4nodes", "deadlines.drain_s=4", "name=it's mine")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    config, _ = asked("qwen3_30b_a3b_4nodes")
    waits = round(config.deadlines.step_s + config.deadlines.checkpoint_s)
    assert options == {
        "job-name": "evenkeel-it-s-mine",
        "nodes": "4",
        "gpus-per-node": "8",
        "ntasks-per-node": "1",
        "exclusive": "",
        "signal": f"B:TERM@{waits}",
    }
    words = shlex.split(text.splitlines()[-1])
    assert words[:4] == ["exec", "deploy/slurm.sh", "recipes/qwen3_30b_a3b_4nodes.yaml", "deadlines.drain_s=4"]
    assert words[4:] == ["name=it's mine", "--retries", "3", "metrics.bind=node", "metrics.discovery_port=9400"]
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=14" in text


@pytest.mark.parametrize(
    ("form", "overrides", "said"),
    [
        ("local", ("rollout.workers=12",), r"^--host names 1 host, and the run needs 2 with 8 x H200\. Name more"),
        ("aws", ("run_dir=runs/here",), r"^run_dir = runs/here: not on the volume that all nodes see at /shared"),
        ("aws", ("rollout.engine.tensor_parallel=16",), r"H200x8: a tensor-parallel group of 16 has to fit into a node"),
        ("aws", ("learner.gpus_per_rank=0.5", "rollout.gpus_per_worker=0.5", *ELASTIC), r"which share no GPU\. Set both to 1"),
    ],
)
def test_what_such_nodes_cannot_run_is_refused(form: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(form, "qwen3_8b_8gpu", *overrides, hosts=1)


def test_the_command_prints_each_form_for_a_model_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_tiny_model(save_tiny_tokenizer(tmp_path / "model"))
    words = ["deploy", str(ROOT / "recipes/qwen3_0.6b_1gpu.yaml"), f"model={model}", f"run_dir={tmp_path}/run", "ray.address=auto"]
    words += ["rollout.engine.context_length=64", "rollout.sampling.max_tokens=16", "--gpus", "L40Sx1"]

    def printed(*more: str) -> str:
        answer = CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
        assert answer.exit_code == 0
        return answer.stdout

    found = yaml.safe_load(printed("--aws", "--image", "R/evenkeel:gpu", "--volume", "F", "--mount", str(tmp_path)))
    assert found["available_node_types"]["gpus"]["node_config"]["InstanceType"] == "g6e.8xlarge"
    assert yaml.safe_load(printed("--local", "--host", "10.0.0.1"))["provider"] == {
        "type": "local",
        "head_ip": "10.0.0.1",
        "worker_ips": [],
    }
    assert printed("--slurm").startswith("#!/usr/bin/env bash\n#SBATCH --job-name=evenkeel-")
    for more, said in (
        ([], "one of --kuberay, --aws, --local and --slurm"),
        (["--local"], "needs? --host"),
        (["--slurm", "--aws"], "one of"),
    ):
        with pytest.raises(ConfigError, match=said):
            printed(*more)


@pytest.mark.parametrize(
    ("name", "said"),
    [("Qwen3 8B", "qwen3-8b"), ("3b-run", "run-3b-run"), ("a" * 39 + "-bcd", "a" * 39), ("_", "run"), ("7a" * 30, "run-" + "7a" * 18)],
)
def test_a_name_is_one_that_kubernetes_takes(name: str, said: str) -> None:
    """Of a Service it begins with a letter (DNS-1035), and as a label's value it ends in no dash."""
    config, _ = asked("qwen3_8b_8gpu", f"name={name}")
    assert name_of(config) == said and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", said)


def test_a_slurm_job_offers_the_resource_that_the_run_asks_for() -> None:
    assert "EVENKEEL_RESOURCE=engines" in script("qwen3_8b_8gpu", "ray.rollout_resource=engines")
    assert "${EVENKEEL_RESOURCE:-rollout}" in (ROOT / "deploy" / "slurm.sh").read_text()
    (line,) = (line for line in script("qwen3_8b_8gpu", "ray.rollout_resource=my engines").splitlines() if line.startswith("export"))
    told = subprocess.run(["bash", "-c", f"{line}; echo $EVENKEEL_RESOURCE"], capture_output=True, text=True, check=True)
    assert told.stdout == "my engines\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slurm", "--host", "10.0.0.1"), "takes --host with --local alone"),
        (("--slurm", "--volume", "shared"), "takes --image, --volume and --mount with --kuberay and --aws alone"),
        (("--local", "--host", "10.0.0.1", "--image", "x"), "takes --image, --volume and --mount with --kuberay and --aws alone"),
        (("--slurm", "--mount", "/data"), "takes --image, --volume and --mount with --kuberay and --aws alone"),
        (("--slurm", "--namespace", "runs"), "takes --namespace with --kuberay alone"),
        (("--slurm", "--cluster"), "takes --cluster with --kuberay alone"),
        (("--slurm", "--gpus", "H200x8x4"), "--gpus H200x8x4: evenkeel deploy counts the nodes itself, from the recipe. Write H200x8"),
    ],
)
def test_an_option_of_another_kind_of_cluster_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(
            app, ["deploy", str(ROOT / "recipes" / "qwen3_8b_8gpu.yaml"), *words], catch_exceptions=False, standalone_mode=False
        )
