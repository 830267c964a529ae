"""Held-out accuracy, measured with the engines that sample for training, beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.statistics import Proportion, wilson
from rollout.trajectory import FinishReason, Prompt, Trajectory


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
    """Answers whose scoring failed; they count as wrong."""

    def metrics(self) -> dict[str, float]:
        """By name of the catalogue."""
        answered = max(1, len(self.trajectories))
        versions = [span.version for t in self.trajectories for span in t.version_spans]
        return {
            "held_out/accuracy": self.accuracy.value,
            "held_out/wilson_low": self.accuracy.low,
            "held_out/wilson_high": self.accuracy.high,
            "held_out/problems": self.accuracy.n,
            "held_out/weight_version": min(versions) if versions else 0,
            "held_out/truncated_share": sum(t.finish_reason is FinishReason.LENGTH for t in self.trajectories) / answered,
            "held_out/response_tokens": sum(len(t.response_ids) for t in self.trajectories) / answered,
            "held_out/seconds": self.seconds,
        }

    def text(self, prompts: Sequence[Prompt], limit: int = 40) -> str:
        """The first answers, readable."""
        lines = [f"held-out accuracy {self.accuracy} after {self.step} steps", ""]
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
    right = sum(t.reward is not None and t.reward >= correct_at for t in trajectories)
    return Evaluation(
        step=step,
        accuracy=wilson(right, len(prompts)),
        seconds=time.monotonic() - began,
        trajectories=tuple(trajectories),
        failed=sum(t.reward is None for t in trajectories),
    )
