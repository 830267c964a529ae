"""A run in which something dies, or stands still, every few seconds: what it takes, what is done again, whether its books balance.

    python benchmarks/chaos.py [--seed 0] [--steps 150] [--every 20] [--workers 2] [--alone] [--keep FOLDER]

The nano recipe with two workers is trained by `evenkeel train --retries`. Every 20 s one process of it, drawn by the seed, is killed with
SIGKILL or stopped for a while: a rollout worker, a scheduler of SGLang's, a scoring process, the trajectory queue, the correction service,
a learner rank, the driver. It has to end by itself. Printed are the faults, with the seconds until the run was further than it had been
when it came; the share of useful time, which is what the same steps take undisturbed by what they took here; whether each prompt was
trained or discarded once, and none is missing; what the run has left behind; and its held-out accuracy beside that of the undisturbed run
(not with --alone, which plays none). Exit code 1: books, orphans or the end are not as they should be.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.descendants import adopted_orphans, descendants, end_new
from actors.record.run_folder import RunFolder
from actors.resume import TrainingState
from benchmarks.chaos_strikes import Strike, Strikes
from benchmarks.sides import EVENKEEL, NANO_RECIPE, ROOT, evenkeel, options
from correction.errors import EvenkeelError

_POLL_S = 0.2
_LEFT_S = 90.0
"""Ray's agents take a minute to notice that nobody is there any more."""
_REWARD = ("rollout.reward.kind=function", "rollout.reward.path=benchmarks.word_reward:share_of_words", "rollout.reward.processes=1")
"""Scored by processes of its own, which can die."""


@dataclass
class PlayedRun:
    """Of one run."""

    code: int | None
    """None: it had to be ended."""
    training_s: float
    """From the first step's begin to the last one's end, the learner's and the queue's returns included."""
    orphans: list[str]
    faults: list[Strike]


class ChaosRun:
    """`evenkeel train --retries`, watched."""

    def __init__(self, run_dir: Path, words: list[str]) -> None:
        self.run_dir = run_dir
        self._temp = tempfile.TemporaryDirectory(prefix="ek-", dir="/tmp", ignore_cleanup_errors=True)  # Ray's socket paths are short
        command = [*EVENKEEL, "train", str(NANO_RECIPE), *words, f"run_dir={run_dir}", f"ray.temp_dir={self._temp.name}"]
        self._log = run_dir.with_suffix(".log").open("wb")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        self.process = subprocess.Popen(
            [*command, "--retries", "1000"], cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def reached(self) -> int:
        """The last step that is written."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def is_training(self) -> bool:
        events = self.run_dir / "events.log"
        return events.exists() and " training\n" in events.read_text()

    def close(self) -> list[str]:
        """Returns: command lines of processes that have outlived the run."""
        until = time.monotonic() + _LEFT_S
        while (left := descendants()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        commands = [" ".join(process.cmdline())[:100] for process in left if process.is_running()]
        end_new()
        self._log.close()
        self._temp.cleanup()
        return commands


def play(run_dir: Path, words: list[str], faults: Strikes | None, *, limit_s: float) -> PlayedRun:
    """Train to the end of the run, or of the time."""
    with adopted_orphans():
        run, began, first_s, last_s = ChaosRun(run_dir, words), time.monotonic(), None, 0.0
        reached = 0
        while run.process.poll() is None and (now := time.monotonic() - began) < limit_s:
            if first_s is None and run.is_training():
                first_s = now
            step = run.reached()
            if step > reached:
                reached, last_s = step, now
            if faults is not None and first_s is not None:
                faults.watch(now, step)
            time.sleep(_POLL_S)
        code = run.process.poll()
        if faults is not None:
            faults.end()
        if code is None:
            end_new()
        return PlayedRun(code, last_s - (first_s or 0.0), run.close(), faults.told if faults else [])


def wrong_in_the_books(run_dir: Path, *, groups_per_step: int) -> list[str]:
    """Each prompt once: trained, discarded, or under way in the last checkpoint; full steps, in their order. Empty: so it is."""
    folder, wrong = RunFolder.view(run_dir), []
    state = TrainingState.load(folder.latest_checkpoint().state)
    entries = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    settled = [entry["prompt_id"] for entry in entries]
    under_way = [t.prompt.prompt_id for t in state.queue.in_flight] + [g.prompt.prompt_id for g in state.queue.finished]
    if len(set(settled)) != len(settled):
        wrong.append(f"{len(settled) - len(set(settled))} prompts were trained or discarded twice")
    missing = set(range(state.queue.admitted)) - {int(prompt.rpartition("/")[2]) for prompt in settled + under_way}
    if missing:
        wrong.append(f"{len(missing)} of {state.queue.admitted} prompts are nowhere, {sorted(missing)[:5]} among them")
    trained = [entry["step"] for entry in entries if entry["outcome"] == "trained"]
    if short := [step for step in range(1, state.step + 1) if trained.count(step) != groups_per_step]:
        wrong.append(f"steps {short[:5]} have not {groups_per_step} prompts each")
    if [int(line.step) for line in folder.read_metrics()] != list(range(1, state.step + 1)):
        wrong.append("metrics.jsonl does not have every step once")
    return wrong


def accuracy(run_dir: Path) -> tuple[float, float, float] | None:
    """Of the last evaluation: share of right answers, and its interval."""
    found = RunFolder.view(run_dir).read_evaluations()
    if not found:
        return None
    last = found[-1]
    return tuple(float(last[f"held_out/{name}"]) for name in ("accuracy", "wilson_low", "wilson_high"))  # type: ignore[return-value]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of what dies, and when (0)")
    parser.add_argument("--steps", type=int, default=150, help="of the run (150)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults, at a mean (20)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a run is ended (1800)")
    parser.add_argument("--alone", action="store_true", help="without an undisturbed run to compare with")
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(compare(folder, arguments.seed, arguments))


def compare(folder: Path, seed: int, arguments: object) -> int:
    """Play the runs and print what was seen. Returns: the exit code."""
    given = vars(arguments)
    model, groups = f"model={folder / 'model'}", 16
    evenkeel("init-model", NANO_RECIPE, model, "--if-missing")
    words = [model, f"steps={given['steps']}", f"groups_per_step={groups}", f"rollout.workers={given['workers']}", *_REWARD]
    words += ["checkpoint.every_steps=5", "evaluation.every_steps=0", "rollout.engine.threads=1", "learner.threads=1"]
    calm = None if given["alone"] else play(folder / "calm", words, None, limit_s=given["limit"])
    chaos = play(folder / "chaos", words, Strikes(random.Random(seed), every_s=given["every"]), limit_s=given["limit"])
    print(Strikes.table(chaos.faults))
    try:
        wrong = wrong_in_the_books(folder / "chaos", groups_per_step=groups)
    except EvenkeelError as error:
        wrong = [str(error)]
    wrong += [f"left behind: {command}" for command in chaos.orphans]
    if chaos.code != 0:
        wrong.append("it had to be ended" if chaos.code is None else f"exit code {chaos.code}; see {folder / 'chaos.log'}")
    print(f"seed {seed}: {len(chaos.faults)} faults in {chaos.training_s:.0f} s of training, {given['steps']} steps asked for")
    if calm is not None:
        print(f"useful time: {calm.training_s / max(chaos.training_s, 1e-9):.2f} (undisturbed: {calm.training_s:.0f} s)")
    for name in ("calm", "chaos") if calm is not None else ("chaos",):
        if not wrong and (found := accuracy(folder / name)) is not None:
            print(f"held-out accuracy, {name}: {found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]")
    print("books balance, nothing is left behind" if not wrong else "\n".join(f"WRONG: {line}" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
