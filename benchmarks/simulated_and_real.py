"""How near does a simulation come? Real runs of the nano recipe, and what `evenkeel simulate --run` makes of one of them.

    python benchmarks/simulated_and_real.py [--steps 26] [--rounds 1] [--folder FOLDER]

Four runs: synchronous and asynchronous, one and two workers, one thread for each engine and for the learner. The synchronous run of one
worker gives all speeds and lengths, as --run with --cores does, and the simulation predicts the others. "With its own speeds" simulates a
run by what it has measured itself: what is off there is the simulation's, what is off only beside it is speeds that differ between runs
(other programs on the machine, caches, processors that share more than the model knows). The first steps of each run are left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.commands.measured_costs import MeasuredRun
from actors.simulation.outcome import Outcome
from actors.simulation.run import simulate
from benchmarks.async_vs_sync import COMMON
from benchmarks.sides import NANO_RECIPE, evenkeel, options, scratch

KINDS = {f"{name}-{workers}": (staleness, workers) for workers in (1, 2) for name, staleness in (("sync", 0), ("async", 1))}
CALIBRATION = "sync-1"


def predicted(by: MeasuredRun, run: MeasuredRun) -> Outcome:
    """The shape of `run` in simulated time, with what `by` has measured."""
    return simulate(run.shape, by.costs, by.lengths.afresh(), prompt_tokens=by.prompt_tokens, steps=200)


def row(name: str, by: MeasuredRun, run: MeasuredRun) -> str:
    found = predicted(by, run)
    return (
        f"  {name:8} step {found.step_s / run.step_s:.2f} of the measured one; mean staleness {found.mean_staleness:.2f}, "
        f"measured {run.staleness:.2f}"
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
                    words = [f"max_staleness={staleness}", f"rollout.workers={workers}", f"run_dir={run_dir}"]
                    evenkeel("train", NANO_RECIPE, *COMMON, *one_thread, *words)
            runs = {kind: MeasuredRun.of(folder / f"{kind}-{turn}", cores=float(os.cpu_count() or 1)) for kind in KINDS}
            print(f"round {turn}, all speeds of {CALIBRATION} (decodes {runs[CALIBRATION].costs.decode} tokens/s):")
            print("\n".join(row(kind, runs[CALIBRATION], run) for kind, run in runs.items()))
            print("each with its own speeds:")
            print("\n".join(row(kind, run, run) for kind, run in runs.items()), flush=True)


if __name__ == "__main__":
    main()
