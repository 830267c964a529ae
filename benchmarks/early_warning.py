"""Who warns earlier of a collapse: our monitor, or the detectors of rlwatch, on recorded runs of a nano model.

    python benchmarks/early_warning.py                                  # ours alone
    python benchmarks/early_warning.py --make-rlwatch /tmp/rlwatch      # once: rlwatch 0.5.1 in a virtual environment of its own
    python benchmarks/early_warning.py --rlwatch /tmp/rlwatch           # both
    python benchmarks/early_warning.py --series benchmarks/series/mismatch --rlwatch /tmp/rlwatch     # fresh batches, other engines

The series are in benchmarks/series, those of engines in other number formats, with a mismatch in every step, in its folder mismatch
(lab/record_collapse.py records both). A run has collapsed if the reward of its own samples has fallen, for good, under half of the best
that it had reached: the outcome decides, neither the settings nor a metric that a monitor reads.
Both systems are scored as they are shipped, and with thresholds that were chosen on the runs of even seeds, by the same rule from as many
candidates; the scores are of the odd seeds.
What our monitor ships with is itself from the even seeds. What it follows, and over how many steps, was settled with an eye on all seeds up
to 9; those from 10 on were recorded once it was finished, and are scored apart.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import Peer, options
from evenkeel.correction.early_warning.monitor import Monitor, MonitorConfig, State, Symptom
from lab.recorded_runs import SERIES, RecordedRun, load_runs

RLWATCH = Peer("rlwatch", "rlwatch_worker.py", (("rlwatch==0.5.1",),))


# -- scores --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning of one of the two systems."""

    step: int
    what: str
    """Symptom or detector."""
    is_severe: bool
    """At the higher of the system's two levels: an alarm of ours, a critical alert of rlwatch's."""


@dataclass(slots=True)
class WarningScore:
    """How a system did on a set of runs."""

    runs: int = 0
    collapsed: int = 0
    leads: list[int] = field(default_factory=list)
    """Of each collapse that was announced: steps from the first warning since the onset to it, >= 1."""
    healthy_steps: int = 0
    """Healthy steps: all steps of a run that didn't collapse, and the steps before the onset of one that did."""
    false_alarms: int = 0
    """Warnings in healthy steps."""
    disturbed: int = 0
    """Runs that had one."""

    @property
    def detection(self) -> float:
        """Share of the collapses that were announced."""
        return len(self.leads) / self.collapsed if self.collapsed else math.nan

    @property
    def false_alarm_rate(self) -> float:
        """For 100 healthy steps."""
        return 100 * self.false_alarms / self.healthy_steps if self.healthy_steps else math.nan

    @property
    def lead(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile over all collapses; one that wasn't announced counts as 0."""
        leads = [*self.leads, *[0] * (self.collapsed - len(self.leads))]
        if len(leads) < 2:
            return (*(leads or [math.nan]),) * 3
        low, middle, high = statistics.quantiles(leads, n=4, method="inclusive")
        return low, middle, high

    @property
    def merit(self) -> tuple[float, float]:
        """What thresholds are chosen by: share of collapses announced less share of runs with a false alarm, then the median lead."""
        return self.detection - self.disturbed / self.runs, self.lead[1]


def score(runs: Sequence[RecordedRun], warnings: Sequence[Sequence[Warned]], *, only_severe: bool = False) -> WarningScore:
    """Compare a system's warnings in each run with how the run ended.

    Args:
        warnings: for each run.
        only_severe: alarms alone.
    """
    result = WarningScore(runs=len(runs))
    for run, said in zip(runs, warnings, strict=True):
        steps = [warned.step for warned in said if warned.is_severe or not only_severe]
        healthy = run.steps if run.collapse is None or run.onset is None else min(run.onset, run.collapse)
        false = sum(step < healthy for step in steps)
        result.healthy_steps += healthy
        result.false_alarms += false
        result.disturbed += false > 0
        if run.collapse is not None:
            result.collapsed += 1
            in_time = [step for step in steps if healthy <= step < run.collapse]
            result.leads += [run.collapse - min(in_time)] if in_time else []
    return result


# -- the two systems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """A candidate for thresholds: factors on a system's own; 1 and 1 is as shipped."""

    threshold: float = 1.0
    """On every threshold: above 1 is less easily alarmed."""
    time: float = 1.0
    """On every window, baseline, warm-up and patience, in steps."""

    def __str__(self) -> str:
        return f"thresholds x {self.threshold:g}, windows x {self.time:g}"


THRESHOLDS = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)
TIMES = (0.25, 0.5, 1.0)
CANDIDATES = tuple(Setting(threshold, time) for threshold in THRESHOLDS for time in TIMES)

System = Callable[[Setting], list[list[Warned]]]
"""What a system with these thresholds says of each run."""


def monitor_config(setting: Setting) -> MonitorConfig:
    """Ours, scaled: growths on the log scale, deviations, and all counts of steps, down to the smallest that are allowed."""
    plain = MonitorConfig()
    return MonitorConfig(
        skip_steps=plain.skip_steps,
        baseline_steps=max(round(plain.baseline_steps * setting.time), 8),
        level_steps=max(round(plain.level_steps * setting.time), 3),
        trend_steps=max(round(plain.trend_steps * setting.time), 8),
        watch_growth=plain.watch_growth**setting.threshold,
        alarm_growth=plain.alarm_growth**setting.threshold,
        watch_deviations=plain.watch_deviations * setting.threshold,
        alarm_deviations=plain.alarm_deviations * setting.threshold,
        patience=plain.patience,
    )


def monitor_warnings(run: RecordedRun, config: MonitorConfig | None = None) -> list[Warned]:
    """Every event of our monitor that is a change for the worse."""
    monitor, said = Monitor(config), []
    before: dict[str, State] = {}
    for step in range(run.steps):
        for event in monitor.update(step, run.numbers(step)):
            if event.state.rank > before.get(event.name, State.OK).rank:
                said.append(Warned(step, event.name, event.state is State.ALARM))
            before[event.name] = event.state
    return said


RLWATCH_READS = ("entropy", "reward_mean", "reward_std", "advantage_std", "loss", "grad_norm")
"""Arguments of rlwatch's that are series of ours. Single rewards are left out, as its integrations of trainers do: those of a task with
right and wrong answers are always bimodal."""
RLWATCH_KL = {"to the start": "reference_kl", "of the update": "target_k3_kl"}
"""What trainers log as KL, and rlwatch then reads: to the reference model, or from the sampling policy to the trained one."""


def rlwatch_changes(setting: Setting) -> dict[str, dict[str, float]]:
    """rlwatch's configuration, scaled like ours; entropy counts from below, and its threshold has a factor of its own."""
    t, s = setting.threshold, setting.time

    def steps(count: int) -> int:
        return max(round(count * s), 3)

    return {
        "entropy_collapse": {"threshold": 1.0 / t, "consecutive_steps": steps(50), "warmup_steps": steps(20)},
        "kl_explosion": {"sigma_multiplier": 3.0 * t, "rolling_window": steps(100), "warmup_steps": steps(20)},
        "reward_hacking": {"variance_multiplier": 3.0 * t, "baseline_window": max(steps(100), 20), "warmup_steps": steps(50)},
        "advantage_variance": {"std_multiplier": 3.0 * t, "rolling_window": steps(100), "warmup_steps": steps(20)},
        "gradient_norm_spike": {"sigma_multiplier": 3.0 * t, "rolling_window": steps(100), "warmup_steps": steps(20)},
        "reward_mean_drift": {"consecutive_steps": steps(50), "min_drift_magnitude": 0.1 * t, "warmup_steps": steps(50)},
    }


def rlwatch_warnings(ask: Callable[[Any], Any], runs: Sequence[RecordedRun], kl: str, setting: Setting) -> list[list[Warned]]:
    """What rlwatch's worker says of each run; `kl` is the series that it reads as KL."""
    reads = {name: name for name in RLWATCH_READS} | {"kl_divergence": kl}
    numbers = [[run.numbers(step) for step in range(run.steps)] for run in runs]
    steps = [[{name: step[ours] for name, ours in reads.items() if ours in step} for step in run] for run in numbers]
    answer = ask({"runs": steps, "changes": rlwatch_changes(setting) if setting != Setting() else {}})
    return [[Warned(step, what, severity == "critical") for step, what, severity in said] for said in answer]


# -- the comparison ------------------------------------------------------------------------------------------------------


FRESH = 10
"""First seed of the runs that were recorded after the monitor was finished."""


def shares(runs: Sequence[RecordedRun]) -> tuple[list[int], list[int], list[int]]:
    """Indices of the runs that thresholds are chosen on (even seeds), of those that are scored, and of fresh ones."""
    old = [k for k, run in enumerate(runs) if run.seed < FRESH]
    fresh = [k for k, run in enumerate(runs) if run.seed >= FRESH]
    return [k for k in old if runs[k].seed % 2 == 0], [k for k in old if runs[k].seed % 2 == 1], fresh


def of(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [values[k] for k in indices]


def choose(runs: Sequence[RecordedRun], system: System, indices: Sequence[int], *, only_severe: bool) -> Setting:
    """The candidate of the greatest merit on some of the runs; among equals the one next to the shipped thresholds."""

    def rank(setting: Setting) -> tuple[float, ...]:
        result = score(of(runs, indices), of(system(setting), indices), only_severe=only_severe)
        return (*result.merit, -abs(math.log(setting.threshold)) - abs(math.log(setting.time)))

    return max(CANDIDATES, key=rank)


def row(name: str, runs: Sequence[RecordedRun], warnings: Sequence[Sequence[Warned]], indices: Sequence[int], *, only_severe: bool) -> str:
    result = score(of(runs, indices), of(warnings, indices), only_severe=only_severe)
    low, middle, high = result.lead
    return (
        f"| {name} | {len(result.leads)} of {result.collapsed} | {half_steps(middle)} ({half_steps(low)} to {half_steps(high)}) | "
        f"{result.false_alarm_rate:.2f} | {result.disturbed} of {result.runs} |"
    )


LEVELS = {"evenkeel": ("watch", "alarm"), "rlwatch": ("warning", "critical")}
"""What each system calls its two levels."""


def half_steps(value: float) -> str:
    """Quartiles of a few whole numbers: more digits than half a step mean nothing."""
    return f"{round(2 * value) / 2:g}"


HEAD = """| system | collapses announced | lead in steps, median (quartiles) | false alarms in 100 healthy steps | runs with one |
| --- | --- | --- | --- | --- |"""


def compare(runs: Sequence[RecordedRun], systems: Mapping[str, System], fitted: Sequence[int], scored: Sequence[int]) -> str:
    """The table: each system as shipped and with thresholds chosen on the fitted runs, at both of its levels, on the scored runs."""
    lines = [HEAD]
    for (name, system), only_severe in itertools.product(systems.items(), (False, True)):
        levels = LEVELS[name.partition(",")[0]]
        level = f"{name}, {levels[1] if only_severe else ' or '.join(levels)}"
        setting = choose(runs, system, fitted, only_severe=only_severe)
        lines.append(row(f"{level}, as shipped", runs, system(Setting()), scored, only_severe=only_severe))
        lines.append(row(f"{level}, {setting}", runs, system(setting), scored, only_severe=only_severe))
    return "\n".join(lines)


def census(runs: Sequence[RecordedRun]) -> str:
    """How many runs of each condition collapsed, and when."""
    lines = ["| condition | runs | collapsed | steps from onset to collapse |", "| --- | --- | --- | --- |"]
    for condition in dict.fromkeys(run.condition for run in runs):
        mine = [run for run in runs if run.condition == condition]
        after = sorted(run.collapse - (run.onset or 0) for run in mine if run.collapse is not None)
        lines.append(f"| {condition} | {len(mine)} | {len(after)} | {f'{after[0]} to {after[-1]}' if after else ''} |")
    return "\n".join(lines)


def first_words(runs: Sequence[RecordedRun], warnings: Sequence[Sequence[Warned]]) -> str:
    """What each system said first of a collapse, by condition: how often."""
    counts: dict[str, dict[str, int]] = {}
    for run, said in zip(runs, warnings, strict=True):
        in_time = [w for w in said if run.collapse is not None and (run.onset or 0) <= w.step < run.collapse]
        what = in_time[0].what if in_time else "nothing"
        if run.collapse is not None:
            mine = counts.setdefault(run.condition, {})
            mine[what] = mine.get(what, 0) + 1
    return "; ".join(f"{condition}: " + ", ".join(f"{what} {n}" for what, n in found.items()) for condition, found in counts.items())


# -- signal by signal ----------------------------------------------------------------------------------------------------


def _falling(name: str) -> Callable[[Mapping[str, float]], float | None]:
    """The inverse of a number, which grows as the number falls; infinite at 0."""
    return lambda numbers: None if name not in numbers else 1 / max(numbers[name], 1e-9)


SIGNALS: dict[str, tuple[Callable[[Mapping[str, float]], float | None], float]] = {
    "mismatch k3": (lambda numbers: numbers.get("mismatch_k3_kl"), 1e-9),
    "k3": (lambda numbers: numbers.get("k3_kl"), 1e-9),
    "drift k3": (lambda numbers: numbers.get("drift_k3_kl"), 1e-9),
    "bad updates": (lambda numbers: numbers.get("bad_update_share"), 5e-3),
    "gradient norm": (lambda numbers: numbers.get("grad_norm"), 1e-3),
    "entropy falls": (_falling("entropy"), 1e-3),
}
"""What is followed, alone, with the monitor's own thresholds, and its offset."""
LOST = 0.8
"""Of the best mean reward of 5 steps so far, under which the reward has visibly fallen."""


def states(run: RecordedRun, signal: str, config: MonitorConfig | None = None) -> Iterator[State]:
    """Of a signal alone, at every step."""
    read, offset = SIGNALS[signal]
    monitor = Monitor(config, symptoms=(Symptom(signal, "", "", offset=offset),))
    for step in range(run.steps):
        value = read(run.numbers(step))
        if value is not None:
            monitor.update(step, {signal: value})
        yield monitor.state


def first_watch(run: RecordedRun, signal: str) -> int | None:
    """First step, since its onset if it has one, in which a signal alone is watched; None: never, or its level stays without a start."""
    onset = run.onset or 0
    return next((step for step, state in enumerate(states(run, signal)) if step >= onset and state is not State.OK), None)


def alone(runs: Sequence[RecordedRun], signal: str, setting: Setting) -> list[list[Warned]]:
    """A signal as a system of its own: it speaks when its state gets worse."""
    config, said = monitor_config(setting), []
    for run in runs:
        pairs = enumerate(itertools.pairwise([State.OK, *states(run, signal, config)]))
        said.append([Warned(step, signal, now is State.ALARM) for step, (before, now) in pairs if now.rank > before.rank])
    return said


def signals_scored(runs: Sequence[RecordedRun], fitted: Sequence[int], scored: Sequence[int]) -> str:
    """Each signal alone, with the thresholds that suit it best on the fitted runs, on the scored ones."""
    lines = [HEAD.replace("system", "signal")]
    for signal in SIGNALS:
        system = functools.cache(functools.partial(alone, runs, signal))
        setting = choose(runs, system, fitted, only_severe=False)
        lines.append(row(f"{signal}, {setting}", runs, system(setting), scored, only_severe=False))
    return "\n".join(lines)


def reward_falls(run: RecordedRun) -> int | None:
    """First step since its onset, if it has one, at which the mean reward of the last 5 steps is under LOST of the best such mean."""
    means = [statistics.fmean(run.outcome[max(0, step - 4) : step + 1]) for step in range(run.steps)]
    best = list(itertools.accumulate(means, max))
    return next((step for step in range(max(run.onset or 0, 5), run.steps) if means[step] < LOST * best[step]), None)


def by_signal(runs: Sequence[RecordedRun]) -> str:
    """Median steps from the onset to the first watch, over the collapsed runs of a condition that have one before the collapse."""
    names = [*SIGNALS, f"reward -{1 - LOST:.0%}"]
    lines = ["| condition | " + " | ".join(names) + " | collapse |", "| " + " | ".join(["---"] * (len(names) + 2)) + " |"]
    for condition in dict.fromkeys(run.condition for run in runs):
        mine = [run for run in runs if run.condition == condition]
        lost = [run for run in mine if run.collapse is not None]
        cells = []
        for name in names:
            steps = [(run, first_watch(run, name) if name in SIGNALS else reward_falls(run)) for run in lost or mine]
            seen = [step - (run.onset or 0) for run, step in steps if step is not None and (run.collapse is None or step < run.collapse)]
            share = f"{len(seen)} of {len(steps)}"
            cells.append(f"{half_steps(statistics.median(seen))} ({share})" if seen and lost else share)
        after = [run.collapse - (run.onset or 0) for run in lost if run.collapse is not None]
        lines.append(f"| {condition} | " + " | ".join(cells) + f" | {half_steps(statistics.median(after)) if after else 'none'} |")
    return "\n".join(lines)


# -- audit or warning ----------------------------------------------------------------------------------------------------

# The question of pytorch/rl issue 3984, whose author found that detectors of this kind audit a run that has gone wrong, and do not warn of
# it at a usable rate of false alarms; and the protocol of that author's Flight Recorder (evaluator.py): a warning counts by its lead to the
# turn, the first step at which a CUSUM of the held-out reward fires; false alarms are those in runs in which nothing goes wrong. Ours has
# two things less: the reward is the run's own, of what it samples, and no other judge's; and there are no hard negatives, runs that look
# as if they went wrong and don't.

CUSUM_WARM_UP, CUSUM_SLACK, CUSUM_LIMIT = 10, 0.5, 3.0
"""Steps from which its mean and deviation are, and in deviations what a step may fall for nothing, and what all falls may add up to."""
LEAST_LEAD = 5
"""Steps in which an action on a warning could still do something: those by which our weights on their way are old, and some."""


def cusum_turn(outcome: Sequence[float], warm_up: int = CUSUM_WARM_UP) -> int | None:
    """First step at which the reward has turned down, by Page's cumulative sum. None: never."""
    if len(outcome) <= warm_up:
        return None
    mean, deviation = statistics.fmean(outcome[:warm_up]), statistics.pstdev(outcome[:warm_up]) + 1e-6
    total = 0.0
    for step in range(warm_up, len(outcome)):
        total = max(0.0, total + (mean - outcome[step]) / deviation - CUSUM_SLACK)
        if total > CUSUM_LIMIT:
            return step
    return None


def turn_of(run: RecordedRun) -> int | None:
    """The earlier one of that turn and of the step at which the reward is visibly under its best (reward_falls): a reward that has grown
    stays above its start for long after it has turned."""
    found = [step for step in (cusum_turn(run.outcome), reward_falls(run)) if step is not None]
    return min(found, default=None)


@dataclass(frozen=True, slots=True)
class Audit:
    """What a system's warnings were worth, by runs."""

    failed: int
    """Runs that collapsed."""
    flagged: int
    """Of these: with a warning at any time since the onset."""
    leads: tuple[int, ...]
    """Of the flagged: steps from the first such warning to the turn; 0 or less: it came no earlier than the reward's own."""
    clean: int
    """Runs in which nothing was disturbed."""
    false_alarms: int
    """Of these: with a warning."""
    survived: int
    """Runs that were disturbed and didn't collapse: neither clean, nor known to have failed."""
    survived_flagged: int
    """Of these: with a warning."""

    @classmethod
    def of(cls, runs: Sequence[RecordedRun], warnings: Sequence[Sequence[Warned]]) -> Audit:
        failed, leads, clean, survived = 0, [], [], []
        for run, said in zip(runs, warnings, strict=True):
            if run.collapse is None:
                (clean if run.onset is None else survived).append(bool(said))
                continue
            failed += 1
            since, turn = [one.step for one in said if one.step >= (run.onset or 0)], turn_of(run)
            if since:
                leads.append((run.collapse if turn is None else turn) - min(since))
        return cls(failed, len(leads), tuple(leads), len(clean), sum(clean), len(survived), sum(survived))

    def warned(self, lead: int = 1) -> int:
        """Failed runs with a warning so many steps before the turn, or more."""
        return sum(one >= lead for one in self.leads)

    def row(self, name: str) -> str:
        middle = half_steps(statistics.median(self.leads)) if self.leads else ""
        counts = f"{self.flagged} of {self.failed} | {self.warned()} | {self.warned(LEAST_LEAD)} | {middle}"
        return f"| {name} | {counts} | {self.false_alarms} of {self.clean} | {self.survived_flagged} of {self.survived} |"


def audited(runs: Sequence[RecordedRun], systems: Mapping[str, System], fitted: Sequence[int], scored: Sequence[int]) -> str:
    """Each system as shipped, and with the thresholds by which it warns of most collapses of the fitted runs before their turn while it
    says nothing in an undisturbed one."""
    lines = [
        f"| system | flagged at all | before the turn | {LEAST_LEAD} steps before it | median lead to it | "
        "undisturbed runs with a warning | disturbed runs without a collapse, with a warning |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, system in systems.items():

        def rank(setting: Setting, system: System = system) -> tuple[float, ...]:
            found = Audit.of(of(runs, fitted), of(system(setting), fitted))
            return (-found.false_alarms, found.warned(), sum(found.leads), -abs(math.log(setting.threshold)) - abs(math.log(setting.time)))

        for setting in dict.fromkeys((Setting(), max(CANDIDATES, key=rank))):
            title = f"{name}, {'as shipped' if setting == Setting() else setting}"
            lines.append(Audit.of(of(runs, scored), of(system(setting), scored)).row(title))
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--series", type=Path, default=SERIES)
    arguments = RLWATCH.parse(parser)
    runs = load_runs(arguments.series)
    print(census(runs))
    systems: dict[str, System] = {"evenkeel": lambda setting: [monitor_warnings(run, monitor_config(setting)) for run in runs]}
    fitted, held_out, fresh = shares(runs)
    with ExitStack() as stack:
        if arguments.rlwatch:
            ask = stack.enter_context(RLWATCH.start(arguments.rlwatch))
            systems |= {f"rlwatch, KL {kind}": functools.partial(rlwatch_warnings, ask, runs, kl) for kind, kl in RLWATCH_KL.items()}
        systems = {name: functools.cache(system) for name, system in systems.items()}
        for title, scored in (("odd seeds", held_out), ("fresh seeds", fresh)):
            if not scored:
                continue
            print(f"\n{title}: {len(scored)} runs\n\n{compare(runs, systems, fitted, scored)}")
            for name, system in systems.items():
                print(f"\n{name}, as shipped, said first: {first_words(of(runs, scored), of(system(Setting()), scored))}")
    print(f"\none signal at a time, odd seeds, thresholds from the even ones:\n\n{signals_scored(runs, fitted, held_out)}")
    print(f"\nsteps from the onset to the first watch, one signal at a time:\n\n{by_signal(runs)}")
    alone_of = {signal: functools.cache(functools.partial(alone, runs, signal)) for signal in SIGNALS}
    scored = [*held_out, *fresh]
    print(f"\naudit or warning, odd and fresh seeds:\n\n{audited(runs, {**systems, **alone_of}, fitted, scored)}")
    print("\nthe turn is of the run's own sampled reward, not of a held-out oracle's; no run is a hard negative")


if __name__ == "__main__":
    main()
