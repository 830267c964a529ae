"""A chat model whose turns end with a token that its two configs don't name: evaluation, filter and training all stop there.

Half of the chat models that are fine-tuned from a base model are such. An engine by itself goes on to the limit, and what it says after the
end is scored, and trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, evenkeel

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NANO = str(ROOT / "recipes" / "nano_spell_backward.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano recipe's, warmed up to end its answers; then its configs name another end."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    made = evenkeel("init-model", NANO, f"model={folder}")
    assert made.returncode == 0, made.stderr
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        assert settings["eos_token_id"] == 2
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": 0}))
    return folder


def test_answer_ends_in_evaluation(model: Path) -> None:
    done = evenkeel("eval", str(model), "--task", NANO, "--problems", "32")
    assert done.returncode == 0 and "cut answers 0%" in done.stdout, done.stdout + done.stderr


def test_answer_ends_in_filter(model: Path, tmp_path: Path) -> None:
    """More than a quarter is right to the letter, as it was after the warm-up; with text after the end hardly one would be."""
    kept, words = tmp_path / "kept.jsonl", ["--questions", "32", "--answers", "4", "rollout.reward={kind: exact_match}"]
    done = evenkeel("filter", NANO, f"model={model}", *words, "--output", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    asked = kept.with_suffix(".asked.jsonl").read_text().splitlines()[1:]
    assert len(asked) == 32 and sum(json.loads(line)["solved"] for line in asked) > 32


def test_answer_ends_in_training_under_the_overlong_rule(model: Path, tmp_path: Path) -> None:
    words = ["steps=2", "groups_per_step=8", "max_staleness=0", "evaluation.every_steps=0", "evaluation.problems=8"]
    done = evenkeel("train", NANO, f"model={model}", f"run_dir={tmp_path / 'run'}", *words, "rollout.overlong.kind=mask")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["length/truncated_share"] == 0.0
        assert step["length/trained_tokens"] == step["length/sampled_tokens"]
