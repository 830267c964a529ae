"""Held-out accuracy: the scored answers, and shares of them with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, pvariance

from evenkeel.actors.metrics.step_metrics import with_interval
from evenkeel.correction.errors import counted
from evenkeel.rollout.trajectory import FinishReason, Prompt, Trajectory


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
"""A proportion without a single trial."""


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
    """Pass@k by k: 2, 4, 8 ... and samples, each over the questions of which k answers could be scored."""
    seconds: float
    answers: tuple[tuple[Trajectory, ...], ...]
    """All answers to each question."""
    failed: int
    """Answers that could not be scored; the accuracy leaves them out."""
    by_task: Mapping[str, Evaluation] = field(default_factory=dict)
    """The same of each of several tasks, by name."""

    def __str__(self) -> str:
        text = str(self.accuracy)
        if self.samples > 1:
            text += f" x {self.samples} answers" + "".join(f", pass@{k} {share}" for k, share in self.pass_at.items() if k == self.samples)
        text += f", {counted(self.failed, 'answer')} could not be scored" if self.failed else ""
        return text + "".join(f"; {name}: {one}" for name, one in self.by_task.items())

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All answers, question by question."""
        return tuple(one for of_one in self.answers for one in of_one)

    @property
    def reward(self) -> float:
        """Mean of the scored answers' rewards; NaN without one."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        return fmean(rewards) if rewards else math.nan

    @property
    def truncated_share(self) -> float:
        """Share of the answers that were cut at max_tokens."""
        return sum(t.finish_reason is FinishReason.LENGTH for t in self.trajectories) / max(1, len(self.trajectories))

    @property
    def first_failure(self) -> str:
        """Why the first of those answers has no score; empty if all have one."""
        return next((f"{t.prompt_id}: {t.error}" for t in self.trajectories if t.reward is None), "")

    def metrics(self) -> dict[str, float | None]:
        """Numbers by name of the catalogue; the accuracy is None when nothing could be scored."""
        known, all_answers = self.accuracy.n > 0, self.trajectories
        count = max(1, len(all_answers))
        versions = [span.version for t in all_answers for one in t.sequences for span in one.version_spans]
        numbers = {
            "held_out/accuracy": self.accuracy.value if known else None,
            "held_out/wilson_low": self.accuracy.low if known else None,
            "held_out/wilson_high": self.accuracy.high if known else None,
            "held_out/reward": self.reward if known else None,
            "held_out/problems": len(self.answers),
            "held_out/samples": self.samples,
            "held_out/unscored": self.failed,
            "held_out/weight_version": min(versions) if versions else 0,
            "held_out/truncated_share": self.truncated_share,
            "held_out/response_tokens": sum(t.response_tokens for t in all_answers) / count,
            "held_out/turns": sum(t.turns for t in all_answers) / count,
            "held_out/seconds": self.seconds,
        }
        for name, one in self.by_task.items():
            if one.accuracy.n:
                of_task = {"accuracy": one.accuracy.value, "wilson_low": one.accuracy.low, "wilson_high": one.accuracy.high}
                numbers |= {f"held_out/task_{what}/{name}": value for what, value in (of_task | {"reward": one.reward}).items()}
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


# A warning for held-out answers that are nearly all cut: few can be right. driver/no_learning.py says it of those in training.

NEARLY_ALL = 0.9
"""Share of answers from which something is said. A small chat model with answers of 256 tokens has 40 to 75 % cut, and learns."""
# Number of answers below which nothing is said.
_FEWEST = 8


def cut_remark(answers: Sequence[Trajectory], limit: str) -> str | None:
    """A sentence if nearly all of the answers were cut, else None. Args: limit: RolloutConfig.limit_of_answers."""
    cut = sum(one.finish_reason is FinishReason.LENGTH for one in answers)
    if len(answers) < _FEWEST or cut < NEARLY_ALL * len(answers):
        return None
    return (
        f"{cut} of {len(answers)} answers were cut at {limit}. Raise it if they were going to be right; "
        "if they had ended by then, and the model went on, `evenkeel doctor MODEL` shows the tokens at which answers end"
    )
