"""docs/extending.md: its program writes questions that a run takes, its reward and its environment score them, its correction corrects."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from docs.examples import BLOCK
from evenkeel.correction import CorrectionConfig, correct
from evenkeel.preparation import prepare
from evenkeel.resume_point import recipe_of
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.trajectory import Prompt, Trajectory
from tests.correction.fixtures import MU, PROX, worked_example
from tests.rollout.environment_scene import ScriptedModel, in_a_pool

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
FILES = {name[1]: code for language, code in BLOCK.findall(PAGE) if (name := re.match(r"# (\w+\.py)\n", code)) and language == "python"}
WITH_REWARD, WITH_ENVIRONMENT, CORRECTION = (yaml.safe_load(code) for language, code in BLOCK.findall(PAGE) if language == "yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and the questions that its program has written."""
    made = tmp_path_factory.mktemp("extending")
    for name, code in FILES.items():
        (made / name).write_text(code)
    subprocess.run([sys.executable, "questions.py"], cwd=made, check=True, timeout=60)
    return made


@pytest.mark.parametrize("rollout", [WITH_REWARD, WITH_ENVIRONMENT], ids=["reward", "environment"])
def test_a_run_starts_on_its_questions(rollout: dict, tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a start checks, the reward or environment tried in its processes; the page's correction is the run's."""
    recipe = {"model": str(tiny_model), "steps": 1, "groups_per_step": 4, **rollout, **CORRECTION}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(folder)
    config, task, notes = prepare(recipe_of(Path("recipe.yaml"), []).config)
    assert config.correction.importance.upper == 3 and not [note for note in notes if "without a reward" in note]
    distinct = len({row["prompt"] for row in map(json.loads, (folder / "questions.jsonl").read_text().splitlines())})
    assert len(task.held_out_prompts()) == pytest.approx(distinct / 10, rel=0.5), "a tenth, by a hash"


def test_its_reward_counts_what_is_right_as_1_and_all_else_as_less() -> None:
    names: dict = {}
    exec(FILES["counting.py"], names)
    given = [sum(names["score"](said, "2", {"length": 5}).values()) for said in ("2", " 2.", "4", "9", "two")]
    assert given == [1.0, 1.0, 0.1, 0.0, 0.0]


def test_its_environment_halves_the_reward_for_each_hint(tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    environment = RolloutConfig.model_validate(WITH_ENVIRONMENT["rollout"]).environment
    assert environment is not None
    model, prompt = ScriptedModel(tiny_model), Prompt("train/0/0", "How many a are in abca?", (1,), "2")
    scripts = [["2"], ["1", "2"], ["5", "1", "2."], ["two"], ["1"] * 3]

    async def play(pool: EnvironmentPool) -> list[Trajectory]:
        return await asyncio.gather(*(model.playing(script, pool, prompt=prompt)[1] for script in scripts))

    rollouts = in_a_pool(environment, play)
    assert [(one.turns, one.reward) for one in rollouts] == [(1, 1.0), (2, 0.5), (3, 0.25), (1, 0.0), (3, 0.0)]
    assert "Fewer." in model.read(rollouts[2]) and "More." in model.read(rollouts[2])


def test_its_correction_is_the_closed_form() -> None:
    """Weights min(prox/mu, 3); a sequence stays if the geometric mean of its ratios is within 1 % of 1: of the worked example the last."""
    corrected = correct(worked_example(), CorrectionConfig(**CORRECTION["correction"]))
    ratios = [[prox / mu for prox, mu in zip(*rows, strict=True)] for rows in zip(PROX, MU, strict=True)]
    means = [math.prod(row) ** (1 / len(row)) for row in ratios]
    kept = [abs(mean - 1) <= 0.01 for row, mean in zip(ratios, means, strict=True) for _ in row]
    assert corrected.keep_mask.tolist() == kept and Counter(kept)[True] == 2
    weights = [min(ratio, 3) for row in ratios for ratio in row]
    assert corrected.importance_weights.tolist() == pytest.approx(weights)
