"""Models and batches of the benchmarks: random weights and random tokens, since only their sizes matter to speed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from evenkeel.correction.batch import PackedBatch
from evenkeel.rollout.config import TrainOverlong
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.sampler import sample_seed
from evenkeel.rollout.trajectory import Group, Prompt, Trajectory
from lab.background_loop import BackgroundLoop

SHAPES: dict[str, dict[str, int]] = {
    "recipe": {"hidden_size": 384, "intermediate_size": 1408, "num_hidden_layers": 3},
    "3M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "60M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""recipe: what `make train` trains. 3M: the default nano model. Heads, unless said: 4 for queries, 2 for keys and values, of 64."""


def save_model(folder: Path, shape: str, vocabulary: int, **settings: Any) -> int:
    """A random Qwen3 with tied embeddings. Returns: the number of its parameters."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
    tokens = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": True}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**heads | tokens | {"dtype": "float32"} | SHAPES[shape] | settings))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


# -- batches -------------------------------------------------------------------------------------------------------------


def lengths_of_groups(groups: int, samples: int, prompts: tuple[int, int], answers: tuple[int, int]) -> list[tuple[int, int]]:
    """Lengths of prompt and answer for each sequence, drawn between these bounds; those of a group have one prompt."""
    draw = random.Random(0)
    return [(prompt, draw.randint(*answers)) for prompt in (draw.randint(*prompts) for _ in range(groups)) for _ in range(samples)]


def random_batch(lengths: Sequence[tuple[int, int]], samples: int, vocabulary: int) -> PackedBatch:
    """Random tokens of fresh weights, and an advantage of its own for each sequence.

    Args:
        lengths: of each sequence's prompt and answer.
        samples: sequences of a group; they share its prompt.
    """
    generator = torch.Generator().manual_seed(0)
    pieces: list[torch.Tensor] = []
    for number, (prompt_tokens, answer_tokens) in enumerate(lengths):
        if number % samples == 0:
            prompt = torch.randint(vocabulary, (prompt_tokens,), generator=generator)
        pieces += [prompt, torch.randint(vocabulary, (answer_tokens,), generator=generator)]
    sizes = torch.tensor([sum(pair) for pair in lengths])
    count = int(sizes.sum())
    return PackedBatch(
        token_ids=torch.cat(pieces),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
        loss_mask=torch.tensor([False, True]).repeat(len(lengths)).repeat_interleave(torch.tensor(lengths).flatten()),
        behavior_logprobs=torch.full((count,), -5.0),
        advantages=torch.repeat_interleave(torch.randn(len(lengths), generator=generator), sizes),
        weight_versions=torch.zeros(count, dtype=torch.int32),
        group_ids=torch.arange(len(lengths)) // samples,
    ).validate()


def sampled_batch(model: Path, config: EngineConfig, prompts: Sequence[tuple[int, ...]], *, samples: int, max_tokens: int) -> PackedBatch:
    """What a fresh engine answers to prompts of these tokens; all rewards are 1. Raises: EngineError if it doesn't serve the model here."""

    async def sample() -> list[Group]:
        engine = await RolloutEngine.start(model, config, name=f"{config.dtype} engine")
        asked = [Prompt(f"train/0/{number}", "", tokens, "") for number, tokens in enumerate(prompts)]

        def answers_to(prompt: Prompt) -> Awaitable[list[Trajectory]]:
            seeds = [sample_seed(0, prompt.prompt_id, index) for index in range(samples)]
            return engine.generate(prompt.token_ids, max_tokens=max_tokens, samples=samples, seeds=seeds)

        try:
            answers = await asyncio.gather(*(answers_to(prompt) for prompt in asked))
        finally:
            await engine.shutdown()
        scored = (tuple(replace(one, reward=1.0) for one in group) for group in answers)
        return [Group(number, prompt, group, 0) for number, (prompt, group) in enumerate(zip(asked, scored, strict=True))]

    groups = asyncio.run(sample())
    settings = {"learner_version": 0, "overlong": TrainOverlong(), "max_tokens": {"": max_tokens}}
    return pack_groups(groups, advantage=lambda rewards, _: rewards, **settings).batch


# -- decoding ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one turn of decoding."""

    by_clock: float
    by_processor: float
    """Of the scheduler process: it does the work, and other work on the machine is not in it."""


Decoder = Callable[[int, int, int], Spent]
"""(requests in flight, tokens of each prompt, tokens sampled for each) -> what sampling took."""


@contextmanager
def decoders(model: Path, configs: Mapping[str, EngineConfig]) -> Iterator[dict[str, Decoder]]:
    """Engines on one model, started one after the other (20 to 60 s each on a CPU)."""
    loop, engines = BackgroundLoop(), {}
    print(f"starting {len(configs)} engines on a CPU, one after the other", flush=True)
    try:
        for name, config in configs.items():
            engines[name] = loop.run(RolloutEngine.start(model, config, name=name))
        yield {name: _decoder(loop, engine) for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            loop.run(engine.shutdown())
        loop.stop()


def _decoder(loop: BackgroundLoop, engine: RolloutEngine) -> Decoder:
    async def decode(requests: int, prompt_tokens: int, tokens: int) -> Spent:
        draw = random.Random(requests)
        prompts = [[draw.randrange(5, 100) for _ in range(prompt_tokens)] for _ in range(requests)]
        # A warm-up, which leaves the prompts in the prefix cache.
        await asyncio.gather(*(engine.generate(prompt, max_tokens=4, ignore_stop=True) for prompt in prompts))
        scheduler = psutil.Process(engine.process_ids["scheduler"])
        began, used = time.perf_counter(), sum(scheduler.cpu_times()[:2])
        await asyncio.gather(*(engine.generate(prompt, max_tokens=tokens, ignore_stop=True) for prompt in prompts))
        return Spent(time.perf_counter() - began, sum(scheduler.cpu_times()[:2]) - used)

    return lambda requests, prompt_tokens, tokens: loop.run(decode(requests, prompt_tokens, tokens), timeout_s=3600.0)
