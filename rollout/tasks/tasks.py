"""Where prompts come from: reasoning-gym, files and Hugging Face data sets, each as a training stream and a held-out list.

Training prompts are a function of (seed, position), so a run resumes from an integer. Training and held-out questions are disjoint
by construction: a hash of the question's text decides to which side it belongs, whatever the seed and however long training runs.
Demonstrations for the supervised warm-up come from the training side. `Task.check` looks at the texts all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any

import xxhash

from evenkeel.correction.errors import DataError, counted
from evenkeel.rollout.config import ReasoningGymTask, TaskConfig
from evenkeel.rollout.prompt_place import PromptPlace
from evenkeel.rollout.rewards.reward_process import GYM_ENTRY, accepted, as_json
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.gym_source import ReasoningGymSource, check_names
from evenkeel.rollout.tasks.questions import Question, QuestionSource, SkippedRow, text_key
from evenkeel.rollout.tasks.rows import RowSource, with_field
from evenkeel.rollout.trajectory import Demonstration, Prompt

_FINGERPRINT_POSITIONS = 16


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What the check at start-up counted; whoever asked prints it."""

    name: str
    """Data set or file."""
    held_out: int
    """Distinct questions kept for evaluation."""
    train_questions: int | None
    """Distinct training questions there are; None: no end is known."""
    train_checked: int
    """Training positions whose texts were compared with the held-out ones."""
    train_distinct: int
    """Distinct questions among those."""
    demonstrations_checked: int
    """Demonstrations compared likewise."""
    skipped: tuple[SkippedRow, ...]
    """Rows left out, each with its reason."""
    warnings: tuple[str, ...]
    """Sentences to show."""

    def __str__(self) -> str:
        stock = f"{self.train_questions} distinct"
        if self.train_questions is not None and self.train_questions < self.train_checked:
            stock += f" in {self.train_checked} rows; rollout.task.distinct: true takes each once"
        if self.train_questions is None:
            stock = f"without end; {self.train_distinct} distinct among the first {self.train_checked}"
        rows = f"; {counted(len(self.skipped), 'bad row')} skipped" if self.skipped else ""
        shown = f" and from the {self.demonstrations_checked} demonstrations of the model's warm-up" if self.demonstrations_checked else ""
        return (
            f"{self.name}: {counted(self.held_out, 'held-out question')}, disjoint by text from the training questions ({stock})"
            f"{shown}{rows}"
        )


def check_task_names(config: TaskConfig) -> None:
    """What can be said of a task before its model is looked at. Raises: ConfigError for an unknown data set or option."""
    if isinstance(config, ReasoningGymTask):
        check_names(config)


def build_task(config: TaskConfig, encoder: ChatEncoder | None = None, *, called: str = "") -> Task:
    """The task of a configuration.

    Args:
        called: its name among several tasks of a run.
        encoder: makes token ids and refuses prompts that are too long; without one ids stay empty, and every length fits
            (a tokenizer that is trained on the task needs its texts first).
    Raises: ConfigError for an unknown data set or option, DataError for a missing or useless file.
    """

    def excess(question: Question) -> str | None:
        return None if encoder is None else encoder.excess(asked(config, question))

    source: QuestionSource = ReasoningGymSource(config, excess) if isinstance(config, ReasoningGymTask) else RowSource(config, excess)
    return Task(config, source, encoder, called)


def user_text(config: TaskConfig, question: str) -> str:
    """What the user turn says: the question in the task's template."""
    return config.prompt_template.replace("{question}", question)


def asked(config: TaskConfig, question: Question) -> str | list[Mapping[str, Any]]:
    """What the chat template is given: the text of a user turn, or all turns; the task's template is round the last one."""
    if not question.turns:
        return user_text(config, question.text)
    *earlier, last = question.turns
    return [*earlier, {**last, "content": user_text(config, last["content"])}]


class Task:
    """Training prompts by position, held-out prompts, demonstrations."""

    def __init__(self, config: TaskConfig, source: QuestionSource, encoder: ChatEncoder | None, called: str = "") -> None:
        self._called = called
        self._config = config
        self._source = source
        self._encoder = encoder

    @property
    def name(self) -> str:
        """Data set or file, for people."""
        return self._source.name

    @property
    def remark(self) -> str | None:
        """The remark of its ChatEncoder."""
        return None if self._encoder is None else self._encoder.remark

    def train_prompt(self, position: int) -> Prompt:
        """The prompt at a position of the training stream; its id is "train/EPOCH/POSITION IN THE EPOCH", after the task's name, if it has
        one.

        Raises: DataError if the task can't make one.
        """
        epoch, index = (0, position) if self._source.questions_per_epoch is None else divmod(position, self._source.questions_per_epoch)
        return self._prompt(PromptPlace("train", epoch, index, self._called), self._source.train_question(position))

    @property
    def questions_per_epoch(self) -> int | None:
        """Training positions after which questions repeat; None: there is no end of them."""
        return self._source.questions_per_epoch

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the training questions and their answers in order: all of a file or data set, the first of a stream without end."""
        digest = xxhash.xxh3_64(repr(self._source.questions_per_epoch).encode())
        for position in range(self._source.questions_per_epoch or _FINGERPRINT_POSITIONS):
            question = self._source.train_question(position)
            digest.update(f"{len(question.text)} {question.text}{question.answer}\n".encode())
        return digest.hexdigest()

    def train_row(self, position: int) -> dict[str, Any]:
        """The question at a position of the training stream as a row of a .jsonl file, to be asked again from there.

        It has the task's own columns; one that was generated has `prompt`, `answer` and what its scorer needs.
        Raises: DataError naming what JSON can't hold, or if the task can't make the question.
        """
        return self._row(self._source.train_question(position), f"training question {position}")

    def held_out_rows(self) -> list[dict[str, Any]]:
        """Rows of the held-out questions. Raises: DataError likewise."""
        return [self._row(question, f"held-out question {number}") for number, question in enumerate(self._source.held_out)]

    def _row(self, question: Question, place: str) -> dict[str, Any]:
        config = self._config
        try:
            if isinstance(config, ReasoningGymTask):
                return {"prompt": question.text, "answer": question.answer, GYM_ENTRY: as_json(question.metadata)}
            row = with_field(question.metadata, config.prompt_field, [dict(turn) for turn in question.turns] or question.text)
            if config.answer_field is not None:
                row = with_field(row, config.answer_field, question.answer if isinstance(question.answer, str) else list(question.answer))
            if config.demonstration_field is not None:
                shown = question.demonstration
                row = with_field(row, config.demonstration_field, shown if shown is None or isinstance(shown, str) else list(shown))
            for name, value in row.items():
                if as_json(value, name) != value:
                    raise TypeError(f"{name} is {type(value).__name__} ({value!r:.60})")
            return row
        except TypeError as error:
            raise DataError(f"{self.name}, {place}: {error}, which a line of JSON can't hold") from error

    def held_out_prompts(self) -> tuple[Prompt, ...]:
        """All held-out questions as prompts, "held_out/0/0" onwards."""
        places = (PromptPlace("held_out", 0, number, self._called) for number in count())
        return tuple(map(self._prompt, places, self._source.held_out))

    def held_out_sample(self) -> Prompt:
        """The first held-out prompt.

        Raises: DataError if there is none, with the reason.
        """
        if self._source.held_out:
            return self._prompt(PromptPlace("held_out", 0, 0, self._called), self._source.held_out[0])
        if skipped := self._source.skipped:
            raise DataError(
                f"{self.name}: no question could be held out; {len(skipped)} of those looked at can't be asked, the first: {skipped[0]}. "
                f"Take shorter questions, or raise rollout.engine.context_length (at most the model's own context), or "
                f"rollout.engine.max_total_tokens, whichever is named there"
            )
        raise DataError(f"{self.name}: no question could be held out; raise rollout.task.held_out_fraction, or take more questions")

    def demonstrations(self, count: int) -> tuple[Demonstration, ...]:
        """Worked examples from the training side alone.

        Args:
            count: how many; a file with fewer rows gives them again.
        Raises: DataError if the task has no answers to demonstrate.
        """
        found: list[Demonstration] = []
        for tried, question in enumerate(self._source.demonstration_questions()):
            if len(found) >= count:
                break
            answer = accepted(question.answer)[0] if question.demonstration is None else question.demonstration
            if not isinstance(answer, str):
                found += self._turns_of(question, answer)
            elif answer:
                found.append(Demonstration(question.text, asked(self._config, question), answer))
            elif tried > 100 and not found:
                raise DataError(f"{self.name}: none of {tried} questions has an answer that could be demonstrated; skip the warm-up")
        return tuple(found[:count])

    def _turns_of(self, question: Question, worked: Sequence[Mapping[str, Any]]) -> Iterator[Demonstration]:
        """A demonstration of each of the model's turns, after all that was said before it."""
        before = asked(self._config, question)
        turns = [{"role": "user", "content": before}] if isinstance(before, str) else list(before)
        for number, turn in enumerate(worked):
            if turn["role"] == "assistant":
                yield Demonstration(question.text, [*turns, *worked[:number]], turn["content"])

    def check(
        self, train_positions: int = 1000, demonstrations: Sequence[Demonstration] = (), others: Mapping[str, Task] = MappingProxyType({})
    ) -> TaskReport:
        """Compare the texts of training, held-out questions and demonstrations, and count.

        Args:
            train_positions: how many of the first training questions to compare, where they have no end; of a file, all.
            others: the run's other tasks, by name: what they hold out isn't trained on here, either.
        Raises: DataError naming a text that is on both sides.
        """
        held_out = self._held_out_keys()
        positions = range(self._source.questions_per_epoch or train_positions)
        train = [text_key(self._source.train_question(position).text) for position in positions]
        _refuse_overlap(self.name, "the training stream", held_out, train)
        _refuse_overlap(self.name, "the warm-up demonstrations", held_out, [text_key(d.question) for d in demonstrations])
        for name, other in others.items():
            _refuse_overlap(f"{other.name} (task {name})", f"the training stream of {self.name}", other._held_out_keys(), train)
        return TaskReport(
            name=self.name,
            held_out=len(held_out),
            train_questions=self._source.distinct_train_questions,
            train_checked=len(train),
            train_distinct=len(set(train)),
            demonstrations_checked=len(demonstrations),
            skipped=self._source.skipped,
            warnings=tuple(self._warnings(len(held_out), len(train), len(set(train)))),
        )

    def _held_out_keys(self) -> set[str]:
        return {text_key(question.text) for question in self._source.held_out}

    def held_out_shortage(self, wanted: int) -> str:
        """Why there are fewer held-out questions than wanted, and what to do; empty: there are enough."""
        config, source = self._config, self._source
        if (found := len(source.held_out)) >= wanted:
            return ""
        own = getattr(config, "held_out_path", None) or getattr(config, "held_out_split", None)
        left_out = f", {counted(len(source.skipped), 'bad row')} aside ({source.skipped[0]})" if source.skipped else ""
        if own is not None:
            return f"{own} has no more with other texts{left_out}; add some"
        if source.questions_per_epoch is None:
            return f"no more with other texts were found{left_out}; set rollout.task.options that allow more"
        share, distinct = config.held_out_fraction, found + (source.distinct_train_questions or 0)
        return (
            f"rollout.task.held_out_fraction = {share:g} holds back that share of its {distinct} different questions{left_out}; raise it "
            "or take more questions"
        )

    def _warnings(self, held_out: int, checked: int, distinct: int) -> Iterator[str]:
        wanted = self._config.held_out_size
        if "held_out_size" in self._config.model_fields_set and (why := self.held_out_shortage(wanted)):
            yield (
                f"{self.name}: only {held_out} of the {wanted} held-out questions could be found: {why}, or lower "
                "rollout.task.held_out_size"
            )
        if self._source.questions_per_epoch is None and distinct < checked / 2:
            yield (
                f"{self.name}: the first {checked} training questions have only {distinct} distinct texts; "
                f"set rollout.task.options that allow more, or the model will memorise them"
            )

    def _prompt(self, place: PromptPlace, question: Question) -> Prompt:
        text = question.text if question.turns else user_text(self._config, question.text)
        token_ids = () if self._encoder is None else self._encoder.encode(asked(self._config, question))
        return Prompt(prompt_id=str(place), text=text, token_ids=token_ids, answer=question.answer, metadata=question.metadata)


def _refuse_overlap(name: str, side: str, held_out: set[str], texts: Iterable[str]) -> None:
    common = held_out.intersection(texts)
    if common:
        raise DataError(
            f"{name}: {len(common)} held-out questions are also in {side}, e.g. {min(common)[:80]!r}; "
            f"accuracy would be measured on what was trained. Make the warm-up's and the run's task settings agree"
        )
