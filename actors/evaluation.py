"""Held-out accuracy, measured with the engines that sample for training, beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scipy.stats import binomtest

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
            verdict = trajectory.error or f"reward {trajectory.reward:g}"
            lines.append(f"{prompt.text!r} -> {trajectory.text!r}   (answer {prompt.answer!r}, {verdict})")
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
