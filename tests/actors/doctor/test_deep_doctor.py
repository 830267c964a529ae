"""The doctor's live layer: its rules with facts that are made up, the model that it cuts out, and a whole visit on gloo."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from actors.carriers import ExportPlan
from actors.commands.cli import app
from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.doctor.cut_model import CONTEXT, VOCABULARY, cut_config, make_model, reference
from actors.doctor.deep_facts import ENGINE_AND_LEARNER, AgreementFact, BroadcastFact, CollectiveFact, DeepFacts, UpdateFact
from actors.doctor.deep_rules import GRADIENT, deep_complaints, predicted
from actors.doctor.live import _Visit, compare_logprobs, slowest, why_no_broadcast
from actors.settings.deadlines import with_deadlines
from actors.settings.derived import derived
from correction.errors import ConfigError, DeadlineExceeded, SyncError
from learner.config import LearnerConfig
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B
from tests.e2e.launch import EVENKEEL, RECIPE, ROOT, environment, evenkeel
from tests.learner.learner_cases import grouped_batch, learner_on
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

RECIPES = Path(__file__).parents[3] / "recipes"
MOST_CPU_S = 90.0
"""Of a visit, with what Ray takes for itself: 48 s were seen on a quiet machine, 67 to 73 s beside ten to twenty busy processes. Twice the
work is more than that on any of them."""
BY_BROADCAST = "weight_sync.transport=broadcast"
REDUCE = CollectiveFact("tensor_parallel", "all_reduce", 2, 256 << 20, 1e-3, True)
UPDATE = UpdateFact(1 << 30, 0.5, 1.0, 0.25)
BROADCAST = BroadcastFact("nccl", 1, 1 << 30, 1.5, 0.25, 0.125)
HEALTHY = DeepFacts("bfloat16", 16 << 30, True, (REDUCE,), (AgreementFact("the engine and the learner", 0.2, 0.01),), UPDATE)


def eight(*overrides: str) -> RunConfig:
    return with_deadlines(derived(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", overrides), has_gpu=True), 16 << 30)


def said(facts: DeepFacts, *overrides: str) -> list[tuple[str, str]]:
    return [(one.severity, str(one)) for one in deep_complaints(facts, eight(*overrides))]


def test_of_a_healthy_machine_only_numbers_are_told() -> None:
    """An all_reduce over two ranks passes its tensor once; the whole version is 16 times what was sent."""
    assert said(HEALTHY) == [
        ("note", "all_reduce of 0.25 GiB over 2 tensor_parallel ranks inside a node: 268 GB/s"),
        ("note", "the engine and the learner differ by up to 0.2 nats, median 0.01, on a model of two layers in bfloat16"),
        ("note", "expect 24 s to publish a version of 16 GiB, and 4 s of an engine's pause (measured with 1 GiB under 8 requests)"),
    ]


def slow(seconds: float, **facts: Any) -> tuple[CollectiveFact, ...]:
    return (replace(REDUCE, seconds=seconds, **facts),)


def differing(**facts: Any) -> tuple[AgreementFact, ...]:
    return (replace(HEALTHY.agreements[0], **facts),)


@pytest.mark.parametrize(
    ("facts", "severity", "words"),
    [
        ({"broken": (("collectives of the learner", "it hung"),)}, "fail", "collectives of the learner: it hung"),
        ({"collectives": slow(1e-3, is_right=False)}, "fail", "all_reduce over 2 tensor_parallel ranks gave wrong numbers. Look for"),
        ({"collectives": slow(0.02)}, "warn", "inside a node: 13.4 GB/s, less than 20 GB/s. Look at nvidia-smi topo -m"),
        ({"collectives": slow(0.2, is_inside_a_node=False)}, "warn", "between nodes: 1.34 GB/s, less than 2 GB/s. Name the fast network"),
        ({"agreements": differing(largest=0.6)}, "fail", "differ by up to 0.6 nats, median 0.01, on a model of two layers in bfloat16: m"),
        ({"agreements": differing(median=0.05)}, "fail", "median 0.05"),
        ({"agreements": differing(largest=float("nan"))}, "fail", "differ by up to nan nats"),
        ({"agreements": differing(gradient=0.2)}, "fail", "the learner's gradient has a norm 20 % off float32's"),
        ({"agreements": differing(gradient=float("nan"))}, "fail", "a norm nan % off"),
        ({"repeats": False}, "warn", "answers to the same seeds differ"),
        ({"update": replace(UPDATE, take_s=400.0)}, "warn", "expect 6.41e+03 s to publish a version of 16 GiB"),
        (
            {"broadcast": replace(BROADCAST, error="no such interface")},
            "fail",
            "a broadcast from the learner's rank 0 to the 1 rank of an engine (nccl) did not work: no such interface. "
            "Set weight_sync.transport: object_store",
        ),
        ({"broadcast": replace(BROADCAST, send_s=1.0)}, "warn", "has 1.07 GB/s, in a group that was there in 1.5 s: less than 2 GB/s"),
    ],
)
def test_a_rule_of_what_was_measured(facts: dict[str, Any], severity: str, words: str) -> None:
    found = said(replace(HEALTHY, **facts))
    assert [(s, t) for s, t in found if words in t and s == severity], found
    assert [s for s, _ in found if s != "note"] == [severity], "and nothing else is complained of"


def test_limits_go_by_the_type_and_gloo_may_be_slow() -> None:
    on_cpu = replace(HEALTHY, dtype="float32", on_gpus=False, collectives=slow(10.0), agreements=differing(largest=2e-4, median=2e-5))
    assert {severity for severity, _ in said(on_cpu)} == {"note"}
    beyond = said(replace(on_cpu, agreements=differing()))
    assert beyond[0][0] == "fail" and "0.2 nats" in beyond[0][1] and "in float32: more than rounding explains" in beyond[0][1]
    assert GRADIENT["float32"] < GRADIENT["float16"] < GRADIENT["bfloat16"]


def test_an_engine_in_float8_may_differ_more_and_the_learner_may_not() -> None:
    apart = AgreementFact("the learner and float32 on a CPU", 0.8, 0.1), AgreementFact(ENGINE_AND_LEARNER, 0.8, 0.1)
    facts = replace(HEALTHY, agreements=apart)
    failed = [sentence for severity, sentence in said(facts, "rollout.engine.quantization=float8_block") if severity == "fail"]
    assert len(failed) == 1 and failed[0].startswith("the learner and float32")
    assert sum(severity == "fail" for severity, _ in said(facts)) == 2


def test_a_version_takes_no_less_than_the_part_of_it_that_was_measured() -> None:
    assert predicted(1 << 20, 1 << 30, 1.5) == 1.5
    assert predicted(4 << 30, 1 << 30, 1.5) == 6.0


@pytest.mark.parametrize(
    ("sync_s", "limit"),
    [(12.0, "12 s here (deadlines.sync_s = 12)"), (600.0, "40 s here (the doctor's own limit, below deadlines.sync_s = 600)")],
)
def test_a_weight_group_that_is_late_names_the_limit_that_was_meant(sync_s: float, limit: str) -> None:
    """A setting that changes nothing is not advised."""
    run = eight(f"deadlines.sync_s={sync_s}")
    late = DeadlineExceeded("weight group w-0-1: not done in 40 s", setting="deadlines")
    assert why_no_broadcast(late, run) == f"weight group w-0-1: not done in 40 s; a weight group has {limit}"
    assert why_no_broadcast(SyncError("no such interface"), run) == "no such interface"


def test_where_weights_are_broadcast_that_is_what_a_version_will_take() -> None:
    """Sent and received at the same time; the object store is for who joins."""
    found = said(replace(HEALTHY, broadcast=BROADCAST), "weight_sync.transport=broadcast")
    assert [severity for severity, _ in found] == ["note"] * 5
    assert [text for _, text in found[2:]] == [
        "expect 24 s to publish a version of 16 GiB to an engine that joins, and 4 s of an engine's pause "
        "(measured with 1 GiB under 8 requests)",
        "a broadcast from the learner's rank 0 to the 1 rank of an engine (nccl) has 4.29 GB/s, in a group that was there in 1.5 s",
        "expect 4 s to publish a version of 16 GiB by broadcast, and 2 s of an engine's pause (measured with 1 GiB under 8 requests)",
    ]


def test_of_each_kind_of_group_the_slowest_is_told_and_a_wrong_one_first() -> None:
    wrong = replace(REDUCE, seconds=1e-4, is_right=False)
    data = replace(REDUCE, group="data_parallel", ranks=4)
    assert slowest([REDUCE, replace(REDUCE, seconds=0.5), data]) == [replace(REDUCE, seconds=0.5), data]
    assert slowest([REDUCE, wrong]) == [wrong]


def test_an_agreement_of_numbers_that_are_none_is_none() -> None:
    assert compare_logprobs("x", [-1.0, -2.0, -3.0], [-1.5, -2.0, -3.1]).largest == 0.5
    assert compare_logprobs("x", [-1.0, float("nan")], [-1.0, -1.0]).largest == float("inf")


def test_what_is_cut_keeps_widths_and_fits_the_layout() -> None:
    """Stages, shares of experts and the vocabulary that is left have to come out even."""
    dense = cut_config(QWEN3_8B | {"layer_types": ["full_attention"] * 36, "eos_token_id": 151_645}, LearnerConfig(pipeline_parallel=4))
    assert (dense["num_hidden_layers"], len(dense["layer_types"]), dense["vocab_size"]) == (4, 4, VOCABULARY)
    assert dense["hidden_size"] == QWEN3_8B["hidden_size"] and dense["eos_token_id"] == VOCABULARY - 1
    assert dense["max_position_embeddings"] == CONTEXT
    experts = cut_config(QWEN3_30B_A3B, LearnerConfig(expert_parallel=4, data_parallel=4))
    assert (experts["num_hidden_layers"], experts["num_experts"]) == (2, 16)
    assert cut_config(QWEN3_8B | {"num_experts": 6}, LearnerConfig())["num_experts"] == 6, "left over: no layer has them"
    small = cut_config(QWEN3_8B | {"vocab_size": 512, "max_position_embeddings": 128}, LearnerConfig())
    assert (small["vocab_size"], small["max_position_embeddings"]) == (512, 128)


def test_the_reference_is_that_of_the_rounded_weights_and_its_gradient_that_of_the_loss(tmp_path: Path) -> None:
    """The gradient's norm by a difference quotient along the gradient itself: d loss / d t of weights + t g is |g|^2."""
    import torch
    from transformers import AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    content = json.loads((save_tiny_model(tmp_path / "whole", **shape) / "config.json").read_text())
    folder, sequences = tmp_path / "cut", [[1, 5, 9, 200, 7, 3], [4, 4, 100, 2, 8, 11]]
    make_model(folder, cut_config(content, LearnerConfig()), "bfloat16")
    found = reference(folder, sequences)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert all(torch.equal(p, p.bfloat16().double()) for p in model.parameters())
    ids = torch.tensor(sequences)

    def loss() -> Any:
        return -torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).mean()

    loss().backward()
    step, losses = 1e-3, []
    with torch.no_grad():
        for factor in (step, -2 * step):  # to one side, and back to the other
            for parameter in model.parameters():
                parameter += factor * parameter.grad
            losses.append(float(loss()))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(found.gradient_norm**2, rel=5e-3)
    assert len(found.logprobs) == 5 and max(found.logprobs) < 0


@pytest.mark.parametrize(("family", "tie"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", False)])
def test_the_learner_agrees_with_the_reference_of_what_was_made(tmp_path: Path, family: str, tie: bool) -> None:
    """To float32's rounding, with a head that is the embedding and with one of its own: the folder says all that both read."""
    content = json.loads((save_tiny_model(tmp_path / "whole", family, tie=tie) / "config.json").read_text())
    folder, batch = tmp_path / "cut", grouped_batch([([1], [5])])
    make_model(folder, cut_config(content, LearnerConfig()), "float32")
    with learner_on(folder) as learner:
        found = learner.logprobs(batch)[1:].tolist()
    assert found == pytest.approx(reference(folder, [batch.token_ids.tolist()]).logprobs, abs=2e-5)


def test_an_engine_in_float8_is_broadcast_float8() -> None:
    """It refuses weights of other types, by either way. The first of two exports by the object store isn't measured."""
    asked: list[ExportPlan] = []

    class BuiltGroup:
        async def export(self, plan: ExportPlan, **_: float) -> Any:
            asked.append(plan)
            return SimpleNamespace(broadcast_error="")

    group: Any = BuiltGroup()
    for quantization in ("none", "float8_block"):
        run = eight(BY_BROADCAST, f"rollout.engine.quantization={quantization}")
        visit = _Visit(run, QWEN3_8B, print)
        asyncio.run(visit._exported(group))
        asyncio.run(visit._broadcast_all(group))
    assert [(plan.float8, plan.stores, plan.broadcasts) for plan in asked] == [
        (float8, not broadcasts, broadcasts) for float8 in (False, True) for broadcasts in (False, False, True)
    ]


def test_deep_is_for_machines_that_are_here() -> None:
    done = CliRunner().invoke(app, ["doctor", str(RECIPE), "--deep", "--gpus", "H100x8"])
    assert isinstance(done.exception, ConfigError) and "leave --gpus and --cluster out" in str(done.exception)


@pytest.mark.slow
def test_a_weight_group_that_comes_to_nothing_is_one_sentence(tmp_path: Path) -> None:
    """The engine gives up after a millisecond, before the learner's rank 0 has told its address."""
    model = save_tiny_model(save_tiny_tokenizer(tmp_path / "model"))
    hasty = "rollout.engine.weight_group_timeout_s=0.001"
    done = evenkeel("doctor", str(RECIPE), "--deep", "--json", f"model={model}", BY_BROADCAST, hasty, timeout_s=300.0)
    failed = [one for one in json.loads(done.stdout)["findings"] if one["level"] == "fail"]
    assert len(failed) == 1, done.stdout + done.stderr
    assert failed[0]["sentence"].startswith("a broadcast from the learner's rank 0 to the 1 rank of an engine (gloo) did not work: ")
    assert failed[0]["setting"].startswith("Set weight_sync.transport: object_store")


def with_cpu_seconds(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """What a short command says, and the CPU seconds of its processes, its children's too, as last seen of each."""
    seen: dict[psutil.Process, float] = {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen([*EVENKEEL, *words], stdout=out, stderr=err, env=environment(), cwd=ROOT)
        until = time.monotonic() + 600.0
        while process.poll() is None and time.monotonic() < until:
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    seen[one] = times.user + times.system
            time.sleep(0.25)
        if process.poll() is None:
            process.terminate()  # it ends its Ray
            process.wait(60.0)
            raise AssertionError("it is still at work")
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, out.read(), err.read()), sum(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "kinds"),
    [
        ("qwen3", ["learner.tensor_parallel=2", "learner.sequence_parallel=true", BY_BROADCAST], ["tensor_parallel"]),
        ("qwen3_moe", ["learner.data_parallel=2", "learner.expert_parallel=2"], ["data_parallel", "expert_parallel"]),
        ("qwen3", ["learner.pipeline_parallel=2"], ["pipeline_parallel"]),
    ],
    ids=["dense", "experts", "stages"],
)
def test_a_visit_on_gloo(tmp_path: Path, family: str, layout: list[str], kinds: list[str]) -> None:
    """Everything is measured, from config.json alone, agrees to float32's rounding, and nothing is left. `make test-deep` runs [dense]. It
    is about a minute's work: of CPU seconds, for a busy machine takes longer."""
    model = tmp_path / "model"
    model.mkdir()
    (save_tiny_model(tmp_path / "whole", family, tie=False) / "config.json").rename(model / "config.json")
    before = set(Path("/tmp").glob("evenkeel-doctor-*"))
    done, cpu_s = with_cpu_seconds("doctor", str(RECIPE), "--deep", "--json", f"model={model}", *layout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert cpu_s < MOST_CPU_S
    findings = json.loads(done.stdout)["findings"]
    notes = [one["sentence"] for one in findings if one["level"] == "note"]
    assert [kind for kind in kinds if any(f"{kind} ranks inside a node" in note for note in notes)] == kinds
    broadcasts = BY_BROADCAST in layout
    assert sum("in float32" in note for note in notes) == 2 + broadcasts, "learner with reference, engine with learner, by each way"
    assert sum(note.startswith("expect ") for note in notes) == 1 + broadcasts
    assert sum("(gloo) has " in note for note in notes) == broadcasts
    failed = [one["sentence"] for one in findings if one["level"] == "fail"]
    assert [text in one for text, one in zip(("no *.safetensors in it", "the folder has no tokenizer"), failed, strict=True)] == [True] * 2
    assert set(Path("/tmp").glob("evenkeel-doctor-*")) == before
