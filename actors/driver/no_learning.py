"""Why a run can't learn, said once for each cause, from the groups that come; no clock, no processes.

All groups that workers finish are counted: under dynamic sampling a batch has a choice of them, and while nothing can be scored there is
no batch at all. A step's worth is groups_per_step of them. A cause is looked for in the last _STEPS steps' worth, and from
_LEAST_ANSWERS answers on: what is never seen in 200 of them is, with 95 % confidence, rarer than 1.5 % (3 / n, the rule of three).

Causes come in the order in which they explain each other: an answer cut before its end is never right, so where nearly all are cut, that
none was right is no news. The first that holds is said, and while it holds no later one is.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from evenkeel.actors.carriers import DiscardReason, Notify, PreparedBatch, StoredGroup
from evenkeel.actors.config import RunConfig
from evenkeel.actors.groups.tokens import fetched, tokens_fetch_s
from evenkeel.actors.metrics.held_out import NEARLY_ALL, Evaluation
from evenkeel.correction.errors import DataError, EvenkeelError, counted
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.rewards.reward_process import accepted, build_extraction
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Group, GroupFacts

if TYPE_CHECKING:
    from evenkeel.learner.results import StepResult

_STEPS = 3
_LEAST_ANSWERS = 200
# For rewards that differ and are all too low: partial rewards are learned from, and the first right answer may come later.
_PARTIAL_STEPS, _PARTIAL_ANSWERS = 8, 1000
# Share of groups without gradient from which one in 50 teaches something. Late in a run that goes well 70 to 90 % have none.
_NO_GRADIENT = 0.98
# A batch is given up when, with 95 % confidence, fewer than one group in _SHORTAGE has a gradient: a step would cost more than a hundred
# times the groups that it trains on. With none in n the share is below 3 / n; with k of them, below about (k + 3) / n.
_SHORTAGE, _RULE_OF_THREE = 100, 3
_SHOWN = 2
# Characters of a question, and of an answer, that a sentence has room for: of the answer its end, where it says what it found.
_LONGEST = 120


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer, and what the scorer made of it."""

    question: str
    expected: str | tuple[str, ...]
    """Reference answer, or several; "" if there is none."""
    text: str
    seen: str
    """What the extraction leaves of it."""
    reward: float | None
    error: str | None
    """Why there is no reward."""
    differs: bool
    """Another answer of its group says something else."""

    @property
    def is_right(self) -> bool:
        """What the scorer was given is an expected answer, blanks and case aside."""
        return any(one and self.seen.strip().casefold() == one.strip().casefold() for one in accepted(self.expected))

    @property
    def names_expected(self) -> bool:
        """An expected answer stands somewhere in the text, as a word of its own."""
        return bool(self._places)

    @property
    def goes_on(self) -> bool:
        """Whether there is text after an expected answer."""
        return any(self.text[end:].strip(" \n.!") for end in self._places)

    @property
    def _places(self) -> list[int]:
        """Places in the text at which expected answers end."""
        patterns = (rf"(?<!\w){re.escape(one.strip())}(?!\w)" for one in accepted(self.expected) if one.strip())
        return [place.end() for pattern in patterns if (place := re.search(pattern, self.text, re.IGNORECASE))]

    def __str__(self) -> str:
        seen = "" if self.seen == self.text else f", of which the reward saw {_end(self.seen)}"
        expected = f", expected {' or '.join(map(repr, accepted(self.expected)))[:_LONGEST]}" if self.expected else ""
        got = f"reward {self.reward:g}" if self.reward is not None else f"no score ({(self.error or '')[:_LONGEST]})"
        return f"question {_end(self.question)}{expected}, answer {_end(self.text)}{seen}: {got}"


def _end(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST else f"...{text[-_LONGEST:]!r}"


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of one group."""

    answers: int
    unscored: int
    """Answers without a score by the reward's fault."""
    cut: int
    lowest: float
    highest: float
    """Highest of its rewards; minus infinity if there is none."""
    has_gradient: bool | None
    """None: too few answers could be scored."""
    correct_at: float

    @classmethod
    def of(cls, group: GroupFacts, correct_at: float, *, by_turn: bool) -> _Counts:
        rewards = [one.reward for one in group.valid if one.reward is not None]
        return cls(
            len(group.trajectories),
            sum(kind is not FailureKind.ENGINE for kind, _ in group.failures),
            sum(one.finish_reason is FinishReason.LENGTH for one in group.trajectories),
            min(rewards, default=float("inf")),
            max(rewards, default=float("-inf")),
            not group.is_uniform(by_turn=by_turn) if group.is_trainable else None,
            correct_at,
        )


@dataclass(frozen=True, slots=True)
class Window:
    """The last groups together, and the settings that decide what they mean."""

    steps: float
    """Steps' worth of groups since the start."""
    answers: int
    unscored_share: float
    cut_share: float
    no_gradient_share: float
    """Share of the groups that could be scored; 0 without one."""
    lowest: float
    highest: float
    correct_at: float
    """Reward of a right answer; where the tasks of the groups differ in it, the highest."""
    are_right: bool
    has_right: bool
    """Whether any answer is."""
    extracts: bool
    """The reward is given a part of an answer."""
    limit: str
    """RolloutConfig.limit_of_answers."""
    temperature: float

    @property
    def is_alike(self) -> bool:
        """Every answer got the same reward."""
        return self.lowest == self.highest


@dataclass(frozen=True, slots=True)
class Cause:
    """Why nothing can be learned."""

    name: str
    holds: Callable[[Window], bool]
    """Whether the counts show it."""
    sentence: str
    """Filled with the window's fields and the settings'."""
    remedy: str
    shows: Callable[[Sequence[Sample]], bool] = lambda _: True
    """Whether the samples show it, where counts don't tell it from the next ones."""
    exhibit: Callable[[Sample], bool] = lambda _: True
    """Which samples show it best."""
    steps: int = _STEPS
    answers: int = _LEAST_ANSWERS

    def is_met(self, window: Window) -> bool:
        return window.steps >= self.steps and window.answers >= self.answers and self.holds(window)


CAUSES = (
    Cause(
        "unscored",
        lambda w: w.unscored_share >= 0.5,  # the reward fails on most answers, and baselines rest on the others
        "the reward gives no score to {unscored_share:.0%} of the last {answers} answers: they are left out of baseline, loss and accuracy",
        "Mend the reward (rollout.reward); where an answer is wrong, let it return 0.0",
        exhibit=lambda s: s.reward is None,
        steps=1,
        answers=64,
    ),
    Cause(
        "extraction",
        lambda w: w.is_alike and w.extracts,
        "rollout.reward.extraction finds nothing in the answers, and each of the last {answers} got the reward {highest:g}",
        "Set it to a form that the model answers in, or ask for the form in rollout.task.prompt_template",
        shows=lambda samples: not any(s.seen.strip() for s in samples) and any(s.text.strip() for s in samples),
    ),
    Cause(
        "no_end",
        lambda w: w.cut_share >= 0.99,  # one in a hundred that meets the end by chance
        "no answer ends by itself: {cut_share:.0%} of the last {answers} were cut at {limit}, and go on after the expected answer",
        "The token that ends a turn may be another than the engine stops at: `evenkeel doctor MODEL` shows both",
        shows=lambda samples: sum(s.goes_on for s in samples) > len(samples) / 4,
        exhibit=lambda s: s.goes_on,
    ),
    Cause(
        "cut",
        lambda w: w.cut_share >= NEARLY_ALL,
        "{cut_share:.0%} of the last {answers} answers were cut at {limit}",
        "Raise it, or ask for shorter answers; if they should have ended by then, see whether the engine stops at the token that ends a "
        "turn (`evenkeel doctor MODEL`)",
    ),
    Cause(
        "all_right",
        lambda w: w.is_alike and w.are_right,
        "all of the last {answers} answers are right (reward {highest:g}): there is nothing left to learn from these questions",
        "Take harder ones; `evenkeel filter` finds those that the model solves sometimes",
        shows=lambda samples: bool(samples) and all(s.names_expected for s in samples),
    ),
    Cause(
        "constant",
        lambda w: w.is_alike and w.are_right,
        "the reward is {highest:g} for each of the last {answers} answers, whatever it says",
        "Look at what rollout.reward compares",
        exhibit=lambda s: not s.names_expected,
    ),
    Cause(
        "blind",
        lambda w: w.is_alike and not w.are_right,
        "the reward is {highest:g} for each of the last {answers} answers, the expected ones among them",
        "Look at what rollout.reward compares, and at rollout.reward.extraction",
        shows=lambda samples: any(s.is_right for s in samples),
        exhibit=lambda s: s.is_right,
    ),
    Cause(
        "never_right",
        lambda w: w.is_alike and not w.are_right,
        "none of the last {answers} answers is right: each got the reward {highest:g}",
        "If some look right, the reward is at fault (rollout.reward, its extraction); else take easier questions (`evenkeel filter`), show "
        "in rollout.task.prompt_template what is wanted, or give partial rewards",
    ),
    Cause(
        "one_answer",
        lambda w: w.no_gradient_share >= _NO_GRADIENT,
        "{no_gradient_share:.0%} of the last groups have no gradient, because their answers are all the same",
        "Raise rollout.sampling.temperature = {temperature:g}",
        shows=lambda samples: sum(s.differs for s in samples) < len(samples) / 10,
    ),
    Cause(
        "no_gradient",
        lambda w: w.no_gradient_share >= _NO_GRADIENT,
        "{no_gradient_share:.0%} of the last groups have no gradient: the answers to a question all get the same reward",
        "Take questions that the model solves sometimes (`evenkeel filter`), or raise rollout.sampling.samples_per_group or temperature",
    ),
    Cause(
        "below",
        lambda w: math.isfinite(w.highest) and not w.has_right,
        "none of the last {answers} answers counts as right: the best got {highest:g}, and right is a reward of evaluation.correct_at = "
        "{correct_at:g} or more",
        "If an answer can't get more, set evaluation.correct_at: {highest:g}; accuracy stays 0 until then",
        exhibit=lambda s: s.is_right,
        steps=_PARTIAL_STEPS,
        answers=_PARTIAL_ANSWERS,
    ),
)
"""Causes in the order in which they explain each other. Where two have the same counts, the samples decide which it is."""


def _met(window: Window) -> tuple[Cause, ...]:
    return tuple(one for one in CAUSES if one.is_met(window))


class NoLearning:
    """Is told of each finished group, asks for samples when it has a suspicion, and says then what is wrong."""

    def __init__(self, config: RunConfig) -> None:
        sampling, self._per_step, self._correct_at = config.rollout.sampling, config.groups_per_step, config.correct_at
        self._last: deque[_Counts] = deque(maxlen=max(_STEPS * self._per_step, _PARTIAL_ANSWERS // sampling.samples_per_group + 1))
        self._by_turn = config.correction.advantage.is_by_turn
        self._settings: dict[str, Any] = {
            "extracts": any(entry.reward.extraction.kind != "whole" for entry in config.rollout.entries),
            "limit": config.rollout.limit_of_answers,
            "temperature": sampling.temperature,
        }
        self._every = max(8, self._per_step // 4)
        self._groups = 0
        self._said: set[str] = set()
        self._looked_at: set[tuple[Cause, ...]] = set()
        # Since the last step: groups with a gradient, and those that dynamic sampling has discarded for want of one.
        self._usable = self._useless = 0

    def finished(self, group: GroupFacts, *, is_discarded: bool = False) -> bool:
        """Count a group. Args: is_discarded: by dynamic sampling. Returns: whether `said` wants samples now."""
        counts = _Counts.of(group, self._correct_at[task_of(group.prompt_id)], by_turn=self._by_turn)
        self._last.append(counts)
        self._groups += 1
        self._usable += counts.has_gradient is True
        self._useless += is_discarded
        if self._groups % self._every:
            return self.is_short
        met = _met(self.window())
        return (bool(met) and met not in self._looked_at) or self.is_short

    def trained(self) -> None:
        """A step was trained: the next batch is filled from here on."""
        self._usable = self._useless = 0

    @property
    def is_short(self) -> bool:
        """Whether dynamic sampling discards so many groups that a batch is out of reach."""
        return self._useless > _SHORTAGE * (self._usable + _RULE_OF_THREE)

    @property
    def shortage(self) -> str:
        """How many groups were discarded in vain, in words."""
        return (
            f"dynamic sampling has discarded {self._useless} groups since the last step, and kept {self._usable}: with 95 % confidence "
            f"fewer than 1 in {_SHORTAGE} has a gradient"
        )

    def window(self) -> Window:
        """The last groups together; there is one at least."""
        last = self._last
        answers = sum(one.answers for one in last)
        scored = [one for one in last if one.has_gradient is not None]
        return Window(
            self._groups / self._per_step,
            answers,
            sum(one.unscored for one in last) / answers,
            sum(one.cut for one in last) / answers,
            sum(not one.has_gradient for one in scored) / len(scored) if scored else 0.0,
            min(one.lowest for one in last),
            max(one.highest for one in last),
            max(one.correct_at for one in last),
            all(one.lowest >= one.correct_at for one in last),
            any(one.highest >= one.correct_at for one in last),
            **self._settings,
        )

    def said(self, samples: Sequence[Sample], *, again: bool = False) -> str:
        """What is wrong, with two samples and what to change; empty: nothing that has not been said.

        Args:
            samples: all answers of a few of the last groups.
            again: also what has been said.
        """
        window = self.window()
        met = _met(window)
        self._looked_at.add(met)
        cause = next((one for one in met if one.shows(samples)), None)
        if cause is None or (cause.name in self._said and not again):
            return ""
        self._said.add(cause.name)
        fields = asdict(window)
        told = f"{cause.sentence.format(**fields)}. {cause.remedy.format(**fields)}"
        shown = {one.question: one for one in sorted(samples, key=cause.exhibit)}  # the last of a question stays
        examples = sorted(shown.values(), key=cause.exhibit, reverse=True)[:_SHOWN]
        return told + "".join(f". {'For instance' if number == 0 else 'And'}: {one}" for number, one in enumerate(examples))


# Reads the answers of a few groups when a run seems unable to learn, has the cause named, and reports it.

# Groups whose answers can be looked at: with half of the answers right, one in 2^64 times none of those of 8 groups of 8 is.
_KEPT = 8


class LearningWatch:
    """One event loop uses it, that of the driver."""

    def __init__(self, config: RunConfig, notify: Notify, on_shortage: Callable[[str], None]) -> None:
        """Args: on_shortage: called once with the reason if dynamic sampling leaves too few groups for a batch."""
        self._judge, self._notify, self._on_shortage = NoLearning(config), notify, on_shortage
        self._extract = {entry.name: build_extraction(entry.reward.extraction.model_dump()) for entry in config.rollout.entries}
        self._bytes_per_s = config.deadlines.bytes_per_s
        self._recent: deque[StoredGroup] = deque(maxlen=_KEPT)
        self._looking: asyncio.Task[None] | None = None
        self._is_short = False

    def finished(self, group: StoredGroup) -> None:
        """A worker has sampled and scored it."""
        self._recent.append(replace(group, wide=None))  # which can be large, and says nothing
        wants = self._judge.finished(group.facts, is_discarded=group.reason is DiscardReason.UNIFORM)
        if wants and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())

    def trained(self) -> None:
        """A step is over."""
        self._judge.trained()

    async def _look(self) -> None:
        recent = list(self._recent)
        try:
            groups, _ = await fetched(recent, deadline_s=tokens_fetch_s(recent, self._bytes_per_s))
        except (EvenkeelError, RayError):  # the counts say enough
            groups = []
        samples = [one for group in groups for one in self._samples(group)]
        if self._judge.is_short and not self._is_short:
            self._is_short = True
            self._on_shortage("; ".join(filter(None, (self._judge.shortage, self._judge.said(samples, again=True)))))
            self._judge.trained()  # each group would be looked at, for what has been said
        elif told := self._judge.said(samples):
            self._notify("warning", told)

    def _samples(self, group: Group) -> list[Sample]:
        """All its answers. A pattern has gone through the same texts in a scoring process within its deadline; where that failed the text
        is left whole."""
        texts, extract = {one.text for one in group.trajectories}, self._extract[task_of(group.prompt_id)]
        return [
            Sample(
                group.prompt.text,
                group.prompt.answer,
                one.text,
                one.text if one.error else extract(one.text),
                one.reward,
                one.error,
                differs=len(texts) > 1,
            )
            for one in group.trajectories
        ]


def refuse_unscored(first: Evaluation | None) -> None:
    """A reward that raised on every held-out answer would do so in training, for half an hour. One that is late may be a judge's, which
    comes back: for that a run waits (Scoring, pool/faults.py).

    Args: first: evaluation of a run that has not begun to train.
    Raises: DataError.
    """
    if first is None or not first.trajectories or any(one.failure is not FailureKind.REWARD for one in first.trajectories):
        return
    raise DataError(
        f"rollout.reward: none of {counted(len(first.trajectories), 'held-out answer')} before training got a score, so nothing could be "
        f"learned. The first: {first.first_failure}, answer {first.trajectories[0].text!r:.200}",
        remedy="mend the reward; where an answer is wrong, let it return 0.0",
    )


# Steps whose batch had no token left to train on: each is reported, and too many in a row end the run.
#
# Such a step is a skipped one: the weights stay, the version grows, its groups count as trained. A batch whose answers are all right or all
# wrong is another matter: it has no gradient either, but the next one may.

# Number of skipped steps in a row that are allowed beyond max_staleness.
_BEYOND_STALENESS = 3


class EmptySteps:
    """Counts the steps in a row from which nothing was learned."""

    def __init__(self, max_staleness: int, notify: Notify) -> None:
        """Args: notify: takes an event's level and text."""
        # A skipped step leaves the weights as they are. After max_staleness of them all tokens are of the present weights: rejection will
        # repeat.
        self._most, self._notify = max_staleness + _BEYOND_STALENESS, notify
        self._in_a_row = 0

    def note(self, step: int, batch: PreparedBatch, result: StepResult) -> None:
        """Count a step. Raises: DataError if too many in a row had nothing to train on."""
        reason = _why_nothing_was_left(batch, result)
        self._in_a_row = self._in_a_row + 1 if reason else 0
        if not reason:
            return
        if self._in_a_row >= self._most:
            raise DataError(f"nothing was learned in {self._most} steps in a row, up to step {step}: {reason}")
        self._notify("warning", f"step {step} is skipped ({self._in_a_row} of {self._most} in a row end the run): {reason}")


def _why_nothing_was_left(batch: PreparedBatch, result: StepResult) -> str:
    """The reason in a sentence; empty if there was a token to train on."""
    if result.trained_tokens == 0:
        answers = [answer for group in batch.groups for answer in group.valid]
        cut = sum(answer.finish_reason is FinishReason.LENGTH for answer in answers)
        return (
            f"{cut} of its {len(answers)} answers were cut at rollout.sampling.max_tokens, and the others are empty; rollout.overlong "
            "leaves cut ones out. Raise max_tokens, or set rollout.overlong.kind to train or penalise"
        )
    if result.kept_tokens == 0:
        return (
            f"the correction rejected all {result.trained_tokens} tokens of its batch: the bounds of correction.rejection or "
            "correction.veto are narrower than the difference of sampled and trained logprobs. Widen them, or see in the report how large "
            "it is"
        )
    return ""
