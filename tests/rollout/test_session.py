"""A rollout of several turns on the real engine, against forwards of transformers over the whole of it: each turn goes on from the exact
tokens, each token has the logprob of the weights that sampled it, whatever comes between two turns or in the middle of one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from evenkeel.correction.errors import DataError
from evenkeel.rollout.config import ExactMatchReward, SamplingConfig
from evenkeel.rollout.continuation import is_begun, unsampled
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FinishReason, Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.rollout.engine_scene import TOLERANCE, buckets_of, prompts, some_tokens
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, tiny_weights

pytestmark = pytest.mark.engine
READINGS = prompts(2, 5, seed=3)
SESSIONS = 6


@pytest.fixture
def sampler(engine: RolloutEngine, tiny_model: Path) -> Sampler:
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))
    settings = SamplingConfig(samples_per_group=2, max_tokens=2000)
    return Sampler(engine, {"": Player(encoder, RewardPool(ExactMatchReward(processes=1)), settings)}, seed=4)


def sessions(sampler: Sampler, count: int = SESSIONS) -> list[Session]:
    asked = prompts(count, 9, seed=2)
    return [sampler.session(Prompt(f"train/0/{i}", "", tuple(ids), ""), 0, topk=2) for i, ids in enumerate(asked)]


def expected(models: dict[int, Any], one: Trajectory) -> tuple[list[float], list[float]]:
    """Logprobs of the response tokens, and the largest at each place, under the weights of each one's version: of one forward over all
    tokens, read and sampled, for each version."""
    ids = torch.tensor(one.token_ids)[None]
    places = torch.cat([torch.full((len(s.ids),), s.sampled is not None) for s in one.segments]).nonzero()[:, 0]
    found: dict[int, Tensor] = {}
    for version, model in models.items():
        with torch.no_grad():
            found[version] = torch.log_softmax(model(ids).logits[0].double(), -1)[places - 1]
    versions = [span.version for span in one.version_spans for _ in range(span.start, span.end)]
    rows = [found[version][i] for i, version in enumerate(versions)]
    return [float(row[token]) for row, token in zip(rows, one.response_ids, strict=True)], [float(row.max()) for row in rows]


def test_each_turn_goes_on_from_the_exact_tokens_under_the_weights_of_its_time(
    sampler: Sampler, engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """Of three turns the second comes after an update, and another falls into the third."""
    begun = engine.version
    weights = [tiny_weights(tiny_model), *(perturbed(tiny_weights(tiny_model), seed=seed) for seed in (1, 2))]

    async def run() -> list[Session]:
        rollouts = sessions(sampler)
        await asyncio.gather(*(one.sample(max_tokens=7) for one in rollouts))
        await engine.update_weights(begun + 1, buckets_of(weights[1], 2))
        await asyncio.gather(*(one.sample(READINGS[0], max_tokens=7) for one in rollouts))
        assert engine.requests_in_flight == 0, "nothing is under way between two turns"
        last = [asyncio.ensure_future(one.sample(READINGS[1], max_tokens=600)) for one in rollouts]
        await some_tokens(engine)
        await engine.update_weights(begun + 2, buckets_of(weights[2], 2))
        for one, turn in zip(rollouts, await asyncio.gather(*last), strict=True):
            assert turn is not None and turn.turn == 2 and turn.sampled is not None
            assert turn.ids == one.trajectory.response_ids[turn.sampled]
        return rollouts

    models = {begun + i: hf_model(tiny_model, of_version) for i, of_version in enumerate(weights)}
    ended = 0
    for rollout in engine_loop.run(run()):
        one = rollout.trajectory
        assert [reading.ids.tolist() for reading in one.later] == READINGS and one.turns == 3
        assert {span.version for span in one.version_spans} >= {begun, begun + 1}
        ended += one.version_spans[-1].version == begun + 2
        assert one.retractions == len(one.version_spans) - 1, "read again after each update, and at no other turn"
        logprobs, likeliest = expected(models, one)
        assert largest_difference(one.behavior_logprobs, logprobs) < TOLERANCE
        assert one.top_logprobs is not None
        assert largest_difference(one.top_logprobs.logprobs[::2], likeliest) < TOLERANCE
    assert ended, "an update came in the middle of a turn"


def test_a_turn_of_the_same_weights_finds_all_before_it_in_the_cache(
    sampler: Sampler, engine: RolloutEngine, engine_loop: BackgroundLoop
) -> None:
    """The engine says how many tokens of a turn's prefix it had read before: all but the last one sampled, and what came after it."""
    found: list[tuple[int, int]] = []
    asked = engine._answers

    async def heard(inputs: Any, *args: Any) -> Any:
        answers = await asked(inputs, *args)
        found.extend((len(read), answer["meta_info"]["cached_tokens"]) for read, answer in zip(inputs, answers, strict=True))
        return answers

    async def run() -> None:
        (rollout,) = sessions(sampler, 1)
        for reading in ([], *READINGS):
            await rollout.sample(reading, max_tokens=40)

    engine._answers = heard  # type: ignore[method-assign]
    try:
        engine_loop.run(run())
    finally:
        del engine._answers
    (_, _), *later = found
    assert [cached for _, cached in later] == [length - len(reading) - 1 for (length, _), reading in zip(later, READINGS, strict=True)]


def test_what_is_handed_back_in_the_middle_of_a_turn_goes_on_elsewhere(
    sampler: Sampler, engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """One session in its second turn, one between two turns, one that waits for a place: at the end of this test the engine stands for the
    next one."""
    model = {engine.version: hf_model(tiny_model)}

    async def run() -> tuple[list[Trajectory], list[Trajectory]]:
        sampling, waiting = sessions(sampler, 2)
        await asyncio.gather(*(one.sample(max_tokens=7) for one in (sampling, waiting)))
        turn = asyncio.ensure_future(sampling.sample(READINGS[0], max_tokens=1500))
        await some_tokens(engine)
        try:
            await engine.hand_back()
            assert await waiting.sample(READINGS[0], max_tokens=7) is None, "one that leaves samples nothing"
            assert await turn is not None
        finally:
            engine.is_leaving = False
        handed = [one.trajectory for one in (sampling, waiting)]
        assert all(map(is_begun, handed))
        taken = [sampler.session(Prompt(one.prompt_id, "", tuple(one.prompt_ids), ""), 0, topk=2, begun=one) for one in handed]
        turns = await asyncio.gather(*(one.sample(max_tokens=50) for one in taken))
        begun = [len(one.response_ids) - one.later[0].after for one in handed]
        assert all(len(turn.ids) <= max(50, there + 1) for turn, there in zip(turns, begun, strict=True)), "the limit is the whole turn's"
        await asyncio.gather(*(one.sample(READINGS[1], max_tokens=7) for one in taken))
        return handed, [one.trajectory for one in taken]

    handed, taken = engine_loop.run(run())
    assert [len(one.later) for one in handed] == [1, 1]
    assert len(handed[0].response_ids) >= 19 and handed[1].later[0].after == len(handed[1].response_ids), "none of the turn before is lost"
    for before, one in zip(handed, taken, strict=True):
        assert [reading.ids.tolist() for reading in one.later] == READINGS and one.error is None
        assert one.token_ids[: len(before.token_ids)] == before.token_ids
        assert largest_difference(one.behavior_logprobs, expected(model, one)[0]) < TOLERANCE


def test_a_turn_without_room_is_cut_visibly(engine_loop: BackgroundLoop) -> None:
    """Prompt 4 and 6 sampled tokens; then a suffix that leaves one token below the limit, and ones that leave none, below the limit of all
    that follows the prompt and within what the engine takes. What has no room is not read."""
    limits: list[int] = []

    async def go_on(begun: Trajectory, most: int) -> Trajectory:
        limits.append(most)
        count = most - len(begun.answer_ids) if begun.later else 6
        new = [30] * count
        return replace(begun, response_ids=begun.response_ids + type(begun.response_ids)("i", new), finish_reason=FinishReason.STOP)

    async def after(suffix: int, max_tokens: int, longest_prompt: int) -> Trajectory:
        lengths = RequestLengths(together=100, prompt=longest_prompt)
        rollout = Session(unsampled([1, 2, 3, 4], "p"), go_on, max_tokens=max_tokens, lengths=lengths)
        await rollout.sample()
        turn = await rollout.sample([9] * suffix)
        assert (turn is None) == (rollout.trajectory.finish_reason is FinishReason.LENGTH)
        return rollout.trajectory

    fits = engine_loop.run(after(3, max_tokens=10, longest_prompt=50))
    assert fits.turns == 2 and len(fits.answer_ids) == 10 and limits == [10, 10]
    for suffix, max_tokens, longest_prompt in ((4, 10, 50), (60, 200, 60)):
        cut = engine_loop.run(after(suffix, max_tokens, longest_prompt))
        assert (cut.turns, len(cut.answer_ids), cut.finish_reason) == (1, 6, FinishReason.LENGTH)
    assert limits[-1] == 96, "what the engine takes beside the prompt, where that is less than max_tokens"


def test_a_session_has_one_turn_at_a_time_and_something_to_read_before_each(sampler: Sampler, engine_loop: BackgroundLoop) -> None:
    async def run() -> None:
        (rollout,) = sessions(sampler, 1)
        with pytest.raises(ValueError, match="nothing was sampled since"):
            await rollout.sample([5])
        first = asyncio.ensure_future(rollout.sample(max_tokens=30))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="a turn is being sampled"):
            await rollout.sample([5])
        await first
        with pytest.raises(ValueError, match="give the model something to read"):
            await rollout.sample()
        before = rollout.trajectory
        with pytest.raises(DataError, match="token id 99999 in a prompt"):
            await rollout.sample([5, 99_999])
        assert rollout.trajectory is before, "a turn that was refused leaves no trace"
        assert await rollout.sample([5], max_tokens=3) is not None

    engine_loop.run(run())
