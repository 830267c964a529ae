"""Rollouts of several turns in real environment processes: what the model reads, what its turns are worth, and what one bad environment
costs the others: nothing. The model is a script; on a real engine: test_played_groups.py."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from evenkeel.correction.errors import ConfigError
from evenkeel.preparation import prepare
from evenkeel.resume_point import recipe_of
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.environments import environments
from evenkeel.rollout.environments.environments import EnvironmentPool, task_of
from evenkeel.rollout.environments.interface import Turn
from evenkeel.rollout.limited_processes import many_calls
from evenkeel.rollout.limited_processes.output import PRINTED_BYTES
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory
from tests.rollout.environment_scene import PROMPT, ScriptedModel, environment, in_a_pool, write_user_module
from tests.rollout.reward_scene import sleepers, wait_until


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_module(tmp_path, monkeypatch)
    monkeypatch.setattr(many_calls, "_LATER_S", 2.0)
    monkeypatch.setattr(environments, "_MOST_PROCESSES", 128)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ScriptedModel:
    return ScriptedModel(tiny_model)


def test_what_is_read_and_said_is_the_whole_conversation(model: ScriptedModel) -> None:
    """To the token what transformers makes of the whole at once; rewards are added up, by part, and the last reading is left out."""
    (one,) = in_a_pool(environment(), lambda pool: asyncio.gather(model.rollout(["12", "3 + 4", "end"], pool)))
    said = ["12", "3 + 4", "end"]
    messages = [{"role": "user", "content": PROMPT.text}]
    for text, reading in zip(said, ("0: 12", "1: 12+3 + 4", None), strict=True):
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "user", "content": reading}] if reading else []
    whole = model.encoder.tokenizer.apply_chat_template(messages, tokenize=False)
    assert model.read(one) + "\n" == whole
    assert one.token_ids.tolist() == model.encoder.tokenizer.encode(whole.removesuffix("\n"), add_special_tokens=False)
    assert [segment.ids.tolist() for segment in one.segments if segment.sampled] == [model.said(text) for text in said]
    assert (one.turns, one.finish_reason, one.reward) == (3, FinishReason.STOP, 1.5)
    assert one.reward_components == {"right": 1.5, "cut": 0.0} and one.turn_rewards == (0.25, 0.25, 1.0)


def test_environments_of_a_process_wait_side_by_side(model: ScriptedModel) -> None:
    """50 of them, of which none goes on before all have come."""
    scripts = [["wait", "meet", "end"]] * 50
    rollouts = in_a_pool(environment(), lambda pool: asyncio.gather(*(model.rollout(script, pool) for script in scripts)))
    assert [(one.turns, one.error) for one in rollouts] == [(3, None)] * 50 and all(one.tool_s >= 0.3 for one in rollouts)


REFUSED = {
    "raise": "the environment raised KeyError: 'no such tool' in step",
    "cancel": "the environment raised CancelledError in step",
    "print": "characters for the model to read, and may return 1048576",
    "exit": "the environment called sys.exit in step",
    "memory": "ran out of memory (rollout.environment.memory_gib)",
    "pair": "step returned ('x', 0.5); it returns (what the model reads next, reward, whether it is done)",
    "none": "reward = None is no number",
    "yes": "step returned 'yes' for whether it is done, and not True or False",
    "object": "it may be a text, messages with role and content, or token ids",
    "nothing": "step returned None for the model to read",
    "nan": "reward = nan is not finite",
    "half": "UnicodeEncodeError",
    "no id": "step returned the token id 2147483648 for the model to read, which no vocabulary has",
    "ids": "the environment's first prompt was messages, and what follows is token ids",
}
DEADLY = {
    "stubborn": "took more than 4 s (rollout.environment.deadline_s) and awaited nothing; it was killed",
    "spin": "took more than 4 s (rollout.environment.deadline_s) and awaited nothing; it was killed",
    "die": "the process of the environment died at a step (exit code 7)",
    "forks": "it had started more than 128 processes",
    "write": "sent no reply at a step, but something else",
}
GOOD = ["12", "wait", "3", "wait", "wait", "end"]


def beside_good_ones(model: ScriptedModel, words: Iterable[str], **settings: float) -> dict[str, Trajectory]:
    """The rollout with each bad word, beside three others that are at work in the same process then, and are what they are without it."""
    scripts = {word: ["1", word, "end"] for word in words}

    async def play(pool: EnvironmentPool) -> list[Trajectory]:
        return await asyncio.gather(*(model.rollout(script, pool) for script in [*scripts.values(), *[GOOD] * 3]))

    rollouts = in_a_pool(environment(**settings), play)
    bad, others = rollouts[:-3], rollouts[-3:]
    assert {model.read(one) for one in others} == {model.read(others[0])}
    assert [(one.turns, one.reward, one.error) for one in others] == [(6, 2.25, None)] * 3
    assert not any(one.is_valid or one.reward is not None for one in bad)
    return dict(zip(scripts, bad, strict=True))


def test_an_environment_that_fails_is_one_rollout_lost(model: ScriptedModel) -> None:
    bad = beside_good_ones(model, [*REFUSED, "hang"], deadline_s=2.0, memory_gib=1.0)
    for word, said in REFUSED.items():
        assert said in str(bad[word].error) and bad[word].failure is FailureKind.REWARD
    assert bad["hang"].error == "the environment took more than 2 s for step (rollout.environment.deadline_s)"
    assert bad["hang"].failure is FailureKind.REWARD_TIMEOUT


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_an_environment_that_takes_its_process_along_is_one_rollout_lost(model: ScriptedModel) -> None:
    bad = beside_good_ones(model, DEADLY, deadline_s=4.0, processes=2)
    for word, said in DEADLY.items():
        assert said in str(bad[word].error), word
    assert wait_until(lambda: not sleepers("69.5"))


def test_what_an_environment_prints_is_handed_on_up_to_a_limit(model: ScriptedModel, capfd: pytest.CaptureFixture[str]) -> None:
    """A tool that prints megabytes takes no disk, and costs its rollout nothing; what is printed elsewhere is still there."""
    (one,) = in_a_pool(environment(), lambda pool: asyncio.gather(model.rollout(["prints", "end"], pool)))
    assert (one.reward, one.error) == (1.25, None)
    printed, sentence = ["", ""], "[more than 1 MiB printed within 10 minutes; the rest of it is left out]"

    def is_there() -> bool:
        printed[:] = [before + more for before, more in zip(printed, capfd.readouterr(), strict=True)]
        return "a tool was called\n" in printed[0] and sentence in printed[1]

    assert wait_until(is_there)
    assert printed[1].count("y") <= PRINTED_BYTES


def test_an_environment_is_closed_at_its_end(model: ScriptedModel, tmp_path: Path) -> None:
    async def play(pool: EnvironmentPool) -> bool:
        await model.playing(["1", "end"], pool, prompt=replace(PROMPT, metadata={"folder": str(tmp_path / "closed")}))[1]
        return await asyncio.to_thread(wait_until, (tmp_path / "closed").is_dir)

    assert in_a_pool(environment("Closing"), play)


def test_a_process_that_was_closed_is_there_again_at_once() -> None:
    """Who read from the old one is told of its end only after the new one was started, which has done nothing."""

    async def play(pool: EnvironmentPool) -> list[dict[str, str]]:
        await pool.check(PROMPT)
        await pool.close()
        async with pool.opened(task_of(PROMPT, seed=0)) as one:
            return await one.reset()  # type: ignore[no-any-return]

    assert in_a_pool(environment(), play) == [{"role": "user", "content": PROMPT.text}]


def test_an_environment_in_a_process_of_its_own_is_closed_before_that_ends(tmp_path: Path) -> None:
    """Where it is alone because another has taken its process along, and where a start tries one."""

    def closed(name: str) -> Prompt:
        return replace(PROMPT, metadata={"folder": str(tmp_path / name)})

    async def play(pool: EnvironmentPool) -> None:
        async with pool.opened(task_of(closed("alone"), seed=0), is_alone=True) as one:
            await one.reset()
        await pool.check(closed("tried"))

    in_a_pool(environment("Closing"), play)
    assert (tmp_path / "alone").is_dir() and (tmp_path / "tried").is_dir()


def test_a_step_under_way_ends_before_its_environment_is_closed(model: ScriptedModel, tmp_path: Path) -> None:
    async def play(pool: EnvironmentPool) -> bool:
        async with pool.opened(task_of(replace(PROMPT, metadata={"folder": str(tmp_path / "closed")}), seed=0)) as one:
            await one.reset()
            stepping = asyncio.create_task(one.step(Turn("1", (1,), 0, is_cut=False)))
            await asyncio.sleep(0)
            stepping.cancel()
        return await asyncio.to_thread(wait_until, lambda: any(tmp_path.glob("closed*")))

    assert in_a_pool(environment("Orderly"), play)
    assert [path.name for path in tmp_path.glob("closed*")] == ["closed-after-its-step"]


def test_limits_cut_a_rollout_visibly_and_it_keeps_its_rewards(model: ScriptedModel) -> None:
    """After two turns; after a turn of three tokens, at which the environment is told that it is cut; after 0.3 s of tools."""

    def cut(script: list[str], **limits: float) -> Trajectory:
        (one,) = in_a_pool(environment(**limits), lambda pool: asyncio.gather(model.rollout(script, pool)))
        assert one.finish_reason is FinishReason.LENGTH and one.is_valid and len(one.later) == one.turns - 1
        return one  # type: ignore[no-any-return]

    two = cut(["1", "2", "3"], max_turns=2)
    assert (two.turns, two.reward) == (2, 0.5)
    long = cut(["1", "1 2 3 4 5 6 7 8 9", "3"], max_turn_tokens=3)
    assert (long.turns, len(long.response_ids), long.reward) == (2, 5, 1.25 + 1.0)
    assert long.reward_components == {"right": 1.25, "cut": 1.0}
    slow = cut(["wait", "1", "2"], max_tool_s=0.2)
    assert (slow.turns, slow.reward) == (1, 0.25)


def test_what_a_rollout_is_worth_that_is_cut_between_turns_is_asked(model: ScriptedModel) -> None:
    """After two turns; a turn that is cut itself is seen by step."""
    two, long = (
        in_a_pool(environment("Worth", **limits), lambda pool: model.rollout(["1", "1 2 3 4 5 6 7 8 9", "3"], pool))
        for limits in ({"max_turns": 2}, {"max_turn_tokens": 3})
    )
    assert (two.turns, two.reward, two.reward_components) == (2, 3.0, {"right": 1.0, "left": 2.0})
    assert (long.turns, long.reward_components) == (2, {"right": 1.25, "cut": 1.0})


def test_a_rollout_goes_on_elsewhere_if_its_environment_answers_as_before(model: ScriptedModel) -> None:
    """Stopped while its environment waits in its second turn. One whose answers differ is begun again; both end."""

    async def play(name: str) -> tuple[Trajectory, Trajectory]:
        pool, other = EnvironmentPool(environment(name)), EnvironmentPool(environment(name))
        try:
            played, playing = model.playing(["12", "wait", "3", "end"], pool)
            while played.trajectory.turns < 2 or played.trajectory.finish_reason is not FinishReason.STOP:
                await asyncio.sleep(0.01)
            played.stop()
            begun = await playing
            model.version = 1
            return begun, await model.rollout(["12", "wait", "3", "end"], other, begun)
        finally:
            model.version = 0
            await pool.close()
            await other.close()

    begun, whole = asyncio.run(play("Game"))
    assert (begun.turns, begun.reward, begun.error) == (2, None, None)
    assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids and (whole.turns, whole.reward) == (4, 1.75)
    assert [span.version for span in whole.version_spans] == [0, 1], "what was sampled stays"
    begun, whole = asyncio.run(play("Forgetful"))
    assert len(begun.later) == 1 and whole.is_valid and whole.turns == 4
    assert [span.version for span in whole.version_spans] == [1], "it was begun again"


SHORT = ["12", "short", "3", "short", "wait", "end"]
"""Three conversations."""


def test_a_conversation_begun_anew_is_another_sequence_of_the_rollout(model: ScriptedModel) -> None:
    """To the token what transformers makes of each conversation; rewards and the numbers of turns go on; each token is said in one."""
    (one,) = in_a_pool(environment("Compacts"), lambda pool: asyncio.gather(model.rollout(SHORT, pool)))
    asked = [PROMPT.text, "so far 1: 12", "so far 3: 12+3"]
    said = [["12", "short"], ["3", "short"], ["wait", "end"]]
    read = ["0: 12", "2: 12+3", "4: 12+3+wait"]
    for sequence, first, (before, after), between in zip(one.sequences, asked, said, read, strict=True):
        messages = [("user", first), ("assistant", before), ("user", between), ("assistant", after)]
        whole = model.encoder.tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
        assert model.read(sequence) + "\n" == whole
        assert [segment.ids.tolist() for segment in sequence.segments if segment.sampled] == [model.said(before), model.said(after)]
    facts = one.facts
    assert (facts.sequence_count, facts.turns, facts.reward, facts.finish_reason) == (3, 6, 1.0 + 5 * 0.25, FinishReason.STOP)
    assert facts.response_tokens == sum(len(model.said(text)) for text in SHORT) == facts.version_spans[-1].end
    (cut,) = in_a_pool(environment("Compacts", max_sequences=2), lambda pool: asyncio.gather(model.rollout(SHORT, pool)))
    assert (cut.sequence_count, cut.turns, cut.reward, cut.finish_reason) == (2, 4, 4 * 0.25, FinishReason.LENGTH)


def test_a_rollout_of_several_conversations_goes_on_elsewhere(model: ScriptedModel) -> None:
    """Stopped while its environment waits in the third. One that begins another conversation then than before is begun again."""

    async def play(name: str) -> tuple[Trajectory, Trajectory]:
        pool, other = EnvironmentPool(environment(name)), EnvironmentPool(environment(name))
        try:
            played, playing = model.playing(SHORT, pool)
            while played.trajectory.turns < 5 or played.trajectory.finish_reason is not FinishReason.STOP:
                await asyncio.sleep(0.01)
            played.stop()
            begun = await playing
            model.version = 1
            return begun, await model.rollout(SHORT, other, begun)
        finally:
            model.version = 0
            await pool.close()
            await other.close()

    begun, whole = asyncio.run(play("Compacts"))
    assert (begun.turns, begun.sequence_count, begun.reward) == (5, 3, None) and whole.is_valid
    assert whole.branches == begun.branches and whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert [[span.version for span in one.version_spans] for one in whole.sequences] == [[0], [0], [0, 1]], "what was sampled stays"
    begun, whole = asyncio.run(play("ForgetsWhatItMadeShort"))
    assert begun.sequence_count == 3 and whole.is_valid and whole.turns == 6
    assert {span.version for one in whole.sequences for span in one.version_spans} == {1}, "it was begun again"


def test_token_ids_in_and_out(model: ScriptedModel) -> None:
    (one,) = in_a_pool(environment("Ids"), lambda pool: asyncio.gather(model.rollout(["12", "end"], pool)))
    first = model.said("12")
    assert one.token_ids.tolist() == [7, 8, 9, *first, first[0], 10, *model.said("end")] and one.reward == 2.0


def test_a_base_model_starts_with_an_environment_of_token_ids(tiny_model: Path, tmp_path: Path) -> None:
    """Without a chat template nothing has to go on after a turn."""
    rows = [json.dumps({"prompt": f"{number} + 1 = ", "answer": str(number + 1)}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    recipe = {
        "model": str(tiny_model), "steps": 1, "groups_per_step": 4,
        "rollout": {
            "task": {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "apply_chat_template": False},
            "environment": {"path": "user_environments:Ids", "processes": 1},
            "reward": {"kind": "environment"},
        },
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    config, task, _ = prepare(recipe_of(tmp_path / "recipe.yaml", []).config)
    assert config.rollout.environment is not None and len(task.tasks) == 1


def test_a_template_that_rewrites_what_was_said_is_refused(tiny_model: Path) -> None:
    """As those do that cut thoughts from earlier turns: named by the first token that differs."""
    model = ScriptedModel(tiny_model)
    template = model.encoder.tokenizer.chat_template
    model.encoder.tokenizer.chat_template = template.replace("m['content']", "m['content'].replace('12', '')")
    assert model.encoder.tokenizer.chat_template != template
    one = in_a_pool(environment(), lambda pool: model.rollout(["3 + 12", "end"], pool))
    assert one.error is not None and "rewrites what the model said: token" in one.error and one.failure is FailureKind.REWARD


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Missing", {}, "rollout.environment.path = user_environments:Missing: user_environments has no Missing"),
        ("Plain", {}, "rollout.environment.path = user_environments:Plain: it has no `async def reset`"),
        ("Slow", {"deadline_s": 0.3}, "took more than 0.3 s for reset (rollout.environment.deadline_s) (tried on train/0/0)"),
        ("Spins", {"deadline_s": 0.3}, "took more than 0.3 s (rollout.environment.deadline_s) and awaited nothing; it was killed"),
        ("Breaks", {}, "the environment raised KeyError: 'file' in reset (tried on train/0/0)"),
    ],
)
def test_a_mistake_shows_at_the_start(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        in_a_pool(environment(name, **settings), lambda pool: pool.check(PROMPT))
    assert message in str(caught.value)


def test_settings_that_don_t_go_together_are_refused() -> None:
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    own = {"path": "my_environment:Calculator"}
    assert RolloutConfig.model_validate({"task": task, "reward": {"kind": "environment"}, "environment": own}).environment is not None
    for settings, message in (
        ({"reward": {"kind": "environment"}}, "nothing would return a reward"),
        ({"reward": {"kind": "exact_match"}, "environment": own}, "Set reward: {kind: environment}"),
        (
            {"reward": {"kind": "environment"}, "environment": {"path": "my_environment.py"}},
            "it takes MODULE:CLASS, e.g. my_environment:Calc",
        ),
    ):
        with pytest.raises(ValueError, match=r"environment") as caught:
            RolloutConfig.model_validate({"task": task, **settings})
        assert message in str(caught.value)
