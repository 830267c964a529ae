"""Bad input through the real command line: one clear sentence with the place and the remedy, no traceback, a non-zero exit, no engine.

Single bad rows are skipped, counted and reported instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.preparation import prepare
from tests.e2e.launch import RECIPE, environment, evenkeel, refused


def refused_by_process(*words: str) -> str:
    """`refused` from a process of its own: exit code and everything that it prints."""
    result = evenkeel(*words, timeout_s=180.0)
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    said = result.stderr.strip()
    return said[said.rindex("evenkeel: ") :]


@pytest.fixture
def recipe(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that would run, with its folder in the test's own, and its reward's module where it is found."""
    monkeypatch.syspath_prepend(RECIPE.parent)
    path = tmp_path / "recipe.yaml"
    text = RECIPE.read_text().replace("set-by-the-test", str(model))
    path.write_text(text + f"run_dir: {tmp_path / 'run'}\n")
    return path


def rows_task(path: Path) -> list[str]:
    """Overrides for a task of a file's rows."""
    return ["rollout.task.kind=file", f"rollout.task.path={path}", "rollout.reward.kind=exact_match"]


# -- eval ------------------------------------------------------------------------------------------------------------


def test_eval_of_an_unknown_data_set_names_the_nearest(model: Path) -> None:
    """Whatever the sizes of the model: the name is what is wrong."""
    assert "did you mean spell_backward?" in refused("eval", str(model), "--task", "spel_backward")


def test_eval_says_that_no_question_fits(model: Path) -> None:
    said = refused("eval", str(model), "--task", "spell_backward", "rollout.sampling.max_tokens=60", "rollout.engine.context_length=64")
    assert "no question fits into the 2 tokens" in said and "lower it" in said


def test_resume_takes_no_recipe(tmp_path: Path) -> None:
    assert "--resume takes no recipe" in refused("train", "--resume", str(tmp_path), "recipes/nano_chain_sum.yaml")


@pytest.mark.parametrize("content", ["", "a: [1", "steps: 5\nmodel: models/none\n"])
def test_resume_says_what_to_do_about_a_damaged_configuration(tmp_path: Path, content: str) -> None:
    """Its missing keys are not the user's to add: a recipe's remedy would be the wrong one."""
    (tmp_path / "config.yaml").write_text(content)
    (path := tmp_path / "recipe.yaml").write_text(content)
    said = refused("train", "--resume", str(tmp_path))
    assert said.startswith(f"evenkeel: {path}: damaged") and "Put back a whole copy, or start a new run from its weights" in said


# -- the recipe ------------------------------------------------------------------------------------------------------


def test_missing_recipe(tmp_path: Path) -> None:
    assert "no such recipe file" in refused("train", str(tmp_path / "none.yaml"))


def test_unknown_key_names_file_line_and_nearest_key(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "max_stalenes: 2\n")
    line = len(recipe.read_text().splitlines())
    assert refused_by_process("train", str(recipe)) == (
        f"evenkeel: {recipe}:{line}: max_stalenes = 2: no such key; the nearest is max_staleness."
    )


def test_unknown_override(recipe: Path) -> None:
    sentence = refused("train", str(recipe), "rollout.wokers=2")
    assert "command line: rollout.wokers" in sentence and "workers" in sentence


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=many", ["steps = 'many'", "expected int"]),
        ("rollout.sampling.min_tokens=9", ["min_tokens = 9", "every importance ratio would be biased", "Set min_tokens: 0"]),
        ("rollout.sampling.top_k=-1", ["rollout.sampling.top_k: top_k = -1: leave it out"]),
        ("learner.optimizer_steps_per_batch=3", ["groups_per_step = 4 is not a multiple of learner.optimizer_steps_per_batch = 3"]),
        ("correction.preset=icepopp", ["icepopp", "icepop"]),
        ("rollout.sampling.max_tokens=128", ["leaves no room for a prompt"]),
        ("rollout.engine.context_length=52", ["more than the 2 that fit", "or raise rollout.engine.context_length"]),
        ("rollout.engine.context_length=100000", ["context_length = 100000 is more than the model's context of 1024 tokens"]),
        ("learner.learning_rate=inf", ["learner.learning_rate = 'inf': input should be a finite number"]),
        ("steps=100000000000000000000", ["steps = 100000000000000000000: expected int > 0 and <= 1000000000"]),
        ("name=" + "n" * 300, ["name = 'nnn", "string should have at most 100 characters"]),
    ],
)
def test_bad_value(recipe: Path, override: str, words: list[str]) -> None:
    sentence = refused("train", str(recipe), override)
    assert all(word in sentence for word in words), sentence


def test_gpus_that_are_not_there(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for them until deadlines.start_s."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sentence = refused("train", str(recipe), "rollout.engine.device=cuda", "learner.device=cuda")
    assert "rollout.engine.device = cuda with 1 worker and learner.device = cuda with 1 rank: 2 GPUs are needed" in sentence
    assert not (recipe.parent / "run").exists(), "nothing was made"


def test_an_unknown_task_is_said_before_any_size(model: Path) -> None:
    """The sizes of a task that there is not are nobody's concern: answers of 2,000 tokens don't fit into 1,024 either."""
    sentence = refused("eval", str(model), "--task", "nope", "rollout.sampling.max_tokens=2000")
    assert "rollout.task.dataset = nope: reasoning-gym has no such data set" in sentence


def test_unknown_data_set_names_the_nearest(recipe: Path) -> None:
    sentence = refused("train", str(recipe), "rollout.task.dataset=spell_backwards")
    assert "rollout.task.dataset = spell_backwards" in sentence and "did you mean spell_backward?" in sentence


# -- data ------------------------------------------------------------------------------------------------------------


def test_missing_data_file(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert f"rollout.task.path = {path}: no such file" in refused("train", str(recipe), *rows_task(path))


def test_no_usable_row(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1"}\n')
    sentence = refused("train", str(recipe), *rows_task(path))
    assert "none of its 1 rows can be used" in sentence and f'{path}:1: no field "prompt" (it has question)' in sentence


def test_a_file_of_another_encoding(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Épelez été {i}", "answer": f"é{i}"} for i in range(20)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="latin-1")
    sentence = refused("train", str(recipe), *rows_task(path))
    assert f"rollout.task.path = {path}: not UTF-8: 20 lines" in sentence and "likely Windows-1252" in sentence


def test_half_a_surrogate_pair_is_a_skipped_row(recipe: Path, tmp_path: Path) -> None:
    from evenkeel.actors.config import RunConfig
    from evenkeel.recipe import load_config

    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i} + 1 =" + "\ud800" * (i == 4), "answer": str(i + 1)} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, _, notes = prepare(load_config(RunConfig, recipe, rows_task(path)))
    assert "1 bad row skipped" in notes[0] and f"{path}:5: field 'prompt' holds '\\ud800'" in "\n".join(notes)


def test_bad_rows_are_skipped_counted_and_reported(recipe: Path, tmp_path: Path) -> None:
    """The notes that a run puts into its events; what makes them is called as the run calls it."""
    from evenkeel.actors.config import RunConfig
    from evenkeel.recipe import load_config

    path = tmp_path / "rows.jsonl"
    rows: list[object] = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]
    rows[3] = {"answer": "no prompt"}
    rows[7] = {"prompt": "word " * 200, "answer": "longer than the context"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{torn\n")
    _, task, notes = prepare(load_config(RunConfig, recipe, rows_task(path)))
    text = "\n".join(notes)
    assert "3 bad rows skipped" in notes[0]
    assert f'{path}:4: no field "prompt" (it has answer)' in text
    assert f"{path}:8: its prompt has " in text and "tokens, more than the 78 that fit" in text
    assert f"{path}:41: no valid JSON" in text
    assert len({task.train_prompt(i).text for i in range(100)} | {p.text for p in task.held_out_prompts()}) == 38


# -- reward ----------------------------------------------------------------------------------------------------------


def test_a_judge_that_is_down_at_a_resume_is_waited_for(recipe: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has had scores, so it starts, and says what its workers will wait for; a new run is refused. A function that can't be loaded
    is refused either way."""
    from evenkeel.actors.config import RunConfig
    from evenkeel.recipe import load_config
    from evenkeel.rollout.rewards.rewards import RewardError

    (tmp_path / "far_judge.py").write_text("def score(completion):\n    raise TimeoutError('the judge is down')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(RunConfig, recipe, ["rollout.reward.path=far_judge:score"])
    said = "rollout.reward (far_judge:score): the reward raised TimeoutError: the judge is down (tried on held_out/"
    with pytest.raises(RewardError, match=re.escape(said)):
        prepare(config)
    _, _, notes = prepare(config, resumed_from=model)
    (note,) = [one for one in notes if one.startswith(said)]
    assert note.endswith("The run has had scores, and goes on: its workers try that again for 30 minutes")
    with pytest.raises(RewardError, match="far_judge has no scores; did you mean score"):
        prepare(load_config(RunConfig, recipe, ["rollout.reward.path=far_judge:scores"]), resumed_from=model)


# -- model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (["*"], "has no config.json"),
        (["tokenizer*"], "the folder has no tokenizer"),
        (["*.safetensors"], "no *.safetensors in it"),
    ],
)
def test_incomplete_model_folder(recipe: Path, model: Path, tmp_path: Path, missing: list[str], words: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(*missing))
    sentence = refused("train", str(recipe), f"model={folder}")
    assert f"model = {folder}" in sentence and words in sentence


def edited(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def layers(folder: Path, count: int) -> None:
    edited(folder, num_hidden_layers=count, layer_types=["full_attention"] * count)


def without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "model.norm.weight"}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "model.safetensors: damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(bytes(5000)), "model.safetensors: damaged"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3",'), "config.json: damaged, no JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json: damaged, no JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: damaged, it holds no JSON object"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "unusable tokenizer"),
        (lambda folder: edited(folder, hidden_size=96), "embed_tokens.weight has shape (512, 64) instead of (512, 96)"),
        (lambda folder: layers(folder, 3), "model.layers.2.self_attn.q_proj.weight is missing"),
        (lambda folder: layers(folder, 1), "model.layers.1.input_layernorm.weight has no place in the model"),
        (without_a_tensor, "model.norm.weight is missing"),
        (lambda folder: edited(folder, model_type="gpt2"), "gpt2 can't be trained; supported are glm4, llama, mistral"),
        (lambda folder: edited(folder, model_type="no_such"), "config.json: transformers makes no model of it"),
        (lambda folder: edited(folder, num_key_value_heads=0), "its sizes make no model"),
    ],
)
def test_damaged_model_folder(recipe: Path, model: Path, tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    """Known from the headers of the files: before a run folder is made, and long before an engine."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    damage(folder)
    sentence = refused("train", str(recipe), f"model={folder}")
    assert str(folder) in sentence and words in sentence, sentence
    assert not (tmp_path / "run").exists()


def test_missing_model_folder(recipe: Path, tmp_path: Path) -> None:
    sentence = refused("train", str(recipe), f"model={tmp_path / 'none'}")
    assert "no such folder" in sentence and "evenkeel init-model RECIPE" in sentence


# -- run folder and cluster ------------------------------------------------------------------------------------------


def test_two_runs_on_one_folder(recipe: Path, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "other"):
        assert f"in use by process {os.getpid()}" in refused("train", str(recipe))
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert "holds other files" in refused("train", str(recipe)), "the folder is free now, but not empty"


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    assert "not a run folder: it has no config.yaml" in refused("train", "--resume", str(tmp_path))


def test_whatever_the_system_refuses_is_said_with_the_file() -> None:
    name = "x" * 300
    assert refused("doctor", name) == f"evenkeel: {name}/config.json: File name too long"


def test_address_of_no_cluster(recipe: Path) -> None:
    """At once, and not after Ray has tried for a minute."""
    sentence = refused("train", str(recipe), "ray.address=foo")
    assert "ray.address = 'foo': it is neither HOST:PORT nor auto" in sentence and "starting Ray" not in sentence


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_cluster_that_is_not_there(recipe: Path, address: str) -> None:
    sentence = refused("train", str(recipe), f"ray.address={address}", f"run_dir={recipe.parent / address[:3]}")
    assert f"ray.address = '{address}': no Ray cluster answers at" in sentence and "leave it empty for a private one" in sentence


def test_ray_sessions_in_too_long_a_path(recipe: Path, tmp_path: Path) -> None:
    sentence = refused("train", str(recipe), f"ray.temp_dir={tmp_path / ('x' * 60)}")
    assert "ray.temp_dir = " in sentence and "set ray.temp_dir to a path of" in sentence


# -- reward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("e2e_reward:raises", ["raised ZeroDivisionError", "tried on held_out/0/0"]),
        ("no_such_module:score", ["no_such_module:score", "ModuleNotFoundError"]),
        ("e2e_reward:vowel", ["e2e_reward has no vowel", "did you mean vowels?"]),
    ],
)
def test_reward_function_that_cannot_work(
    recipe: Path, path: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tried on a held-out prompt before a folder is made, and long before an engine; its process prints no traceback either."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    sentence = refused("train", str(recipe), f"rollout.reward.path={path}")
    assert all(word in sentence for word in words), sentence
    assert "Traceback" not in "".join(capfd.readouterr())
    assert not (recipe.parent / "run").exists()
