"""Twenty updates under load with SGLang's overlap schedule, its default on GPUs: what is sampled is scored by the Megatron learner.

In that schedule the scheduler starts a step before it has looked at the tokens of the one before; a run's engines on a CPU are without it.
Here one has it: nothing runs at the same time there, but pauses, retractions and versions meet the same order of events as on a GPU.
Where torch sees a GPU the test runs there, in bfloat16: `python -m pytest -m slow tests/e2e/test_overlapped_updates.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine.weight_transfer import UpdateMode
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import VersionSpan
from tests.conftest import BackgroundLoop
from tests.e2e.on_policy_cases import Sampled, as_batch, random_prompts
from tests.e2e.test_families import copies
from tests.e2e.test_weight_updates import train
from tests.learner.learner_cases import learner_on

pytestmark = [pytest.mark.engine, pytest.mark.slow]

UPDATES = 20
DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE: Literal["float32", "bfloat16"] = "bfloat16" if DEVICE == "cuda" else "float32"
LIMITS = ProbeLimits(0.5, 0.02) if DEVICE == "cuda" else ProbeLimits(1e-5, 1e-5)
"""On a CPU those of float32 by two implementations."""


async def under_load(engine: RolloutEngine, updates: Sequence[list[WeightBucket]], mode: UpdateMode) -> list[Sampled]:
    """Twice as many clients as the engine runs requests, each with another request as soon as it has an answer, until all updates are done.

    So requests begin and end at any time, also in the step that an update finds under way.
    """
    finished: list[Sampled] = []
    is_over = asyncio.Event()

    async def client(number: int) -> None:
        draw = random.Random(number)
        for prompt in random_prompts(1000, seed=number, longest=60):
            if is_over.is_set():
                return
            answers = await engine.generate(prompt, max_tokens=draw.randint(1, 150), ignore_stop=True)
            finished.append(Sampled(prompt, answers[0]))

    clients = [asyncio.ensure_future(client(number)) for number in range(2 * engine.config.max_running_requests)]
    for buckets in updates:
        await engine.generate([5], max_tokens=12, ignore_stop=True)  # some steps later
        await engine.update_weights(engine.version + 1, buckets, mode=mode)
    is_over.set()
    await asyncio.gather(*clients)
    return finished


def differences(learner: LearnerRank, kept: KeptWeights, sampled: Sequence[Sampled]) -> Tensor:
    """Nats, of each sampled token: of its logprob from the learner's at the weights of its version."""
    batch = as_batch(sampled, temperature=1.0, version=UPDATES)
    return (kept.at_sampling(batch, oldest=0) - batch.behavior_logprobs)[batch.loss_mask].abs()


def in_span(sampled: Sequence[Sampled], number: int, tokens: int | None = None) -> Tensor:
    """Which sampled tokens are in a request's span of this number. Args: tokens: the first so many of it alone."""
    masks = []
    for one in sampled:
        masks.append(torch.zeros(len(one.completion.response_ids), dtype=torch.bool))
        for span in one.completion.version_spans[number : number + 1]:
            masks[-1][span.start : span.end if tokens is None else span.start + tokens] = True
    return torch.cat(masks)


def all_of_the_first_version(one: Sampled) -> Sampled:
    tokens = len(one.completion.response_ids)
    return Sampled(one.prompt, replace(one.completion, version_spans=(VersionSpan(one.completion.version_spans[0].version, 0, tokens),)))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_twenty_updates_under_load(mode: UpdateMode, tiny_model: Path, engine_loop: BackgroundLoop) -> None:
    """With `retract` every token is of its version. In place the tokens before a request's first update are, and the one after it isn't
    of the weights before, which a token that was counted too late would be."""
    limits = {"max_total_tokens": 4096, "max_running_requests": 8}
    config = EngineConfig(device=DEVICE, dtype=DTYPE, engine_args={"disable_overlap_schedule": False}, **limits)
    with learner_on(tiny_model, device=DEVICE, dtype=DTYPE, learning_rate=3e-3) as learner:
        kept, updates = KeptWeights(learner), list[list[WeightBucket]]()
        kept.keep(0, oldest=0)
        for version in range(1, UPDATES + 1):
            train(learner, seed=version)
            kept.keep(version, oldest=0)
            updates.append(copies(learner))
        engine = engine_loop.run(RolloutEngine.start(tiny_model, config, name="engine with overlap"))
        try:
            sampled = engine_loop.run(under_load(engine, updates, mode))
            assert engine_loop.run(engine.weight_checksums()) == learner.weight_checksums()
            (state,) = engine_loop.run(engine._manager.get_internal_state())
        finally:
            engine_loop.run(engine.shutdown())
        assert state["disable_overlap_schedule"] is False
        across = [one for one in sampled if len(one.completion.version_spans) > 1]
        assert len(across) > UPDATES and all((one.completion.retractions > 0) == (mode == "retract") for one in across)
        off = differences(learner, kept, sampled)
        exact = off if mode == "retract" else off[in_span(sampled, 0)]
        assert float(exact.max()) < LIMITS.largest and float(exact.median()) < LIMITS.median
        if DTYPE == "float32":
            after = differences(learner, kept, [all_of_the_first_version(one) for one in across])[in_span(across, 1, tokens=1)]
            assert len(after) == len(across) and float((after < LIMITS.largest).float().mean()) < 0.05
