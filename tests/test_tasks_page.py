"""docs/tasks.md: the recipe at its head, with its questions and its reward, is one that `evenkeel train` takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from evenkeel.preparation import prepare
from evenkeel.resume_point import recipe_of

PAGE = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
RECIPE, QUESTIONS, REWARD = re.findall(r"```(?:yaml|python|)\n(.*?)```", PAGE.split("## A whole recipe")[1].split("\n## ")[0], re.DOTALL)


def test_the_whole_recipe_starts(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a start checks, with the reward tried in its processes, on a model that needs no network; of 40 questions 4 are held out."""
    (tmp_path / "sums.yaml").write_text(RECIPE)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    asked = [json.loads(line) for line in QUESTIONS.splitlines()]
    asked += [{"prompt": f"What is {n} + 1? Reply with only the number.", "answer": str(n + 1)} for n in range(40 - len(asked))]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    monkeypatch.chdir(tmp_path)
    config = recipe_of(Path("sums.yaml"), [f"model={tiny_model}"]).config
    config, task, notes = prepare(config)
    given = yaml.safe_load(RECIPE)
    assert (config.steps, config.learner.learning_rate) == (given["steps"], given["learner"]["learning_rate"])
    assert 1 <= len(task.held_out_prompts()) <= 8 and not [note for note in notes if "without a reward" in note]


def test_its_reward_is_right_for_the_page_s_own_answers_alone() -> None:
    names: dict[str, object] = {}
    exec(REWARD, names)
    score = names["score"]
    for row in map(json.loads, QUESTIONS.splitlines()):
        given = [score(f"It is {row['answer']}", row["answer"]), score("12345", row["answer"]), score("", row["answer"])]  # type: ignore[operator]
        assert given == [1.0, 0.0, 0.0]


def test_its_reward_of_parts_scores_by_name() -> None:
    """Right and short, right and long, wrong and long."""
    names: dict[str, object] = {}
    exec(PAGE.split("\n## Reward")[1].split("```python\n")[1].split("```")[0], names)
    score = names["score"]
    long = "4" * 100
    given = [score("What?", said, answer, {}) for said, answer in (("4\n", "4"), (long, long), (long, "4"))]  # type: ignore[operator]
    assert given == [{"right": 1.0, "short": 0.1}, {"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 0.0}]
