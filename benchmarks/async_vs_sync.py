"""How much does asynchrony gain? The nano recipe with max_staleness 0 and 1, same number of steps, in one benchmark.

    python benchmarks/async_vs_sync.py [--steps 30] [--pairs 1]

One thread for the engine and one for the learner, so that each side has a core. The ideal gain is that of two phases that overlap
completely, (t_rollout + t_train) / max(t_rollout, t_train), with the phases of the synchronous run itself. A third run is synchronous with
two threads in each phase: the other way to use two cores. Prints ratios; the first steps of each run are left out, they warm up.

The ideal takes for granted that two cores compute as fast at once as each alone. On a shared machine, or with two threads of one core, they
don't: so it also prints how fast two processes multiply matrices at once, as a share of the speed of one alone, before and after the runs,
and, beside the share of the ideal that was reached, the share of what these cores allow: the ideal times that speed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import NANO_RECIPE, evenkeel, in_turns, options, steps_of

WARM_UP_STEPS = 5
COMMON = [
    *("dynamic_sampling=false", "evaluation.every_steps=0", "evaluation.problems=64", "checkpoint.every_steps=0"),
    *("learner.learning_rate=0.0", "learner.min_learning_rate=0.0"),
]
"""Learning rate 0: answers keep their length, so that every step of every run has the same work."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one run's steps, the warm-up left out."""

    step_s: float
    """Mean of a step."""
    wait_s: float
    """Mean time in which the learner had no batch; in a synchronous run that is the rollout phase and the correction."""
    train_s: float
    rollout_wait_share: float
    mixed_share: float
    largest_staleness: float


def run(run_dir: Path, steps: int, *overrides: str) -> Phases:
    """Train for some steps in a process of its own and read its metrics."""
    print(f"... {run_dir.name}: {' '.join(overrides)}", flush=True)
    evenkeel("train", NANO_RECIPE, *COMMON, f"steps={steps}", f"run_dir={run_dir}", *overrides)
    lines = steps_of(run_dir)[WARM_UP_STEPS:]

    def mean(key: str) -> float:
        found = [line[key] for line in lines if key in line]  # a step whose answers were all cut trained nothing
        return statistics.fmean(found) if found else 0.0

    step_s = mean("time/step_s")
    return Phases(
        step_s=step_s,
        wait_s=mean("wait/learner_s"),
        train_s=mean("time/train_s"),
        rollout_wait_share=mean("wait/rollout_s") / step_s,
        mixed_share=mean("staleness/mixed_version_share"),
        largest_staleness=max((line["staleness/max"] for line in lines if "staleness/max" in line), default=0.0),
    )


def products_a_second(seconds: float) -> float:
    """Products of two matrices that one thread of this process makes."""
    torch.set_num_threads(1)
    a, b = torch.randn(256, 1024), torch.randn(1024, 256)
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        torch.mm(a, b)
        count += 1
    return count / took


def speed_at_once(rounds: int = 5, seconds: float = 1.0) -> float:
    """Speed of two processes that compute at once, as a share of that of one alone; median."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def mean_speed(processes: int, seconds: float = seconds) -> float:
            return statistics.fmean(pool.map(products_a_second, [seconds] * processes))

        mean_speed(2, 5.0)  # both start meanwhile
        return statistics.median(mean_speed(2) / mean_speed(1) for _ in range(rounds))


def allowed(ideal: float, at_once: Sequence[float]) -> float:
    """Gain of two phases that overlap completely, each of them at the speed of two processes at once (a mean of these shares of one's)."""
    return ideal * statistics.fmean(at_once)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--pairs", type=int, default=1, help="how often the runs are repeated, interleaved")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE over the recipe, for every run")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP_STEPS} warm up and are left out; take more")
    evenkeel("init-model", NANO_RECIPE, "--if-missing")
    one = ["rollout.engine.threads=1", "learner.threads=1"]
    two = ["rollout.engine.threads=2", "learner.threads=2"]
    kinds = {"sync": ["max_staleness=0", *one], "async": ["max_staleness=1", *one], "sync-two-threads": ["max_staleness=0", *two]}
    at_once = [speed_at_once()]
    with tempfile.TemporaryDirectory() as folder:

        def side(kind: str, turn: int) -> Phases:
            return run(Path(folder) / f"{kind}-{turn}", arguments.steps, *kinds[kind], *arguments.overrides)

        runs = in_turns({kind: lambda turn, kind=kind: side(kind, turn) for kind in kinds}, arguments.pairs, rotate=False)
    at_once.append(speed_at_once())
    figures: list[tuple[float, float, float, float]] = []
    for sync, later, wide in zip(runs["sync"], runs["async"], runs["sync-two-threads"], strict=True):
        ideal = (sync.wait_s + sync.train_s) / max(sync.wait_s, sync.train_s)
        gain, both = sync.step_s / later.step_s, wide.step_s / later.step_s
        possible = allowed(ideal, at_once)
        figures.append((gain, gain / ideal, gain / possible, both))
        print_run("synchronous, 1 thread a side", sync, sync.step_s)
        print_run("asynchronous, 1 thread a side", later, sync.step_s)
        print_run("synchronous, 2 threads a phase", wide, sync.step_s)
        print(f"  asynchronous is {gain:.2f} times as fast as synchronous; ideal {ideal:.2f}, reached {gain / ideal:.0%} of it")
        print(f"  ... these cores, slower at once than alone, allow {possible:.2f}; reached {gain / possible:.0%} of that")
        print(f"  ... and {both:.2f} times as fast as the synchronous run with both cores in each phase")
    print(f"two processes at once compute at {at_once[0]:.2f} (after the runs: {at_once[1]:.2f}) of the speed of one alone")
    if arguments.pairs > 1:
        gain, share, of_possible, both = map(statistics.median, zip(*figures, strict=True))
        shares = f"{share:.0%} of the ideal, {of_possible:.0%} of what these cores allow"
        print(f"median of {arguments.pairs}: gain {gain:.2f}, {shares}, {both:.2f} against both cores in each phase")


def print_run(name: str, phases: Phases, reference_s: float) -> None:
    step, wait, train = (seconds / reference_s for seconds in (phases.step_s, phases.wait_s, phases.train_s))
    print(
        f"  {name:32} step time {step:.2f} of the synchronous one (learner waits {wait:.2f}, trains {train:.2f}); "
        f"waiting: learner {phases.wait_s / phases.step_s:.0%}, rollouts {phases.rollout_wait_share:.0%}; "
        f"mixed versions {phases.mixed_share:.1%}, staleness up to {phases.largest_staleness:.0f}"
    )


if __name__ == "__main__":
    main()
