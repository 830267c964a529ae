"""An answer that one engine begins and another ends is a trajectory like any other: each token with its version, its logprob, its top K."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.engines.weights import WeightBucket
from evenkeel.rollout.continuation import continued, is_begun, kept, unsampled, with_more_to_read
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.trajectory import FinishReason, KeptTokens, TopLogprobs, Trajectory, VersionSpan, ids_of, logprobs_of
from tests.conftest import BackgroundLoop
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, response_logprobs, tiny_weights

PROMPT = [201, 45, 67, 300, 90, 410, 155]


def part(ids: list[int], spans: list[tuple[int, int, int]], *, prompt: tuple[int, ...] = (1, 2), reason: str = "abort") -> Trajectory:
    """Token t has logprob -t, the pairs (t, -t) and (t + 1, -t - 1) as its top 2, and was drawn from t % 3 tokens; 0: from all."""
    top = TopLogprobs(2, array("i", [i for t in ids for i in (t, t + 1)]), array("f", [-float(i) for t in ids for i in (t, t + 1)]))
    versions = tuple(VersionSpan(*span) for span in spans)
    logprobs = logprobs_of(-float(t) for t in ids)
    return Trajectory(
        "p", ids_of(prompt), ids_of(ids), logprobs, versions, FinishReason(reason), top_logprobs=top, kept_tokens=sets_of(ids)
    )


def sets_of(ids: list[int]) -> KeptTokens:
    return KeptTokens.of([[t, 500][: t % 3] for t in ids])


def test_the_last_token_of_an_answer_under_way_is_sampled_again() -> None:
    """It may be the end of the sequence: the engine says "abort" of that, too."""
    found = kept(part([10, 11, 12, 13], [(3, 0, 2), (4, 2, 4)]), longest=100)
    assert found.response_ids.tolist() == [10, 11, 12] and found.behavior_logprobs.tolist() == [-10.0, -11.0, -12.0]
    assert found.version_spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert found.top_logprobs is not None and found.top_logprobs.ids.tolist() == [10, 11, 11, 12, 12, 13]
    assert found.kept_tokens == sets_of([10, 11, 12])
    assert kept(part([10], [(3, 0, 1)]), longest=100).version_spans == ()
    assert kept(part([10, 11, 12, 13], [(3, 0, 2), (4, 2, 4)]), longest=4).version_spans == (VersionSpan(3, 0, 2),), "2 of prompt, 2 of it"
    assert kept(unsampled([1, 2], "p"), longest=100).response_ids.tolist() == []


def test_of_a_turn_under_way_alone_the_last_token_is_sampled_again() -> None:
    """2 of prompt, 2 in the first turn, 3 read. An earlier turn is whole: it ends where the model ended it. Where the next engine takes
    less than what was read, the turn before is under way again."""

    def tokens(sampled: int, longest: int) -> tuple[int, int]:
        ids = list(range(10, 10 + sampled))
        first = part(ids[:2], [(3, 0, 2)])
        turns = with_more_to_read(first, [50, 51, 52])
        if sampled > 2:
            turns = continued(turns, part(ids[2:], [(3, 0, sampled - 2)], prompt=tuple(turns.token_ids)))
        found = kept(turns, longest)
        assert found.behavior_logprobs.tolist() == [-float(token) for token in found.response_ids]
        assert found.top_logprobs is not None and len(found.top_logprobs.ids) == 2 * len(found.response_ids)
        return len(found.response_ids), len(found.later)

    assert tokens(5, longest=100) == (4, 1)
    assert tokens(3, longest=100) == (2, 1), "the turn's only token is sampled again, from what was read"
    assert tokens(2, longest=100) == (2, 1), "nothing of the turn was there"
    assert tokens(5, longest=8) == (3, 1)
    assert tokens(5, longest=6) == (1, 0)


def test_both_parts_are_one_answer() -> None:
    begun = kept(part([10, 11, 12], [(3, 0, 1), (4, 1, 3)]), longest=100)
    whole = continued(begun, part([12, 13], [(4, 0, 1), (5, 1, 2)], prompt=(1, 2, 10, 11), reason="stop"))
    assert whole.prompt_ids.tolist() == [1, 2] and whole.response_ids.tolist() == [10, 11, 12, 13]
    assert whole.finish_reason is FinishReason.STOP
    assert whole.behavior_logprobs.tolist() == [-10.0, -11.0, -12.0, -13.0]
    assert whole.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3), VersionSpan(5, 3, 4)), "version 4 has one span"
    assert whole.top_logprobs is not None and whole.top_logprobs.ids.tolist() == [10, 11, 11, 12, 12, 13, 13, 14]
    assert whole.kept_tokens == sets_of([10, 11, 12, 13])
    assert whole.retractions == 1 and whole.error is None


@pytest.mark.engine
def test_answers_handed_back_are_continued_from_their_tokens(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    """60 answers of 300 tokens, and 10 more than the 64 places hold; new weights come, then the engine leaves. At the end of this test it
    stands for the next engine."""
    old, version = tiny_weights(tiny_model), engine.version
    new = perturbed(old, seed=4)

    async def run() -> tuple[list[Trajectory], list[Trajectory]]:
        ask: dict[str, Any] = {"max_tokens": 300, "topk": 3, "ignore_stop": True}
        early, late = ({"samples": n, "seeds": list(range(n))} | ask for n in (60, 10))
        running = [asyncio.ensure_future(engine.generate(PROMPT, **early))]
        await engine.generate([5], max_tokens=20, ignore_stop=True)
        await engine.update_weights(version + 1, [WeightBucket.of(new)])
        await engine.generate([5], max_tokens=20, ignore_stop=True)
        running.append(asyncio.ensure_future(engine.generate(PROMPT, **late)))
        while len(engine._manager.rid_to_state) < 70:  # SGLang has them: what comes after the abort would find free places
            await asyncio.sleep(0.01)
        try:
            await engine.hand_back()
            first, second = await asyncio.gather(*running)
            assert engine.requests_in_flight == 0
            assert await engine.generate(PROMPT, begun=first, **early) == first, "one that leaves takes nothing up"
        finally:
            engine.is_leaving = False
        ends = await engine.generate(PROMPT, begun=first, **early), await engine.generate(PROMPT, begun=second, **late)
        return first + second, ends[0] + ends[1]

    begun, whole = engine_loop.run(run())
    assert all(map(is_begun, begun)) and sum(len(one.response_ids) == 0 for one in begun) >= 6, "they had no place yet"
    assert sum(len(one.version_spans) == 2 and 20 <= len(one.response_ids) < 299 for one in begun) == 60
    models = {version: hf_model(tiny_model, old), version + 1: hf_model(tiny_model, new)}
    for first, answer in list(zip(begun, whole, strict=True))[::7]:
        assert len(answer.response_ids) == 300 and answer.finish_reason is FinishReason.LENGTH and answer.error is None
        assert answer.response_ids[: len(first.response_ids)] == first.response_ids
        assert answer.prompt_ids.tolist() == PROMPT and answer.retractions == first.retractions + bool(first.response_ids)
        for span in answer.version_spans:
            expected = response_logprobs(models[span.version], PROMPT, answer.response_ids)[span.start : span.end]
            assert largest_difference(answer.behavior_logprobs[span.start : span.end], expected) < 2e-5
        with torch.no_grad():
            logits = models[version + 1](torch.tensor([[*PROMPT, *answer.response_ids]])).logits[0, len(PROMPT) - 1 : -1].double()
        last = answer.version_spans[-1]
        assert last.version == version + 1 and answer.top_logprobs is not None
        top = torch.log_softmax(logits, -1).topk(3, -1).values[last.start : last.end]
        assert largest_difference(answer.top_logprobs.logprobs[3 * last.start : 3 * last.end].tolist(), top.flatten().tolist()) < 2e-5
