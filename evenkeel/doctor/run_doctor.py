"""What happened to a run, read from its folder: how it ended, what it waited for, which part was slow or gone, whether the ledger has each
prompt once, and what to do."""

from __future__ import annotations

import fcntl
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from evenkeel.actors.carriers import EventLevel
from evenkeel.actors.checkpoints.reader import Reading, read_at_start, verify_whole
from evenkeel.actors.checkpoints.state import OtherVersionError
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups.ledger import TRAINED
from evenkeel.actors.json_lines import JsonLines, step_of
from evenkeel.actors.metrics.step_metrics import StepMetrics, shown
from evenkeel.actors.processes.disk import by_disk_at_start
from evenkeel.actors.record.config_that_ran import recipe_given
from evenkeel.actors.record.run_folder import EventKind, RunEvent, RunFolder
from evenkeel.actors.record.stack_summary import newest_stack_summary
from evenkeel.actors.settings.resolve import refuse_contradictions
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.learner.weights.file_sums import may_pass

EVALUATION, REPORT = "the evaluation after training", "its report"


def left_after_training(folder: RunFolder, steps: int) -> tuple[str, ...]:
    """EVALUATION and REPORT, those that the folder of a run of so many steps lacks. A report that is older than its numbers counts as
    missing. Raises: OSError."""
    is_evaluated = any(metrics.step == steps for metrics in folder.read_evaluations())
    return ((EVALUATION,) if not is_evaluated else ()) + ((REPORT,) if not _is_reported(folder) else ())


def _is_reported(folder: RunFolder) -> bool:
    if not folder.report_path.exists():
        return False
    numbers = [path.stat().st_mtime for path in (folder.metrics_path, folder.evaluations_path) if path.exists()]
    return folder.report_path.stat().st_mtime >= max(numbers, default=0.0)


# Positions whose bits are kept together.
_CHUNK = 1 << 16
# Lines between two looks at the clock.
_LOOK = 10_000
_MOST_DIGITS = 18
# Numbers of a step with which the ledger's are compared.
_TOTALS = {"trained": "groups/trained_total", "discarded": "groups/discarded_total"}


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """Whether the ledger has each prompt once, and as many trained and discarded ones as the last step says. If a damaged ledger was set
    aside, this covers the time since then."""

    is_balanced: bool
    sentence: str


class LinesRead:
    """How much of the ledger is read, for whoever waits: ten million lines take a minute."""

    def __init__(self) -> None:
        self._count, self.newest = 0, time.monotonic()

    def add(self) -> None:
        self._count += 1
        if self._count % _LOOK == 0:
            self.newest = time.monotonic()

    def __str__(self) -> str:
        return f"{self._count:,} lines of the ledger are read"


class _Seen:
    """Prompts that have been met: a bit for each that ends in a number, as a task's do, so that ten million of them are 1.3 MB.

    Their order doesn't help: groups leave the book in another order than they came, and a ledger that was set aside is read after the
    later one.
    """

    def __init__(self) -> None:
        self._bits: dict[tuple[str, int], bytearray] = {}
        self._others: set[str] = set()

    def add(self, prompt_id: str) -> bool:
        """Returns: whether it was there already."""
        number = prompt_id[prompt_id.rfind("/") + 1 :]
        if len(number) > _MOST_DIGITS or not number.isdecimal() or str(position := int(number)) != number:  # not 07, nor digits of Arabic
            is_there = prompt_id in self._others
            self._others.add(prompt_id)
            return is_there
        key = prompt_id[: -len(number)], position // _CHUNK
        bits = self._bits.get(key)
        if bits is None:
            bits = self._bits[key] = bytearray(_CHUNK // 8)
        byte, bit = position % _CHUNK >> 3, 1 << (position & 7)
        is_there = bool(bits[byte] & bit)
        bits[byte] |= bit
        return is_there


def check_ledger(folder: RunFolder, last: StepMetrics | None, read: LinesRead) -> LedgerCheck:
    """Check the ledger, and each one that a resume has set aside up to the step at which the next one began, as far as they can be read.

    Args:
        last: numbers of the run's last step; None: it has none.
        read: is told how far this is.
    """
    aside = _set_aside(folder.path)
    end = last.step + 1 if last else math.inf  # later ones are settled before the step's line was written, or done again
    seen, twice = _Seen(), set[str]()
    counted_in, begun_at, outcomes = list[Counter[str]](), list[float](), Counter[str]()
    for path in (folder.path / "ledger.jsonl", *aside):
        first, before = end, _trained_and_discarded(outcomes)
        for prompt, outcome, step in JsonLines(path).each(_settled):
            read.add()
            if step < end:
                first = min(first, step)
                outcomes[outcome] += 1
                if seen.add(prompt):
                    twice.add(prompt)
        counted_in.append(_trained_and_discarded(outcomes) - before)
        begun_at.append(first)
        end = first
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if count)
    once = f"{told}, each prompt once" if told else "no prompt is trained on or discarded yet"
    told = told or "none"
    if twice:
        named = ", ".join(sorted(twice)[:5])
        return LedgerCheck(False, f"NOT balanced: {len(twice)} prompts stand in the ledger twice, {named} among them ({told})")
    files = f"{' and '.join(path.name for path in aside)}, set aside as damaged by a resume"
    totals, in_ledger = _totals(last.finite()) if last else {}, _trained_and_discarded(outcomes)
    wrong = [kind for kind, total in totals.items() if total != in_ledger[kind]]
    if not wrong:
        return LedgerCheck(True, f"balanced: {once}" + (f"; {files}, counted" if aside else ""))
    earlier = _totals_before(folder, begun_at[0]) if aside else {}
    if earlier.keys() >= totals.keys() and all(total - earlier[kind] == counted_in[0][kind] for kind, total in totals.items()):
        since = " and ".join(f"{counted_in[0][kind]} {kind}" for kind in totals)
        lost = " and ".join(f"{sum(counted[kind] for counted in counted_in[1:])} of {earlier[kind]} {kind}" for kind in totals)
        told = f"{lost} before can be read in {files} ({told}, each prompt once)"
        return LedgerCheck(True, f"balanced from step {begun_at[0]:.0f} on, with {since}; {told}")
    say = " and ".join(f"{totals[kind]} groups {kind}, the ledger has {in_ledger[kind]}" for kind in wrong)
    return LedgerCheck(False, f"NOT balanced: the last step says {say} ({told})")


def _trained_and_discarded(outcomes: Counter[str]) -> Counter[str]:
    return Counter(trained=outcomes[TRAINED], discarded=outcomes.total() - outcomes[TRAINED])


def _totals(numbers: Mapping[str, float]) -> dict[str, int]:
    """Groups trained and discarded since the run began, as far as the numbers of a step say it."""
    return {kind: int(numbers[name]) for kind, name in _TOTALS.items() if name in numbers}


def _settled(record: Mapping[str, Any]) -> tuple[str, str, int]:
    """Prompt, what became of it, and the step, of a line of the ledger."""
    return str(record["prompt_id"]), str(record["outcome"]), step_of(record)


def _set_aside(folder: Path) -> list[Path]:
    """Damaged ledgers in whose place resumes have begun new ones (actors/groups/ledger.py), the newest first."""
    numbers = {path: re.fullmatch(r"ledger\.damaged(?:-(\d+))?\.jsonl", path.name) for path in folder.glob("ledger.damaged*.jsonl")}
    known = [(int(found[1] or 1), path) for path, found in numbers.items() if found]
    return [path for _, path in sorted(known, reverse=True)]


def _totals_before(folder: RunFolder, step: float) -> dict[str, int]:
    """Groups trained and discarded until then; empty: no line says it."""
    if step <= 1:
        return dict.fromkeys(_TOTALS, 0)

    def of_that_step(record: dict[str, Any]) -> StepMetrics:
        if step_of(record) != step - 1:
            raise ValueError(f"not of step {step - 1}")
        return StepMetrics.of_record(record)

    return next((_totals(line.finite()) for line in JsonLines(folder.metrics_path).each(of_that_step)), {})


RECENT_STEPS = 20
"""Medians are over this many last steps."""
LAST_EVENTS = 8
# Shares of a step above which a change of the recipe is proposed. An elastic pool acts at half of each (pool/scaling.py): it can take its
# step back.
_LEARNER_WAITS, _ENGINES_WAIT = 0.3, 0.5
_NUMBER = re.compile(r"\d+(\.\d+)?")


class RunState(Enum):
    """How a run ended."""

    RUNNING = "is running"
    COMPLETE = "is complete"
    STOPPED = "was stopped"
    FAILED = "failed"
    VANISHED = "ended, and nothing says why"
    """Killed, out of memory, or the machine went down: the process had no time to write an event."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The longest notice of one thing that was waited for."""

    what: str
    seconds: int
    notices: int
    detail: str
    """What was missing, as the last notice said; empty if none did."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Events of one kind: their texts differ only in numbers."""

    level: EventLevel
    last: RunEvent
    count: int


@dataclass(frozen=True, slots=True)
class RunDiagnosis:
    """The diagnosis of a run from its folder."""

    path: Path
    state: RunState
    reason: str
    """The event that says why it ended; empty if none does."""
    step: int
    steps: int
    saved_step: int | None
    """Step of the newest complete checkpoint; None: there is none."""
    left: tuple[str, ...] | None
    """What is still to be done when all steps are done and saved (run_doctor.py); None: they aren't."""
    damaged: tuple[str, ...]
    """A sentence for each newer checkpoint that is damaged, or can't be read now."""
    refused: str
    """Why a resume would refuse the newest complete checkpoint, or settings in recipe.yaml that this version can't read or that contradict
    each other, and what to do instead; empty: nothing of that was found. What it would refuse of devices or the model isn't looked for."""
    pace: dict[str, float]
    """Medians of the recent steps, by metric."""
    waits: tuple[Wait, ...]
    troubles: tuple[Trouble, ...]
    stacks: tuple[str, ...]
    """Where each process stood the last time that a wait had used half of its deadline, or was long without one."""
    books: LedgerCheck
    last_events: tuple[RunEvent, ...]

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, the most important first."""
        resume = f"evenkeel train --resume {self.path}"
        found = []
        match self.state:
            case RunState.RUNNING:
                found.append("It is still running; this page is of this moment.")
            case _ if self.refused:
                found.append(f"{'Nothing. A' if self._is_done and not self.left else 'A'} resume would be refused: {self.refused}")
            case _ if self.left:
                found.append(f"{resume} makes what is left: {' and '.join(self.left)}.")
            case _ if self._is_done:
                found.append("Nothing. To train on, resume it with more steps: " + resume + " steps=N")
            case RunState.FAILED if self.saved_step is None:
                found.append("Mend what the error says, and start it again: as it is, it would end there again. There is no checkpoint.")
            case _ if self.saved_step is None:
                found.append("Start it again: there is no checkpoint to go on from.")
            case _:
                lost = self.step - self.saved_step
                again = f" and does {lost} of its steps again." if lost else "."
                found.append(f"{resume} goes on from step {self.saved_step}{again}")
                if self.state is RunState.FAILED:
                    found.append("Unless the error's cause has passed or is mended, it would end there again.")
        if self.state is RunState.VANISHED:
            found.append("Look whether it was killed, or the machine ran out of memory then (dmesg, the batch system's log).")
        if self.waits and self.waits[0].seconds >= 60:
            longest = self.waits[0]
            found.append(f"It waited {longest.seconds} s for {longest.what}: look at that part first.")
        learner, rollout = self.pace.get("wait/learner_share", 0.0), self.pace.get("wait/rollout_share", 0.0)
        if learner > _LEARNER_WAITS and learner > rollout:
            share = shown(self.pace, "wait/learner_share")
            found.append(f"The learner waits {share} of a step: more workers or a higher max_staleness pay.")
        elif rollout > _ENGINES_WAIT:
            share = shown(self.pace, "wait/rollout_share")
            found.append(f"The engines wait {share} of a step: fewer workers would do, or a faster learner.")
        if not self.books.is_balanced:
            found.append("The ledger is the proof that no prompt was lost or trained twice: keep the folder and report this.")
        return tuple(found)

    @property
    def _is_done(self) -> bool:
        """Whether all steps are done, and a resume would not have to go back to a checkpoint before a damaged one."""
        is_last_damaged = bool(self.damaged) and (self.saved_step or 0) < self.steps
        return (self.state is RunState.COMPLETE or self.left is not None) and not is_last_damaged


def diagnose_run(folder: RunFolder) -> RunDiagnosis:
    """Read a run's folder, while it runs or afterwards; nothing in it is changed. Each half minute stderr has what is read.

    Raises: ConfigError; DiskLate if the folder's disk hangs.
    """
    config, unusable = by_disk_at_start(partial(_settings, folder), "the run's config.yaml")
    deadlines = _deadlines(config)
    by_disk = partial(by_disk_at_start, limit_s=lambda: deadlines.disk_s)
    metrics = by_disk(lambda: JsonLines(folder.metrics_path).last(RECENT_STEPS, StepMetrics.of_record), "the numbers of the last steps")
    events = by_disk(folder.read_events, "the run's events")
    saved_step, damaged, refused = read_at_start(partial(_verified, folder), deadlines)
    steps = int(config.get("steps", 0))
    step = metrics[-1].step if metrics else 0
    lines = LinesRead()
    books = by_disk(
        lambda: check_ledger(folder, metrics[-1] if metrics else None, lines),
        "the run's ledger",
        counts_from=lambda: lines.newest,
        detail=lambda: str(lines),
    )

    def rest() -> RunDiagnosis:
        is_complete = step >= steps > 0 and all(checkpoint.step >= steps for checkpoint in folder.checkpoints()[-1:])
        left = left_after_training(folder, steps) if is_complete and saved_step == steps else None
        state, reason = _end(events, is_complete, is_owned(folder.path), is_nothing_left=left == ())
        return RunDiagnosis(
            path=folder.path,
            state=state,
            reason=reason,
            step=step,
            steps=steps,
            saved_step=saved_step,
            left=left,
            damaged=damaged,
            refused=refused or unusable,
            pace=_pace(metrics),
            waits=_waits(events),
            troubles=_troubles(events),
            stacks=newest_stack_summary(folder.path),
            books=books,
            last_events=tuple(events[-LAST_EVENTS:]),
        )

    return by_disk(rest, "the run's evaluations and stacks")


def _settings(folder: RunFolder) -> tuple[dict[str, Any], str]:
    """The run's settings, and why a resume would refuse them, whatever machine it is on; empty: nothing of that was found.

    Raises: as RunFolder.read_config.
    """
    content = folder.read_config()
    try:
        config = recipe_given(folder)
    except ConfigError as error:
        return content, str(error)
    try:
        refuse_contradictions(config)
    except ConfigError as error:
        return content, f"{folder.recipe_path}: {error}"
    return content, ""


def _deadlines(config: Mapping[str, Any]) -> DeadlinesConfig:
    """The run's own; the defaults, if they can't be read, which its diagnosis says (refused)."""
    try:
        return DeadlinesConfig.model_validate(config.get("deadlines", {}))
    except (ConfigError, ValueError):
        return DeadlinesConfig()


def page(found: RunDiagnosis) -> str:
    """The diagnosis as text, a page of it."""
    saved = "no checkpoint" if found.saved_step is None else f"newest checkpoint: step {found.saved_step}"
    lines = [f"{found.path} {found.state.value}, after step {found.step} of {found.steps} ({saved})"]
    lines += [f"  {sentence}" for sentence in (found.reason, *found.damaged) if sentence]
    lines += _section("What to do", found.advice)
    lines += _section(f"Pace, medians of the last {RECENT_STEPS} steps", [f"{name:<28} {shown(found.pace, name)}" for name in found.pace])
    lines += _section("Longest waits", [_wait_line(wait) for wait in found.waits[:5]])
    lines += _section("Warnings and errors, by kind", [_trouble_line(trouble) for trouble in found.troubles[-8:]])
    lines += _section("Stacks", found.stacks)
    lines += _section("Books", [found.books.sentence])
    lines += _section("Last events", [f"{event.time}  {event.level:<8}{event.text}" for event in found.last_events])
    return "\n".join(lines)


def is_owned(path: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        with (path / ".owner.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _section(title: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _wait_line(wait: Wait) -> str:
    return f"{wait.seconds:>5} s  {wait.what}" + (f" ({wait.detail})" if wait.detail else "")


def _trouble_line(trouble: Trouble) -> str:
    times = f"{trouble.count} times, last at " if trouble.count > 1 else ""
    return f"{trouble.level:<8} {times}{trouble.last.time}: {trouble.last.text}"


def _end(events: Sequence[RunEvent], is_complete: bool, is_running: bool, *, is_nothing_left: bool) -> tuple[RunState, str]:
    """State, and the event that says why."""
    if is_running:
        return RunState.RUNNING, ""
    last = events[-1] if events else None
    if last is not None and last.level == "error" and last.kind is EventKind.STOPPED:
        return (RunState.COMPLETE if is_nothing_left else RunState.STOPPED), last.text
    if last is not None and last.level == "error":
        return RunState.FAILED, last.text
    if is_complete:
        return RunState.COMPLETE, ""
    resumed_at = max((i for i, event in enumerate(events) if event.kind is EventKind.RESUMED), default=0)
    asked_at = max((i for i, event in enumerate(events) if event.kind is EventKind.ENDING), default=-1)
    if asked_at >= resumed_at:
        is_saved = any(event.kind is EventKind.SAVED for event in events[asked_at:])
        return RunState.STOPPED, events[asked_at].text + ("" if is_saved else ". It ended without that checkpoint")
    return RunState.VANISHED, f"its last event is of {last.time}" if last else "it has no events"


def _verified(folder: RunFolder, reading: Reading) -> tuple[int | None, tuple[str, ...], str]:
    """Step of the newest checkpoint whose files have the sizes and sums that its manifest says, what is wrong with newer ones, and why a
    resume would refuse this one. All of it is read: eight times the model."""
    damaged: list[str] = []
    for checkpoint in reversed(folder.checkpoints()):
        reading.begins(checkpoint)
        try:
            verify_whole(checkpoint, reading)
        except OtherVersionError as error:
            return checkpoint.step, tuple(damaged), str(error)
        except (ConfigError, DataError, OSError) as error:
            if not checkpoint.path.exists():  # removed by the run, which has gone on meanwhile and has newer ones
                return _verified(folder, reading)
            if may_pass(error) is not None:
                refused = f"{checkpoint.path.name} can't be read now, which is no damage: a resume ends in this sentence until it can"
                return checkpoint.step, (*damaged, f"{refused}: {error}"), ""
            damaged.append(str(error))
            continue
        return checkpoint.step, tuple(damaged), ""
    return None, tuple(damaged), ""


def _pace(metrics: Sequence[StepMetrics]) -> dict[str, float]:
    names = ("time/step_s", "wait/learner_share", "wait/rollout_share", "time/train_s", "time/sync_s", "time/pause_s", "staleness/mean")
    recent = metrics[-RECENT_STEPS:]
    values = {name: [step[name] for step in recent if name in step] for name in names}
    return {name: statistics.median(numbers) for name, numbers in values.items() if numbers}


def _waits(events: Sequence[RunEvent]) -> tuple[Wait, ...]:
    """What the run has waited for, with the longest wait of each, longest first."""
    found: dict[str, Wait] = {}
    for event in events:
        if (notice := event.notice) is None:
            continue
        before = found.get(notice.what)
        longest = max(notice.seconds, before.seconds if before else 0)
        found[notice.what] = Wait(notice.what, longest, 1 + (before.notices if before else 0), notice.detail)
    return tuple(sorted(found.values(), key=lambda wait: -wait.seconds))


def _troubles(events: Sequence[RunEvent]) -> tuple[Trouble, ...]:
    """Warnings and errors, one of each kind, in the order of their last event; waits have a list of their own."""
    found: dict[tuple[str, str], Trouble] = {}
    for event in events:
        if event.level == "info" or event.notice is not None:
            continue
        kind = (event.level, _NUMBER.sub("#", event.text))
        before = found.pop(kind, None)
        found[kind] = Trouble(event.level, event, 1 + (before.count if before else 0))
    return tuple(found.values())
