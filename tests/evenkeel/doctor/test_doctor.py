"""Each rule of the doctor, with facts that are made up; and that a run stops at what can't work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError
from evenkeel.doctor import gather
from evenkeel.doctor.facts import Complaint, GpuFact, NodeFacts, PaperFacts
from evenkeel.doctor.gather import this_node
from evenkeel.doctor.on_nodes import on_nodes
from evenkeel.doctor.on_paper import enough, on_paper, stop_at_failures
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import load_config
from evenkeel.rollout.engine_settings.engine_capabilities import TESTED_SGLANG
from tests.actors.known_models import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, save_config
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

RECIPES = Path(__file__).parents[3] / "recipes"
DENSE, EXPERTS = ModelShape.of(QWEN3_8B), ModelShape.of(QWEN3_30B_A3B)
H100 = Gpus.parse("H100x8")
RANKS = "rollout.engine.tensor_parallel"
IN_FLOAT32 = "learner.device=cpu rollout.engine.device=cpu learner.dtype=float32 rollout.engine.dtype=float32"
FLOAT8 = "rollout.engine.quantization=float8_block"


def recipe(name: str, *overrides: str, has_gpu: bool = True) -> RunConfig:
    return with_devices(load_config(RunConfig, RECIPES / f"{name}.yaml", overrides), has_gpu=has_gpu)


def eight(*overrides: str) -> RunConfig:
    return recipe("qwen3_8b_8gpu", *overrides)


def paper(**facts: Any) -> PaperFacts:
    return replace(PaperFacts(DENSE, (H100.memory,)), **facts)


def test_engines_of_several_gpus_are_on_one_node() -> None:
    """Those of sixteen find no node of eight."""
    gpus, shape = Gpus.parse("H100x8x4"), ModelShape.of(QWEN3_30B_A3B)
    facts = PaperFacts(shape, (gpus.memory,))
    two = recipe("qwen3_30b_a3b_4nodes", "rollout.engine.tensor_parallel=2", "rollout.workers=8")
    assert [c for c in on_paper(facts, two) + enough(gpus, two) if c.severity != "note"] == []
    sixteen = recipe("qwen3_30b_a3b_4nodes", "rollout.engine.tensor_parallel=16", "rollout.workers=1")
    assert [c.sentence for c in enough(gpus, sixteen)] == [
        "rollout.engine.tensor_parallel = 16, but a node has 8 GPUs: an engine is on one node"
    ]


@pytest.mark.parametrize(
    ("overrides", "facts", "severity", "said", "setting"),
    [
        ("learner.tensor_parallel=3", {}, "fail", "learner.tensor_parallel = 3: num_attention_heads = 32, num_key", "divisor"),
        ("learner.pipeline_parallel=5", {}, "fail", "= 5 doesn't divide the model's 36 layers", "divisor"),
        ("rollout.engine.tensor_parallel=3", {}, "fail", "engine.tensor_parallel = 3 doesn't divide the model's 32 heads", "divisor"),
        ("rollout.engine.tensor_parallel=5", {}, "fail", "= 5 and the model's 8 key-value heads: neither divides the other", "divisor"),
        (f"{RANKS}=2", {"shape": replace(DENSE, model_type="olmoe")}, "fail", "olmoe normalises queries and keys over all heads", "to 1"),
        ("learner.gpus_per_rank=0.5", {}, "fail", "two of them would fit on one GPU", ""),
        ("rollout.engine.dtype=float16", {}, "fail", "rollout.engine.dtype = float16 with learner.dtype = bfloat16", ""),
        ("learner.recompute_activations=false", {}, "fail", "a learner rank needs 106 GiB of its 79.6 GiB", "tensor_parallel=4"),
        ("", {"gpus": (18 << 30,)}, "fail", "an engine has 0 MiB for its KV cache in addition to weights of 15.3 GiB", "context_length"),
        (FLOAT8, {"shape": replace(DENSE, model_type="llama")}, "fail", "no engine of llama was seen to take it", "none"),
        (FLOAT8, {"shape": replace(EXPERTS, feed_forward=704)}, "fail", "its experts have 704 channels, no multiple of 128", "none"),
        (f"{FLOAT8} {RANKS}=4", {"shape": EXPERTS}, "fail", "its experts have 192 channels on each of 4 ranks", "expert_parallel higher"),
        (FLOAT8, {"shape": replace(DENSE, key_heads=1, head_width=64)}, "fail", "its keys have 64 channels, no multiple", "none"),
        (f"{FLOAT8} {RANKS}=4", {"shape": replace(DENSE, head_width=32)}, "fail", "its keys have 64 channels on each of 4 ranks", "lower"),
        ("", {"gpus": (24 << 30, H100.memory)}, "warn", "smallest GPUs there are, of 24 GiB: a learner rank", "larger GPUs"),
        ("", {"taken_names": ("/w/rollout.py",)}, "warn", "which a reward gets in their place: /w/rollout.py", "Rename"),
        ("", {"stand_ins": tuple("abcdefg")}, "warn", "Python's standard library, for every process: a, b, c, d, e and 2 more", "Rename"),
        ("", {"disk_free": 100 << 30}, "fail", "a checkpoint has 122 GiB, but the run folder's disk has 100 GiB free", "run_dir"),
        ("", {"disk_free": 200 << 30}, "warn", "2 checkpoints and the one being written have 366 GiB", "checkpoint.keep"),
        ("", {"host_bytes": 128 << 30}, "warn", "or container has outside its GPUs: copy for a checkpoint 122", "more memory"),
    ],
)
def test_a_rule_on_paper(overrides: str, facts: dict[str, Any], severity: str, said: str, setting: str) -> None:
    complaints = on_paper(paper(**facts), eight(*overrides.split()))
    assert any(c.severity == severity and said in c.sentence and setting in c.setting for c in complaints), complaints


@pytest.mark.parametrize(
    ("overrides", "gpu", "severity", "said", "setting"),
    [
        ("", 16, "fail", "a learner rank of 14.7 GiB and an engine of 3.2 GiB (with a KV cache for one", "larger GPU"),
        (
            "rollout.gpus_per_worker=0.12",
            24,
            "fail",
            "for its KV cache in addition to weights of 1.11 GiB and 1.87 GiB for context",
            "raise",
        ),
    ],
)
def test_a_gpu_that_learner_and_engine_share(overrides: str, gpu: int, severity: str, said: str, setting: str) -> None:
    """Both sides are added: each may fit its own share of a larger GPU."""
    complaints = on_paper(PaperFacts(ModelShape.of(QWEN3_06B), (gpu << 30,)), recipe("qwen3_0.6b_1gpu", *overrides.split()))
    assert any(c.severity == severity and said in c.sentence and setting in c.setting for c in complaints), complaints


def test_shares_that_no_gpu_holds_together_are_not_added() -> None:
    """0.96 + 0.5: a rank of 15.2 GiB and an engine of 3.4 are on two GPUs of 16, each of which has room for its own."""
    config = recipe("qwen3_0.6b_1gpu", "learner.gpus_per_rank=0.96", "rollout.gpus_per_worker=0.5")
    assert on_paper(PaperFacts(ModelShape.of(QWEN3_06B), (16 << 30,)), config) == []


def test_nothing_is_said_about_gpus_that_nobody_uses() -> None:
    on_cpu = recipe("nano_spell_backward", has_gpu=False)
    assert on_paper(PaperFacts(replace(DENSE, context=128)), on_cpu) == []
    assert on_paper(paper(disk_free=1 << 50, host_bytes=1 << 40), eight()) == []
    assert on_paper(paper(), eight(FLOAT8)) == []


def node(**facts: Any) -> NodeFacts:
    gpu = GpuFact("H100", H100.memory, H100.memory, "sm_90")
    whole: dict[str, Any] = {
        "name": "10.0.0.1", "offered_gpus": 8.0, "free_gpus": 8.0, "gpus": (gpu,) * 8, "driver_gpus": 8,
        "architectures": ("sm_80", "sm_90"), "rollout_units": 8.0, "cpus": 64.0, "free_cpus": 64.0,
        "versions": {"torch": "2.13.0", "ray": "2.60.0", "sglang": TESTED_SGLANG, "sglang-kernel": "0.4.7"},
    }  # fmt: skip
    whole |= facts
    return NodeFacts(**({"gpu_bytes": tuple(one.bytes for one in whole["gpus"])} | whole))


OTHER_SGLANG = {"torch": "2.13.0", "ray": "2.60.0", "sglang": "0.5.22", "sglang-kernel": "0.4.7"}


def test_a_healthy_node_has_nothing_said() -> None:
    assert on_nodes([node()], eight(), DENSE) == []


HEAD = node(name="head", offered_gpus=0.0, free_gpus=0.0, gpus=(), driver_gpus=0, architectures=(), rollout_units=0.0)
SMALL = GpuFact("RTX 4090", 24 << 30, 24 << 30, "sm_89")
NO_FOLDER = "the folder isn't there"
BLACKWELL = GpuFact("B200", 180 << 30, 180 << 30, "sm_100")


@pytest.mark.parametrize(
    ("nodes", "overrides", "severity", "said", "setting"),
    [
        ([node(offered_gpus=4.0, free_gpus=4.0)], "", "fail", "the run asks for 8 GPUs, and Ray has 4: 4 ranks x 1, 4 workers x 1",
         "or take a machine with more"),
        ([node(offered_gpus=4.0)], "ray.address=auto", "warn", "4 workers x 1; ranks wait for nodes up to deadlines.start_s = 600 s",
         "or add nodes"),
        ([node(free_gpus=5.0)], "ray.address=auto", "warn", "of 8 only 5 are free", "Wait for it"),
        ([node(cpus=7.0)], "", "fail", "the run asks for 8 CPUs, and Ray has 7: 4 ranks, 4 workers", "Raise ray.num_cpus"),
        ([node(cpus=4.0), node(name="b", cpus=3.0)], "ray.address=auto", "warn", "for 8 CPUs, and Ray has 7: 4 ranks, 4 workers; ranks",
         "ray start --num-cpus"),
        ([node(free_cpus=7.0)], "ray.address=auto", "warn", "the run asks for 8 CPUs, of 64 only 7 are free", "Wait for it"),
        (
            [node(offered_gpus=3.0), node(name="b", offered_gpus=3.0), node(name="c", offered_gpus=2.0)],
            "learner.tensor_parallel=4 learner.data_parallel=1",
            "fail",
            "1 tensor-parallel groups of 4 ranks, each on one node, and there is room for 0",
            "Lower learner.tensor_parallel",
        ),
        (
            [node(offered_gpus=5.0), node(name="b", offered_gpus=7.0)],
            "rollout.engine.tensor_parallel=4 rollout.workers=2",
            "fail",
            "2 engines of 4 GPUs each (rollout.engine.tensor_parallel) in addition to the learner, each on one node, and there is room "
            "for 1: GPUs",
            "Lower rollout.engine.tensor_parallel",
        ),
        (
            [node(rollout_units=0.0), node(name="b", offered_gpus=4.0)],
            "ray.address=auto rollout.workers=8",
            "warn",
            "8 engines in addition to the learner, each on a node with a unit of 'rollout', and there is room for 4: GPUs by node",
            "Lower rollout.workers",
        ),
        ([node()], "rollout.engine.tensor_parallel=2", "fail", "the run asks for 12 GPUs, and Ray has 8: 4 ranks x 1, 4 workers x 2",
         "rollout.engine.tensor_parallel"),
        (
            [node(rollout_units=1.5), node(name="b", rollout_units=0.5), node(name="c", rollout_units=2.0)],
            "ray.address=auto",
            "warn",
            "4 rollout workers, each of which asks for one unit of the Ray resource 'rollout', and the nodes offer 3 whole units by now",
            '--resources=\'{"rollout": N}\'',
        ),
        ([node(rollout_units=0.5)] * 2, "ray.address=auto", "warn", "and no node offers a whole unit by now: the workers wait",
         "--resources="),
        ([node(gpus=(), architectures=(), has_cuda=False)], "", "fail", "has 8 GPUs, but its torch is a build without CUDA",
         "constraints-gpu.txt"),
        ([node(offered_gpus=8.0, gpus=node().gpus[:1])], "", "fail", "offers Ray 8 GPUs, but torch sees 1 there", "without --num-gpus"),
        ([node(versions={"torch": "2.13.0"})], "", "fail", "SGLang's GPU kernels (sglang-kernel) aren't installed on 10.0.0.1: that is an",
         "make gpu"),
        ([node(versions={"sglang-kernel": "0.4.7"})], "", "fail", "10.0.0.1: sglang: none is installed: evenkeel hooks functions of",
         "Install that version"),
        ([node(versions=OTHER_SGLANG), node(name="b", versions=OTHER_SGLANG)], "ray.address=auto", "fail",
         f"10.0.0.1, b: sglang: 0.5.22 is installed: evenkeel hooks functions of sglang {TESTED_SGLANG} by name", "Install that version"),
        ([node(), node(name="b", has_plugin=False)], "ray.address=auto", "fail", "b: sglang does not find evenkeel's plugin: without it",
         "as a package"),
        ([node(gpus=(), architectures=())], "", "fail", "has 8 GPUs, but torch, a build with CUDA, sees none: most often the driver",
         "Update the driver"),
        ([node(gpus=(), architectures=(), visible_devices="", offered_gpus=0.0)], "", "fail", "CUDA_VISIBLE_DEVICES = '' hides them",
         "Unset it"),
        ([HEAD, node(gpus=(SMALL,) * 8)], "ray.address=auto", "fail", "a learner rank needs 53.5 GiB of its 24 GiB", "larger GPUs"),
        ([HEAD, node(gpus=(), gpu_bytes=(18 << 30,) * 8)], "ray.address=auto", "fail", "an engine has 0 MiB for its KV cache",
         "context_length"),
        ([node(), node(name="b", gpus=(SMALL,) * 8)], "ray.address=auto", "warn", "smallest GPUs there are, of 24 GiB: a learner rank",
         "larger GPUs"),
        ([node(architectures=("sm_80",))], "", "fail", "torch has no kernels for sm_90, only for sm_80", "another torch"),
        ([node(gpus=(replace(BLACKWELL, free=90 << 30),) * 8, architectures=("sm_100",))], "", "warn", "(B200) has 90 GiB of 180 GiB free",
         "nvidia-smi"),
        ([node(), node(name="b", versions={"torch": "2.12", "ray": "2.60.0"})], "", "fail", "versions of torch: 2.12 on b; 2.13.0 on 10.",
         "the same everywhere"),
        ([node(), node(name="b", reads_run_folder=False)], "", "fail", "the run folder isn't the same on b", "Set run_dir"),
        ([node(), node(name="b", model_obstacle=NO_FOLDER)], "model=m/Qwen3-8B", "warn", "Qwen3-8B: the folder isn't there on b",
         "all nodes mount"),
        ([node(), node(name="b", model_obstacle="not in the cache")], "", "warn", "hf:Qwen/Qwen3-8B: not in the cache on b, where",
         "HF_HOME"),
        ([node(model_obstacle="no"), node(name="b", model_obstacle="no")], "model=m/8B", "fail", "m/8B: no on 10.0.0.1, b, where",
         "all nodes mount"),
        ([node(shared_memory=1 << 30)], "", "fail", "/dev/shm has 1 GiB free, less than the largest bucket of weights, 1.16 G",
         "--shm-size)"),
        ([node(shared_memory=2 << 30)], "", "warn", "/dev/shm has 2 GiB free, and 4 engines may want 9.27 GiB", "--shm-size)"),
        ([node(shared_memory=2 << 30)], "weight_sync.bucket_bytes=4000000000", "fail", "weights, 3.73 GiB",
         "lower weight_sync.bucket_bytes"),
        ([node(shared_memory=4 << 30)], "rollout.engine.tensor_parallel=4", "warn", "and 2 engines may want 4.64 GiB", "--shm-size"),
        ([node(memory=64 << 30)], "ray.address=auto", "warn", "10.0.0.1: 4 ranks would take up to 164 GiB of its 64 GiB of memory: copy",
         "more memory"),
        ([node(open_files=1024)], "ray.address=auto", "warn", "a process may open 1024 files", "ulimit -n"),
        ([node(compilers=("gcc", "nvcc"))], "", "warn", "g++, ninja not found", "CUDA toolkit"),
    ],
)  # fmt: skip
def test_a_rule_about_nodes(nodes: list[NodeFacts], overrides: str, severity: str, said: str, setting: str) -> None:
    complaints = on_nodes(nodes, eight(*overrides.split()), DENSE)
    assert any(c.severity == severity and said in c.sentence and setting in c.setting for c in complaints), complaints


def test_an_engine_s_sglang_matters_where_an_engine_may_be_put_and_a_build_s_own_name_does_not() -> None:
    """Of a node for ranks alone nothing is asked; a version with +cu130 is that version."""
    of_a_build = node(versions=dict(node().versions) | {"sglang": f"{TESTED_SGLANG}+cu130"})
    for_ranks = node(name="b", rollout_units=0.0, has_plugin=False, versions=OTHER_SGLANG)
    on_cpus = node(name="c", gpus=(), offered_gpus=0.0, free_gpus=0.0, architectures=(), driver_gpus=0, has_plugin=False)
    joined = eight("ray.address=auto")
    assert on_nodes([of_a_build], joined, DENSE) == []
    told = on_nodes([node(), for_ranks, on_cpus], joined, DENSE)
    assert not [one.sentence for one in told if "hooks functions" in one.sentence or "plugin" in one.sentence], told
    engines_there = recipe("nano_spell_backward", has_gpu=False)
    assert any("c: sglang does not find evenkeel's plugin" in one.sentence for one in on_nodes([on_cpus], engines_there, DENSE))


def test_kernels_of_a_minor_architecture_run_on_later_ones() -> None:
    assert on_nodes([node(gpus=(GpuFact("L40S", 1 << 36, 1 << 36, "sm_89"),) * 8)], eight(), DENSE) == []


def test_a_machine_with_gpus_that_its_torch_can_t_use_may_compute_on_the_cpu() -> None:
    """The worst that is said then: how to use them."""
    here = node(gpus=(), architectures=(), has_cuda=False, offered_gpus=0.0, free_gpus=0.0)
    (found,) = on_nodes([here], recipe("nano_spell_backward", has_gpu=False), DENSE)  # nor are SGLang's kernels missed
    assert found.severity == "warn" and "constraints-gpu.txt" in found.setting


def test_a_cluster_with_a_head_without_gpus_is_judged_by_its_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver's own GPU, if it has one, says nothing about those of the nodes."""
    monkeypatch.setattr(gather, "gpus_of_driver", lambda: [SMALL])
    model = f"model={save_config(tmp_path, QWEN3_8B)}"
    assert gather.paper_facts(eight(model, "ray.address=auto")).gpus == ()
    assert gather.paper_facts(eight(model)).gpus == (SMALL.bytes,)
    joined = eight("ray.address=auto")
    assert on_nodes([HEAD, node()], joined, DENSE) == []
    small_ones_sample_nothing = [node(), node(name="b", gpus=(SMALL,) * 8, rollout_units=0.0)]
    assert all("learner rank" in found.sentence for found in on_nodes(small_ones_sample_nothing, joined, DENSE))


def test_a_node_s_gpus_of_several_sizes_are_judged_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What fits one of them warns. A display's card that Ray doesn't offer counts for nothing, on a cluster and on this machine."""
    joined, display = eight("ray.address=auto"), GpuFact("T400", 2 << 30, 2 << 30, "sm_75")
    mixed = node(gpus=(), gpu_bytes=(H100.memory,) * 7 + (SMALL.bytes,), visible_devices="")
    assert {found.severity for found in on_nodes([mixed], joined, DENSE)} == {"warn"}
    assert on_nodes([node(gpus=(), gpu_bytes=(display.bytes, *(H100.memory,) * 8), visible_devices="")], joined, DENSE) == []
    large = GpuFact("H100", H100.memory, H100.memory, "sm_90")
    monkeypatch.setattr(gather, "gpus_of_driver", lambda: [display, large, replace(large, bytes=0)])
    monkeypatch.setattr(gather, "visible_gpus", lambda: 1)
    model = f"model={save_config(tmp_path, QWEN3_8B)}"
    assert gather.paper_facts(eight(model)).gpus == (H100.memory,)
    assert this_node(str(tmp_path)).gpu_bytes == (display.bytes, H100.memory), "one doesn't tell its size"


def test_gpus_that_are_hidden_from_torch_are_told_where_nobody_asked_for_them() -> None:
    """`device: auto` would be the CPU without a word. A Ray that offers them may be told to hide them from tasks that ask for none, such as
    the doctor's: nothing is said of them."""
    on_cpu = recipe("nano_spell_backward", has_gpu=False)
    alone = {"gpus": (), "architectures": (), "offered_gpus": 0.0, "free_gpus": 0.0}
    severities = [[c.severity for c in on_nodes([node(**alone, visible_devices=seen)], on_cpu, DENSE)] for seen in (None, "", "-1")]
    assert severities == [["warn"], ["note"], ["note"]]
    assert on_nodes([node(gpus=(), gpu_bytes=(H100.memory,) * 8, visible_devices="")], eight("ray.address=auto"), DENSE) == []


def test_a_run_stops_at_what_can_t_work_and_at_nothing_less() -> None:
    stop_at_failures([Complaint("warn", "slow"), Complaint("note", "so many")])
    with pytest.raises(ConfigError, match=r"^one\. Change it\ntwo$"):
        stop_at_failures([Complaint("fail", "one", "Change it"), Complaint("warn", "slow"), Complaint("fail", "two")])


def test_the_command_says_what_stands_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(save_tiny_tokenizer(tmp_path / "model"), max_position_embeddings=128)
    few = ["rollout.task.held_out_size=16", "rollout.engine.context_length=128"]  # its tokenizer has a token for each byte
    nano = [str(RECIPES / "nano_spell_backward.yaml"), f"model={model}", *few]
    good = CliRunner().invoke(app, ["doctor", *nano, "--json"])
    found = json.loads(good.stdout, parse_constant=pytest.fail)  # Infinity and NaN are no JSON
    assert good.exit_code == 0 and found["summary"].startswith("ready")
    assert [(row["kind"], row["parts"]) for row in found["resources"]] == [("CPU", "1 rank, 1 worker (as Ray counts, not cores)")]
    monkeypatch.setattr(gather, "gpus_of_driver", list)
    bad = CliRunner().invoke(app, ["doctor", *nano, "learner.tensor_parallel=3"])
    assert bad.exit_code == 1 and "num_attention_heads = 4, num_key_value_heads = 2," in bad.stdout
    assert "the run can't work like this" in bad.stdout
    one_gpu = [*nano, "--gpus", "H100x1"]
    assert CliRunner().invoke(app, ["doctor", *one_gpu]).exit_code == 0, "the quick start wants one GPU"
    paper_only = CliRunner().invoke(app, ["doctor", *one_gpu, "learner.gpus_per_rank=1", "rollout.gpus_per_worker=1"])
    assert paper_only.exit_code == 1 and "the run asks for 2 GPUs, and 1 x H100 (80 GiB) are 1" in paper_only.stdout
