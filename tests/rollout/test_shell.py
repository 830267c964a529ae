"""Task folders played with a shell, by a model that says what a script has: in the processes and sandboxes of a run."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import EnvironmentConfig, FoldersTask
from evenkeel.rollout.environments.environments import EnvironmentPool, task_of
from evenkeel.rollout.tasks.tasks import build_task
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory
from tests.rollout.environment_scene import ScriptedModel, in_a_pool
from tests.rollout.folder_scene import bubblewrap, needs_bubblewrap, write_folder
from tests.rollout.reward_scene import sleepers, wait_until

__all__ = ["bubblewrap"]
pytestmark = [needs_bubblewrap, pytest.mark.usefixtures("bubblewrap")]
SHELL = "evenkeel.rollout.environments.shell:Shell"
READ, WRITE = "```sh\ncat notes.txt\n```", "I see.\n```sh\nexit 1\n```\nNo:\n```sh\ncut -d' ' -f1 notes.txt > answer.txt\n```"


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ScriptedModel:
    return ScriptedModel(tiny_model)


def shell(**settings: float) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"path": SHELL, "processes": 1, **settings})


def prompt_of(tmp_path: Path, name: str = "one", **changes: str) -> Prompt:
    write_folder(tmp_path / name / "asked", **changes)
    write_folder(tmp_path / name / "held out", **{"instruction.md": "another", **changes})
    task = build_task(FoldersTask(path=tmp_path / name, command_s=8))
    prompts = [task.train_prompt(0), task.held_out_sample()]
    return next(prompt for prompt in prompts if prompt.text.startswith("Write"))


def played(model: ScriptedModel, prompt: Prompt, *scripts: list[str], **settings: float) -> list[Trajectory]:
    async def play(pool: EnvironmentPool) -> list[Trajectory]:
        return await asyncio.gather(*(model.playing(script, pool, prompt=prompt)[1] for script in scripts))

    return in_a_pool(shell(**settings), play)  # type: ignore[no-any-return]


def test_a_turn_is_a_command_and_the_next_reading_what_it_printed(model: ScriptedModel, tmp_path: Path) -> None:
    """The last block of a turn is run; a turn without one is the last, and the tests give the reward. Many are played side by side."""
    one, *others = played(model, prompt_of(tmp_path), [READ, WRITE, "Done."], *[["Done."]] * 8)
    text = model.read(one)
    assert "<|im_start|>user\nWrite the first word of notes.txt to answer.txt.<" in text
    assert "<|im_start|>user\nheron pike\n[exit code 0]<" in text and "<|im_start|>user\n[exit code 0]<" in text
    assert (one.turns, one.reward, one.finish_reason) == (3, 1.0, FinishReason.STOP)
    assert [(other.turns, other.reward, other.error) for other in others] == [(1, 0.0, None)] * 8


def test_a_rollout_that_a_limit_ends_is_tested_as_it_is(model: ScriptedModel, tmp_path: Path) -> None:
    """By turns, by the time of tools, by a turn that is cut, by tokens that leave no room for what was printed."""
    prompt = prompt_of(tmp_path)
    (by_turns,) = played(model, prompt, [WRITE, READ, READ], max_turns=2)
    (by_time,) = played(model, prompt, [WRITE, READ], max_tool_s=0.01)
    (by_turn,) = played(model, prompt, [WRITE, READ * 20], max_turn_tokens=len(model.said(WRITE)))
    (by_tokens,) = played(model, prompt, [WRITE, "```sh\nyes | head -c 3000\n```", READ])
    assert [one.turns for one in (by_turns, by_time, by_turn, by_tokens)] == [2, 1, 2, 2]
    assert [(one.reward, one.finish_reason, one.error) for one in (by_turns, by_time, by_turn, by_tokens)] == [
        (1.0, FinishReason.LENGTH, None)
    ] * 4


BAD_TESTS = {
    "sleep 68.5": "/tests/test.sh: it took more than 1 s in step",
    "exit 4": "ended with exit code 4 and no /logs/verifier/reward.txt or reward.json () in step",
    "echo nan > /logs/verifier/reward.txt": "reward.txt can't be used: reward = nan is not finite",
    "echo '[1]' > /logs/verifier/reward.json": "reward.json can't be used: reward = [1] is no number",
    "yes; echo 1 > /logs/verifier/reward.txt": "/tests/test.sh: it took more than 1 s in step",
}


@pytest.mark.parametrize("script", BAD_TESTS)
def test_tests_that_fail_cost_one_rollout(model: ScriptedModel, tmp_path: Path, script: str) -> None:
    """Beside a good folder's, in the same process."""
    limit_s = 1 if "took more than 1 s" in BAD_TESTS[script] else 20
    toml = f"[verifier]\ntimeout_sec = {limit_s}\n"
    bad = prompt_of(tmp_path, "bad", **{"tests/test.sh": f"#!/bin/bash\n{script}\n", "task.toml": toml})
    good = prompt_of(tmp_path)

    async def play(pool: EnvironmentPool) -> list[Trajectory]:
        asked = [(bad, ["Done."]), (good, [WRITE, READ, "Done."]), (good, [READ, "Done."])]
        return await asyncio.gather(*(model.playing(script, pool, prompt=prompt)[1] for prompt, script in asked))

    lost, *kept = in_a_pool(shell(), play)
    assert BAD_TESTS[script] in str(lost.error) and lost.reward is None and lost.failure is FailureKind.REWARD
    assert [(one.reward, one.error) for one in kept] == [(1.0, None), (0.0, None)]
    assert wait_until(lambda: not sleepers("68.5"))


def test_tests_that_a_model_has_made_hang_are_its_loss(model: ScriptedModel, tmp_path: Path) -> None:
    """Though verifier.timeout_sec, 600 s unless given, is longer than a step may take: they have half of that."""
    script = "#!/bin/bash\n[ -f answer.sh ] && . ./answer.sh\necho 1 > /logs/verifier/reward.txt\n"
    prompt = prompt_of(tmp_path, **{"tests/test.sh": script, "task.toml": ""})
    hangs = ["```sh\necho sleep 68.5 > answer.sh\n```", "Done."]
    bad, good = played(model, prompt, hangs, ["```sh\ntrue\n```", "Done."], deadline_s=20)
    assert [(one.reward, one.error) for one in (bad, good)] == [(0.0, None), (1.0, None)]


def test_commands_that_go_wrong_are_for_the_model_to_see(model: ScriptedModel, tmp_path: Path) -> None:
    """They end no rollout: only what the tests say counts."""
    commands = ["sleep 68.5", "kill -9 -1", "exit 3"]
    (one,) = played(model, prompt_of(tmp_path), [WRITE, *(f"```sh\n{command}\n```" for command in commands), "Done."], max_turns=9)
    text = model.read(one)
    assert "[ended: it took more than 8 s]" in text and "[exit code 3]" in text
    assert (one.turns, one.reward, one.error) == (5, 1.0, None)
    assert wait_until(lambda: not sleepers("68.5"))


def test_a_rollout_that_is_cancelled_while_its_sandbox_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor what its Dockerfile runs, in a process that goes on."""
    (tmp_path / "scratch").mkdir(mode=0o711)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    prompt = prompt_of(tmp_path, **{"environment/Dockerfile": "FROM a\nRUN sleep 68.5\n"})

    def made() -> list[Path]:
        return list((tmp_path / "scratch").glob("*/sandbox-*"))

    async def play(pool: EnvironmentPool) -> tuple[bool, bool]:
        async with pool.opened(task_of(prompt, seed=0)) as environment:
            resetting = asyncio.create_task(environment.reset())
            is_made = await asyncio.to_thread(wait_until, lambda: bool(made() and sleepers("68.5")))
            resetting.cancel()
        return is_made, await asyncio.to_thread(wait_until, lambda: not made() and not sleepers("68.5"))

    assert in_a_pool(shell(deadline_s=600), play) == (True, True)


def test_a_folder_that_is_gone_costs_its_rollouts(model: ScriptedModel, tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path)
    Path(prompt.metadata["folder"], "tests", "test.sh").unlink()
    (one,) = played(model, prompt, ["Done."])
    assert "it has no tests/test.sh, what scores a rollout; add it in reset" in str(one.error)


def test_a_machine_without_sandboxes_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(tmp_path)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(ConfigError, match=r"no sandbox starts here \(bwrap: No permissions to create a new namespace\): the kernel, or"),
    ):
        Path(folder).chmod(0o755)
        (Path(folder) / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
        (Path(folder) / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        in_a_pool(shell(), lambda pool: pool.check(prompt))
