"""What it brings to compute a group's prompt once: training steps and logprob passes, plain against shared.

    python benchmarks/shared_prompts.py

One model (the size of recipes/nano_spell_backward.yaml), two shapes of a batch: prompts of 68 tokens with 8 answers of up to 32, 16 groups;
and that recipe's own, prompts of about 20 tokens with 8 answers of about 6, 64 groups. Each with equal and with ragged lengths. Plain
and shared take turns in one run, so that a busy machine hits both; printed are the medians of the pairs' ratios, with quartiles, beside
the ratio of the positions computed, which is what there would be to gain if everything were proportional to them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.sides import TimeRatio, in_turns, options, seconds_of
from benchmarks.workloads import lengths_of_groups, random_batch, save_model
from correction import CorrectionConfig, defer
from learner.config import LearnerConfig
from learner.inputs import ModelInputs
from learner.learner_rank import LearnerRank

CORRECTION = CorrectionConfig(preset="tis-token")
SAMPLES, VOCABULARY = 8, 300
SHAPES = {
    "68 + 32, 16 groups": (16, (68, 68), (32, 32)),
    "68 + 32, 16 groups, ragged": (16, (48, 88), (8, 32)),
    "20 + 6, 64 groups": (64, (20, 20), (6, 6)),
    "20 + 6, 64 groups, ragged": (64, (18, 22), (4, 7)),
}
"""Groups, and shortest and longest prompt and answer."""


def compare(learner: LearnerRank, action: Callable[[], object], pairs: int) -> TimeRatio:
    """Seconds the plain way over seconds shared."""

    def measure(shares: bool) -> float:
        learner.config = learner.config.model_copy(update={"shared_prompts": shares})
        return seconds_of(action)

    seconds = in_turns({"plain": lambda _: measure(False), "shared": lambda _: measure(True)}, pairs, warm_up=1)
    return TimeRatio.of(seconds["plain"], seconds["shared"])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), "recipe", VOCABULARY)
        learner = LearnerRank(LearnerConfig(learning_rate=0.0))
        learner.load(folder)
        print(f"{'times as fast, median (quartiles)':36s}{'positions':>20s}{'training step':>22s}{'logprobs':>22s}")
        for name, (groups, prompts, answers) in SHAPES.items():
            batch = random_batch(lengths_of_groups(groups, SAMPLES, prompts, answers), SAMPLES, VOCABULARY)
            corrected = defer(batch, CORRECTION)
            plain, shared = (len(ModelInputs.of(batch, share_prompts=share).token_ids) for share in (False, True))
            step = compare(learner, lambda: learner.step(corrected, CORRECTION, step=0), pairs)  # noqa: B023
            logprobs = compare(learner, lambda: learner.logprobs(batch), pairs)  # noqa: B023
            print(f"{name:32s}{f'{plain:,} / {shared:,} = {plain / shared:.2f}':>24s}{step!s:>22s}{logprobs!s:>22s}", flush=True)
        learner.close()


if __name__ == "__main__":
    main()
