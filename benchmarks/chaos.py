"""A run in which a process dies, is stopped or gets its calls late every few seconds: what each fault costs, what is done again, whether
the books balance, and whether the run learns the same.

    python benchmarks/chaos.py [--seeds 0] [--steps 150] [--every 20] [--workers 2] [--groups 16] [--save-every 5]
        [--alone] [--keep FOLDER] [--write PAGE]

The nano recipe with two workers is trained by `evenkeel train --retries`: once undisturbed, and once for each seed with faults. Every 20 s
one process of it, drawn by the seed, is killed with SIGKILL, stopped for a while, or gets its calls late: a rollout worker, a scheduler of
SGLang's, a scoring process, the correction service, a learner rank, the driver. Of the kills every third is meant
for the inside of a weight update, and half of these meet one: an engine is stopped as the learner hands out new weights, so that the update
is under way when the kill comes. The run knows nothing of this; all is done from outside. It has to end by itself.

It prints the faults, each with the seconds until the run was further than before it; the share of useful time, which is the time of the
same steps undisturbed over their time here, with the number of faults a step (published shares are for 0.1; with more --groups a step takes
longer); the steps done again; whether each prompt was trained or discarded once, none is missing, and the books are those of the
undisturbed run; what the run has left behind; and its held-out accuracy.

Exit code 1: books, leftover processes or the end are not as they should be; a run had no fault, or a kind of process should have had one
and never did; or the 99 % interval of the accuracy's difference from the undisturbed run's (Newcombe's, of two shares that both err) leaves
out 0. --alone plays no undisturbed run, and compares nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chaos_books import HeldOut, RunBooks, steps_done_again
from benchmarks.chaos_strikes import Strike, Strikes, table
from benchmarks.sides import NANO_RECIPE, evenkeel, options, put_between, scratch
from benchmarks.watched_run import WatchedRun
from evenkeel.actors.processes.children import adopted_orphans, end_new
from evenkeel.correction.errors import EvenkeelError

_POLL_S = 0.2
# Share of the time that is to be useful.
_GOAL = 0.9
# Scored by processes of its own, which can die.
_REWARD = ("rollout.reward.kind=function", "rollout.reward.path=benchmarks.word_reward:share_of_words", "rollout.reward.processes=1")


@dataclass
class ChaosRun:
    """Of one run."""

    name: str
    folder: Path
    groups: int
    """Of a step."""
    code: int | None
    """None: it had to be ended."""
    training_s: float
    """From the first step's begin to the last one's end, all returns included."""
    orphans: list[str]
    faults: list[Strike]
    books: RunBooks | None = None
    held_out: HeldOut | None = None
    again: int = 0
    """Finished steps that were taken back."""
    wrong: list[str] = field(default_factory=list)

    def read(self) -> None:
        """What it has written, and what of that is wrong by itself."""
        self.wrong = [f"left behind: {command}" for command in self.orphans]
        if self.code != 0:
            self.wrong.append("it had to be ended" if self.code is None else f"exit code {self.code}; see {self.folder}.log")
        try:
            self.books = RunBooks.of(self.folder, groups_per_step=self.groups)
            self.held_out, self.again = HeldOut.of(self.folder), steps_done_again(self.folder)
            self.wrong += self.books.wrong
        except EvenkeelError as error:
            self.wrong.append(str(error))

    def compare(self, calm: ChaosRun) -> None:
        """Adds what differs from an undisturbed run."""
        if self.books is not None and calm.books is not None:
            self.wrong += self.books.differs_from(calm.books)
        if self.held_out is None or calm.held_out is None:
            self.wrong.append("there is no accuracy after the last step to compare")
            return
        low, high = self.held_out.less(calm.held_out)
        if not low <= 0.0 <= high:
            self.wrong.append(f"its accuracy is off by [{low:+.3f}, {high:+.3f}], an interval that leaves out 0")


def play(run_dir: Path, words: list[str], faults: Strikes | None, *, groups: int, limit_s: float) -> ChaosRun:
    """Train to the end of the run, or of the time. Args: groups: of a step."""
    with adopted_orphans():
        run = WatchedRun(run_dir, [*words, f"groups_per_step={groups}"])
        began, first_s, last_s = time.monotonic(), None, 0.0
        reached = 0

        def now() -> float:
            return time.monotonic() - began

        while run.process.poll() is None and now() < limit_s:
            if first_s is None and run.is_training():
                first_s = now()
            if (step := run.reached()) > reached:
                reached, last_s = step, now()
            if faults is not None and first_s is not None:
                faults.watch(now, run.reached)
            time.sleep(_POLL_S)
        code = run.process.poll()
        if faults is not None:
            faults.end()
        if code is None:
            end_new()
        took_s, told = last_s - (first_s or 0.0), faults.told if faults else []
        played = ChaosRun(run_dir.name, run_dir, groups, code, took_s, run.close(), told)
    played.read()
    played.wrong += faults.wrong() if faults is not None else []
    return played


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", default="0", help="seeds of the faults and their times, one run each, such as 1,2,3 (0)")
    parser.add_argument("--steps", type=int, default=150, help="of each run (150)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults, in the mean (20)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16, help="of a step, which takes the longer (16)")
    parser.add_argument("--save-every", type=int, default=5, help="steps between two checkpoints; 1 where a step is long (5)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a run is ended (1800)")
    parser.add_argument("--alone", action="store_true", help="without an undisturbed run to compare with")
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, between its marks")
    arguments = parser.parse_args()
    with scratch(arguments.keep) as folder:
        calm, disturbed = played_runs(folder, arguments)
    told = summary(calm, disturbed)
    print(f"\n{told}")
    for run in [*([calm] if calm else []), *disturbed]:
        print("\n".join(f"WRONG, {run.name}: {line}" for line in run.wrong) or f"{run.name}: {run.books}; nothing is left behind")
    if arguments.write is not None:
        put_between(arguments.write, "chaos", told)
    sys.exit(1 if any(run.wrong for run in [*([calm] if calm else []), *disturbed]) else 0)


def played_runs(folder: Path, arguments: argparse.Namespace) -> tuple[ChaosRun | None, list[ChaosRun]]:
    """The undisturbed run, if it is asked for, and one for each seed."""
    model = f"model={folder / 'model'}"
    evenkeel("init-model", NANO_RECIPE, model, "--if-missing")
    words = [model, f"steps={arguments.steps}", f"rollout.workers={arguments.workers}", *_REWARD]
    words += [f"checkpoint.every_steps={arguments.save_every}", "evaluation.every_steps=0", "rollout.engine.threads=1", "learner.threads=1"]
    of_each = {"groups": arguments.groups, "limit_s": arguments.limit}
    calm = None if arguments.alone else play(folder / "undisturbed", words, None, **of_each)
    disturbed = []
    for seed in map(int, arguments.seeds.split(",")):
        print(f"-- seed {seed}", flush=True)
        strikes = Strikes(random.Random(seed), every_s=arguments.every)
        run = play(folder / f"seed-{seed}", words, strikes, **of_each)
        if calm is not None:
            run.compare(calm)
        disturbed.append(run)
    return calm, disturbed


def summary(calm: ChaosRun | None, disturbed: Sequence[ChaosRun]) -> str:
    """Two tables in Markdown, and what a fault costs in the mean."""
    head = ["run", "faults", "s of training", "useful share", "faults a step"]
    head += ["steps done again", "held-out accuracy", "all as it should be"]
    rows = [head, ["---"] * len(head)]
    for run in [*([calm] if calm else []), *disturbed]:
        share = f"{calm.training_s / run.training_s:.2f}" if calm is not None and run.training_s > 0 else "-"
        steps = run.books.steps if run.books is not None else 0
        often = f"{len(run.faults) / steps:.2f}" if steps else "-"
        accuracy = "-"
        if run.held_out is not None:
            accuracy = f"{run.held_out.accuracy:.3f}"
            if calm is not None and calm.held_out is not None and run is not calm:
                accuracy += " ({:+.3f} to {:+.3f} off)".format(*run.held_out.less(calm.held_out))
        told = "no" if run.wrong else "yes"
        rows.append([run.name, str(len(run.faults)), f"{run.training_s:.0f}", share, often, f"{run.again} of {steps}", accuracy, told])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    faults = [fault for run in disturbed for fault in run.faults]
    lines += ["", table(faults)]
    if calm is not None and faults:
        cost_s = sum(run.training_s - calm.training_s for run in disturbed) / len(faults)
        again = sum(run.again for run in disturbed) / len(faults)
        lines += [
            "",
            f"A fault costs {cost_s:.1f} s in the mean, {again:.1f} steps done again included. With one in {cost_s / (1 - _GOAL):.0f} s "
            f"{_GOAL} of the time is useful.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
