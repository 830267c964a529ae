"""Further rules of the first layer: what ranks and engines would refuse late, memory outside the cache, one node and several."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from evenkeel.actors.cluster import address, cluster
from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.doctor import surroundings
from evenkeel.doctor.facts import NodeFacts, PaperFacts
from evenkeel.doctor.gather import paper_facts
from evenkeel.doctor.memory_rules import rank_options
from evenkeel.doctor.on_nodes import on_nodes
from evenkeel.doctor.on_paper import enough, on_paper
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.memory import RESERVE, rank_memory, state_bytes
from evenkeel.plan.shape import ModelShape
from tests.actors.known_models import QWEN3_06B, QWEN3_8B, save_config
from tests.evenkeel.doctor.test_doctor import DENSE, EXPERTS, H100, HEAD, IN_FLOAT32, RECIPES, eight, node, paper, recipe

doctor = import_module("evenkeel.doctor_command")  # whose function has the same name

OLMOE = {"shape": replace(EXPERTS, model_type="olmoe")}
RECOMPUTED = "learner.routing_replay=recompute learner.optimizer_steps_per_batch=2 correction.proximal=recompute"
ALONE = "learner.tensor_parallel=1 learner.sequence_parallel=false"
FOUR = "learner.tensor_parallel=4 learner.data_parallel=1"
NO_HUB = f"rollout.task.path={RECIPES}"  # a folder, without rows: nothing is looked for on the hub
ARGS, BACKEND = "rollout.engine.engine_args", "rollout.engine.attention_backend"
ENGINES = "rollout.engine.device=cpu rollout.engine.dtype=bfloat16 weight_sync.transport=object_store"
SPLIT = "correction.preset=split-tis"
FRACTION, REQUESTS = "rollout.engine.memory_fraction", "rollout.engine.max_running_requests"


@pytest.mark.parametrize(
    ("overrides", "facts", "severity", "said", "setting"),
    [
        (f"{FRACTION}=0.998", {}, "fail", "an engine leaves 0.908 GiB outside weights and KV cache", "memory_fraction"),
        (f"{FRACTION}=0.98", {}, "warn", "an engine leaves 2.33 GiB outside weights and KV cache", "memory_fraction"),
        (f"{FRACTION}=0.9 {REQUESTS}=4096", {}, "fail", "4096 requests at the same time take up to", "max_running_requests"),
        ("", {"closed_folder": "/shared"}, "fail", "run_dir = runs: this process may not write into /shared", "Set run_dir"),
        (f"{ARGS}.chunked_prefil_size=8", {}, "fail", "chunked_prefil_size: SGLang has no such argument", "chunked_prefill_size?"),
        (f"{BACKEND}=flashinfre", {}, "fail", "attention_backend = flashinfre: SGLang has no such backend", "Did you mean flashinfer?"),
        (f"{BACKEND}=nonsense", {}, "fail", "attention_backend = nonsense", "Leave it out"),
        (f"{BACKEND}=stock", {}, "fail", "attention_backend = stock: SGLang has no such backend", "Leave it out"),
        (f"{ARGS}.decode_attention_backend=nonsense", {}, "fail", "engine_args.decode_attention_backend = nonsense", "Leave it out"),
        (f"{IN_FLOAT32} {ALONE}", {"host_bytes": 16 << 30}, "fail", "of the 16 GiB that this machine or con", "smaller model"),
        (f"{IN_FLOAT32} {ALONE}", {"host_bytes": 500 << 30}, "warn", "of the 500 GiB that this machine or con", "more memory"),
        (ENGINES, {"host_bytes": 48 << 30}, "fail", "of the 48 GiB that this machine or container has outside its GPUs: ", "smaller model"),
        # Four copies, in each of four ranks, of half a model: 122 GiB, whatever else there is.
        (f"{SPLIT} max_staleness=4", {"host_bytes": 120 << 30}, "fail", "earlier weights 122 GiB", "Lower max_staleness"),
        (f"{SPLIT} max_staleness=4", {"host_bytes": 128 << 30}, "warn", "earlier weights 122 GiB", "Lower max_staleness"),
        ("learner.routing_replay=rollout", {}, "fail", "routing_replay = rollout: qwen3 has no experts", "none"),
        (RECOMPUTED, {}, "fail", "routing_replay = recompute: qwen3 has no experts", "none"),
        ("learner.moe_aux_loss_coefficient=0.001", {}, "fail", "moe_aux_loss_coefficient = 0.001: qwen3 has no experts", "Set it to 0"),
        ("learner.routing_replay=rollout", OLMOE, "fail", "SGLang's olmoe doesn't report which experts it took", "recompute"),
    ],
)
def test_a_rule(overrides: str, facts: dict[str, Any], severity: str, said: str, setting: str) -> None:
    complaints = on_paper(paper(**facts), eight(*overrides.split()))
    assert any(c.severity == severity and said in c.sentence and setting in c.setting for c in complaints), complaints


def test_what_sglang_knows_is_handed_on() -> None:
    assert on_paper(paper(), eight(f"{BACKEND}=fa3", f"{ARGS}.chunked_prefill_size=4096", f"{ARGS}.prefill_attention_backend=triton")) == []
    on_cpu = recipe("nano_spell_backward", f"{BACKEND}=stock", has_gpu=False)
    assert on_paper(PaperFacts(replace(DENSE, context=128)), on_cpu) == []


def test_nothing_is_said_of_experts_that_are_there() -> None:
    words = ["learner.sequence_parallel=true", "learner.moe_aux_loss_coefficient=0.001"]
    for kind, replay in (("qwen3_moe", "learner.routing_replay=rollout"), ("olmoe", RECOMPUTED)):
        found = on_paper(paper(shape=replace(EXPERTS, model_type=kind)), eight(*words, *replay.split()))
        assert not any("experts" in one.sentence for one in found), found


def test_the_doctor_looks_where_the_run_folder_would_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a cluster are shown a file there, as `train` shows them one in the folder itself."""
    shown: list[Path | None] = []

    def nodes(config: RunConfig, folder: Path | None) -> list[NodeFacts]:
        shown.append(folder)
        return [replace(node(), reads_run_folder=False)]

    monkeypatch.setattr(doctor, "nodes_of_cluster", nodes)
    monkeypatch.setattr(cluster, "Cluster", lambda _, *, tries: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "gpus_there", lambda _, *, tries: 8)
    monkeypatch.setattr(surroundings, "check_ray", lambda _: None)
    model = f"model={save_config(tmp_path / 'model', QWEN3_8B)}"
    words = [str(RECIPES / "qwen3_8b_8gpu.yaml"), model, "ray.address=auto", f"run_dir={tmp_path / 'runs' / 'one'}", NO_HUB]
    done = CliRunner().invoke(app, ["doctor", *words])
    assert shown == [tmp_path] and done.exit_code == 1
    assert "the run folder isn't the same on 10.0.0.1" in " ".join(done.stdout.split())


@pytest.mark.parametrize("late", [False, True], ids=["nobody listens", "it doesn't let us join"])
def test_what_follows_from_the_recipe_is_said_also_where_no_cluster_answers(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever mends the address would meet it next. With devices left open nothing of them is known."""

    def refuse(_: object, **__: object) -> None:
        raise address.NoClusterError("ray.address = 'auto': no Ray cluster answers there. Start one")

    monkeypatch.setattr(surroundings, "check_ray", (lambda _: None) if late else refuse)
    monkeypatch.setattr(cluster, "Cluster", refuse)
    recipe_path, model = str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={save_config(tmp_path / 'model', QWEN3_8B)}"
    words = ["doctor", recipe_path, model, "ray.address=auto", "learner.pipeline_parallel=5", NO_HUB]
    done = CliRunner().invoke(app, [*words, "learner.device=cuda", "rollout.engine.device=cuda", "--json"])
    said = [(one["level"], one["sentence"]) for one in json.loads(done.stdout)["findings"]]
    assert done.exit_code == 1 and said[0][0] == "fail" and "no Ray cluster answers there" in said[0][1]
    assert any("= 5 doesn't divide the model's 36 layers" in sentence for _, sentence in said), said
    left_open = CliRunner().invoke(app, [*words, "learner.device=auto", "--json"])
    assert [one["sentence"] for one in json.loads(left_open.stdout)["findings"]] == [said[0][1]]


def test_what_is_said_of_this_machine_starts_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[object]()
    monkeypatch.setattr(ray, "init", lambda *_, **__: started.append(1))
    on_cpus = ["learner.device=cpu", "rollout.engine.device=cpu"]
    words = [str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={save_config(tmp_path, QWEN3_8B)}", *on_cpus, NO_HUB]
    done = CliRunner().invoke(app, ["doctor", *words, "--json"])
    assert [row["kind"] for row in json.loads(done.stdout)["resources"]] == ["CPU"], done.output
    assert not started and not ray.is_initialized()


def test_without_an_address_a_run_has_one_node() -> None:
    """Ray started by the run itself knows no other machine."""
    four = Gpus.parse("H100x8x4")
    (found,) = enough(four, eight("rollout.workers=16"))
    assert found.severity == "fail" and "it asks for 20 GPUs, and 8 x H100 (80 GiB) are 8" in found.sentence and "auto" in found.setting
    assert enough(four, eight("rollout.workers=16", "ray.address=auto")) == []
    assert enough(replace(four, nodes=1), eight()) == enough(four, eight()) == []


def test_who_has_too_few_gpus_or_too_small_ones_is_told_what_to_set() -> None:
    (found,) = enough(Gpus.parse("24GBx1"), recipe("qwen3_0.6b_1gpu", "rollout.gpus_per_worker=0.9"))
    assert "the run asks for 2 GPUs" in found.sentence
    assert "learner.gpus_per_rank and rollout.gpus_per_worker that add up to 1" in found.setting
    small = on_paper(PaperFacts(ModelShape.of(QWEN3_8B), (24 << 30,)), eight())
    of_rank = next(one for one in small if "rank needs" in one.sentence)
    assert all(name in of_rank.setting for name in ("learner.tensor_parallel", "rollout.engine.context_length")), of_rank.setting


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        ("rollout.engine.tensor_parallel=2", "Lower rollout.workers or rollout.engine.tensor_parallel or learner.data_parallel"),
        ("rollout.workers=5 learner.data_parallel=4 ALONE", "Lower rollout.workers or learner.data_parallel, or have an engine and a rank"),
        ("rollout.min_workers=1 rollout.max_workers=8", "Lower rollout.max_workers or learner.data_parallel or learner.tensor_parallel"),
        ("rollout.engine.tensor_parallel=8 rollout.workers=1 learner.data_parallel=1 ALONE", "Lower rollout.engine.tensor_parallel"),
        ("rollout.workers=8 learner.data_parallel=1 ALONE weight_sync.transport=broadcast", "Lower rollout.workers"),
        ("rollout.workers=9 learner.device=cpu learner.dtype=bfloat16", "Lower rollout.workers"),
    ],
)
def test_who_has_too_few_gpus_is_told_the_settings_that_ask_for_them(words: str, advised: str) -> None:
    """Each that is above 1, and no other; a share where both sides can have one. Of settings at 1 there is nothing to lower."""
    config = eight(*words.replace("ALONE", ALONE).split())
    (found,) = [one for one in enough(H100, config) if "the run asks for" in one.sentence]
    assert found.setting.startswith(advised) and (found.setting == advised or not advised.endswith(("workers", "engine.tensor_parallel")))
    (of_nodes,) = [one for one in on_nodes([node()], config, DENSE) if "GPUs, and Ray has 8" in one.sentence]
    assert of_nodes.setting == f"{found.setting}; or take a machine with more"


def test_who_has_no_gpu_is_told_so() -> None:
    """To share one, or to lower a number, would help nobody there."""
    bare = replace(HEAD, rollout_units=1.0)
    for config in (recipe("qwen3_0.6b_1gpu"), eight()):
        (found,) = [one for one in on_nodes([bare], config, ModelShape.of(QWEN3_06B)) if "and Ray has 0" in one.sentence]
        assert found.setting == "Start it on a machine with GPUs that torch sees, or set rollout.engine.device and learner.device to cpu"
        assert ("asks for 1 GPU, and" in found.sentence) == (config.learner.world_size == 1)


def test_a_remedy_names_nothing_that_is_set_already_or_has_no_effect() -> None:
    """The one-GPU recipe recomputes activations, and its ranks and engines have shares, which go with no tensor parallelism."""
    small = PaperFacts(ModelShape.of(QWEN3_06B), (12 << 30,))
    (of_rank,) = [one.setting for one in on_paper(small, recipe("qwen3_0.6b_1gpu")) if "rank needs" in one.sentence]
    assert "recompute_activations" not in of_rank and "tensor_parallel" not in of_rank and "learner.gpus_per_rank" in of_rank
    tight = recipe("qwen3_0.6b_1gpu", "rollout.gpus_per_worker=0.15")
    (of_share,) = [one.setting for one in on_paper(small, tight) if "an engine has" in one.sentence]
    assert "rollout.gpus_per_worker" in of_share and "tensor_parallel" not in of_share and "memory_fraction" not in of_share
    (whole,) = [one.setting for one in on_paper(paper(gpus=(18 << 30,)), eight()) if "an engine has" in one.sentence]
    assert "gpus_per_worker" not in whole and "rollout.engine.tensor_parallel" in whole


def test_a_rank_too_large_by_its_micro_batch_is_told_so() -> None:
    """Of 65,536 tokens, where the longest sequence has 10,240; the head's logits are those of a chunk."""
    config = eight("learner.tokens_per_microbatch=65536", "learner.logprob_chunk_tokens=65536")
    found = next(one for one in on_paper(paper(gpus=(24 << 30,)), config) if "rank needs" in one.sentence)
    assert "activations of 65,536 tokens" in found.sentence, "what is counted, not the longest sequence"
    assert "learner.tokens_per_microbatch" in found.setting and "learner.logprob_chunk_tokens" in found.setting


@pytest.mark.parametrize(
    "words", ["learner.report_kl_every=1", "monitor.split_every=10", "learner.report_kl_every=1 monitor.split_every=10"]
)
def test_other_weights_on_a_rank_s_gpu_are_counted_once_and_beside_no_training_pass(words: str) -> None:
    """Of the reference or of an earlier version: each is loaded in addition to the present ones for its forward pass, and none together.
    Activations that are kept for a backward pass, and the head's gradients, are of another time: what counts is the larger of the two."""
    facts = paper(gpus=(24 << 30,))

    def needed(*more: str) -> tuple[float, str]:
        sentence = next(one.sentence for one in on_paper(facts, eight(*more)) if "rank needs" in one.sentence)
        return float(sentence.partition("rank needs ")[2].partition(" GiB")[0]), sentence

    weights = state_bytes(DENSE, eight().learner)[0] / 2**30
    for recomputes in (True, False):
        layers = f"learner.recompute_activations={recomputes}"
        (bare, of_training), (found, of_both) = needed(layers), needed(layers, *words.split())
        config = eight(layers, *words.split())
        memory = rank_memory(DENSE, config.learner, **rank_options(config))
        assert memory.other / 2**30 == pytest.approx(weights) and "other weights" not in of_training
        at_most = memory.state + max(memory.training, memory.other + memory.forward) + RESERVE
        assert found == pytest.approx(at_most / 2**30, rel=0.006), "as printed, with three digits"
        assert (f"other weights {weights:.3g} GiB, a forward pass of 16,384 tokens with them" in of_both) == recomputes
        assert (found > bare) == recomputes and found < bare + weights
    at_once = eight("monitor.split_every=10", "max_staleness=0")
    assert not at_once.loads_other_weights, "no earlier version is kept"


def test_a_kl_that_is_reported_fits_where_training_fits() -> None:
    """Of the one-GPU recipe on an A10G: a rank's share is 15.7 GiB; activations and the reference's weights together would be more."""
    config = recipe("qwen3_0.6b_1gpu", "learner.report_kl_every=1")
    facts = PaperFacts(ModelShape.of(QWEN3_06B), (Gpus.parse("A10Gx1").memory,))
    assert config.loads_other_weights
    assert [one for one in on_paper(facts, config) if one.severity != "note"] == []


@pytest.mark.parametrize(
    ("words", "model", "gpu"),
    [
        ("learner.recompute_activations=false", QWEN3_8B, H100.memory),
        ("learner.distributed_optimizer=false", QWEN3_8B, 60 << 30),
        ("FOUR learner.sequence_parallel=false learner.recompute_activations=false", QWEN3_8B, 70 << 30),
        ("learner.pipeline_parallel=2 learner.data_parallel=1 learner.recompute_activations=false", QWEN3_8B, 70 << 30),
        ("ALONE learner.gpus_per_rank=0.7 rollout.workers=1 learner.recompute_activations=false", QWEN3_06B, 36 << 30),
    ],
)
def test_a_rank_that_doesn_t_fit_is_told_a_layout_that_does(words: str, model: dict[str, Any], gpu: int) -> None:
    """Who follows the advice is told nothing more of the rank, nor that another of its settings is wrong."""
    facts, asked = PaperFacts(ModelShape.of(model), (gpu,)), words.replace("ALONE", ALONE).replace("FOUR", FOUR).split()
    remedy = next(c.setting for c in on_paper(facts, eight(*asked)) if "rank needs" in c.sentence)
    advice = [f"learner.{word}" for word in remedy.removeprefix("Set, under learner: ").split()]
    mended = eight(*asked, *advice)
    assert [c for c in on_paper(facts, mended) if c.severity == "fail"] == [], remedy
    assert mended.learner.world_size == eight(*asked).learner.world_size


def test_that_layout_has_no_group_larger_than_a_node(tmp_path: Path) -> None:
    """Eight ranks on nodes of four GPUs, whether the nodes are meant, or there."""
    kind, asked = Gpus.parse("A100-40x4x4"), ["ray.address=auto", "learner.data_parallel=8", *ALONE.split()]
    config = eight(*asked)
    facts = paper_facts(config, save_config(tmp_path, QWEN3_8B), meant=[kind])
    there = [node(name=f"10.0.0.{i}", offered_gpus=4.0, gpu_bytes=(kind.memory,) * 4) for i in range(4)]
    for found in (on_paper(facts, config), on_nodes(there, config, DENSE)):
        (remedy,) = [one.setting for one in found if "rank needs" in one.sentence]
        mended = eight(*asked, *(f"learner.{word}" for word in remedy.removeprefix("Set, under learner: ").split()))
        assert [one for one in on_paper(facts, mended) + enough(kind, mended) if one.severity == "fail"] == [], remedy
        assert mended.learner.tensor_parallel == 4, "on a node of eight it would be 8"
