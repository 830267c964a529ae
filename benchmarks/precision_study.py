"""What the precision of engine and learner does to the mismatch between them, at equal weights.

    OMP_NUM_THREADS=1 python benchmarks/precision_study.py [--engines float32 bfloat16 ...] [--prompts 32] [--samples 4] [--tokens 48]

One random Qwen3 of 3M parameters, whose distributions are not uniform (mean -log mu is printed; ln 512 is 6.24). An engine of each
precision samples from it; a learner of each precision then gives the logprobs of every engine's tokens. A row is a pairing: the k3 KL, the
standard deviation and the largest size of the log-ratio (nats), and the correlation of the probabilities. `+ head` computes the logits in
float32. Equal half precisions aren't exact either: weights are rounded alike, but sums and their order are not. An engine that doesn't
start is named with its error.

`float8` is bfloat16 with the projections' weights rounded to float8 e4m3 before: `blocks` of the bfloat16 weights, with a scale for each
32 x 32 of a matrix; `tensor` with one scale for a matrix; `masters` by blocks of the float32 weights, of which the bfloat16 ones are
roundings. A float8 learner is one that computes with the rounded weights.

The last columns say what the mismatch does to a policy gradient, whose tokens should count by rho = pi / mu: the mean |rho - 1| of one
without correction, the mean |rho - w| with truncated importance weights (tis-token), and these weights' effective sample size.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package learner, not its neighbour here of the same name

import torch
from torch import Tensor

from benchmarks.sides import options
from benchmarks.workloads import sampled_batch, save_model
from evenkeel.correction import CorrectionConfig, PackedBatch, correct, diagnose
from evenkeel.correction.errors import EvenkeelError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from lab.float8 import write_float8_folder

VOCABULARY = 512
HEAD: dict[str, Any] = {"engine_args": {"enable_fp32_lm_head": True}}
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 + head": {"dtype": "bfloat16", **HEAD},
    "float16": {"dtype": "float16"},
    "float16 + head": {"dtype": "float16", **HEAD},
}
LEARNERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 + head": {"dtype": "bfloat16", "float32_head": True},
    "float16": {"dtype": "float16"},
    "float16 + head": {"dtype": "float16", "float32_head": True},
}
FLOAT8: dict[str, dict[str, Any]] = {
    "float8 blocks": {"block": 32, "rounded_first": torch.bfloat16},
    "float8 tensor": {"block": 0, "rounded_first": torch.bfloat16},
    "float8 masters": {"block": 32, "rounded_first": None},
}
"""How the weights are rounded of engines and learners that have these."""
ENGINES |= {name: {"dtype": "bfloat16"} for name in FLOAT8}
LEARNERS |= {name: {"dtype": "bfloat16"} for name in ("float8 blocks", "float8 masters")}
COLUMNS = {"k3_kl": "k3 KL", "log_ratio_std": "std", "log_ratio_abs_max": "max |log ratio|", "pearson": "pearson"}
AFTER = ("uncorrected", "corrected", "sample size")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4, help="for each prompt, at least 2")
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(3, VOCABULARY) for _ in range(16)) for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("as they are", *FLOAT8)}
        plain = folders["as they are"]
        save_model(plain, "3M", VOCABULARY, initializer_range=0.1)
        for kind, rounding in FLOAT8.items():
            write_float8_folder(plain, folders[kind], **rounding)
        batches: dict[str, PackedBatch] = {}
        for engine in arguments.engines:
            try:
                config = EngineConfig(device="cpu", max_running_requests=64, **ENGINES[engine])
                sizes = {"samples": arguments.samples, "max_tokens": arguments.tokens}
                batches[engine] = sampled_batch(folders.get(engine, plain), config, prompts, **sizes)
            except EvenkeelError as error:
                print(f"{engine}: does not run here: {error}", flush=True)
        logprobs: dict[tuple[str, str], Tensor] = {}
        for learner in arguments.learners:
            rank = LearnerRank(LearnerConfig(**LEARNERS[learner]))
            rank.load(folders.get(learner, plain))
            logprobs |= {(engine, learner): rank.logprobs(batch) for engine, batch in batches.items()}
            rank.close()
    for engine, batch in batches.items():
        surprise = -float(batch.behavior_logprobs[batch.loss_mask].mean())
        print(f"engine {engine}: {int(batch.loss_mask.sum()):,} tokens, mean -log mu {surprise:.2f} nats")
    print(f"{'engine':17s}{'learner':17s}" + "".join(f"{title:>17s}" for title in (*COLUMNS.values(), *AFTER)))
    correction = CorrectionConfig(preset="tis-token")
    for (engine, learner), values in sorted(logprobs.items()):
        batch = replace(batches[engine], proximal_logprobs=values)
        corrected = correct(batch, correction)
        numbers = diagnose(batch, corrected)
        cells = [f"{numbers[column]:17.8f}" if column == "pearson" else f"{numbers[column]:17.2e}" for column in COLUMNS]
        rho = (values - batch.behavior_logprobs)[batch.loss_mask].double().exp()
        errors = [float((rho - weight).abs().mean()) for weight in (1.0, corrected.importance_weights[batch.loss_mask])]
        cells += [*(f"{error:17.2e}" for error in errors), f"{numbers['importance_weight_ess']:17.5f}"]
        print(f"{engine:17s}{learner:17s}{''.join(cells)}")


if __name__ == "__main__":
    main()
