"""A real model's rollout and training step on a CPU, against transformers, llama.cpp and TRL on the same weights and threads.

    python benchmarks/real_model.py [--part rollout learner] [--model models/smollm2-135m-instruct] [--turns 3] [--check]
    python benchmarks/real_model.py --make-llama FOLDER      # once: llama.cpp's package, which is compiled (10 minutes on one core)
    python benchmarks/real_model.py --llama FOLDER --gguf FILE --trl FOLDER      # with both; benchmarks/peers.py makes TRL's

Rollout: tokens a second of 1, 16 and 64 answers at a time of up to 24 tokens to questions of the recipe smollm2_sums, 8 answers to a
question where there are several. All sample at temperature 1 and end where the model ends. transformers' generate takes one batch, padded
on the left; llama.cpp decodes all sequences together, each prompt once, from the GGUF file's weights in float32, as the folder has them
(and, as a row of its own, in the file's own 4 bits). A single answer is asked for 8 times, one after the other.
Learner: the step on a batch that the engine has sampled (64 answers), against torch's AdamW on transformers' model, padded and one sequence
at a time, as benchmarks/learner.py has them, and against what TRL's GRPOTrainer does in a step besides generating, on the same questions.
Operations are counted alike for all: 6 for each weight of the layers and position computed, 6 for each of the head's and position whose
logits are. The sides take turns; nothing else computes meanwhile, so each has all threads (--threads, 2). Of rollouts the processor time of
the process that computes is compared, too: other work on the machine is not in it.
Limits: a decode step reads every weight once, and computes 2 operations for each and request; the speeds of both are measured here.
`--check` fails if a goal is missed: rollout 3, 3 and 2 times generate; learner 0.9 x padded / computed positions.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of all sides: no side's threads spin while another computes

import psutil
import torch

from benchmarks.learner import CORRECTION, UPDATE, Rival, measure
from benchmarks.peers import TRL
from benchmarks.sides import ROOT, Peer, TimeRatio, in_turns, options, seconds_of
from benchmarks.workloads import Spent, sampled_batch
from evenkeel.correction import PackedBatch, defer
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.inputs import ModelInputs
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from lab.background_loop import BackgroundLoop

LLAMA = Peer("llama", "llama_worker.py", (("llama-cpp-python==0.3.36", "gguf"),))
MAX_TOKENS, SAMPLES = 24, 8
REQUESTS = {1: 3.0, 16: 3.0, 64: 2.0}
"""Answers at a time, and the goal: times the tokens a second of generate."""
LEARNER_GOAL = 0.9


@dataclass(frozen=True, slots=True)
class Work:
    """What a turn asks for: `calls` times answers to these prompts, all of a call at the same time."""

    calls: list[list[list[int]]]
    """Token ids of the prompts of each call."""
    samples: int

    @classmethod
    def of(cls, requests: int, prompts: Iterator[list[int]]) -> Work:
        """Of prompts that no turn has had before: they would be in the engine's prefix cache."""
        if requests == 1:
            return cls([[next(prompts)] for _ in range(8)], 1)
        return cls([[next(prompts) for _ in range(requests // SAMPLES)]], SAMPLES)


@dataclass(frozen=True, slots=True)
class Side:
    """One that samples."""

    sample: Callable[[Work, int], int]
    """(what, seed) -> number of tokens sampled."""
    process: int
    """Id of the process that computes."""

    def spent(self, works: list[Work], number: int) -> Spent:
        """What a token of a turn took."""
        tokens, process = [], psutil.Process(self.process)
        used = sum(process.cpu_times()[:2])
        seconds = seconds_of(lambda: tokens.append(self.sample(works[number], number)))
        return Spent(seconds / tokens[0], (sum(process.cpu_times()[:2]) - used) / tokens[0])


def questions(count: int) -> list[dict[str, str]]:
    """As the recipe asks them, with their answers."""
    from reasoning_gym import create_dataset

    items = create_dataset("chain_sum", size=count, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
    return [{"prompt": f"{item['question']} Reply with only the number.", "answer": item["answer"]} for item in items]


def prompts_of(model: Path, rows: list[dict[str, str]]) -> list[list[int]]:
    from evenkeel.rollout.tasks.chat import load_tokenizer

    tokenizer = load_tokenizer(model)
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]


# -- rollout -------------------------------------------------------------------------------------------------------------


@contextmanager
def engine_side(model: Path, dtype: str, threads: int) -> Iterator[Side]:
    """evenkeel's engine."""
    loop = BackgroundLoop()
    engine = loop.run(RolloutEngine.start(model, EngineConfig(device="cpu", dtype=dtype, threads=threads, context_length=256)))

    async def ask(prompts: list[list[int]], samples: int, seed: int) -> int:
        seeds = [seed * 1000 + number for number in range(samples)]
        calls = (engine.generate(prompt, max_tokens=MAX_TOKENS, samples=samples, seeds=seeds) for prompt in prompts)
        return sum(one.response_tokens for answers in await asyncio.gather(*calls) for one in answers)

    def sample(work: Work, seed: int) -> int:
        return sum(loop.run(ask(prompts, work.samples, seed), timeout_s=3600.0) for prompts in work.calls)

    try:
        yield Side(sample, engine.process_ids["scheduler"])
    finally:
        loop.run(engine.shutdown())
        loop.stop()


def generate_side(model: Path, dtype: str) -> Side:
    """transformers' generate."""
    import transformers

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS,
        eos_token_id=policy.generation_config.eos_token_id, pad_token_id=policy.config.pad_token_id or 0,
    )  # fmt: skip
    ends = torch.tensor(settings.eos_token_id).flatten()

    def call(prompts: list[list[int]], samples: int) -> int:
        rows = [prompt for prompt in prompts for _ in range(samples)]
        longest = max(map(len, rows))
        ids = torch.tensor([[settings.pad_token_id] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            answers = policy.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:]
        is_end = torch.isin(answers, ends)
        return int((is_end.cumsum(1) - is_end.long() == 0).sum())  # all up to and with the first end

    def sample(work: Work, seed: int) -> int:
        torch.manual_seed(seed)
        return sum(call(prompts, work.samples) for prompts in work.calls)

    return Side(sample, os.getpid())


def llama_side(ask: Callable[[Any], Any], gguf: Path, weights: str, threads: int, ends: list[int]) -> Side:
    """llama.cpp, in its own process. Args: weights: "float32", or "file" for those of the file as they are."""
    settings = {"gguf": str(gguf.resolve()), "weights": weights, "threads": threads, "ends": ends, "max_tokens": MAX_TOKENS}

    def sample(work: Work, seed: int) -> int:
        return sum(int(ask(settings | {"prompts": prompts, "samples": work.samples, "seed": seed})["tokens"]) for prompts in work.calls)

    return Side(sample, ask(settings | {"prompts": [], "samples": 1, "seed": 0})["process"])


def rollout(sides: dict[str, Side], model: Path, prompts: list[list[int]], turns: int, rows: list[int], dtype: str) -> list[str]:
    """Print a table; return what misses its goal. Args: dtype: whose limit is printed."""
    missed = []
    print(f"rollout: prompts of {statistics.fmean(map(len, prompts)):.0f} tokens, answers of up to {MAX_TOKENS}", flush=True)
    fresh = iter(prompts)

    for requests in rows:
        goal = REQUESTS[requests]
        works = [Work.of(requests, fresh) for _ in range(turns + 1)]
        spent = in_turns({name: partial(side.spent, works) for name, side in sides.items()}, turns, warm_up=1)
        clock = {name: [one.by_clock for one in each] for name, each in spent.items()}
        processor = {name: [one.by_processor for one in each] for name, each in spent.items()}
        rates = ", ".join(f"{name} {1 / statistics.median(values):,.1f}" for name, values in clock.items())
        print(f"{requests:>4} at a time, tokens/s: {rates}; limit {limit(model, requests, getattr(torch, dtype)):,.0f}", flush=True)
        for name in list(sides)[1:]:
            ratio, used = (TimeRatio.of(each[name], each["evenkeel"]) for each in (clock, processor))
            print(f"    times {name:20s} {ratio}, processor time {used}" + f", goal {goal:g}" * (name == "generate"), flush=True)
            if name == "generate" and ratio.median < goal:
                missed.append(f"{requests} at a time: {ratio.median:.2f} times generate, goal {goal:g}")
    return missed


# -- limits --------------------------------------------------------------------------------------------------------------


def weights_of(model: Path) -> tuple[int, int]:
    """Weights of the layers' matrices, and of the head."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    of_attention = hidden * size * (2 * heads + 2 * config["num_key_value_heads"])
    return config["num_hidden_layers"] * (of_attention + 3 * hidden * inner), config["vocab_size"] * hidden


def speeds(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second that products with one row read, and operations a second of products of 1,024 rows; the fastest of five."""
    matrix, row, rows = (torch.randn(count, 576, dtype=dtype) for count in (49152, 1, 1024))
    read = min(seconds_of(lambda: row @ matrix.t()) for _ in range(5))
    computed = min(seconds_of(lambda: rows @ matrix.t()) for _ in range(5))
    return matrix.nbytes / read, 2 * matrix.numel() * 1024 / computed


def limit(model: Path, requests: int, dtype: torch.dtype) -> float:
    """Tokens a second of a decode step that does nothing but read each weight once and multiply by it, whichever takes longer."""
    weights = sum(weights_of(model))
    bytes_a_second, operations_a_second = speeds(dtype)
    return requests / max(dtype.itemsize * weights / bytes_a_second, 2 * weights * requests / operations_a_second)


# -- learner -------------------------------------------------------------------------------------------------------------


def operations(model: Path, computed: int, with_logits: int) -> float:
    """Of a forward and backward pass: computed positions in the layers, and those of them whose logits are."""
    of_layers, of_head = weights_of(model)
    return 6.0 * (of_layers * computed + of_head * with_logits)


def learner(model: Path, batch: PackedBatch, turns: int, *, dtype: str, threads: int, trl: Sequence[float]) -> list[str]:
    """Print a table; return what misses its goal. Args: trl: seconds of its training in each of some steps, if it was there."""
    rank = LearnerRank(LearnerConfig(device="cpu", dtype=dtype, threads=threads, **UPDATE))
    rank.load(model)
    rival = Rival(model, batch, getattr(torch, dtype))
    corrected = defer(replace(batch, behavior_logprobs=rank.logprobs(batch)), CORRECTION)
    ours: dict[str, Callable[[], float]] = {"evenkeel": lambda: rank.step(corrected, CORRECTION, step=0).grad_norm}
    seconds = measure(ours | {"padded": rival.padded, "one by one": rival.one_by_one}, turns, differ=1e-3 if dtype == "float32" else 0.1)
    rank.close()
    longest, trained = int(batch.lengths.max()), int(batch.loss_mask.sum())
    first = min(int(mask.nonzero()[0]) for mask in batch.loss_mask.split(batch.lengths.tolist()))
    computed = {
        "evenkeel": (len(ModelInputs.of(batch).token_ids), trained),
        "padded": (batch.num_sequences * (longest - 1), batch.num_sequences * (longest - first)),
        "one by one": (batch.num_tokens - batch.num_sequences, trained),
    }
    print(f"learner: {batch.num_sequences} answers, {batch.num_tokens:,} tokens; padded {batch.num_sequences * longest:,}", flush=True)
    for name, positions in computed.items():
        count, taken = operations(model, *positions), statistics.median(seconds[name])
        print(f"    {name:12s} {positions[0]:,} positions, {positions[1]:,} with logits, {count / 1e12:.2f} T operations: "
              f"{taken:.2f} s, {count / taken / 1e9:.0f} G/s", flush=True)  # fmt: skip
    goal, missed = LEARNER_GOAL * batch.num_sequences * longest / computed["evenkeel"][0], []
    for name in ("padded", "one by one"):
        ratio = TimeRatio.of(seconds[name], seconds["evenkeel"])
        print(f"    times {name:24s} {ratio}" + (f", goal {goal:.2f}" if name == "padded" else ""), flush=True)
        if name == "padded" and ratio.median < goal:
            missed.append(f"learner: {ratio.median:.2f} times padded, goal {goal:.2f}")
    if trl:
        median = statistics.median(seconds["evenkeel"])
        ratios = ", ".join(f"{one / median:.2f}" for one in trl)
        print(f"    times TRL's step without generating  {statistics.median(trl) / median:.2f} ({ratios})", flush=True)
    return missed


def trl_steps(environment: Path, model: Path, rows: list[dict[str, str]], steps: int, threads: int, folder: Path) -> list[float]:
    """Seconds of TRL's steps besides generating, the first step left out; 16 answers at a time, since all 64 need 15 GB."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = {"samples_per_group": SAMPLES, "max_tokens": MAX_TOKENS}
    shared = {"model": str(model), "data": str(data), "groups": 64 // SAMPLES, "sampling": sampling, "microbatch": 16}
    own = {"output": str(folder / "trl"), "steps": steps + 1, "threads": threads, "seed": 0, "learning_rate": 1e-6, "warmup_steps": 1}
    with TRL.start(environment) as train:
        return [line["step_s"] - line["generate_s"] for line in train(shared | own)][1:]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", nargs="+", choices=("rollout", "learner"), default=["rollout", "learner"])
    parser.add_argument("--requests", type=int, nargs="+", choices=REQUESTS, default=list(REQUESTS), help="rows of the rollout")
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct")
    parser.add_argument("--gguf", type=Path, help="the same model's file, for --llama")
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help="virtual environment that has TRL, as peers.py makes it")
    parser.add_argument("--turns", type=int, default=3, help="of each side, in each row; at least 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all sides but llama.cpp and TRL")
    parser.add_argument("--check", action="store_true")
    arguments = LLAMA.parse(parser)
    if arguments.llama is not None and arguments.gguf is None:
        parser.error("--llama needs --gguf FILE: the model's weights as llama.cpp reads them")
    torch.set_num_threads(arguments.threads)
    rows = questions(18 * (arguments.turns + 1))  # 8, 2 and 8 for a turn of each row
    prompts, missed = prompts_of(arguments.model, rows), []
    if "rollout" in arguments.part:
        with ExitStack() as stack:
            sides = {"evenkeel": stack.enter_context(engine_side(arguments.model, arguments.dtype, arguments.threads))}
            sides["generate"] = generate_side(arguments.model, arguments.dtype)
            if arguments.llama is not None:
                ends = json.loads((arguments.model / "generation_config.json").read_text())["eos_token_id"]
                for name, weights in (("llama.cpp", "float32"), ("llama.cpp, 4 bits", "file")):
                    ask = stack.enter_context(LLAMA.start(arguments.llama))
                    ends = [ends] if isinstance(ends, int) else ends
                    sides[name] = llama_side(ask, arguments.gguf, weights, arguments.threads, ends)
            missed += rollout(sides, arguments.model, prompts, arguments.turns, arguments.requests, arguments.dtype)
    if "learner" in arguments.part:
        config = EngineConfig(device="cpu", dtype=arguments.dtype, threads=arguments.threads, context_length=256)
        asked = [tuple(prompt) for prompt in prompts[: 64 // SAMPLES]]
        batch = sampled_batch(arguments.model, config, asked, samples=SAMPLES, max_tokens=MAX_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            trl: list[float] = []
            if arguments.trl is not None:  # before the others: its step and theirs need more memory together than a laptop has
                trl = trl_steps(arguments.trl, arguments.model, rows, arguments.turns, arguments.threads, Path(folder))
                print(f"TRL: {statistics.median(trl):.2f} s a step without generating", flush=True)
            missed += learner(arguments.model, batch, arguments.turns, dtype=arguments.dtype, threads=arguments.threads, trl=trl)
    if arguments.check and missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
