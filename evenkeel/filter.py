"""Which training questions a model solves sometimes: asked with one engine, without Ray, and written as rows to train on.

A question that no answer of its group solves, or every one, has advantages of 0. The Trust Region paper's sanity test trains on 1,460
problems that the initial model is known to solve: whatever keeps a run from solving all of them is a fault of the method.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from evenkeel.actors.cluster.hub import model_folder
from evenkeel.actors.config import RunConfig
from evenkeel.actors.json_lines import JsonLines
from evenkeel.actors.settings.devices import visible_gpus
from evenkeel.actors.settings.resolve import refuse_contradictions_of_engines, with_engine_types
from evenkeel.correction.errors import ConfigError, DataError, counted
from evenkeel.correction.settings.base import Settings
from evenkeel.evaluation import Asker, tasks_for
from evenkeel.rollout.config import AnswerSampling, FileTask, FoldersTask, ReasoningGymReward, ReasoningGymTask
from evenkeel.rollout.tasks.questions import text_key
from evenkeel.rollout.tasks.tasks import Task


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which questions are kept."""

    answers: int
    """Number of answers to each question."""
    min_solved: int
    max_solved: int

    @classmethod
    def of(cls, answers: int, min_solved: int, max_solved: int | None) -> Bounds:
        """Args: max_solved: None: all answers may be right. Raises: ConfigError if no question can be within."""
        most = answers if max_solved is None else max_solved
        if not 0 <= min_solved <= most <= answers:
            raise ConfigError(
                f"--min-solved {min_solved} --max-solved {most} of --answers {answers}: no number of right answers is within; "
                f"keep 0 <= min <= max <= answers"
            )
        return cls(answers, min_solved, most)


@dataclass(frozen=True, slots=True)
class Asked:
    """The result of one question."""

    position: int
    """Its position in the task's training stream."""
    solved: int
    """Right answers."""
    unscored: int
    """Answers whose reward raised, timed out or never came: they may have been right or wrong."""

    def is_within(self, bounds: Bounds) -> bool:
        """Whether the question is kept, whichever of the unscored answers are right."""
        return bounds.min_solved <= self.solved and self.solved + self.unscored <= bounds.max_solved

    def kind(self, answers: int) -> str:
        """never, sometimes or always solved; unknown where unscored answers leave that open."""
        if self.solved == answers:
            return "always"
        if self.solved == 0:
            return "unknown" if self.unscored else "never"
        return "unknown" if self.solved + self.unscored == answers else "sometimes"


def filter_questions(config: RunConfig, output: Path, bounds: Bounds, *, questions: int | None, say: Callable[[str], None]) -> list[Asked]:
    """Ask the recipe's model its training questions, and write those within the bounds as rows.

    Args:
        output: .jsonl file; next to it a record is kept of every question that was asked, from which a later call goes on.
        questions: how many, distinct by text; None: all that there are.
    Returns: what came of each question, in the order of the training stream.
    Raises: ConfigError, DataError, EngineError; what was asked by then is on record.
    """
    refuse_contradictions_of_engines(config)
    entry = config.rollout.only_entry
    if isinstance(entry.task, FoldersTask):
        raise ConfigError(
            "evenkeel filter: it writes rows of a file, and rollout.task.kind = folders takes none",
            remedy="link the folders that you want in a folder of their own, and name that in rollout.task.path",
        )
    config = with_engine_types(config.model_copy(update={"model": model_folder(config.model)}), has_gpu=visible_gpus() > 0)
    task = tasks_for(config)[0].tasks[entry.name]
    if task.questions_per_epoch is None and questions is None:
        raise ConfigError(f"evenkeel filter: {task.name} makes questions without end; say how many to ask with --questions")
    if task.remark is not None:
        say(task.remark)
    positions = list(_distinct_positions(task, questions))
    if questions is not None and len(positions) < questions:
        held_back = _held_back(config, task)
        say(f"only {len(positions)} of {questions} questions: {task.name} has no more with other texts to train on{held_back}")
    rows = {position: task.train_row(position) for position in positions}  # what can't be written is refused before anything is asked
    held_out = task.held_out_rows()
    record = _Record(output.with_suffix(".asked.jsonl"), _settings(config, bounds), output)
    known = record.read()
    left = [position for position in positions if position not in known]
    if known:
        say(f"{len(positions) - len(left)} of {len(positions)} questions are on record in {record.path}")
    if left:
        try:
            asyncio.run(_ask(config, task, left, bounds, record))
        except BaseException as error:
            error.add_note(f"{len(record.read())} of {len(positions)} questions are on record; the same command goes on from there")
            raise
        known = record.read()
    asked = [known[position] for position in positions]
    kept = [rows[one.position] for one in asked if one.is_within(bounds)]
    _write(output, kept)
    _write(_held_out_path(output), held_out)
    _say_outcome(asked, len(kept), output, config, bounds, say)
    return asked


def _distinct_positions(task: Task, questions: int | None) -> Iterator[int]:
    """Training positions whose texts are new, in order: as many as `questions`, or those of one epoch."""
    end = task.questions_per_epoch
    seen: set[str] = set()
    position = 0
    while (questions is None or len(seen) < questions) and position < (end if end is not None else 20 * (questions or 0)):
        key = text_key(task.train_prompt(position).text)
        if key not in seen:
            seen.add(key)
            yield position
        position += 1


async def _ask(config: RunConfig, task: Task, positions: list[int], bounds: Bounds, record: _Record) -> None:
    """Ask the remaining questions, enough at a time to keep the engine full. Each is recorded as soon as it is answered."""
    sampling, right_at = config.rollout.sampling, config.correct_at[config.rollout.only_entry.name]
    how = AnswerSampling(samples=bounds.answers, temperature=sampling.temperature, **sampling.request)
    places = asyncio.Semaphore(max(1, 2 * config.rollout.engine.max_running_requests // bounds.answers))
    with Progress(transient=True) as progress:
        bar = progress.add_task("starting the engine", total=len(positions) * bounds.answers)
        asker = Asker(
            config.rollout, config.model, config.seed, lambda answers: progress.update(bar, advance=answers, description="answering")
        )

        async def one(position: int) -> None:
            async with places:
                (answers,) = await asker.answer([task.train_prompt(position)], how)
            rewards = [answer.reward for answer in answers]
            solved = sum(reward is not None and reward >= right_at for reward in rewards)
            record.add(Asked(position, solved, rewards.count(None)))

        async with asker.started([task.train_prompt(positions[0])]):
            await asyncio.gather(*(one(position) for position in positions))


class _Record:
    """The record of the questions asked so far: a line of settings, then one line a question."""

    def __init__(self, path: Path, settings: dict[str, Any], output: Path) -> None:
        """Raises: DataError if the file has other settings, or if the output exists but its record doesn't."""
        self.path, self._lines = path, JsonLines(path)
        self._lines.repair()
        headers = self._lines.read(lambda line: line["settings"])
        if not headers:
            if output.exists():
                raise DataError(f"{output}: exists already, and no record of what was asked for it ({path.name}); choose another --output")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines.append({"settings": settings})
            return
        differing = sorted(key for key in settings.keys() | headers[0].keys() if settings.get(key) != headers[0].get(key))
        if differing:
            key = differing[0]
            raise DataError(
                f"{path}: its questions were asked with {key} = {headers[0].get(key)}, now it is {settings.get(key)}; choose another "
                f"--output, or remove the file"
            )

    def add(self, asked: Asked) -> None:
        self._lines.append({"position": asked.position, "solved": asked.solved, "unscored": asked.unscored})

    def read(self) -> dict[int, Asked]:
        """Questions that have been asked already, by position in the data set."""
        found = self._lines.read(lambda line: Asked(int(line["position"]), int(line["solved"]), int(line["unscored"])))
        return {one.position: one for one in found}


def _settings(config: RunConfig, bounds: Bounds) -> dict[str, Any]:
    """The settings that decide the answers and their scores, by dotted key. A record with other values can't be continued."""
    entry = config.rollout.only_entry
    sections: dict[str, Settings | None] = {"task": entry.task, "reward": entry.reward, "sampling": config.rollout.sampling_of(entry.name)}
    sections |= {"environment": entry.environment, "agent": entry.agent}
    settings: dict[str, Any] = {
        "model": str(config.model.resolve()),
        "--answers": bounds.answers,
        "seed": config.seed,
        "evaluation.correct_at": config.correct_at[entry.name],
    }
    # They don't change a score.
    left_out = {"samples_per_group", "deadline_s", "start_deadline_s", "processes", "memory_gib"}
    for name, section in sections.items():
        said = {} if section is None else section.model_dump(mode="json", exclude=left_out)
        settings |= {f"rollout.{name}.{key}": value for key, value in said.items()}
    return settings


def _held_back(config: RunConfig, task: Task) -> str:
    """A clause on the rows that are kept for evaluation, where those are of the same file."""
    of_task = config.rollout.only_entry.task
    if getattr(of_task, "held_out_path", None) or getattr(of_task, "held_out_split", None):
        return ""
    kept = counted(len(task.held_out_rows()), "other")
    return f"; {kept} are held out (rollout.task.held_out_fraction = {of_task.held_out_fraction:g})"


def _held_out_path(output: Path) -> Path:
    """Path of a file with the task's own held-out questions. So no kept question need be held out, and a run on the kept ones is measured
    on the same questions as other runs."""
    return output.with_suffix(".held_out.jsonl")


def _write(output: Path, rows: list[dict[str, Any]]) -> None:
    temporary = output.with_name(f".{os.getpid()}.{output.name}")
    temporary.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(output)


def _say_outcome(asked: list[Asked], kept: int, output: Path, config: RunConfig, bounds: Bounds, say: Callable[[str], None]) -> None:
    kinds = Counter(one.kind(bounds.answers) for one in asked)
    unscored = sum(one.unscored for one in asked)
    say(
        f"{len(asked)} questions, {bounds.answers} answers each: solved never {kinds['never']}, sometimes {kinds['sometimes']}, "
        f"always {kinds['always']}"
        + (f", unknown {kinds['unknown']}" if kinds["unknown"] else "")
        + f"; {unscored} answers could not be scored"
    )
    between = f"{bounds.min_solved} to {bounds.max_solved}"
    say(f"{output}: the {kept} questions that {between} of {bounds.answers} answers solve")
    if not kept:
        say("none was kept: nothing to train on; ask more questions, or widen --min-solved and --max-solved")
        return
    say(f"to train on them: evenkeel train RECIPE {' '.join(_training_words(config, output))}")


def _training_words(config: RunConfig, output: Path) -> Iterator[str]:
    """Overrides (KEY=VALUE) with which the recipe trains on the rows. If the kind of task changes, they repeat the task's other
    settings."""
    task, reward = config.rollout.only_entry.task, config.rollout.only_entry.reward
    words: dict[str, Any] = {"rollout.task.path": str(output), "rollout.task.held_out_path": str(_held_out_path(output))}
    if not isinstance(task, FileTask):
        common = FileTask.model_fields.keys() - {"kind", "path", "held_out_path"}
        said = task.model_dump(mode="json", exclude_defaults=True, include=set(common))
        words |= {"rollout.task.kind": "file"} | {f"rollout.task.{key}": value for key, value in said.items()}
    if isinstance(task, ReasoningGymTask) and isinstance(reward, ReasoningGymReward):
        words |= {"rollout.reward.dataset": task.dataset} | ({"rollout.reward.options": task.options} if task.options else {})
    for key, value in words.items():
        is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", value)
        yield shlex.quote(f"{key}={value if is_plain else json.dumps(value)}")
