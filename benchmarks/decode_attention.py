"""Decode throughput on a CPU: evenkeel's batched attention backend against SGLang's stock one, by requests in flight.

    OMP_NUM_THREADS=1 python benchmarks/decode_attention.py [--model 3M] [--requests 1 8 32 64] [--tokens 64] [--turns 5] [--check 1.8]

Two engines, one thread each, alike but for the attention backend, on one random nano Qwen3. Every row is measured in turns,
stock, batched, stock ... (A B A), and compares the fastest turn of each, since other work on the machine can only slow a turn down: by the
clock, and by the processor time of the scheduler process. The last column is the fastest over the slowest stock turn, by the clock: far
from 1, the machine was busy, and more turns are needed. `--check` fails if the better of the two ratios at the largest number of requests
is below the given one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig

PROMPT_TOKENS = 32
SHAPES = {
    "recipe": {"hidden_size": 384, "intermediate_size": 1408, "num_hidden_layers": 3, "head_dim": 64},
    "3M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64},
}
"""recipe: what `make train` trains; its other products are a larger part. 3M: the default nano model."""


def save_model(folder: Path, shape: str) -> None:
    """A random Qwen3 of 4 query heads over 2 key heads and a small vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape],
        vocab_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one turn."""

    by_clock: float
    by_processor_time: float


async def measure_turn(engine: RolloutEngine, requests: int, tokens: int) -> Speed:
    """`requests` prompts in flight together; a warm-up of a few tokens comes first, and leaves the prompts in the prefix cache."""
    draw = random.Random(requests)
    prompts = [[draw.randrange(5, 100) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    await asyncio.gather(*(engine.generate(prompt, max_tokens=4, ignore_stop=True) for prompt in prompts))
    scheduler = psutil.Process(engine.process_ids["scheduler"])
    started, used = time.perf_counter(), sum(scheduler.cpu_times()[:2])
    await asyncio.gather(*(engine.generate(prompt, max_tokens=tokens, ignore_stop=True) for prompt in prompts))
    sampled = requests * tokens
    return Speed(sampled / (time.perf_counter() - started), sampled / (sum(scheduler.cpu_times()[:2]) - used))


async def measure(shape: str, all_requests: list[int], tokens: int, turns: int) -> float:
    """Print a row for each number of requests; return the last one's better ratio."""
    limits = {"device": "cpu", "threads": 1, "max_running_requests": max(all_requests), "max_total_tokens": 65_536}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), shape)
        print("starting two engines on a CPU, one after the other (about a minute)", flush=True)
        stock = await RolloutEngine.start(folder, EngineConfig(attention_backend="stock", **limits), name="stock")
        batched = await RolloutEngine.start(folder, EngineConfig(**limits), name="batched")
        print("requests  batched / stock: by clock  by processor time  stock: fastest / slowest", flush=True)
        for requests in all_requests:
            a = [await measure_turn(stock, requests, tokens)]
            b = []
            for _ in range(turns):
                b.append(await measure_turn(batched, requests, tokens))
                a.append(await measure_turn(stock, requests, tokens))
            by_clock = max(s.by_clock for s in b) / max(s.by_clock for s in a)
            by_processor_time = max(s.by_processor_time for s in b) / max(s.by_processor_time for s in a)
            spread = max(s.by_clock for s in a) / min(s.by_clock for s in a)
            print(f"{requests:>8}  {by_clock:>25.2f}  {by_processor_time:>17.2f}  {spread:>24.2f}", flush=True)
        await stock.shutdown()
        await batched.shutdown()
    return max(by_clock, by_processor_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="3M", help="shape of the random model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64], help="numbers of requests in flight, ascending")
    parser.add_argument("--tokens", type=int, default=64, help="sampled for each request")
    parser.add_argument("--turns", type=int, default=5, help="of the batched engine; the stock one has one more")
    parser.add_argument("--check", type=float, default=1.8, help="least ratio at the largest number of requests")
    arguments = parser.parse_args()
    ratio = asyncio.run(measure(arguments.model, arguments.requests, arguments.tokens, arguments.turns))
    if ratio < arguments.check:
        sys.exit(f"at {arguments.requests[-1]} requests the ratio is {ratio:.2f}, less than {arguments.check}")


if __name__ == "__main__":
    main()
