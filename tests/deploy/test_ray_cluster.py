"""The cluster files of deploy/ against Ray's own schema, and against what the recipe of their README asks of Ray."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.testing import CliRunner

from actors.commands.cli import app
from actors.commands.recipe import load_config
from actors.config import RayConfig, RunConfig
from actors.doctor.cluster_file import ClusterFile, NodeKind, _gpu_name, cluster_complaints
from actors.doctor.facts import Complaint
from actors.plan.gpus import MEMORY_MIB
from actors.plan.host_memory import BATCHES, FOR_CHECKPOINTS, hosts
from actors.plan.shape import ModelShape
from actors.settings.derived import derived
from correction.errors import ConfigError
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B, save_config

ROOT = Path(__file__).parents[2]
CLOUD, LOCAL, IMAGE = (ROOT / "deploy" / f"ray-cluster{name}.yaml" for name in ("", "-local", "-gpu"))
RECIPE, LARGE = (ROOT / "recipes" / f"{name}.yaml" for name in ("qwen3_8b_8gpu", "qwen3_30b_a3b_4nodes"))
ASKED = {CLOUD: ("rollout.min_workers=1", "rollout.max_workers=16"), LOCAL: ("rollout.workers=12",)}
"""What the README starts on the first two, next to the smaller recipe's four ranks; on the third the larger recipe as it is."""
LEARNER, ROLLOUT = '{"CPU": 96, "GPU": 8}', '{"CPU": 32, "GPU": 1, "rollout": 1}'
"""Resources of the cloud's types."""


def content(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


def recipe_of(path: Path) -> Path:
    return LARGE if path == IMAGE else RECIPE


def found(path: Path, *overrides: str, recipe: Path | None = None) -> list[Complaint]:
    cluster = ClusterFile.read(path, RayConfig().rollout_resource)
    settings = [one for one in ASKED.get(path, ()) if one.partition("=")[0] not in {other.partition("=")[0] for other in overrides}]
    config = load_config(RunConfig, recipe or recipe_of(path), ["ray.address=auto", *settings, *overrides])
    return cluster_complaints(cluster, derived(config, has_gpu=cluster.has_gpus))


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


@pytest.mark.parametrize("path", [CLOUD, LOCAL, IMAGE], ids=["cloud", "local", "image"])
def test_it_has_what_the_recipe_asks_for(path: Path) -> None:
    assert found(path) == []


def test_what_is_read() -> None:
    assert ClusterFile.read(CLOUD, "rollout").kinds == (
        NodeKind("head", 1, 0.0, 0.0),
        NodeKind("learner", 1, 0.0, 8, "H100"),
        NodeKind("rollout", 16, 1, 1, "L40S"),
    )
    local = ClusterFile.read(LOCAL, "rollout")
    assert local.kinds == (NodeKind("head host", 1, 8.0, 8.0), NodeKind("worker host", 1, 8.0, 8.0)) and local.is_fixed


def test_a_model_is_judged_by_the_memory_of_the_instances(tmp_path: Path) -> None:
    """Pairs of ranks of 55 GiB have a place on the H100s alone, 61 GB of weights none on the L40S. A resource may name the GPU, too."""
    cluster = ClusterFile.read(CLOUD, "rollout")
    config = derived(load_config(RunConfig, RECIPE, ["ray.address=auto"]), has_gpu=True)
    assert cluster_complaints(cluster, config, ModelShape.of(QWEN3_8B)) == []
    too_large = cluster_complaints(cluster, config, ModelShape.of(QWEN3_30B_A3B))
    assert any(one.severity == "fail" and "an engine has 0 MiB for its KV cache" in one.sentence for one in too_large)
    named = content(CLOUD)
    named["available_node_types"]["rollout"] |= {"resources": {"GPU": 1, "rollout": 1, "accelerator_type:H200": 1}, "node_config": {}}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(named))
    assert ClusterFile.read(path, "rollout").kinds[2].gpu_bytes == MEMORY_MIB["H200"] << 20


@pytest.mark.parametrize(
    ("instance", "resource", "gib"),
    [
        ("p4d.24xlarge", "A100", 40),
        ("p4de.24xlarge", "A100", 80),
        ("p4d.24xlarge", "A100-80G", 40),
        ("", "A100-80G", 80),
        ("", "A100-40G", 40),
        ("", "A100", None),
        ("x9.large", "A100", None),
        ("", "A10G", 22),
    ],
)
def test_an_a100_is_of_40_gb_or_of_80(instance: str, resource: str, gib: int | None) -> None:
    """Ray's accelerator_type:A100 is either, so that the instance type is asked first."""
    kind = {"node_config": {"InstanceType": instance}}
    found = _gpu_name(kind, {"GPU": 8, f"accelerator_type:{resource}": 1})
    assert (found and round(MEMORY_MIB[found] / 2**10)) == gib


def test_the_larger_model_has_room_on_the_nodes_with_an_image() -> None:
    cluster, config = ClusterFile.read(IMAGE, "rollout"), derived(load_config(RunConfig, LARGE), has_gpu=True)
    assert cluster.kinds[1] == NodeKind("gpus", 4, 8, 8, "H200")
    assert cluster_complaints(cluster, config, ModelShape.of(QWEN3_30B_A3B)) == []


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
    cluster, config = content(IMAGE), derived(load_config(RunConfig, LARGE), has_gpu=True)
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


@pytest.mark.parametrize(
    ("path", "change", "severity", "said"),
    [
        (CLOUD, (ROLLOUT, ROLLOUT.replace("rollout", "rollouts")), "fail", "no node of"),
        (CLOUD, ("max_workers: 16", "max_workers: 12"), "warn", "offer 12 at most: the others wait"),
        (CLOUD, ("max_workers: 17", "max_workers: 9"), "warn", "9 for all nodes but the head, and their kinds may have 17"),
        (CLOUD, (LEARNER, LEARNER.replace(', "GPU": 8', "")), "fail", "has room for 0 groups"),
        (CLOUD, (LEARNER, LEARNER.replace("8", "2")), "fail", "has room for 1 groups"),
        (CLOUD, (ROLLOUT, ROLLOUT.replace(": 1}", ": 2}")), "warn", "not all of these units can be used"),
        (CLOUD, ("RAY_AUTH_MODE=token", ""), "fail", "lets everybody in"),
        (LOCAL, ('{"rollout": 8}', '{"rollout": 5}'), "warn", "offer 10 at most"),
        (LOCAL, ('{"rollout": 8}', '{"rollout": 5.5}'), "warn", "offer 10 at most"),
        (LOCAL, ('{"rollout": 8}', '{"rollout": 6}'), "warn", "in addition to the learner {path} has room for 10 of them: workers wait"),
        (LOCAL, ('{"rollout": 8}', '{"rollout": 0.5}'), "fail", "no node of {path} offers a whole one"),
        (IMAGE, ('"GPU": 8, "rollout": 8', '"GPU": 8'), "fail", "no node of"),
        (IMAGE, ('"GPU": 8, "rollout": 8', '"GPU": 6, "rollout": 6'), "warn", "16 ranks and 16 workers ask for 32 GPUs, and"),
        (LOCAL, ("--num-gpus=8", "--num-gpus=6"), "warn", "4 ranks and 12 workers ask for 16 GPUs"),
        (LOCAL, ("RAY_AUTH_MODE=token evenkeel/.venv/bin/ray start --address", "evenkeel/.venv/bin/ray start --address"), "fail", "lets"),
    ],
)
def test_what_does_not_agree_is_said(tmp_path: Path, path: Path, change: tuple[str, str], severity: str, said: str) -> None:
    text = path.read_text()
    assert change[0] in text
    changed = tmp_path / "cluster.yaml"
    changed.write_text(text.replace(*change))
    complaints = found(changed, *ASKED.get(path, ()), recipe=recipe_of(path))
    assert any(one.severity == severity and said.format(path=changed) in one.sentence for one in complaints), complaints


def test_an_engine_of_several_gpus_wants_them_on_one_node() -> None:
    said = [(one.severity, one.sentence) for one in found(CLOUD, *ASKED[CLOUD], "rollout.engine.tensor_parallel=2")]
    assert any(severity == "fail" and "offer 'rollout' have 1 GPUs at most" in text for severity, text in said), said
    assert [one for one in found(LOCAL, "rollout.engine.tensor_parallel=4") if one.severity == "fail"] == []


def test_engines_of_several_gpus_are_counted_by_node() -> None:
    """Two hosts of eight GPUs, of which the learner's four leave four: engines of four have room three times, those of six once."""
    few, sum_of_all = "2 workers have an engine of 6 GPUs, each on one node", "4 ranks and 4 workers ask for 20 GPUs"
    for ranks, workers, said in [(4, 3, None), (6, 2, few), (4, 4, sum_of_all)]:
        complaints = [one.sentence for one in found(LOCAL, f"rollout.engine.tensor_parallel={ranks}", f"rollout.workers={workers}")]
        of_gpus = [text for text in complaints if "of these units" not in text]
        assert len(of_gpus) == (said is not None) and all(text.startswith(said or "") for text in of_gpus), of_gpus


def test_ranks_with_a_share_are_counted_by_gpu() -> None:
    """Of 16 GPUs each holds one rank of 0.6, though the shares of 20 are 12 in all; and a rank doesn't wait as a worker does."""
    ranks = ("learner.tensor_parallel=1", "learner.sequence_parallel=false", "learner.gpus_per_rank=0.6")
    shares = (*ranks, "weight_sync.transport=object_store")
    said = {count: found(LOCAL, *shares, f"learner.data_parallel={count}", "rollout.workers=1") for count in (12, 20)}
    assert said[12] == []
    (complaint,) = said[20]
    assert complaint.severity == "fail" and "has room for 16 groups" in complaint.sentence


def test_hosts_that_detect_their_gpus_are_not_judged_by_them(tmp_path: Path) -> None:
    bare = tmp_path / "cluster.yaml"
    bare.write_text(LOCAL.read_text().replace("--num-gpus=8 ", ""))
    assert found(bare, *ASKED[LOCAL]) == []


def test_a_value_may_be_a_word_of_its_own(tmp_path: Path) -> None:
    """As Ray's command line takes it."""
    spaced = tmp_path / "cluster.yaml"
    spaced.write_text(LOCAL.read_text().replace("--num-gpus=8 --resources=", "--num-gpus 8 --resources "))
    assert "--num-gpus 8" in spaced.read_text() and found(spaced, *ASKED[LOCAL]) == []


def test_a_pool_that_grows_on_hosts_of_ones_own_is_noted() -> None:
    (complaint,) = found(LOCAL, "rollout.workers=4", "rollout.min_workers=1", "rollout.max_workers=12")
    assert complaint.severity == "note" and "starts and frees none" in complaint.sentence


def test_the_doctor_judges_it(tmp_path: Path) -> None:
    words = ["doctor", str(RECIPE), f"model={save_config(tmp_path, QWEN3_8B)}", "--cluster"]
    good = CliRunner().invoke(app, [*words, str(LOCAL), *ASKED[LOCAL]])
    assert (good.exit_code, good.stdout) == (0, "ready\n")
    unseen = CliRunner().invoke(app, [*words, str(LOCAL), *ASKED[LOCAL], f"model={tmp_path / 'none'}"])
    assert unseen.exit_code == 0 and "neither the model nor the memory of GPUs was checked" in unseen.stdout
    for words_of_model in ("learner.pipeline_parallel=5", "rollout.engine.context_length=65536"):
        refused = CliRunner().invoke(app, [*words, str(LOCAL), *ASKED[LOCAL], words_of_model])
        assert refused.exit_code == 1 and "model's" in refused.stdout, "rules of the first layer"
    bad = CliRunner().invoke(app, [*words, str(LOCAL), "ray.rollout_resource=sampler"])
    assert bad.exit_code == 1 and "'sampler'" in bad.stdout
    with pytest.raises(ConfigError, match="no cluster file of `ray up`"):
        ClusterFile.read(RECIPE, "rollout")
    (nested := tmp_path / "nested.yaml").write_text("[" * sys.getrecursionlimit())
    with pytest.raises(ConfigError, match="no cluster file of `ray up`"):
        ClusterFile.read(nested, "rollout")
