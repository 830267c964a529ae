"""Held-out accuracy, measured with the engines that sample for training, beside it.

Each question is asked once, or several times. Then accuracy is the mean over questions of the share of right answers, and pass@k the chance
that at least one of k answers is right. Questions are the unit of every interval: the answers to one question are alike (it is hard or easy
for the model), so that n answers to each of N questions say less than n N answers to as many questions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance
from typing import Protocol

from ray.exceptions import RayError

from actors.config import DeadlinesConfig, EvaluationConfig
from actors.metrics.step_metrics import with_interval
from actors.processes.supervision import abandon, counted, wait_for
from actors.weights.weight_sync import WeightSync
from correction.errors import DeadlineExceeded, EvenkeelError
from rollout.config import AnswerSampling
from rollout.trajectory import FinishReason, Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of successes with its Wilson interval."""

    value: float
    low: float
    high: float
    n: int
    """Questions (or other trials) that it is the mean of."""

    def __str__(self) -> str:
        if not self.n:
            return "unknown, n = 0"
        return f"{with_interval(self.value, self.low, self.high)}, n = {self.n}"


UNKNOWN = Proportion(math.nan, 0.0, 1.0, 0)
"""Of no trial."""


def wilson_interval(share: float, n: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share, which keeps inside [0, 1] and holds near its ends too.

    Args:
        share: in [0, 1].
        n: trials, > 0; an effective number of them need not be whole (scipy's takes whole ones alone).
        confidence: of the interval, two-sided, in (0, 1).
    Source: Wilson (1927), J. Am. Stat. Assoc. 22; Brown, Cai, DasGupta (2001) recommend it for n > 40 as well as below.
    """
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At the ends the interval reaches them, which rounding need not know.
    return (0.0 if share == 0 else centre - half), (1.0 if share == 1 else centre + half)


def share_over_questions(values: Sequence[float], trials: int) -> Proportion:
    """Mean of one value in [0, 1] a question, with a 95 % Wilson interval whose trials are an effective number of questions.

    That number is N p (1 - p) / var(values): what as many independent yes-or-no trials would need for the same standard error of the mean,
    sqrt(var / N). With one answer a question it is N, which is Wilson's interval itself; with n answers it lies between N (all answers to a
    question agree) and n N (questions are equally hard). Where all questions have the same value nothing is known of that: N.
    Args:
        values: one a question, at least one.
        trials: independent trials that they rest on at most.
    Source: Dean and Pagano (2015), Franco et al. (2019), J. Surv. Stat. Methodol. 3 and 7: Wilson's interval of clustered answers; Miller
        (2024), Adding Error Bars to Evals, for questions as the unit.
    """
    mean, variance, count = fmean(values), pvariance(values), len(values)
    effective = min(trials, count * mean * (1 - mean) / variance) if variance > 0 else count
    effective = max(count, effective)
    return Proportion(mean, *wilson_interval(mean, effective), count)


def pass_at(k: int, *, right: int, answers: int) -> float:
    """Chance that at least one of k answers is right, from a question's answers, without bias; k <= answers.

    1 - C(answers - right, k) / C(answers, k): of all choices of k answers, the share with a right one.
    Source: Chen et al. (2021), Evaluating Large Language Models Trained on Code, Eq. 1.
    """
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


class Answerer(Protocol):
    """Whatever can answer prompts: the rollout pool, or one engine."""

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt, in order."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The answers to held-out questions, scored."""

    step: int
    """Steps done when it began."""
    samples: int
    """Answers asked for of each question."""
    accuracy: Proportion
    """Over the questions of which an answer could be scored."""
    pass_at: dict[int, Proportion]
    """By k: 2, 4, 8 ... and samples, each over the questions of which k answers could be scored."""
    seconds: float
    answers: tuple[tuple[Trajectory, ...], ...]
    """Of each question."""
    failed: int
    """Answers that could not be scored; the accuracy leaves them out."""

    def __str__(self) -> str:
        text = str(self.accuracy)
        if self.samples > 1:
            text += f" x {self.samples} answers" + "".join(f", pass@{k} {share}" for k, share in self.pass_at.items() if k == self.samples)
        return text + (f", {self.failed} answer{'s' * (self.failed > 1)} could not be scored" if self.failed else "")

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All answers, question by question."""
        return tuple(one for of_one in self.answers for one in of_one)

    @property
    def first_failure(self) -> str:
        """Why the first of those answers has no score; empty if all have one."""
        return next((f"{t.prompt_id}: {t.error}" for t in self.trajectories if t.reward is None), "")

    def metrics(self) -> dict[str, float | None]:
        """By name of the catalogue; the accuracy is None when nothing could be scored."""
        known, all_answers = self.accuracy.n > 0, self.trajectories
        count = max(1, len(all_answers))
        versions = [span.version for t in all_answers for span in t.version_spans]
        numbers = {
            "held_out/accuracy": self.accuracy.value if known else None,
            "held_out/wilson_low": self.accuracy.low if known else None,
            "held_out/wilson_high": self.accuracy.high if known else None,
            "held_out/problems": len(self.answers),
            "held_out/samples": self.samples,
            "held_out/unscored": self.failed,
            "held_out/weight_version": min(versions) if versions else 0,
            "held_out/truncated_share": sum(t.finish_reason is FinishReason.LENGTH for t in all_answers) / count,
            "held_out/response_tokens": sum(len(t.response_ids) for t in all_answers) / count,
            "held_out/seconds": self.seconds,
        }
        for k, share in self.pass_at.items():
            of_k = {"pass_at": share.value, "pass_at_low": share.low, "pass_at_high": share.high}
            numbers |= {f"held_out/{name}/{k}": value for name, value in of_k.items()}
        return numbers

    def text(self, prompts: Sequence[Prompt], limit: int = 40) -> str:
        """The answers to the first questions, readable."""
        lines = [f"held-out accuracy {self} after {self.step} steps", ""]
        for prompt, answers in list(zip(prompts, self.answers, strict=True))[:limit]:
            for trajectory in answers:
                scored = trajectory.error or f"reward {trajectory.reward:g}"
                lines.append(f"{prompt.text!r} -> {trajectory.text!r}   (answer {prompt.answer!r}, {scored})")
        return "\n".join(lines) + "\n"


async def evaluate(answerer: Answerer, prompts: Sequence[Prompt], how: AnswerSampling, *, step: int, correct_at: float) -> Evaluation:
    """Ask every question how.samples times.

    Args:
        correct_at: a reward of at least this is a right answer.
    """
    began = time.monotonic()
    answers = tuple(tuple(of_one) for of_one in await answerer.answer(prompts, how))
    scored = [[t.reward >= correct_at for t in of_one if t.reward is not None] for of_one in answers]
    known = [of_one for of_one in scored if of_one]
    total = sum(map(len, scored))
    return Evaluation(
        step=step,
        samples=how.samples,
        accuracy=share_over_questions([fmean(of_one) for of_one in known], total) if known else UNKNOWN,
        pass_at={k: share for k in _ks(how.samples) if (share := _pass_at(k, scored)).n},
        seconds=time.monotonic() - began,
        answers=answers,
        failed=sum(map(len, answers)) - total,
    )


def _ks(samples: int) -> list[int]:
    """2, 4, 8 ... below the number of answers, and that number; none of a single answer, whose pass@1 is the accuracy."""
    return [2**i for i in range(1, samples.bit_length()) if 2**i < samples] + [samples] * (samples > 1)


def _pass_at(k: int, scored: Sequence[Sequence[bool]]) -> Proportion:
    """Of the questions that have k scored answers; UNKNOWN if none has."""
    enough = [of_one for of_one in scored if len(of_one) >= k]
    values = [pass_at(k, right=sum(of_one), answers=len(of_one)) for of_one in enough]
    return share_over_questions(values, sum(len(of_one) // k for of_one in enough)) if values else UNKNOWN


class EvaluationObserver(Protocol):
    """Is told how evaluations go."""

    def evaluated(self, result: Evaluation, prompts: Sequence[Prompt]) -> None: ...

    def event(self, level: str, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def waiting(self, text: str) -> None: ...


class Evaluations:
    """The evaluations of a run: on all held-out questions at its ends, on some of them beside training."""

    def __init__(
        self,
        settings: EvaluationConfig,
        deadlines: DeadlinesConfig,
        answerer: Answerer,
        prompts: Sequence[Prompt],
        observer: EvaluationObserver,
        *,
        steps: int,
    ) -> None:
        """Args: steps: of the run; after the last one there is no evaluation beside training."""
        self._settings, self._deadlines, self._answerer, self._prompts = settings, deadlines, answerer, prompts
        self._observer, self._steps = observer, steps
        self._beside: asyncio.Task[Evaluation] | None = None
        self.counts_from: Callable[[], float] | None = None
        """Time of the event loop before which nobody was there to answer."""

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation beside training after this step."""
        every = self._settings.every_steps
        return every > 0 and step % every == 0 and step < self._steps

    def begin_if_due(self, step: int, version: int) -> None:
        """After a step: start the evaluation beside training, unless one is running; it ends whenever it ends."""
        if not self.is_due(step):
            return
        if self._beside is not None and not self._beside.done():
            self._observer.event("info", f"evaluation of step {step} left out: the one before is still running")
            return
        prompts = self._prompts[: self._settings.problems_between]
        self._beside = asyncio.create_task(self._in_time(prompts, f"evaluation beside step {step + 1}", step, version))
        self._beside.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[Evaluation]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._observer.event("warning", f"an evaluation beside training failed: {task.exception()}")

    async def finished(self) -> None:
        """Wait for the evaluation beside training, if one is running, however it ends; it has a deadline of its own."""
        if self._beside is not None:
            await asyncio.wait({self._beside})

    async def whole(self, when: str, step: int, version: int, sync: WeightSync) -> Evaluation | None:
        """Evaluate on all held-out questions, with these weights in every engine. One that takes too long, or whose questions cost one
        engine after another, is left out: training can do without it.

        Args:
            when: "before training", for instance.
            step: steps done.
            version: of the weights, which are published first if they aren't yet.
        """
        await self.finished()
        self._observer.phase(f"evaluating {when} on {counted(len(self._prompts), 'held-out problem')}")
        if sync.version < version:
            await sync.publish()
        try:
            await sync.receipts(version, deadline_s=self._deadlines.receipts_s)
        except DeadlineExceeded as error:  # those that hold them answer
            self._observer.event("warning", f"the evaluation {when} goes without some engines: {error}")
        try:
            return await self._in_time(self._prompts, f"evaluation {when}", step, version)
        except (EvenkeelError, RayError) as error:
            self._observer.event("warning", f"left out: {error}")
            return None

    async def abandon(self) -> None:
        """End the one beside training; another may begin."""
        if self._beside is not None:
            abandon(self._beside)
            self._beside = None

    async def _in_time(self, prompts: Sequence[Prompt], what: str, step: int, version: int) -> Evaluation:
        return await wait_for(
            self._evaluate(prompts, step),
            f"{what}, weights v{version} <- rollout workers",
            deadline_s=self._deadlines.evaluation_s,
            counts_from=self.counts_from,
            notice_s=self._deadlines.notice_s,
            notice=self._observer.waiting,
        )

    async def _evaluate(self, prompts: Sequence[Prompt], step: int) -> Evaluation:
        result = await evaluate(self._answerer, prompts, self._settings, step=step, correct_at=self._settings.correct_at)
        self._observer.evaluated(result, prompts)
        return result
