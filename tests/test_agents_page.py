"""docs/agents.md: its environment and its settings are ones that a run takes, and those of recipes/nano_calculator.yaml. Its program
plays a rollout in tests/rollout/test_agents.py, a recipe's here."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from evenkeel.actors.config import RunConfig
from evenkeel.recipe import load_config
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import AT_ONE, MODEL, Script, opened, scripted
from tests.rollout.environment_scene import ScriptedModel, in_a_pool

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
PAGE = (ROOT / "docs" / "agents.md").read_text()
CODE, SETTINGS = re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.split("## A program")[0], re.DOTALL)


def undocumented(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def test_the_page_s_environment_is_the_recipe_s() -> None:
    assert undocumented(CODE) == undocumented((ROOT / "recipes" / "calculator.py").read_text())


def test_the_page_s_environment_answers(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that asks and repeats, one that asks and doesn't, one that guesses, one that never ends asking."""
    (tmp_path / "calculator.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rollout = RolloutConfig.model_validate(yaml.safe_load(SETTINGS)["rollout"])
    assert rollout.environment is not None
    model, prompt = ScriptedModel(tiny_model), Prompt("train/0/0", "412 - 13", (1,), "399")
    scripts = [["412 - 13 =", "399"], ["412 - 13 =", "400"], ["399"], ["1 + 2 ="] * 4]

    async def play(pool: EnvironmentPool) -> list[Trajectory]:
        return await asyncio.gather(*(model.playing(script, pool, prompt=prompt)[1] for script in scripts))

    rollouts = in_a_pool(rollout.environment, play)
    assert [(one.turns, one.reward, str(one.finish_reason)) for one in rollouts] == [
        (2, 1.0, "stop"),
        (2, 0.0, "stop"),
        (1, 1.0, "stop"),
        (3, 0.0, "length"),
    ]
    assert "<|im_start|>user\n399<|im_end|>" in model.read(rollouts[0])


def played_by(program: Path, task: dict[str, str], script: Script, encoder: ChatEncoder, loop: BackgroundLoop) -> Trajectory:
    """A rollout by a program, whose reward is 1, at the real door."""
    given, reward = (program.parent / f"{program.stem}_{what}" for what in ("task", "reward"))
    given.write_text(json.dumps(task))

    async def play() -> tuple[int | None, Trajectory]:
        async with opened(encoder) as door:
            conversation = scripted(script, encoder)
            address = door.admit(conversation, AT_ONE)
            own = {"OPENAI_BASE_URL": address.base_url, "OPENAI_API_KEY": address.key, "OPENAI_MODEL": MODEL}
            own |= {"EVENKEEL_TASK": str(given), "EVENKEEL_REWARD": str(reward)}
            process = await asyncio.create_subprocess_exec(sys.executable, program.name, cwd=program.parent, env={**os.environ, **own})
            return await process.wait(), conversation.trajectory

    status, trajectory = loop.run(play())
    assert status == 0 and json.loads(reward.read_text()) == 1.0
    return trajectory


# -- the real model's calculator: recipes/smollm2_calculator.yaml, and smollm2_agent.yaml by the door -------------------------------


def test_the_chat_calculator_is_asked_and_the_broken_one_is_no_help(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    config = load_config(RunConfig, RECIPES / "smollm2_calculator.yaml").rollout.environment
    assert config is not None
    model, prompt = ScriptedModel(tiny_model), Prompt("train/0/0", "412 - 13", (1,), "399")

    def played(name: str) -> Trajectory:
        settings = config.model_copy(update={"path": f"chat_calculator:{name}", "folder": RECIPES})
        return in_a_pool(settings, lambda pool: model.playing(["412 - 13 =", "399"], pool, prompt=prompt)[1])

    helped, alone = played("ChatCalculator"), played("BrokenCalculator")
    assert (helped.turns, helped.reward) == (alone.turns, alone.reward) == (2, 1.0)
    assert "<|im_start|>user\n399<|im_end|>" in model.read(helped)
    assert (model.read(helped).count("399"), model.read(alone).count("399")) == (2, 1), "the model says it itself"


def test_its_held_out_questions_are_longer_than_those_that_it_learns_from() -> None:
    task = load_config(RunConfig, RECIPES / "smollm2_calculator.yaml").rollout.task
    learnt, asked = ([json.loads(row) for row in path.read_text().splitlines()] for path in (task.path, task.held_out_path))
    for rows, digits, count in ((learnt, 3, 800), (asked, 4, 128)):
        assert len({row["prompt"] for row in rows}) == count
        for row in rows:
            a, sign, b = row["prompt"].split()
            assert {len(a), len(b)} == {digits}
            assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_the_recipe_s_program_plays_a_rollout(tiny_model: Path, tmp_path: Path, engine_loop: BackgroundLoop) -> None:
    """It reads what the environment would give."""
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))
    script = Script(encoder, "412 - 13 =", "399")
    program = Path(shutil.copy(RECIPES / "calculator_agent.py", tmp_path))
    trajectory = played_by(program, {"prompt": "412 - 13", "answer": "399"}, script, encoder, engine_loop)
    assert trajectory.turns == 2
    assert "399" in encoder.text_of(script.read[1])
    assert "What is 412 - 13?" in encoder.text_of(script.read[0])
