"""docs/agents.md: its recipes start with the files that it shows, and its environments answer; the first is that of
recipes/nano_calculator.yaml. Its program plays a rollout in tests/rollout/test_agents.py, a recipe's here."""

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

from docs.examples import BLOCK
from evenkeel.actors.config import RunConfig
from evenkeel.preparation import prepare
from evenkeel.recipe import load_config
from evenkeel.resume_point import recipe_of
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.e2e.launch import evenkeel
from tests.rollout.door_scene import AT_ONE, MODEL, Script, opened, scripted
from tests.rollout.environment_scene import TEMPLATE_WITH_TOOLS, ScriptedModel, in_a_pool

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
PAGE = (ROOT / "docs" / "agents.md").read_text()
BLOCKS = BLOCK.findall(PAGE)
FILES = {name[1]: code for _, code in BLOCKS if (name := re.match(r"# (\w+\.(?:py|yaml))\n", code))}
ROWS = next(code for _, code in BLOCKS if code.startswith('{"prompt"'))
WHOLE = ("calculator", "adder", "agent")


def undocumented(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, as somebody copies them, with more questions; the run starts there."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    more = (json.dumps({"prompt": f"{number} + 7", "answer": str(number + 7)}) for number in range(40))
    (tmp_path / "sums.jsonl").write_text("\n".join([ROWS.strip(), *more]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_each_block_of_yaml_is_a_whole_recipe_or_says_that_it_is_none() -> None:
    """A whole one is taken as it is; a part is one of no recipe by itself (tests/test_docs.py reads it beside what a recipe needs)."""
    blocks = [code for language, code in BLOCKS if language == "yaml"]
    assert [code for code in blocks if not code.startswith(("# part of a recipe\n", *(f"# {name}.yaml\n" for name in WHOLE)))] == []
    assert {f"{name}.yaml" for name in WHOLE} == {name for name in FILES if name.endswith(".yaml")}
    for part in (code for code in blocks if code.startswith("# part")):
        with pytest.raises(ValueError, match="steps"):
            RunConfig.model_validate(yaml.safe_load(part))


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_recipe_starts(name: str, folder: Path, tiny_model: Path) -> None:
    """All that a start checks, environment or program tried, on a model that needs no network. Its template shows no tools."""
    assert load_config(RunConfig, folder / f"{name}.yaml").steps == 40
    config, task, notes = prepare(recipe_of(Path(f"{name}.yaml"), [f"model={tiny_model}"]).config)
    assert len(task.held_out_prompts()) > 0 and config.rollout.reward is not None
    assert any("the model's chat template shows no tools" in note for note in notes) == (name == "adder")


def test_tools_are_shown_by_a_template_that_knows_them(folder: Path, tiny_model: Path) -> None:
    """A start has it go on after a call, with all that a result's message has, and says nothing."""
    model = Path(shutil.copytree(tiny_model, folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE_WITH_TOOLS
    tokenizer.save_pretrained(model)
    _, _, notes = prepare(recipe_of(Path("adder.yaml"), [f"model={model}"]).config)
    assert not any("shows no tools" in note for note in notes)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_recipe_makes_a_real_step(name: str, folder: Path, tiny_model: Path) -> None:
    done = evenkeel("train", f"{name}.yaml", "--smoke", f"model={tiny_model}", timeout_s=900.0, cwd=folder)
    assert done.returncode == 0 and "smoke: passed" in done.stdout, done.stdout + done.stderr


def test_the_page_s_environment_is_the_recipe_s() -> None:
    assert undocumented(FILES["calculator.py"]) == undocumented((ROOT / "recipes" / "calculator.py").read_text())


def played(model: ScriptedModel, recipe: Path, prompt: Prompt, *scripts: list[str]) -> list[Trajectory]:
    """Rollouts in a recipe's environment."""
    settings = load_config(RunConfig, recipe).rollout.environment
    assert settings is not None

    async def play(pool: EnvironmentPool) -> list[Trajectory]:
        return await asyncio.gather(*(model.playing(script, pool, prompt=prompt)[1] for script in scripts))

    return in_a_pool(settings, play)  # type: ignore[no-any-return]


def test_the_page_s_environment_answers(tiny_model: Path, folder: Path) -> None:
    """A model that asks and repeats, one that asks and doesn't, one that guesses, one that never ends asking."""
    model, prompt = ScriptedModel(tiny_model), Prompt("train/0/0", "412 - 13", (1,), "399")
    scripts = [["412 - 13 =", "399"], ["412 - 13 =", "400"], ["399"], ["1 + 2 ="] * 4]
    rollouts = played(model, folder / "calculator.yaml", prompt, *scripts)
    assert [(one.turns, one.reward, str(one.finish_reason)) for one in rollouts] == [
        (2, 1.0, "stop"),
        (2, 0.0, "stop"),
        (1, 1.0, "stop"),
        (3, 0.0, "length"),
    ]
    assert "<|im_start|>user\n399<|im_end|>" in model.read(rollouts[0])


def test_the_page_s_tool_answers(tiny_model: Path, folder: Path) -> None:
    """Two calls at once and a wrong one, then the right number, or another; and an answer without a call."""

    def called(a: int, b: object) -> str:
        return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {json.dumps(b)}}}}}\n</tool_call>'

    calls, prompt = called(40, 318) + called(1, 2) + called(1, "two"), Prompt("train/0/0", "40 + 318", (1,), "358")
    model = ScriptedModel(tiny_model)
    asked, wrong, guess = played(model, folder / "adder.yaml", prompt, [calls, " 358"], [calls, "3"], ["358"])
    assert [(one.turns, one.reward, one.tool_calls, one.tool_errors) for one in (asked, wrong, guess)] == [
        (2, 1.0, 3, 1),
        (2, 0.0, 3, 1),
        (1, 1.0, 0, 0),
    ]
    results = ("358", "3", "error: b: Input should be a valid integer, unable to parse string as an integer")
    assert "".join(f"<|im_start|>tool\n{text}<|im_end|>\n" for text in results) in model.read(asked)


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

    def rollout(name: str) -> Trajectory:
        settings = config.model_copy(update={"path": f"chat_calculator:{name}", "folder": RECIPES})
        return in_a_pool(settings, lambda pool: model.playing(["412 - 13 =", "399"], pool, prompt=prompt)[1])

    helped, alone = rollout("ChatCalculator"), rollout("BrokenCalculator")
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
