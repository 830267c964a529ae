"""New weights for the real SGLang engine on a CPU, as tensors, against a transformers forward in float32.

Behaviours locked here: a retracting update gives each token its own version's logprob; an update in place keeps tokens and spans, and
no later request sees an old prefix; a request that comes during an update waits for it; wrong weights are refused before they are sent; a
failed update makes the engine dirty, and a whole one cleans it; checksums are of what the scheduler holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from evenkeel.correction.errors import EngineDirty, SyncError
from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.trajectory import Trajectory, VersionSpan
from tests.conftest import BackgroundLoop
from tests.rollout.engine_scene import TOLERANCE, buckets_of, is_healthy, prompts, some_tokens
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, response_logprobs, tiny_weights

pytestmark = pytest.mark.engine


async def sample_across_an_update(
    engine: RolloutEngine, asked: list[list[int]], weights: dict[str, Tensor], mode: str, max_tokens: int = 500
) -> list[Trajectory]:
    """Start all requests, let them sample a while, replace the weights, and wait for all."""
    running = [asyncio.ensure_future(engine.generate(p, max_tokens=max_tokens, ignore_stop=True)) for p in asked]
    await some_tokens(engine)
    await engine.update_weights(engine.version + 1, buckets_of(weights, 3), mode=mode)  # type: ignore[arg-type]
    return [(await request)[0] for request in running]


def test_retracting_update_gives_each_token_its_own_versions_logprob(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    old, new = tiny_weights(tiny_model), perturbed(tiny_weights(tiny_model), seed=1)
    version = engine.version
    asked = prompts(8, 12, seed=6)
    sampled = engine_loop.run(sample_across_an_update(engine, asked, new, "retract"))
    models = {version: hf_model(tiny_model, old), version + 1: hf_model(tiny_model, new)}
    of_the_others = dict.fromkeys(models, 0.0)
    for prompt, completion in zip(asked, sampled, strict=True):
        assert len(completion.response_ids) == 500  # no request was aborted or cut
        assert [span.version for span in completion.version_spans] == [version, version + 1]
        assert completion.retractions == 1
        by_version = {v: response_logprobs(model, prompt, completion.response_ids) for v, model in models.items()}
        for span in completion.version_spans:
            sampled_here = completion.behavior_logprobs[span.start : span.end]
            other = version + (span.version == version)
            assert largest_difference(sampled_here, by_version[span.version][span.start : span.end]) < TOLERANCE
            difference = largest_difference(sampled_here, by_version[other][span.start : span.end])
            of_the_others[span.version] = max(of_the_others[span.version], difference)
    # Of all requests together: on a busy machine the update may come when one token is left, and two policies may agree on that one.
    assert min(of_the_others.values()) > 0.1


def test_top_k_logprobs_go_on_across_an_update(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    """A retracted request keeps the rows of its tokens, and gets those of the new weights for the rest. What it has by the update counts as
    sampled by then: a step in which no answer ended has sampled, too."""
    new, prompt = perturbed(tiny_weights(tiny_model), seed=5), prompts(1, 12, seed=12)[0]
    before = engine.sampled_tokens

    async def run() -> tuple[Trajectory, int]:
        running = asyncio.ensure_future(engine.generate(prompt, max_tokens=200, topk=3, ignore_stop=True))
        await some_tokens(engine)
        await engine.update_weights(engine.version + 1, buckets_of(new, 1))
        assert not running.done()
        by_now = engine.sampled_tokens - before
        return (await running)[0], by_now

    completion, by_the_update = engine_loop.run(run())
    assert 20 + completion.version_spans[0].end <= by_the_update < 220 == engine.sampled_tokens - before, "some_tokens are 20"
    top = completion.top_logprobs
    assert completion.retractions == 1 and top is not None and len(top.ids) == 200 * top.k
    for span, weights in zip(completion.version_spans, (None, new), strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *completion.response_ids]])
            logits = hf_model(tiny_model, weights)(ids).logits[0, len(prompt) - 1 : -1].double()[span.start : span.end]
        values = torch.log_softmax(logits, -1).topk(3, -1).values
        assert largest_difference(top.logprobs[3 * span.start : 3 * span.end].tolist(), values.flatten().tolist()) < TOLERANCE


def test_update_in_place_keeps_tokens_and_spans(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    """The tokens after it belong to no single policy: old keys and values, new weights."""
    new = perturbed(tiny_weights(tiny_model), seed=2)
    version = engine.version
    prompt = prompts(1, 12, seed=7)[0]
    completion = engine_loop.run(sample_across_an_update(engine, [prompt], new, "in_place"))[0]
    assert [span.version for span in completion.version_spans] == [version, version + 1]
    assert completion.retractions == 0
    before, after = completion.version_spans
    old_policy = response_logprobs(hf_model(tiny_model), prompt, completion.response_ids)
    new_policy = response_logprobs(hf_model(tiny_model, new), prompt, completion.response_ids)
    assert largest_difference(completion.behavior_logprobs[: before.end], old_policy[: before.end]) < TOLERANCE
    assert largest_difference(completion.behavior_logprobs[after.start :], old_policy[after.start :]) > 0.1
    assert largest_difference(completion.behavior_logprobs[after.start :], new_policy[after.start :]) > 0.1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_that_comes_during_an_update_waits_for_its_end(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, mode: Literal["retract", "in_place"]
) -> None:
    """On a GPU the last answers of the old weights arrive after the engine has stopped, and whoever gets them asks for the next."""
    version, weights = engine.version, perturbed(tiny_weights(tiny_model), seed=4)
    asked = list[asyncio.Future[list[Trajectory]]]()

    async def stops_half_way() -> AsyncIterator[WeightBucket]:
        *first, last = buckets_of(weights, 4)
        for bucket in first:
            yield bucket
        assert engine._dirty == f"an update to v{version + 1} has begun"
        asked.append(asyncio.ensure_future(engine.generate([5, 6, 7], max_tokens=20, samples=2, ignore_stop=True)))
        await asyncio.sleep(0.1)
        assert not asked[0].done()
        yield last

    async def run() -> list[Trajectory]:
        await engine.update_weights(version + 1, stops_half_way(), mode=mode)
        return await asked[0]

    answers = engine_loop.run(run())
    assert [answer.version_spans for answer in answers] == [(VersionSpan(version + 1, 0, 20),)] * 2
    assert is_healthy(engine)


def test_no_request_sees_a_prefix_of_older_weights(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    """In place nothing is flushed: neither the requests that still wait in the engine (64 run at most) nor later ones may use old keys."""
    new = perturbed(tiny_weights(tiny_model), seed=3)
    version = engine.version
    prompt = prompts(1, 120, seed=8)[0]

    async def run() -> tuple[list[Trajectory], list[Trajectory], Trajectory]:
        running = asyncio.ensure_future(engine.generate(prompt, max_tokens=400, samples=63, ignore_stop=True))
        while engine.requests_in_flight < 63:
            await asyncio.sleep(0.01)
        await some_tokens(engine)
        waiting = asyncio.ensure_future(engine.generate(prompt, max_tokens=40, samples=16, ignore_stop=True))
        while engine.requests_in_flight < 63 + 16:
            await asyncio.sleep(0.01)
        await engine.update_weights(version + 1, [WeightBucket.of(new)], mode="in_place")
        later = await engine.generate(prompt, max_tokens=10, ignore_stop=True)
        return await running, await waiting, later[0]

    ran, waited_or_ran, later = engine_loop.run(run())
    assert all([span.version for span in c.version_spans] == [version, version + 1] for c in ran)
    waited = [c for c in waited_or_ran if c.version_spans[0].version == version + 1]
    assert len(waited) >= 15  # one of the 16 had a place to run in
    model = hf_model(tiny_model, new)
    for completion in [*waited[::5], later]:
        assert largest_difference(completion.behavior_logprobs, response_logprobs(model, prompt, completion.response_ids)) < TOLERANCE


def test_three_updates_in_a_row(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    ids = prompts(1, 40, seed=9)[0]
    for seed in (11, 12, 13):
        weights = perturbed(tiny_weights(tiny_model), seed)
        receipt = engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(weights)]))
        assert (receipt.version, receipt.bytes) == (engine.version, sum(tensor.nbytes for tensor in weights.values()))
        scores = engine_loop.run(engine.score(ids))
        assert largest_difference(scores, response_logprobs(hf_model(tiny_model, weights), ids[:1], ids[1:])) < TOLERANCE


def test_checksums_are_of_the_tensors_that_the_scheduler_holds(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    weights = perturbed(tiny_weights(tiny_model), seed=4)
    engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(weights)]))
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        changed = {**weights, name: weights[name].clone()}
        changed[name][-1, -1] += 1e-6 + abs(float(weights[name][-1, -1])) * 1e-6
        engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(changed)]))
        held = engine_loop.run(engine.weight_checksums())
        assert [key for key in weights if held[key] != tensor_checksum(weights[key])] == [name]


def test_specs_are_the_folders_tensors(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    folder = load_file(tiny_model / "model.safetensors")
    assert engine_loop.run(engine.weight_specs()) == {name: WeightSpec(name, "float32", tuple(t.shape)) for name, t in folder.items()}


def wrong_weights(weights: dict[str, Tensor]) -> dict[str, tuple[list[dict[str, Tensor]], str]]:
    """What is wrong -> (tensors of each bucket, what the message says)."""
    query = "model.layers.0.self_attn.q_proj.weight"
    without = {name: tensor for name, tensor in weights.items() if name != query}
    return {
        "unknown name": ([{**weights, "model.layers.9.self_attn.q_proj.weight": weights[query]}], "holds no tensor of this name"),
        "fused name": ([{**without, "model.layers.0.self_attn.qkv_proj.weight": weights[query]}], "holds no tensor of this name"),
        "tied head": ([{**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}], "ties its head"),
        "wrong shape": ([{**weights, query: weights[query][:-1]}], r"is float32 \[63, 64\], the engine holds float32 \[64, 64\]"),
        "wrong dtype": ([{**weights, query: weights[query].bfloat16()}], "is bfloat16"),
        "missing tensor": ([without], f"1 of {len(weights)} tensors were not sent, the first is {query}"),
        "sent twice": ([weights, {query: weights[query]}], "comes twice"),
        "nothing": ([], "were not sent"),
    }


@pytest.mark.parametrize(
    "case", list(wrong_weights(dict.fromkeys(("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"), torch.zeros(64, 64))))
)
def test_wrong_weights_are_refused_before_sending(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, case: str) -> None:
    version, weights = engine.version, tiny_weights(tiny_model)
    buckets, message = wrong_weights(weights)[case]
    with pytest.raises(SyncError, match=message):
        engine_loop.run(engine.update_weights(version + 1, [WeightBucket.of(one) for one in buckets]))
    assert is_healthy(engine) and engine.version == version
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    assert len(engine_loop.run(engine.generate([7, 8], max_tokens=3, ignore_stop=True))[0].response_ids) == 3


def test_failed_update_makes_the_engine_dirty_until_a_whole_one(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    version, weights = engine.version, perturbed(tiny_weights(tiny_model), seed=5)

    async def breaks_off() -> AsyncIterator[WeightBucket]:
        for index, bucket in enumerate(buckets_of(weights, 4)):
            if index == 3:
                running.append(asyncio.ensure_future(engine.generate([5, 6], max_tokens=900, ignore_stop=True)))
                await asyncio.sleep(0.1)
                raise OSError("the learner went away")
            yield bucket

    running = list[asyncio.Future[list[Trajectory]]]()

    async def run() -> list[Any]:
        running.extend(asyncio.ensure_future(engine.generate(p, max_tokens=900, ignore_stop=True)) for p in prompts(4, 6, seed=10))
        await some_tokens(engine)
        with pytest.raises(SyncError, match="the learner went away"):
            await engine.update_weights(version + 1, breaks_off())
        with pytest.raises(EngineDirty, match="dirty"):
            await engine.generate([5, 6], max_tokens=2)
        return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)

    outcomes = engine_loop.run(run())
    *sampled, waited = outcomes
    assert len(sampled) == 4 and all(isinstance(outcome, EngineDirty) and "while this request ran" in str(outcome) for outcome in sampled)
    assert isinstance(waited, EngineDirty) and "is dirty: the update to v" in str(waited), "it is not sampled on half-new weights"
    assert not is_healthy(engine) and engine.version == version
    engine_loop.run(engine.update_weights(version + 1, [WeightBucket.of(weights)]))
    assert is_healthy(engine) and engine.version == version + 1
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}


def test_update_that_fails_before_its_first_bucket_changes_nothing(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    version, weights = engine.version, tiny_weights(tiny_model)

    async def never_starts() -> AsyncIterator[WeightBucket]:
        raise OSError("no weights yet")
        yield WeightBucket.of({})

    async def run() -> Trajectory:
        running = asyncio.ensure_future(engine.generate([5, 6, 7], max_tokens=400, ignore_stop=True))
        await some_tokens(engine)
        with pytest.raises(SyncError, match="still serves its old weights"):
            await engine.update_weights(version + 1, never_starts())
        return (await running)[0]

    completion = engine_loop.run(run())
    assert completion.version_spans == (VersionSpan(version, 0, 400),)
    assert is_healthy(engine) and engine.version == version
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
