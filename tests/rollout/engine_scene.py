"""What tests of the real engine ask it: prompts, weights in buckets, and requests that run while something else happens."""

from __future__ import annotations

import random

from torch import Tensor

from evenkeel.engines.weights import WeightBucket
from evenkeel.rollout.engine.engine import RolloutEngine
from tests.tiny_models import SPECIAL_TOKENS

TOLERANCE = 2e-5
"""Largest |log ratio| that float32 forwards of two implementations may show."""
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_TEXT_TOKEN, 512) for _ in range(length)] for _ in range(count)]


def buckets_of(weights: dict[str, Tensor], count: int) -> list[WeightBucket]:
    names = list(weights)
    return [WeightBucket.of({name: weights[name] for name in names[start::count]}) for start in range(count)]


def is_healthy(engine: RolloutEngine) -> bool:
    """Whether its process lives, and no update has stopped half-way."""
    return engine._process.is_alive and engine._dirty is None


async def some_tokens(engine: RolloutEngine) -> None:
    """Returns when everything that was running before has sampled at least 20 tokens more: all requests advance in step."""
    await engine.generate([5], max_tokens=20, ignore_stop=True)
