"""What the trajectories that are kept token by token cost: processor time of making and writing them, against a step of their run.

    python benchmarks/kept_tokens.py RUN_DIR

The samples of a run's last steps are read back, and what the correction service and the driver had done with each is done again: the
columns are made of the batch's tensors (token_sample), and written (TokenSample.save). Both are beside the training, in threads; the share
is what they would take if they were in its way. It is also told for a step that keeps as many tokens as one may.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from benchmarks.sides import options
from evenkeel.actors.carriers import MOST_TOKENS, TokenSample
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.service.token_sample import token_sample
from evenkeel.correction import CorrectionConfig, PackedBatch, correct
from evenkeel.correction.batch import FinalDecision
from evenkeel.correction.decision import no_counts
from evenkeel.learner.results import StepValues

STEPS, REPEATS = 20, 5
LIMIT = 0.01
"""Share of a step that it may take."""


def batch_of(sample: TokenSample) -> PackedBatch:
    """The batch that a sample is of, as far as it is kept."""
    of = {name: torch.from_numpy(values) for name, values in sample.columns.items()}
    return PackedBatch(
        token_ids=of["token_ids"].long(),
        offsets=torch.from_numpy(sample.offsets),
        loss_mask=of["sampled"],
        behavior_logprobs=of["behavior"].nan_to_num(),
        advantages=of["advantage"].nan_to_num(),
        weight_versions=of["versions"],
        group_ids=torch.tensor([one.group for one in sample.answers]),
        learner_version=sample.version,
        proximal_logprobs=of["proximal"].nan_to_num(),
        at_sampling_logprobs=of.get("at_sampling"),
        turn_ids=of["turns"],
        advantages_by="own",
    )


def seconds(work: Callable[[], object]) -> float:
    """Least processor time of some runs: other processes take caches and clock rates."""
    found = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


def cost_of(sample: TokenSample, groups: list[dict[str, object]], config: CorrectionConfig, path: Path) -> tuple[float, float]:
    """Seconds of making and of writing it."""
    batch = batch_of(sample)
    corrected = correct(batch, config)
    decided = FinalDecision(corrected.keep_mask, corrected.importance_weights, no_counts(config))

    def known(name: str) -> Tensor:
        return torch.from_numpy(sample.columns[name]).nan_to_num()

    values = StepValues(known("target"), decided, known("entropy"))
    sequences = list(range(batch.num_sequences))
    return seconds(lambda: token_sample(corrected, sequences, sample.answers, values)), seconds(lambda: sample.save(path, groups))


def several(sample: TokenSample) -> TokenSample:
    """As many of it as may be kept of a step, all a little different: equal ones would be compressed to nothing."""
    times, draw = max(1, MOST_TOKENS // int(sample.offsets[-1])), np.random.default_rng(0)
    offsets = np.concatenate([[0], *(sample.offsets[1:] + i * sample.offsets[-1] for i in range(times))])
    columns = {name: np.tile(values, times) for name, values in sample.columns.items()}
    for name, values in columns.items():
        if values.dtype == np.float32:
            columns[name] = values * draw.uniform(0.9, 1, len(values)).astype(np.float32)
    return TokenSample(sample.version, sample.answers * times, offsets, columns, sample.labels)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("run_dir", type=Path)
    folder = RunFolder.view(parser.parse_args().run_dir)
    torch.set_num_threads(1)
    config = CorrectionConfig.model_validate(folder.read_config()["correction"])
    step_s = statistics.median(one["time/step_s"] for one in folder.read_metrics())
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokens.npz"
        found = [TokenSample.load(folder.tokens_path(step)) for step in folder.token_steps()[-STEPS:]]
        costs = [cost_of(sample, groups, config, path) for sample, groups in found]
        most = several(found[-1][0])
        costs_of_most = cost_of(most, found[-1][1], config, path)
        size = path.stat().st_size
    making, writing = (statistics.median(part) for part in zip(*costs, strict=True))
    share = (making + writing) / step_s
    tokens = statistics.median(int(sample.offsets[-1]) for sample, _ in found)
    took = f"made in {1e3 * making:.1f} ms, written in {1e3 * writing:.1f} ms"
    print(f"{tokens:,.0f} tokens a step: {took}, {share:.2%} of a step of {step_s:.2f} s")
    making, writing = costs_of_most
    print(
        f"{int(most.offsets[-1]):,} tokens, the most: made in {1e3 * making:.1f} ms, written in {1e3 * writing:.1f} ms, {size / 1e6:.2f} MB"
    )
    sys.exit(share > LIMIT)


if __name__ == "__main__":
    main()
