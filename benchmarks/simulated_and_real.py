"""How near does a simulation come? Real runs of the nano recipe, and what `evenkeel simulate --run` makes of one of them.

    python benchmarks/simulated_and_real.py [--steps 26] [--rounds 1] [--folder FOLDER]

Four runs: synchronous and asynchronous, one and two workers, one thread for each engine and for the learner. The synchronous run of one
worker gives all speeds and lengths, as --run with --cores and --other-cores does, and the simulation predicts the others. What the rest of
a run takes (driver, queue, service, rewards, Ray) is measured while it trains. "With its own speeds" simulates a run by what it has
measured itself: what is off there is the simulation's. What is off only with the speeds of the first run is that speeds differ between
runs (other programs on the machine, caches, processors that share more than the model knows). The first steps of each run are left out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.commands.measured_costs import MeasuredRun
from actors.simulation.outcome import Outcome
from actors.simulation.run import simulate
from benchmarks.async_vs_sync import COMMON
from benchmarks.sides import NANO_RECIPE, evenkeel, options, scratch

KINDS = {f"{name}-{workers}": (staleness, workers) for workers in (1, 2) for name, staleness in (("sync", 0), ("async", 1))}
CALIBRATION = "sync-1"
_COMPUTING = ("ray::LearnerRankActor", "sglang::scheduler")
"""Beginnings of the names of processes whose threads the simulation knows: learner ranks and engines."""
_SKIPPED = 5
"""Steps in which a run gets going."""
_LOOK_S = 1.0


class OtherCores:
    """Cores that this process's descendants take, but for learner ranks and engines, while a run trains."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._seconds = run_dir, dict[int, float]()
        """CPU seconds by process id, of those that have ended, too."""
        self._seen: list[tuple[int, float, float]] = []
        """Steps done, time, and CPU seconds of all together."""
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if not " ".join(process.cmdline()).startswith(_COMPUTING):
                        times = process.cpu_times()
                        self._seconds[process.pid] = times.user + times.system
            metrics = self._run_dir / "metrics.jsonl"
            steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
            self._seen.append((steps, time.monotonic(), sum(self._seconds.values())))

    def end(self) -> float:
        """From the first step that counts to the last."""
        self._is_over.set()
        self._watcher.join()
        last = max(steps for steps, *_ in self._seen)
        counted = [(at, cpu_s) for steps, at, cpu_s in self._seen if _SKIPPED <= steps < last]
        (began, before_s), (ended, after_s) = counted[0], counted[-1]
        return (after_s - before_s) / (ended - began)


def trained(run_dir: Path, *words: object) -> None:
    """Train, and keep with the run's files how many cores others took."""
    others = OtherCores(run_dir)
    evenkeel("train", NANO_RECIPE, *words, f"run_dir={run_dir}")
    (run_dir / "other_cores").write_text(f"{others.end():.3f}\n")


def measured(run_dir: Path) -> MeasuredRun:
    kept = run_dir / "other_cores"
    return MeasuredRun.of(run_dir, cores=float(os.cpu_count() or 1), other_cores=float(kept.read_text()) if kept.is_file() else 0.0)


def predicted(by: MeasuredRun, run: MeasuredRun) -> Outcome:
    """The shape of `run` in simulated time, with what `by` has measured."""
    return simulate(run.shape, by.costs, by.lengths.afresh(), prompt_tokens=by.prompt_tokens, steps=200)


def row(name: str, by: MeasuredRun, run: MeasuredRun) -> str:
    found = predicted(by, run)
    return (
        f"  {name:8} step {found.step_s / run.step_s:.2f} of the measured one; mean staleness {found.mean_staleness:.2f}, "
        f"measured {run.staleness:.2f}; the rest of the run took {run.costs.other_cores:.2f} cores"
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=26, help="training steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="how often the four runs are repeated")
    parser.add_argument("--folder", type=Path, help="keep the runs there; those that are there already are not run again")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE over the recipe, for every run")
    arguments = parser.parse_args()
    evenkeel("init-model", NANO_RECIPE, "--if-missing")
    one_thread = ["rollout.engine.threads=1", "learner.threads=1", f"steps={arguments.steps}", *arguments.overrides]
    with scratch(arguments.folder) as folder:
        for turn in range(1, arguments.rounds + 1):
            for kind, (staleness, workers) in KINDS.items():
                run_dir = folder / f"{kind}-{turn}"
                if not (run_dir / "report.html").is_file():
                    trained(run_dir, *COMMON, *one_thread, f"max_staleness={staleness}", f"rollout.workers={workers}")
            runs = {kind: measured(folder / f"{kind}-{turn}") for kind in KINDS}
            print(f"round {turn}, all speeds of {CALIBRATION} (decodes {runs[CALIBRATION].costs.decode} tokens/s):")
            print("\n".join(row(kind, runs[CALIBRATION], run) for kind, run in runs.items()))
            print("each with its own speeds:")
            print("\n".join(row(kind, run, run) for kind, run in runs.items()), flush=True)


if __name__ == "__main__":
    main()
