"""Held-out accuracy, measured with the engines that sample for training, while it goes on.

Each question is asked once, or several times. Then accuracy is the mean over questions of the share of right answers, and pass@k the chance
that at least one of k answers is right. Questions are the unit of every interval: the answers to one question are alike (it is hard or easy
for the model), so that n answers to each of N questions say less than n N answers to as many questions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean
from typing import Protocol

from ray.exceptions import RayError

from evenkeel.actors.config import DeadlinesConfig, EvaluationConfig
from evenkeel.actors.metrics.held_out import UNKNOWN, Evaluation, Proportion, pass_at, share_over_questions
from evenkeel.actors.processes.supervision import abandon, wait_for
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.weights.weight_sync import WeightSync
from evenkeel.correction.errors import DeadlineExceeded, EvenkeelError, counted
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.tasks.mixture import first_of_each
from evenkeel.rollout.trajectory import Prompt, Trajectory


class Answerer(Protocol):
    """Whatever can answer prompts: the rollout pool, or one engine."""

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt, in order."""


async def evaluate(
    answerer: Answerer, prompts: Sequence[Prompt], how: AnswerSampling, *, step: int, correct_at: Mapping[str, float]
) -> Evaluation:
    """Ask every question how.samples times.

    Args:
        correct_at: a reward of at least this is a right answer, by the name of its task.
    """
    began = time.monotonic()
    answers = [tuple(of_one) for of_one in await answerer.answer(prompts, how)]
    seconds = time.monotonic() - began
    tasks = [task_of(prompt.prompt_id) for prompt in prompts]
    least = [correct_at[task] for task in tasks]

    def of(chosen: Sequence[bool]) -> Evaluation:
        return _evaluation(list(compress(answers, chosen)), list(compress(least, chosen)), how, step, seconds)

    by_task = {name: of([task == name for task in tasks]) for name in (dict.fromkeys(tasks) if any(tasks) else ())}
    return replace(of([True] * len(answers)), by_task=by_task)


def _evaluation(
    answers: Sequence[tuple[Trajectory, ...]], least: Sequence[float], how: AnswerSampling, step: int, seconds: float
) -> Evaluation:
    """Args: answers, least: to each question, and the reward of a right one. Otherwise: see evaluate."""
    scored = [[t.reward >= right for t in of_one if t.reward is not None] for of_one, right in zip(answers, least, strict=True)]
    known = [of_one for of_one in scored if of_one]
    total = sum(map(len, scored))
    return Evaluation(
        step=step,
        samples=how.samples,
        accuracy=share_over_questions([fmean(of_one) for of_one in known], total) if known else UNKNOWN,
        pass_at={k: share for k in _ks(how.samples) if (share := _pass_at(k, scored)).n},
        seconds=seconds,
        answers=tuple(answers),
        failed=sum(map(len, answers)) - total,
    )


def _ks(samples: int) -> list[int]:
    """2, 4, 8 ... below the number of answers, and that number; none of a single answer, whose pass@1 is the accuracy."""
    return [2**i for i in range(1, samples.bit_length()) if 2**i < samples] + [samples] * (samples > 1)


def _pass_at(k: int, scored: Sequence[Sequence[bool]]) -> Proportion:
    """pass@k over the questions that have k scored answers; UNKNOWN if none has."""
    enough = [of_one for of_one in scored if len(of_one) >= k]
    values = [pass_at(k, right=sum(of_one), answers=len(of_one)) for of_one in enough]
    return share_over_questions(values, sum(len(of_one) // k for of_one in enough)) if values else UNKNOWN


class Evaluations:
    """The evaluations of a run: on all held-out questions at its ends, on some of them during training."""

    def __init__(
        self,
        settings: EvaluationConfig,
        deadlines: DeadlinesConfig,
        answerer: Answerer,
        prompts: Sequence[Prompt],
        recorder: Recorder,
        *,
        steps: int,
        correct_at: Mapping[str, float],
        counts_from: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            steps: of the run; after the last one there is no evaluation during training.
            correct_at: as of `evaluate`.
            counts_from: time of the event loop before which nobody was there to answer.
        """
        self._settings, self._deadlines, self._answerer, self._prompts = settings, deadlines, answerer, prompts
        self._recorder, self._steps, self._correct_at, self._counts_from = recorder, steps, correct_at, counts_from
        self._during_training: asyncio.Task[Evaluation] | None = None

    def is_due(self, step: int) -> bool:
        """Whether an evaluation during training begins after this step."""
        every = self._settings.every_steps
        return every > 0 and step % every == 0 and step < self._steps

    def begin_if_due(self, step: int, version: int) -> None:
        """Start the evaluation that is due after a step, unless one is running; it ends whenever it ends."""
        if not self.is_due(step):
            return
        if self._during_training is not None and not self._during_training.done():
            self._recorder.event("info", f"evaluation of step {step} left out: the one before is still running")
            return
        prompts = first_of_each(self._prompts, self._settings.problems_between)
        self._during_training = asyncio.create_task(self._in_time(prompts, f"evaluation during step {step + 1}", step, version))
        self._during_training.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[Evaluation]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._recorder.event("warning", f"an evaluation during training failed: {task.exception()}")

    async def finished(self) -> None:
        """Wait for the evaluation during training, if one is running, however it ends; it has a deadline of its own."""
        if self._during_training is not None:
            await asyncio.wait({self._during_training})

    async def whole(self, when: str, step: int, version: int, sync: WeightSync) -> Evaluation | None:
        """Evaluate on all held-out questions, with these weights in every engine. One that takes too long, or whose questions cost one
        engine after another, is left out: training can do without it.

        Args:
            when: "before training", for instance.
            step: steps done.
            version: of the weights, which are published first if they aren't yet.
        """
        await self.finished()
        self._recorder.phase(f"evaluating {when} on {counted(len(self._prompts), 'held-out problem')}")
        if sync.version < version:
            await sync.publish()
        try:
            await sync.receipts(version, deadline_s=self._deadlines.receipts_s)
        except DeadlineExceeded as error:  # those that hold them answer
            self._recorder.event("warning", f"the evaluation {when} goes without some engines: {error}")
        try:
            return await self._in_time(self._prompts, f"evaluation {when}", step, version)
        except (EvenkeelError, RayError) as error:
            self._recorder.event("warning", f"left out: {error}")
            return None

    async def abandon(self) -> None:
        """End the evaluation during training; another may begin."""
        if self._during_training is not None:
            abandon(self._during_training)
            self._during_training = None

    async def _in_time(self, prompts: Sequence[Prompt], what: str, step: int, version: int) -> Evaluation:
        return await wait_for(
            self._evaluate(prompts, step),
            f"{what}, weights v{version} <- rollout workers",
            deadline_s=self._deadlines.evaluation_s,
            counts_from=self._counts_from,
            notice_s=self._deadlines.notice_s,
            notice=self._recorder.waiting,
        )

    async def _evaluate(self, prompts: Sequence[Prompt], step: int) -> Evaluation:
        result = await evaluate(self._answerer, prompts, self._settings, step=step, correct_at=self._correct_at)
        self._recorder.evaluated(result, prompts)
        return result
