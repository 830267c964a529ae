"""Decode throughput on a CPU: evenkeel's batched attention backend against SGLang's stock one, by requests in flight.

    OMP_NUM_THREADS=1 python benchmarks/decode_attention.py [--model 3M] [--requests 1 8 32 64] [--tokens 64] [--turns 5] [--check 1.8]

Two engines, one thread each, alike but for the attention backend, on one random nano Qwen3. Every row is measured in turns,
and compares the fastest turn of each, since other work on the machine can only slow a turn down: by the
clock, and by the processor time of the scheduler process. The last column is the fastest over the slowest stock turn, by the clock: far
from 1, the machine was busy, and more turns are needed. `--check` fails if the better of the two ratios at the largest number of requests
is below the given one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import in_turns, options
from benchmarks.workloads import SHAPES, Decoder, Spent, decoders, save_model
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

PROMPT_TOKENS = 32


def measure(stock: Decoder, batched: Decoder, requests: int, tokens: int, turns: int) -> float:
    """Print a row; return the better of its ratios."""
    sides = {"stock": lambda _: stock(requests, PROMPT_TOKENS, tokens), "batched": lambda _: batched(requests, PROMPT_TOKENS, tokens)}
    spent: dict[str, list[Spent]] = in_turns(sides, turns)
    clock = {name: [one.by_clock for one in each] for name, each in spent.items()}
    processor = {name: [one.by_processor for one in each] for name, each in spent.items()}
    by_clock, by_processor = (min(each["stock"]) / min(each["batched"]) for each in (clock, processor))
    print(f"{requests:>8}  {by_clock:>25.2f}  {by_processor:>17.2f}  {max(clock['stock']) / min(clock['stock']):>24.2f}", flush=True)
    return max(by_clock, by_processor)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="3M", help="shape of the random model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64], help="numbers of requests in flight, ascending")
    parser.add_argument("--tokens", type=int, default=64, help="sampled for each request")
    parser.add_argument("--turns", type=int, default=5, help="of each engine")
    parser.add_argument("--check", type=float, default=1.8, help="least ratio at the largest number of requests")
    arguments = parser.parse_args()
    limits = {"device": "cpu", "threads": 1, "max_running_requests": max(arguments.requests), "max_total_tokens": 65_536}
    configs = {"stock": EngineConfig(attention_backend="stock", **limits), "batched": EngineConfig(**limits)}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.model, vocabulary=128)
        with decoders(Path(folder), configs) as engines:
            print("requests  batched / stock: by clock  by processor time  stock: fastest / slowest", flush=True)
            ratios = [measure(engines["stock"], engines["batched"], n, arguments.tokens, arguments.turns) for n in arguments.requests]
    if ratios[-1] < arguments.check:
        sys.exit(f"at {arguments.requests[-1]} requests the ratio is {ratios[-1]:.2f}, less than {arguments.check}")


if __name__ == "__main__":
    main()
