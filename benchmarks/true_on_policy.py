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
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package learner, not its neighbour here of the same name

import psutil
import torch
from decode_attention import SHAPES, save_model

from correction.batch import PackedBatch
from correction.config import CorrectionConfig
from correction.correct import defer
from learner.config import LearnerConfig
from learner.learner_rank import LearnerRank
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig

BATCH_TOKENS = 8000
"""Of a learner step's sequences, prompts of each included, whatever their length."""
SAMPLES = 8
"""Answers to a prompt."""
LEAST_OF_BATCHED, LEAST_OF_STOCK, MOST_OF_LEARNER = 0.6, 1.0, 1.15


async def decode_seconds(engine: RolloutEngine, requests: int, length: int) -> float:
    """All requests in flight together; their prompts are in the prefix cache already."""
    draw = random.Random(requests)
    prompts = [[draw.randrange(5, 100) for _ in range(length // 3)] for _ in range(requests)]
    await asyncio.gather(*(engine.generate(prompt, max_tokens=2, ignore_stop=True) for prompt in prompts))
    scheduler = psutil.Process(engine.process_ids["scheduler"])
    used = sum(scheduler.cpu_times()[:2])
    await asyncio.gather(*(engine.generate(prompt, max_tokens=length - length // 3, ignore_stop=True) for prompt in prompts))
    return sum(scheduler.cpu_times()[:2]) - used


async def fastest_in_turns(turns: int, measures: dict[str, Callable[[], Awaitable[float]]]) -> tuple[dict[str, float], float]:
    """Fastest seconds of each, and the first one's slowest over its fastest."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(turns):
        for name, measure in measures.items():
            seconds[name].append(await measure())
    first = next(iter(seconds.values()))
    return {name: min(values) for name, values in seconds.items()}, max(first) / min(first)


async def measure_decode(folder: str, arguments: argparse.Namespace) -> list[str]:
    """Print a row for each length; return what misses its target."""
    lengths, requests, stock = arguments.lengths, arguments.requests, {} if arguments.skip_stock else {"attention_backend": "stock"}
    kinds = {"batch-invariant": {"fixed_order": True}, "batched": {}} | ({"stock": stock} if stock else {})
    missed = []
    engines = {}
    for name, settings in kinds.items():
        limits = {"threads": 1, "max_running_requests": requests, "max_total_tokens": requests * (max(lengths) + 64)}
        config = EngineConfig(device="cpu", dtype=arguments.dtype, **limits, **settings)
        engines[name] = await RolloutEngine.start(folder, config, name=name)
    print("decode        length  requests  of batched  of stock  spread", flush=True)
    for length in lengths:

        def measure(engine: RolloutEngine, length: int = length) -> Callable[[], Awaitable[float]]:
            return lambda: decode_seconds(engine, requests, length)

        best, spread = await fastest_in_turns(arguments.turns, {name: measure(engine) for name, engine in engines.items()})
        ratios = {name: seconds / best["batch-invariant"] for name, seconds in best.items()}
        of_stock = ratios.get("stock", float("nan"))
        print(f"tokens/s ratio  {length:>4}  {requests:>8}  {ratios['batched']:>10.2f}  {of_stock:>8.2f}  {spread:>6.2f}", flush=True)
        if ratios["batched"] < LEAST_OF_BATCHED or of_stock < LEAST_OF_STOCK:
            missed.append(f"decode of {length} tokens")
    for engine in engines.values():
        await engine.shutdown()
    return missed


def learner_batch(length: int) -> PackedBatch:
    """About BATCH_TOKENS random tokens: groups that share a prompt of a third of the length, with answers that fill up to all of it."""
    draw = random.Random(length)
    texts: list[list[int]] = []
    while sum(map(len, texts)) < BATCH_TOKENS:
        if len(texts) % SAMPLES == 0:
            prompt = [draw.randrange(5, 100) for _ in range(length // 3)]
        texts.append([*prompt, *(draw.randrange(5, 100) for _ in range(draw.randint(length // 6, length - length // 3)))])
    masks = [torch.arange(len(text)) >= length // 3 for text in texts]
    token_ids = torch.tensor([token for text in texts for token in text])
    return PackedBatch(
        token_ids=token_ids,
        offsets=torch.tensor([0, *map(len, texts)]).cumsum(0),
        loss_mask=torch.cat(masks),
        behavior_logprobs=torch.full((len(token_ids),), -4.8),
        advantages=torch.ones(len(token_ids)),
        weight_versions=torch.zeros(len(token_ids), dtype=torch.int32),
        group_ids=torch.arange(len(texts)) // SAMPLES,
    ).validate()


async def measure_learner(folder: str, lengths: list[int], turns: int, dtype: str) -> list[str]:
    """Print a row for each length; return what misses its target."""
    config = CorrectionConfig(preset="grpo")
    settings = {
        name: LearnerConfig(device="cpu", dtype=dtype, fixed_order=name == "batch-invariant") for name in ("batch-invariant", "usual")
    }
    learners = {name: LearnerRank(its) for name, its in settings.items()}
    for learner in learners.values():
        learner.load(folder)
    missed = []
    print("learner       length  prompts   step time of usual  spread", flush=True)
    for length, shares in [(length, shares) for length in lengths for shares in (True, False)]:
        corrected = defer(learner_batch(length), config)

        def measure(learner: LearnerRank, corrected: object = corrected) -> Callable[[], Awaitable[float]]:
            async def step() -> float:
                used = time.process_time()
                learner.step(corrected, config, step=0)
                return time.process_time() - used

            return step

        for learner in learners.values():
            learner.config = learner.config.model_copy(update={"shared_prompts": shares})
        best, spread = await fastest_in_turns(turns + 1, {name: measure(learner) for name, learner in learners.items()})
        ratio, kind = best["batch-invariant"] / best["usual"], "shared" if shares else "repeated"
        print(f"step time ratio {length:>4}  {kind:<8}  {ratio:>18.2f}  {spread:>6.2f}", flush=True)
        if ratio > MOST_OF_LEARNER:
            missed.append(f"learner step on {length} tokens, prompts {kind}")
    return missed


async def measure_all(arguments: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.model)
        missed = [] if arguments.skip_learner else await measure_learner(folder, arguments.lengths, arguments.turns, arguments.dtype)
        if not arguments.skip_decode:
            missed += await measure_decode(folder, arguments)
        return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    missed = asyncio.run(measure_all(arguments))
    if arguments.check and missed:
        sys.exit(f"targets missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
