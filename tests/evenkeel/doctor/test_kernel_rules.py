"""What kernels there are, by the kind of GPU; what SGLang's make of the weights that an engine was sent, and which models they take in
float8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.doctor.facts import Complaint, GpuFact, NodeFacts, PaperFacts
from evenkeel.doctor.on_nodes import on_nodes
from evenkeel.doctor.on_paper import architecture_of, float8_can_be_had, half_precision_has_kernels, on_paper, weights_stay_as_sent
from evenkeel.plan.layouts import GPUS, Gpus
from evenkeel.rollout.engine_settings.engine_capabilities import TESTED_SGLANG
from tests.actors.known_models import QWEN3_30B_A3B, save_config
from tests.evenkeel.doctor.test_doctor import DENSE, EXPERTS, FLOAT8, HEAD, RANKS, RECIPES, eight, node, paper, recipe

RUNNER = "rollout.engine.engine_args.moe_runner_backend"
REMEDY = "Set it to triton, or leave it out"
B200 = GpuFact("B200", 180 << 30, 180 << 30, "sm_100")
BLACKWELL = [node(gpus=(B200,) * 8, architectures=("sm_100",))]
HALF = "learner.dtype=float16"
SIDES = ["the learner's attention", "SGLang's kernels"]


def failures(found: list[Complaint]) -> list[str]:
    return [one.setting for one in found if one.severity == "fail"]


@pytest.mark.parametrize(
    ("runner", "setting"),
    [("", []), (f"{RUNNER}=auto", [REMEDY]), (f"{RUNNER}=triton", []), (f"{RUNNER}=cutlass", ["Set it to triton"])],
)
def test_experts_on_blackwell_want_another_runner(runner: str, setting: list[str]) -> None:
    """Than SGLang's auto, and an engine gets it. Whoever asks: for GPUs of a plan, for those of nodes, for those that torch doesn't see
    there."""
    words, kind = runner.split(), Gpus.parse("B200x8x4")
    config = recipe("qwen3_30b_a3b_4nodes", *words)
    facts = PaperFacts(EXPERTS, (kind.memory,), (kind.architecture,))
    assert failures(on_paper(facts, config)) == setting
    joined = [HEAD, node(gpus=(), gpu_bytes=(B200.bytes,) * 8, driver_architectures=("sm_100",) * 8, visible_devices="")]
    for found in (on_nodes(BLACKWELL, eight(*words), EXPERTS), on_nodes(joined, config, EXPERTS)):
        assert [one for one in failures(found) if "triton" in one] == ([REMEDY] if setting == [REMEDY] else [])
    assert on_nodes(BLACKWELL, eight(*words), DENSE) == []


@pytest.mark.parametrize("runner", ["triton_kernel", "flashinfer_trtllm", "flashinfer_trtllm_routed"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_runner_that_lays_experts_out_otherwise_is_refused_everywhere(runner: str, device: str) -> None:
    on = [f"learner.device={device}", f"rollout.engine.device={device}", f"{RUNNER}={runner}"]
    (found,) = [one for one in on_paper(PaperFacts(EXPERTS), recipe("qwen3_30b_a3b_4nodes", *on)) if one.severity == "fail"]
    assert f"moe_runner_backend = {runner}: SGLang may lay the weights of experts out" in found.sentence and "triton" in found.setting
    assert failures(on_paper(PaperFacts(DENSE), eight(f"{RUNNER}={runner}"))) == []


@pytest.mark.parametrize(
    ("products", "architecture", "is_refused"),
    [
        ("auto", "sm_100", True),
        ("deep_gemm", "sm_103", True),
        ("triton", "sm_100", False),
        ("deep_gemm", "sm_90", False),
        ("deep_gemm", "sm_121", True),
        ("auto", "sm_121", False),
        ("deep_gemm", "sm_120", False),
    ],
)
def test_scales_that_would_be_rounded_anew_are_refused(products: str, architecture: str, is_refused: bool) -> None:
    named = f"rollout.engine.engine_args.fp8_gemm_runner_backend={products}"
    found = list(weights_stay_as_sent(DENSE, eight(FLOAT8, named), [architecture]))
    assert ["rounds the scales of float8 anew" in one.sentence for one in found] == [True] * is_refused
    assert [one.setting for one in found] == ["Set it to triton, or leave it out"] * is_refused
    assert [list(weights_stay_as_sent(DENSE, eight(*words), [architecture])) for words in ([FLOAT8], [named])] == [[], []]


@pytest.mark.parametrize(
    ("architectures", "overrides", "severity", "said"),
    [
        (["sm_80"], FLOAT8, "fail", "float8_block on sm_80"),
        (["sm_86"], FLOAT8, "fail", "float8_block on sm_86"),
        (["sm_86", "sm_90"], FLOAT8, "warn", "float8_block on sm_86"),
        (["sm_89"], FLOAT8, "", ""),
        (["sm_80"], "", "", ""),
        ([""], FLOAT8, "", ""),
    ],
)
def test_types_that_a_gpu_has_no_products_of(architectures: list[str], overrides: str, severity: str, said: str) -> None:
    config = eight(*overrides.split())
    found = list(weights_stay_as_sent(DENSE, config, architectures))
    assert [one.severity for one in found] == [severity] * bool(severity) and all(said in one.sentence for one in found), found
    there = [node(gpus=tuple(GpuFact("", 80 << 30, 80 << 30, one) for one in architectures) * (8 // len(architectures)), architectures=())]
    if severity:
        assert found == [one for one in on_nodes(there, config, DENSE) if one.severity == severity]


@pytest.mark.parametrize("half", ["learner.dtype=bfloat16", HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("of_ranks", "of_engines", "overrides", "severity", "sides"),
    [
        (["sm_75"], ["sm_75"], "", "fail", ["the learner's attention", "SGLang's kernels"]),
        (["sm_70", "sm_75"], ["sm_80"], "", "fail", ["the learner's attention"]),
        (["sm_90"], ["sm_75"], "", "fail", ["SGLang's kernels"]),
        (["sm_75", "sm_90"], ["sm_90"], "", "warn", ["the learner's attention"]),
        (["sm_75", "sm_90"], ["sm_75"], "", "fail", ["the learner's attention", "SGLang's kernels"]),
        (["sm_75"], ["sm_75"], "learner.device=cpu", "fail", ["SGLang's kernels"]),
        (["sm_75"], ["sm_75"], "rollout.engine.device=cpu", "fail", ["the learner's attention"]),
        (["sm_80"], ["sm_86"], "", "", []),
        ([""], [], "", "", []),
    ],
)
def test_neither_side_has_kernels_for_gpus_before_ampere(
    half: str, of_ranks: list[str], of_engines: list[str], overrides: str, severity: str, sides: list[str]
) -> None:
    """In float16 no more than in bfloat16: torch's variable-length attention is FlashAttention in both. One sentence for both sides."""
    found = list(half_precision_has_kernels(eight(*overrides.split(), *half.split()), of_ranks=of_ranks, of_engines=of_engines))
    assert [one.severity for one in found] == [severity] * bool(severity)
    assert all("sm_80 (Ampere) and later" in one.setting and [side for side in SIDES if side in one.sentence] == sides for one in found)


def test_a_learner_in_float32_needs_no_flash_attention() -> None:
    on_cpu = ["rollout.engine.device=cpu", "learner.dtype=float32", "rollout.engine.dtype=float32"]
    assert list(half_precision_has_kernels(eight(*on_cpu), of_ranks=["sm_75"], of_engines=["sm_75"])) == []


@pytest.mark.parametrize("half", ["learner.dtype=bfloat16", HALF], ids=["bfloat16", "float16"])
def test_whoever_asks_old_gpus_are_refused(half: str) -> None:
    """For GPUs of a plan, and for those of nodes, of which some may be a rank's and no engine's."""
    config, old = eight("ray.address=auto", *half.split()), "GPUs of sm_75 are too old for the learner's attention in half precision"
    turing = node(gpus=(GpuFact("T4", 80 << 30, 80 << 30, "sm_75"),) * 8, architectures=())
    assert [one.severity for one in on_paper(paper(architectures=("sm_75",)), config) if one.sentence.startswith(old)] == ["fail"]
    for nodes, said in (([turing], ["fail"]), ([replace(turing, rollout_units=0.0), node(name="b")], ["warn"])):
        assert [one.severity for one in on_nodes(nodes, config, DENSE) if one.sentence.startswith(old)] == said


def test_experts_that_ranks_hold_whole_can_be_in_float8() -> None:
    """768 channels are six blocks: of four ranks each has half of an expert at most; on a CPU SGLang counts them as if all shared it."""
    four, facts = [FLOAT8, f"{RANKS}=4"], paper(shape=EXPERTS)
    for groups, on_cpu, said in ((1, False, ["192"]), (2, False, []), (4, False, []), (4, True, ["192"])):
        devices = ["learner.device=cpu", "rollout.engine.device=cpu", "learner.dtype=bfloat16"] if on_cpu else []
        found = list(float8_can_be_had(facts, eight(*four, f"rollout.engine.expert_parallel={groups}", *devices)))
        assert [c.sentence.partition("experts have ")[2].split()[0] for c in found] == said
        assert all(("expert_parallel higher" in c.setting) is not on_cpu for c in found)
    assert list(float8_can_be_had(facts, eight(FLOAT8))) == []


def test_on_a_gpu_float8_wants_whole_blocks_of_the_hidden_channels_too() -> None:
    """SGLang's kernels there round 128 neighbours of what goes in, and nothing less; by hand on a CPU the last ones may be fewer."""
    facts, on_cpu = paper(shape=replace(DENSE, hidden=4160)), ["learner.device=cpu", "rollout.engine.device=cpu", "learner.dtype=bfloat16"]
    (found,) = float8_can_be_had(facts, eight(FLOAT8))
    assert found.severity == "fail" and "its hidden_size is 4160, no multiple of 128" in found.sentence and "none" in found.setting
    assert list(float8_can_be_had(facts, eight(FLOAT8, *on_cpu))) == []


def test_every_gpu_by_name_has_an_architecture() -> None:
    assert all(architecture_of(architecture) is not None for _, architecture in GPUS.values())
    assert (Gpus.parse("A100x8").architecture, Gpus.parse("24GBx1").architecture) == ("sm_80", "")


def test_both_commands_know_the_gpus_kind(tmp_path: Path) -> None:
    model = f"model={save_config(tmp_path, QWEN3_30B_A3B)}"
    words = [str(RECIPES / "qwen3_30b_a3b_4nodes.yaml"), model, f"{RUNNER}=auto", "--gpus", "B200x8x4"]
    for command in ("doctor", "plan"):
        done = CliRunner().invoke(app, [command, *words])
        assert "on Blackwell SGLang lays the weights of experts out" in " ".join(done.stdout.split()), done.output


def test_a_node_without_ranks_and_engines_may_be_installed_for_a_cpu() -> None:
    """A head by `make` beside nodes by `make gpu`. What it has must be of the same release, and what is evenkeel's own the same."""
    joined, installed = eight("ray.address=auto"), dict(node().versions) | {"torch": "2.13.0+cu130", "transformer-engine": "2.9.0"}
    of_cpu = {"torch": "2.13.0+cpu", "ray": "2.60.0", "sglang": TESTED_SGLANG}

    def said(nodes: list[NodeFacts], config: RunConfig) -> list[str]:
        return [one.sentence for one in on_nodes(nodes, config, DENSE) if "different versions" in one.sentence]

    gpu_node = node(versions=installed)
    assert said([replace(HEAD, versions=of_cpu), gpu_node], joined) == []
    (of_torch,) = said([replace(HEAD, versions=of_cpu | {"torch": "2.12.0+cpu"}), gpu_node], joined)
    assert of_torch == "the nodes have different versions of torch: 2.12.0+cpu on head; 2.13.0+cu130 on 10.0.0.1"
    (of_te,) = said([gpu_node, node(name="b", versions=installed | {"transformer-engine": ""})], joined)
    assert of_te == "the nodes have different versions of transformer-engine: none on b; 2.9.0 on 10.0.0.1", "a rank may be on either"
    on_cpus = recipe("nano_spell_backward", "ray.address=auto", has_gpu=False)
    assert len(said([replace(HEAD, versions=of_cpu), gpu_node], on_cpus)) == 3, "there a rank may be on the head, too"
