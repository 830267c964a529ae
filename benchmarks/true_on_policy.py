"""What true on-policy costs on a CPU: decode speed and learner steps with batch-invariant operators, as ratios measured in one run.

    OMP_NUM_THREADS=1 python benchmarks/true_on_policy.py [--model recipe] [--lengths 100 1000] [--dtype float32] [--turns 3] [--check]

Decode: three engines on one random nano Qwen3, alike but for their operators: batch-invariant, evenkeel's batched attention, SGLang's own.
Prompt and answer together have the given length, the prompt a third of it. Learner: a step on groups of 8 such sequences, forward and
backward, batch-invariant and usual, with the prompt of a group computed once on both sides, and for each sequence on both. The
type is that of all engines and learners. What is compared is processor time, of the scheduler process and of this one, with one
thread each; turns alternate, and the fastest of each counts, since other work on the machine can only slow a turn down. The last number of
a row is the slowest over the fastest turn of the mode: far from 1, more turns are needed.
`--check` fails if a ratio misses its target: decode at least 0.6 of the batched engine and no slower than SGLang's own, a learner step at
most 1.15 times the usual one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import in_turns, options
from benchmarks.workloads import SHAPES, decoders, lengths_of_groups, random_batch, save_model
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import defer
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

BATCH_TOKENS = 8000
"""About so many has a learner step, the prompt of each sequence included, whatever their length."""
SAMPLES = 8
"""Answers to a prompt."""
VOCABULARY = 128
LEAST_OF_BATCHED, LEAST_OF_STOCK, MOST_OF_LEARNER = 0.6, 1.0, 1.15


def fastest(seconds: Mapping[str, list[float]]) -> tuple[dict[str, float], float]:
    """The fastest turn of each side, and the slowest over the fastest with batch-invariant operators."""
    return {name: min(values) for name, values in seconds.items()}, max(seconds["batch-invariant"]) / min(seconds["batch-invariant"])


def measure_decode(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Print a row for each length; return what misses its target."""
    kinds: dict[str, dict[str, Any]]
    kinds = {"batch-invariant": {"batch_invariant": True}, "batched": {}, "stock": {"attention_backend": "stock"}}
    if arguments.skip_stock:
        del kinds["stock"]
    requests, lengths = arguments.requests, arguments.lengths
    limits = {"threads": 1, "max_running_requests": requests, "max_total_tokens": requests * (max(lengths) + 64)}
    configs = {name: EngineConfig(device="cpu", dtype=arguments.dtype, **limits, **settings) for name, settings in kinds.items()}
    missed = []
    with decoders(folder, configs) as engines:
        print("decode        length  requests  of batched  of stock  spread", flush=True)
        for length in lengths:
            sizes = (requests, length // 3, length - length // 3)
            sides = {name: lambda _, decode=decode, sizes=sizes: decode(*sizes).by_processor for name, decode in engines.items()}
            best, spread = fastest(in_turns(sides, arguments.turns))
            ratios = {name: seconds / best["batch-invariant"] for name, seconds in best.items()}
            of_stock = ratios.get("stock", float("nan"))
            print(f"tokens/s ratio  {length:>4}  {requests:>8}  {ratios['batched']:>10.2f}  {of_stock:>8.2f}  {spread:>6.2f}", flush=True)
            if ratios["batched"] < LEAST_OF_BATCHED or of_stock < LEAST_OF_STOCK:
                missed.append(f"decode of {length} tokens")
    return missed


def measure_learner(folder: Path, lengths: list[int], turns: int, dtype: Any) -> list[str]:
    """Print a row for each length; return what misses its target."""
    config = CorrectionConfig(preset="grpo")
    learners = {}
    for name in ("batch-invariant", "usual"):
        learners[name] = LearnerRank(LearnerConfig(device="cpu", dtype=dtype, batch_invariant=name == "batch-invariant"))
        learners[name].load(folder)
    missed = []
    print("learner       length  prompts   step time of usual  spread", flush=True)
    for length, shares in [(length, shares) for length in lengths for shares in (True, False)]:
        prompt, answers = length // 3, (length // 6, length - length // 3)
        sequences = round(BATCH_TOKENS / (prompt + sum(answers) / 2))
        sizes = lengths_of_groups(sequences, SAMPLES, (prompt, prompt), answers)[:sequences]
        corrected = defer(random_batch(sizes, SAMPLES, VOCABULARY), config)

        def step(learner: LearnerRank, corrected: Any = corrected) -> float:
            used = time.process_time()
            learner.step(corrected, config, step=0)
            return time.process_time() - used

        for learner in learners.values():
            learner.config = learner.config.model_copy(update={"shared_prompts": shares})
        sides = {name: lambda _, learner=learner, step=step: step(learner) for name, learner in learners.items()}
        best, spread = fastest(in_turns(sides, turns + 1))
        ratio, kind = best["batch-invariant"] / best["usual"], "shared" if shares else "repeated"
        print(f"step time ratio {length:>4}  {kind:<8}  {ratio:>18.2f}  {spread:>6.2f}", flush=True)
        if ratio > MOST_OF_LEARNER:
            missed.append(f"learner step on {length} tokens, prompts {kind}")
    return missed


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="recipe", help="shape of the random model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000], help="tokens of a sequence")
    parser.add_argument("--requests", type=int, default=64, help="in flight together")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights and activations")
    parser.add_argument("--turns", type=int, default=3, help="of each engine")
    parser.add_argument("--skip-stock", action="store_true", help="leave SGLang's own attention out: it takes most of the time")
    parser.add_argument("--skip-decode", action="store_true")
    parser.add_argument("--skip-learner", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    arguments = parser.parse_args()
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.model, VOCABULARY)
        if not arguments.skip_learner:
            missed += measure_learner(Path(folder), arguments.lengths, arguments.turns, arguments.dtype)
        if not arguments.skip_decode:
            missed += measure_decode(Path(folder), arguments)
    if arguments.check and missed:
        sys.exit(f"targets missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
