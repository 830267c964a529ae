"""Questions that a model solves now and then: which are kept, what is on record, and rows that are asked and scored as they were."""

from __future__ import annotations

import asyncio
import datetime
import json
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from evenkeel import filter as command
from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ConfigError, DataError, EngineError
from evenkeel.filter import Asked, Bounds, filter_questions
from evenkeel.recipe import load_config
from evenkeel.rollout.config import AnswerSampling, RolloutConfig
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.tasks.tasks import build_task
from evenkeel.rollout.trajectory import Prompt, Trajectory
from evenkeel.task_config import mixture
from tests.actors.cases import trajectory

Rewards = Callable[[Prompt], Sequence[float | None]]


def recipe(*words: str) -> RunConfig:
    sampling = ["temperature=0.9", "top_p=0.95", "top_k=50", "min_p=0.02"]
    made_up = ["model=models/none", "steps=1", "groups_per_step=1", *(f"rollout.sampling.{one}" for one in sampling)]
    return load_config(RunConfig, None, [*made_up, *words])


def generated(*words: str) -> RunConfig:
    task = ["rollout.task.kind=reasoning_gym", "rollout.task.dataset=spell_backward", "rollout.task.options.max_word_len=5"]
    return recipe(*task, "rollout.reward.kind=reasoning_gym", "rollout.reward.processes=1", *words)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rewards], list[str]]:
    """Sets what each prompt's answers score; returns the list of the prompts that were asked, which grows."""
    prompts: list[str] = []

    def use(rewards: Rewards) -> list[str]:
        class Fake:
            def __init__(self, rollout: RolloutConfig, model: Path, seed: int, on_answers: Callable[[int], None]) -> None:
                pass

            @asynccontextmanager
            async def started(self, sample: Prompt) -> AsyncIterator[None]:
                yield

            async def answer(self, asked: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
                assert (how.temperature, how.top_p, how.top_k, how.min_p) == (0.9, 0.95, 50, 0.02), "as in training"
                prompts.extend(prompt.text for prompt in asked)
                await asyncio.sleep(0)
                found = [tuple(trajectory(prompt, reward=reward) for reward in rewards(prompt)) for prompt in asked]
                assert all(len(answers) == how.samples for answers in found)
                return found

        monkeypatch.setattr(command, "Asker", Fake)
        return prompts

    monkeypatch.setattr(command, "tasks_for", lambda config: (mixture(config, {}), config.rollout.with_context(100)))
    return use


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(path: Path, count: int = 12) -> list[str]:
    rows = ({"q": f"question {i}", "gold": i, "tests": [[i, "x"], {"deep": None}]} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "rollout.task.kind=file", f"rollout.task.path={path}", "rollout.task.prompt_field=q", "rollout.task.answer_field=gold",
        "rollout.task.held_out_size=1", "rollout.reward.kind=exact_match",
    ]  # fmt: skip


def number(prompt: Prompt) -> int:
    return int(prompt.text.removeprefix("question "))


def test_what_is_solved_within_the_bounds_is_kept_with_all_of_its_columns(tmp_path: Path, asked: Callable[[Rewards], list[str]]) -> None:
    """Question i has i % 5 right answers of 4: never, sometimes and always solved are counted, 1 to 3 are kept."""
    config, told = recipe(*questions(tmp_path / "rows.jsonl")), []
    seen = asked(lambda prompt: [1.0] * (number(prompt) % 5) + [0.5] * (4 - number(prompt) % 5))
    found = filter_questions(config, tmp_path / "kept.jsonl", Bounds.of(4, 1, 3), questions=None, say=told.append)
    assert len(seen) == len(found) == 11, "one is held out"
    rows = rows_of(tmp_path / "kept.jsonl")
    numbers = [int(str(row["gold"])) for row in rows]
    assert sorted(numbers) == sorted(int(q.split()[1]) for q in seen if int(q.split()[1]) % 5 in (1, 2, 3))
    assert all(row["q"] == f"question {i}" and row["tests"] == [[i, "x"], {"deep": None}] for row, i in zip(rows, numbers, strict=True))
    kinds = [one.kind(4) for one in found]
    never, always = (sum(int(q.split()[1]) % 5 == k for q in seen) for k in (0, 4))
    assert (kinds.count("never"), kinds.count("always")) == (never, always)
    assert f"never {never}, sometimes {11 - never - always}, always {always}; 0 answers could not be scored" in told[0]
    again = build_task(recipe(*questions(tmp_path / "rows.jsonl"), *told[-1].partition("RECIPE ")[2].split()).rollout.task)
    assert {again.train_prompt(i).text for i in range(20)} == {row["q"] for row in rows} < set(seen)
    assert again.held_out_prompts() == build_task(config.rollout.task).held_out_prompts(), "measured on the same questions"


def test_questions_that_are_played_are_kept_with_what_decides_their_rewards(tmp_path: Path, asked: Callable[[Rewards], list[str]]) -> None:
    """In an environment, whose settings a later call has to have, too; task folders are no rows."""
    played = ["rollout.reward.kind=environment", "rollout.environment.path=a:B", "rollout.environment.max_turns=3"]
    of_file, output = questions(tmp_path / "rows.jsonl")[:-1], tmp_path / "kept.jsonl"
    asked(lambda prompt: [1.0, 0.0])
    assert len(filter_questions(recipe(*of_file, *played), output, Bounds.of(2, 1, 1), questions=None, say=lambda _: None)) == 11
    others = recipe(*of_file, *played, "rollout.environment.deadline_s=5", "rollout.environment.max_turns=4")
    with pytest.raises(DataError, match=r"asked with rollout.environment.max_turns = 3, now it is 4"):
        filter_questions(others, output, Bounds.of(2, 1, 1), questions=None, say=lambda _: None)
    folders = recipe("rollout.task.kind=folders", f"rollout.task.path={tmp_path}", *played)
    with pytest.raises(ConfigError, match=r"it writes rows of a file, and rollout.task.kind = folders takes none"):
        filter_questions(folders, output, Bounds.of(2, 1, 1), questions=None, say=lambda _: None)


@pytest.mark.parametrize(
    ("solved", "unscored", "kind", "kept"),
    [(1, 0, "sometimes", True), (0, 4, "unknown", False), (0, 1, "unknown", False), (2, 1, "sometimes", True), (3, 1, "unknown", False)],
)
def test_answers_without_a_score_may_have_been_either(solved: int, unscored: int, kind: str, kept: bool) -> None:
    """1 to 3 of 4 are kept whatever the unscored ones were: 3 right and one unknown may be 4 right."""
    one = Asked(0, solved, unscored)
    assert (one.kind(4), one.is_within(Bounds.of(4, 1, 3))) == (kind, kept)


def test_it_goes_on_where_it_was_broken_off_and_other_bounds_cost_nothing(tmp_path: Path, asked: Callable[[Rewards], list[str]]) -> None:
    config, output = recipe(*questions(tmp_path / "rows.jsonl")), tmp_path / "kept.jsonl"

    answered: list[str] = []

    def lost_after_five(prompt: Prompt) -> list[float | None]:
        if len(answered) == 5:
            raise EngineError("the engine is gone")
        answered.append(prompt.text)
        return [1.0, 0.0]

    seen = asked(lost_after_five)
    with pytest.raises(EngineError) as caught:
        filter_questions(config, output, Bounds.of(2, 1, None), questions=None, say=lambda _: None)
    assert "5 of 11 questions are on record; the same command goes on from there" in caught.value.__notes__[0]
    assert not output.exists()
    with output.with_suffix(".asked.jsonl").open("a") as record:
        record.write('{"position": 3, "sol')  # a kill in the middle of a line
    seen.clear()
    asked(lambda prompt: [1.0, 0.0])
    filter_questions(config, output, Bounds.of(2, 1, None), questions=None, say=lambda _: None)
    assert len(seen) == 6 and not set(seen) & set(answered) and len(rows_of(output)) == 11
    seen.clear()
    filter_questions(config, output, Bounds.of(2, 2, None), questions=None, say=lambda _: None)
    assert seen == [] and rows_of(output) == []


def test_a_record_of_other_settings_is_refused_by_the_setting(tmp_path: Path, asked: Callable[[Rewards], list[str]]) -> None:
    words, output = questions(tmp_path / "rows.jsonl"), tmp_path / "kept.jsonl"
    asked(lambda prompt: [1.0, 0.0])
    filter_questions(recipe(*words), output, Bounds.of(2, 1, None), questions=3, say=lambda _: None)
    with pytest.raises(DataError, match=r"asked with rollout\.sampling\.max_tokens = 256, now it is 9; choose another --output"):
        filter_questions(recipe(*words, "rollout.sampling.max_tokens=9"), output, Bounds.of(2, 1, None), questions=3, say=print)
    with pytest.raises(DataError, match="asked with --answers = 2, now it is 4"):
        filter_questions(recipe(*words), output, Bounds.of(4, 1, None), questions=3, say=print)
    filter_questions(recipe(*words, "rollout.reward.processes=7"), output, Bounds.of(2, 1, None), questions=3, say=lambda _: None)
    foreign = tmp_path / "mine.jsonl"
    foreign.write_text("{}\n")
    with pytest.raises(DataError, match=r"mine\.jsonl: exists already, and no record"):
        filter_questions(recipe(*words), foreign, Bounds.of(2, 1, None), questions=3, say=print)
    assert foreign.read_text() == "{}\n"


def test_generated_questions_are_distinct_and_scored_from_their_rows_as_by_their_task(
    tmp_path: Path, asked: Callable[[Rewards], list[str]]
) -> None:
    """The words that are told make a recipe whose questions are the kept ones; their scorer gets the entry as it was made."""
    config, output, told = generated("rollout.task.prompt_template='Now: {question}'"), tmp_path / "kept.jsonl", []
    seen = asked(lambda prompt: [1.0, 0.0])
    filter_questions(config, output, Bounds.of(2, 1, None), questions=40, say=told.append)
    assert len(seen) == len(set(seen)) == 40
    words = shlex.split(told[-1].partition("RECIPE ")[2])
    trained = recipe("rollout.reward.kind=reasoning_gym", "rollout.reward.processes=1", *words)
    task = build_task(trained.rollout.task)
    train = [task.train_prompt(i) for i in range(task.questions_per_epoch or 0)]
    prompts = {prompt.text: prompt for prompt in train}
    assert set(prompts) == set(seen)
    source = build_task(config.rollout.task)
    assert [prompt.text for prompt in task.held_out_prompts()] == [prompt.text for prompt in source.held_out_prompts()]
    original = source.train_prompt(0)

    async def score(pool: RewardPool, prompt: Prompt) -> list[float | None]:
        texts = (prompt.answer, prompt.answer[:-1], "nothing like it")
        try:
            answers = tuple(replace(trajectory(prompt), text=text, reward=None) for text in texts)
            return [answer.reward for answer in await pool.score(answers, prompt)]
        finally:
            await pool.close()

    ours = asyncio.run(score(RewardPool(trained.rollout.reward, trained.rollout.task), prompts[original.text]))
    theirs = asyncio.run(score(RewardPool(config.rollout.reward, config.rollout.task), original))
    assert ours == theirs and ours[0] == 1.0 and len(set(ours)) > 1


def test_what_can_not_be_asked_or_written_is_refused_before_anything_is_asked(
    tmp_path: Path, asked: Callable[[Rewards], list[str]]
) -> None:
    seen = asked(lambda prompt: [1.0])
    with pytest.raises(ConfigError, match=r"spell_backward makes questions without end; say how many to ask with --questions"):
        filter_questions(generated(), tmp_path / "kept.jsonl", Bounds.of(2, 1, None), questions=None, say=print)
    for bounds in ((2, 3, None), (2, 2, 1), (2, 0, 3)):
        with pytest.raises(ConfigError, match="no number of right answers is within"):
            Bounds.of(*bounds)
    table = pyarrow.table({"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"], "made": [datetime.date(2026, 1, 1)] * 3})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    words = ["rollout.task.kind=file", f"rollout.task.path={tmp_path / 'rows.parquet'}", "rollout.reward.kind=exact_match"]
    with pytest.raises(DataError, match=r"training question \d: made is date .*which a line of JSON can't hold"):
        filter_questions(recipe(*words), tmp_path / "kept.jsonl", Bounds.of(1, 1, None), questions=None, say=print)
    assert seen == [] and not (tmp_path / "kept.asked.jsonl").exists()


def test_float32_on_a_gpu_is_refused_before_an_engine_starts(
    tmp_path: Path, asked: Callable[[Rewards], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run, whose engines have the learner's type."""
    seen = asked(lambda prompt: [1.0])
    monkeypatch.setattr(command, "visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"rollout.engine.dtype = float32 with device = cuda"):
        filter_questions(generated("learner.dtype=float32"), tmp_path / "kept.jsonl", Bounds.of(1, 1, None), questions=1, say=print)
    assert seen == []


def test_only_what_contradicts_the_engine_s_own_operators_is_refused(tmp_path: Path, asked: Callable[[Rewards], list[str]]) -> None:
    """As by `evenkeel eval`: no learner runs."""
    seen = asked(lambda prompt: [1.0])
    of_learner, of_engine = (generated(f"{side}.batch_invariant=true") for side in ("learner", "rollout.engine"))
    filter_questions(of_learner, tmp_path / "kept.jsonl", Bounds.of(1, 1, None), questions=1, say=lambda _: None)
    assert len(seen) == 1
    with pytest.raises(ConfigError, match=r"^rollout\.engine\.batch_invariant: true with true_on_policy: false"):
        filter_questions(of_engine, tmp_path / "other.jsonl", Bounds.of(1, 1, None), questions=1, say=print)
