"""Held-out accuracy, measured with the engines that sample for training, beside it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.config import DeadlinesConfig, EvaluationConfig
from actors.supervision import abandon, wait_for
from rollout.trajectory import FinishReason, Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of successes with its Wilson interval."""

    value: float
    low: float
    high: float
    n: int
    """Trials."""

    def __str__(self) -> str:
        if not self.n:
            return "unknown, n = 0"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.n}"


UNKNOWN = Proportion(math.nan, 0.0, 1.0, 0)
"""Of no trial."""


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> Proportion:
    """Share of successes with its Wilson score interval, which keeps inside [0, 1] and holds near its ends too.

    Args:
        successes: 0 to n.
        n: trials, > 0.
        confidence: of the interval, two-sided, in (0, 1).
    Raises: ValueError if there was no trial, or more successes than trials.
    Source: Wilson (1927), J. Am. Stat. Assoc. 22; Brown, Cai, DasGupta (2001) recommend it for n > 40 as well as below.
    """
    if n <= 0:
        raise ValueError(f"{successes} of {n}: a share needs at least one trial")
    from scipy.stats import binomtest  # a second of imports, which a start doesn't wait for

    interval = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return Proportion(successes / n, float(interval.low), float(interval.high), n)


class Answerer(Protocol):
    """Whatever can answer prompts: the rollout pool, or one engine."""

    async def answer(self, prompts: Sequence[Prompt], temperature: float) -> list[Trajectory]:
        """One scored answer to each prompt, in order."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The answers to held-out questions, scored."""

    step: int
    """Steps done when it began."""
    accuracy: Proportion
    seconds: float
    trajectories: tuple[Trajectory, ...]
    failed: int
    """Answers that could not be scored; the accuracy leaves them out."""

    def __str__(self) -> str:
        return f"{self.accuracy}" + (f", {self.failed} answer{'s' * (self.failed > 1)} could not be scored" if self.failed else "")

    @property
    def first_failure(self) -> str:
        """Why the first of those answers has no score; empty if all have one."""
        return next((f"{t.prompt_id}: {t.error}" for t in self.trajectories if t.reward is None), "")

    def metrics(self) -> dict[str, float | None]:
        """By name of the catalogue; the accuracy is None when nothing could be scored."""
        known = self.accuracy.n > 0
        answered = max(1, len(self.trajectories))
        versions = [span.version for t in self.trajectories for span in t.version_spans]
        return {
            "held_out/accuracy": self.accuracy.value if known else None,
            "held_out/wilson_low": self.accuracy.low if known else None,
            "held_out/wilson_high": self.accuracy.high if known else None,
            "held_out/problems": len(self.trajectories),
            "held_out/unscored": self.failed,
            "held_out/weight_version": min(versions) if versions else 0,
            "held_out/truncated_share": sum(t.finish_reason is FinishReason.LENGTH for t in self.trajectories) / answered,
            "held_out/response_tokens": sum(len(t.response_ids) for t in self.trajectories) / answered,
            "held_out/seconds": self.seconds,
        }

    def text(self, prompts: Sequence[Prompt], limit: int = 40) -> str:
        """The first answers, readable."""
        lines = [f"held-out accuracy {self} after {self.step} steps", ""]
        for prompt, trajectory in list(zip(prompts, self.trajectories, strict=True))[:limit]:
            scored = trajectory.error or f"reward {trajectory.reward:g}"
            lines.append(f"{prompt.text!r} -> {trajectory.text!r}   (answer {prompt.answer!r}, {scored})")
        return "\n".join(lines) + "\n"


async def evaluate(answerer: Answerer, prompts: Sequence[Prompt], *, step: int, temperature: float, correct_at: float) -> Evaluation:
    """Ask every question once.

    Args:
        correct_at: a reward of at least this is a right answer.
    """
    began = time.monotonic()
    trajectories = await answerer.answer(prompts, temperature)
    scored = [t.reward for t in trajectories if t.reward is not None]
    right = sum(reward >= correct_at for reward in scored)
    return Evaluation(
        step=step,
        accuracy=wilson(right, len(scored)) if scored else UNKNOWN,
        seconds=time.monotonic() - began,
        trajectories=tuple(trajectories),
        failed=len(trajectories) - len(scored),
    )


class EvaluationObserver(Protocol):
    """Is told how evaluations go."""

    def evaluated(self, result: Evaluation, prompts: Sequence[Prompt]) -> None: ...

    def event(self, level: str, text: str) -> None: ...

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

    def begin_if_due(self, step: int, version: int) -> None:
        """After a step: start the evaluation beside training, unless one is running; it ends whenever it ends."""
        every = self._settings.every_steps
        if not every or step % every or step >= self._steps:
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

    async def whole(self, when: str, step: int, version: int) -> Evaluation:
        """Evaluate on all held-out questions.

        Args:
            when: "before training", for instance.
            step: steps done.
            version: of the weights.
        Raises: DeadlineExceeded.
        """
        return await self._in_time(self._prompts, f"evaluation {when}", step, version)

    async def abandon(self) -> None:
        if self._beside is not None:
            abandon(self._beside)

    async def _in_time(self, prompts: Sequence[Prompt], what: str, step: int, version: int) -> Evaluation:
        return await wait_for(
            self._evaluate(prompts, step),
            f"{what}, weights v{version} <- rollout workers",
            deadline_s=self._deadlines.evaluation_s,
            notice_s=self._deadlines.notice_s,
            notice=self._observer.waiting,
        )

    async def _evaluate(self, prompts: Sequence[Prompt], step: int) -> Evaluation:
        settings = self._settings
        result = await evaluate(self._answerer, prompts, step=step, temperature=settings.temperature, correct_at=settings.correct_at)
        self._observer.evaluated(result, prompts)
        return result
