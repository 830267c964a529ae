"""When is the second forward free? `split-tis`, for which stale tokens are scored at the weights that sampled them, against `tis-token`,
which is the same without the split; with the learner idle, and with the learner busy.

    python benchmarks/split_forward.py [--steps 20] [--pairs 3]

Runs of the nano recipe with real engines, one thread for the engine and one for the learner, max_staleness 2, one optimizer step a batch,
so that no proximal forward is in the way. Idle: the engine samples 24 answers at once, and the learner waits for it. Busy: the learner
takes micro-batches of one or two answers, and groups wait for it. All four take turns.

Printed of each, in this order: the step of split-tis over that of tis-token, which a machine that is busy with other things makes coarse;
and from the timeline of the split-tis run alone, which it doesn't: how much of a step the second forward is, and how much of that ran while
the batch's last groups were still being sampled. That share is free. The groups of a batch are scored in two halves, so that it is about
the first half's at most: with the second the batch is whole, and nothing is left to wait for. Learning rate 0: every step has the same
work.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import NANO_RECIPE, evenkeel, in_turns, options, steps_of
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan

WARM_UP_STEPS = 4
COMMON = [
    *("max_staleness=2", "groups_per_step=32", "dynamic_sampling=false", "evaluation.every_steps=0", "checkpoint.every_steps=0"),
    *("rollout.engine.threads=1", "learner.threads=1", "learner.learning_rate=0.0", "learner.min_learning_rate=0.0"),
]
LEARNER = {
    "idle": ["rollout.engine.max_running_requests=24"],
    "busy": ["learner.tokens_per_microbatch=64"],
}
PRESETS = {"apart": "split-tis", "together": "tis-token"}


@dataclass(frozen=True, slots=True)
class Steps:
    """One run's steps, the warm-up left out."""

    step_s: float
    """Median of a step."""
    wait_share: float
    """Of a step: the learner waits for its batch, the second forward included."""
    forward_share: float
    """Of a step: the second forward, and the copy that later ones take."""
    free_share: float
    """Of that: while the batch still lacked groups."""


def of_timeline(spans: list[LaneSpan], *, first_version: int) -> tuple[float, float]:
    """Seconds of forwards at earlier weights and of copies, of the batches from a version on; and those in which groups were lacking."""
    whole_at: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.what == "queue" and span.version is not None:  # from a group's end until its batch is given to the learner
            whole_at[span.version] = max(whole_at[span.version], span.begin)
    seconds = free = 0.0
    for span in spans:
        if span.what in ("forward", "copy") and span.version is not None and first_version <= span.version and span.version in whole_at:
            seconds += span.end - span.begin
            free += max(min(span.end, whole_at[span.version]) - span.begin, 0.0)
    return seconds, free


def run(run_dir: Path, steps: int, *overrides: str) -> Steps:
    """Train for some steps in a process of its own, and read what it has left."""
    print(f"... {run_dir.name}: {' '.join(overrides)}", flush=True)
    evenkeel("train", NANO_RECIPE, *COMMON, f"steps={steps}", f"run_dir={run_dir}", *overrides)
    lines = steps_of(run_dir)[WARM_UP_STEPS:]
    seconds, free = of_timeline(list(RunFolder.view(run_dir).read_timeline()), first_version=WARM_UP_STEPS)
    of_steps = sum(line["time/step_s"] for line in lines)
    return Steps(
        step_s=statistics.median(line["time/step_s"] for line in lines),
        wait_share=sum(line["wait/learner_s"] for line in lines) / of_steps,
        forward_share=seconds / of_steps,
        free_share=free / seconds if seconds else 0.0,
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--pairs", type=int, default=3, help="how often the four runs are repeated, interleaved")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP_STEPS} warm up and are left out; take more")
    evenkeel("init-model", NANO_RECIPE, "--if-missing")
    with tempfile.TemporaryDirectory() as folder:

        def side(learner: str, how: str, turn: int) -> Steps:
            return run(Path(folder) / f"{learner}-{how}-{turn}", arguments.steps, f"correction.preset={PRESETS[how]}", *LEARNER[learner])

        sides = {f"{at} {how}": lambda turn, at=at, how=how: side(at, how, turn) for at in LEARNER for how in PRESETS}
        runs = in_turns(sides, arguments.pairs)
    for at in LEARNER:
        apart, together = runs[f"{at} apart"], runs[f"{at} together"]
        ratios = sorted(one.step_s / other.step_s for one, other in zip(apart, together, strict=True))
        forward, free = (statistics.median(getattr(one, name) for one in apart) for name in ("forward_share", "free_share"))
        print(f"learner {at}: it waits for {statistics.median(one.wait_share for one in together):.0%} of a step of tis-token")
        print(f"  a step of split-tis / one of tis-token: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"  of a step of split-tis {forward:.0%} is the second forward, {free:.0%} of it free: groups were still being sampled")


if __name__ == "__main__":
    main()
