"""The real SGLang engine on a CPU, against a transformers forward in float32. One engine serves the whole session.

Behaviours locked here: logprobs are log_softmax(logits / T) over the whole vocabulary; the sampler samples from what it reports; requests
in flight together don't mix; a retracting update gives each token its own version's logprob; an update in place keeps tokens and spans, and
no later request sees an old prefix; what SGLang would accept wrongly or die of is refused before it is sent; a failed update makes the
engine dirty, and a whole one cleans it; checksums are of what the scheduler holds; weights also come by broadcast.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ipaddress
import math
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from correction.engines.checksum import tensor_checksum
from correction.engines.weight_bucket import WeightBucket
from correction.engines.weight_spec import WeightSpec
from correction.errors import ConfigError, DataError, EngineDirty, SyncError
from learner.broadcast import WeightBroadcaster, end_to_end
from learner.families import FAMILIES
from rollout import weight_transfer
from rollout.engine import RolloutEngine
from rollout.engine_config import RESERVED_ARGUMENTS
from rollout.engine_ranks import REFUSED_ARGUMENTS
from rollout.trajectory import FinishReason, Trajectory, VersionSpan
from tests.conftest import BackgroundLoop
from tests.rollout.hf_reference import hf_model, k3, largest_difference, perturbed, response_logprobs, tiny_weights
from tests.tiny_models import SPECIAL_TOKENS

pytestmark = pytest.mark.engine

TOLERANCE = 2e-5
"""Largest |log ratio| that float32 forwards of two implementations may show; the issue's bound for the learner too."""
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_TEXT_TOKEN, 512) for _ in range(length)] for _ in range(count)]


def buckets_of(weights: dict[str, Tensor], count: int) -> list[WeightBucket]:
    names = list(weights)
    return [WeightBucket.of({name: weights[name] for name in names[start::count]}) for start in range(count)]


def made_anew(module: str) -> Any:
    """Another copy of a module of SGLang's."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def test_an_engines_processes_listen_on_loopback_alone(engine: RolloutEngine) -> None:
    """The store by which the ranks find each other has no authentication, and torch's own listens on all interfaces."""
    schedulers = [child for child in psutil.Process().children(recursive=True) if _name(child).startswith("sglang::scheduler")]
    assert schedulers
    found = {one.laddr.ip for child in schedulers for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    assert found, "the store was seen"
    assert all(ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback for address in found), found


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[0] if command else ""


def test_a_scheduler_imports_our_models_alone_and_no_compiler(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own modules, made anew with the variables that its children get."""
    for name, value in engine._process._environment().items():
        monkeypatch.setenv(name, value)
    registry = made_anew("sglang.srt.models.registry").ModelRegistry
    assert {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "Glm4ForCausalLM"} <= set(registry.models)
    assert registry.resolve_model_cls(["Qwen3ForCausalLM"])[1] == "Qwen3ForCausalLM"
    assert len(registry.models) < 30 and not registry._default_models_loaded
    assert registry.is_arch_supported("GraniteForCausalLM"), "others are found, too"
    assert len(registry.models) > 200 and registry._default_models_loaded
    marked = made_anew("sglang.srt.managers.overlap_utils")._assert_nonneg_and_invalidate
    assert not hasattr(marked, "_torchdynamo_orig_callable"), "to mark a function for the compiler loads it"


def test_the_models_looked_at_first_are_those_that_sglang_itself_would_take(engine: RolloutEngine) -> None:
    """The very classes of its full registry; and each architecture that the learner trains, by transformers' name of it, is among them: of
    one that isn't the engine's start would import every model of SGLang's."""
    everything = importlib.import_module("sglang.srt.models.registry").import_model_classes("sglang.srt.models")
    ours = {one.__name__: one for one in importlib.import_module("rollout.sglang_plugin.served_models.families").EntryClass}
    assert len(everything) > 200 and ours and {name: everything.get(name) for name in ours} == ours
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in FAMILIES} <= set(ours)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_behavior_logprobs_equal_a_float32_forward(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, temperature: float
) -> None:
    asked = prompts(16, 12, seed=1)

    async def sample() -> list[list[Trajectory]]:
        return await asyncio.gather(*(engine.generate(p, max_tokens=48, temperature=temperature, ignore_stop=True) for p in asked))

    sampled = [completions[0] for completions in engine_loop.run(sample())]
    model = hf_model(tiny_model)
    reference = [response_logprobs(model, p, c.response_ids, temperature) for p, c in zip(asked, sampled, strict=True)]
    behavior = [value for completion in sampled for value in completion.behavior_logprobs]
    proximal = [value for values in reference for value in values]
    assert len(behavior) == 16 * 48
    assert largest_difference(behavior, proximal) < TOLERANCE
    assert k3(behavior, proximal) < 1e-11


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_top_k_logprobs_equal_a_float32_forward(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, temperature: float
) -> None:
    """Sixteen requests together, half of them without: K different ids whose logprobs are the K largest of log_softmax(logits / T).

    Ids are held to their logprobs, not to those of the float32 forward: two tokens may be as likely as each other to the last digit.
    """
    asked, k = prompts(16, 12, seed=11), 5

    async def sample() -> list[list[Trajectory]]:
        requests = (
            engine.generate(p, max_tokens=30, temperature=temperature, topk=k * (i % 2), ignore_stop=True) for i, p in enumerate(asked)
        )
        return await asyncio.gather(*requests)

    sampled = [completions[0] for completions in engine_loop.run(sample())]
    model = hf_model(tiny_model)
    for prompt, completion in list(zip(asked, sampled, strict=True))[1::2]:
        top = completion.top_logprobs
        assert top is not None and top.positions == 30
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.response_ids]])).logits[0, len(prompt) - 1 : -1].double()
        logprobs = torch.log_softmax(logits / temperature, -1)
        ids = torch.tensor(top.ids.tolist()).view(30, k)
        assert all(len(set(row)) == k for row in ids.tolist())
        for expected in (logprobs.topk(k, -1).values, logprobs.gather(-1, ids)):
            assert largest_difference(top.logprobs.tolist(), expected.flatten().tolist()) < TOLERANCE
    assert all(completion.top_logprobs is None for completion in sampled[::2])


def test_top_k_logprobs_go_on_across_an_update(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    """A retracted request keeps the rows of its tokens, and gets those of the new weights for the rest."""
    new, prompt = perturbed(tiny_weights(tiny_model), seed=5), prompts(1, 12, seed=12)[0]

    async def run() -> Trajectory:
        running = asyncio.ensure_future(engine.generate(prompt, max_tokens=200, topk=3, ignore_stop=True))
        await some_tokens(engine)
        await engine.update_weights(engine.version + 1, buckets_of(new, 1))
        return (await running)[0]

    completion = engine_loop.run(run())
    top = completion.top_logprobs
    assert completion.retractions == 1 and top is not None and top.positions == 200
    for span, weights in zip(completion.version_spans, (None, new), strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *completion.response_ids]])
            logits = hf_model(tiny_model, weights)(ids).logits[0, len(prompt) - 1 : -1].double()[span.start : span.end]
        values = torch.log_softmax(logits, -1).topk(3, -1).values
        assert largest_difference(top.logprobs[3 * span.start : 3 * span.end].tolist(), values.flatten().tolist()) < TOLERANCE


def test_more_top_k_logprobs_than_the_vocabulary_has_are_refused(engine: RolloutEngine) -> None:
    engine.check_topk(engine.vocab_size)
    with pytest.raises(ConfigError, match=r"correction.topk = 513: the model's vocabulary has 512"):
        engine.check_topk(engine.vocab_size + 1)


def test_sampler_samples_from_the_distribution_that_it_reports(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """The mean of -log p over samples from p is p's entropy; over 1,500 samples within four standard errors, from p's own variance.

    With seeds, as a run gives them: the same samples each time.
    """
    prompt = prompts(1, 6, seed=2)[0]
    count = 1500
    asked = engine.generate(prompt, max_tokens=1, samples=count, temperature=0.7, ignore_stop=True, seeds=range(count))
    completions = engine_loop.run(asked)
    with torch.no_grad():
        logprobs = torch.log_softmax(hf_model(tiny_model)(torch.tensor([prompt])).logits[0, -1].double() / 0.7, -1)
    said, forward = [c.behavior_logprobs[0] for c in completions], [float(logprobs[c.response_ids[0]]) for c in completions]
    assert largest_difference(said, forward) < TOLERANCE
    entropy = float(-(logprobs.exp() * logprobs).sum())
    variance = float((logprobs.exp() * logprobs.square()).sum()) - entropy**2
    mean = -sum(c.behavior_logprobs[0] for c in completions) / count
    assert abs(mean - entropy) < 4 * math.sqrt(variance / count)


def test_64_requests_together_do_not_mix_and_end_for_their_reason(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    asked = prompts(64, 10, seed=3)

    async def sample() -> list[list[Trajectory]]:
        return await asyncio.gather(*(engine.generate(p, max_tokens=150) for p in asked))

    sampled = [completions[0] for completions in engine_loop.run(sample())]
    end_token = SPECIAL_TOKENS.index("<|im_end|>")
    for completion in sampled:
        stopped = completion.response_ids[-1] == end_token
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(completion.response_ids) == 150
        assert end_token not in completion.response_ids[:-1]
        assert completion.version_spans == (VersionSpan(engine.version, 0, len(completion.response_ids)),)
    assert {c.finish_reason for c in sampled} == {FinishReason.STOP, FinishReason.LENGTH}
    model = hf_model(tiny_model)
    for prompt, completion in list(zip(asked, sampled, strict=True))[::8]:
        assert largest_difference(completion.behavior_logprobs, response_logprobs(model, prompt, completion.response_ids)) < TOLERANCE


def test_samples_of_a_prompt_share_its_prefill(engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """All but the last prompt token come from the cache; the last one's logits are needed to sample the first token."""
    completions = engine_loop.run(engine.generate(prompts(1, 200, seed=4)[0], max_tokens=2, samples=8, ignore_stop=True))
    assert [c.cached_tokens for c in completions] == [199] * 8
    assert len({tuple(c.response_ids) for c in completions}) > 1


def test_score_equals_a_forward_and_the_sampled_logprobs(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    prompt = prompts(1, 9, seed=5)[0]
    sampled = engine_loop.run(engine.generate(prompt, max_tokens=30, ignore_stop=True))[0]
    ids = [*prompt, *sampled.response_ids]
    scores = engine_loop.run(engine.score(ids))
    assert len(scores) == len(ids) - 1
    assert largest_difference(scores, response_logprobs(hf_model(tiny_model), ids[:1], ids[1:])) < TOLERANCE
    assert largest_difference(scores[len(prompt) - 1 :], sampled.behavior_logprobs) < TOLERANCE


async def some_tokens(engine: RolloutEngine) -> None:
    """Returns when everything that was running before has sampled at least 20 tokens more: all requests advance in step."""
    await engine.generate([5], max_tokens=20, ignore_stop=True)


async def sample_across_an_update(
    engine: RolloutEngine, asked: list[list[int]], weights: dict[str, Tensor], mode: str, max_tokens: int = 300
) -> list[Trajectory]:
    """Start all requests, let them sample a while, replace the weights, and wait for all."""
    running = [asyncio.ensure_future(engine.generate(p, max_tokens=max_tokens, ignore_stop=True)) for p in asked]
    await some_tokens(engine)
    await engine.update_weights(engine.version + 1, buckets_of(weights, 3), mode=mode)     # type: ignore[arg-type]
    return [(await request)[0] for request in running]


def test_retracting_update_gives_each_token_its_own_versions_logprob(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    old, new = tiny_weights(tiny_model), perturbed(tiny_weights(tiny_model), seed=1)
    version = engine.version
    asked = prompts(8, 12, seed=6)
    sampled = engine_loop.run(sample_across_an_update(engine, asked, new, "retract"))
    models = {version: hf_model(tiny_model, old), version + 1: hf_model(tiny_model, new)}
    for prompt, completion in zip(asked, sampled, strict=True):
        assert len(completion.response_ids) == 300                     # no request was aborted or cut
        assert [span.version for span in completion.version_spans] == [version, version + 1]
        assert completion.retractions == 1
        by_version = {v: response_logprobs(model, prompt, completion.response_ids) for v, model in models.items()}
        for span in completion.version_spans:
            sampled_here = completion.behavior_logprobs[span.start : span.end]
            other = version + (span.version == version)
            assert largest_difference(sampled_here, by_version[span.version][span.start : span.end]) < TOLERANCE
            assert largest_difference(sampled_here, by_version[other][span.start : span.end]) > 0.1


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
    assert len(waited) >= 15                                        # one of the 16 had a place to run in
    model = hf_model(tiny_model, new)
    for completion in [*waited[::5], later]:
        assert largest_difference(completion.behavior_logprobs, response_logprobs(model, prompt, completion.response_ids)) < TOLERANCE


def test_three_updates_in_a_row(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    ids = prompts(1, 40, seed=9)[0]
    for seed in (11, 12, 13):
        weights = perturbed(tiny_weights(tiny_model), seed)
        receipt = engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(weights)]))
        assert (receipt.version, receipt.tensors, receipt.mode) == (engine.version, len(weights), "retract")
        assert receipt.bytes == sum(tensor.nbytes for tensor in weights.values())
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


def test_sglang_reads_a_bucket_of_many_types(engine: RolloutEngine) -> None:
    """By SGLang's own reader: tensors begin at multiples of 16 bytes, and there are gaps between them that it has to leave out."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    types = (torch.bfloat16, torch.float32, torch.uint8, torch.float16)
    tensors = {str(dtype): torch.arange(6, dtype=dtype).reshape(2, 3).T for dtype in types}
    payload = MultiprocessingSerializer.deserialize(weight_transfer.SharedStaging().payloads(WeightBucket.of(tensors))[0])
    read = FlattenedTensorBucket(flattened_tensor=payload["flattened_tensor"], metadata=payload["metadata"]).reconstruct_tensors()
    assert [name for name, _ in read] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype for name, tensor in read)


def test_a_bucket_is_broadcast_as_bytes_and_read_bit_for_bit_whatever_types_it_has(engine: RolloutEngine) -> None:
    """By SGLang's flattened bucket, as its receiving half fills it. That leaves no gaps: after 15 bytes there is no place for a float32."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    generator = torch.Generator().manual_seed(0)
    shapes = {"values": ((3, 5), torch.float8_e4m3fn), "scales": ((1, 3), torch.float32), "odd": ((7,), torch.bfloat16)}
    weights = {
        name: torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
        for name, (shape, dtype) in (shapes | {"one": ((), torch.float32)}).items()
    }
    specs, received = [WeightSpec.of(name, tensor) for name, tensor in weights.items()], dict[str, torch.Tensor]()

    async def asked(request: Any, _: None) -> tuple[bool, str]:
        assert request.load_format == "flattened_bucket"
        named = zip(request.names, request.dtypes, request.shapes, strict=True)
        bucket = FlattenedTensorBucket([(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in named])
        flat = bucket.get_flattened_tensor()
        flat.copy_(end_to_end(weights))  # where SGLang has its one broadcast
        received.update(bucket.reconstruct_tensors())
        return True, ""

    manager: Any = SimpleNamespace(update_weights_from_distributed=asked)
    asyncio.run(weight_transfer.receive(manager, specs, "weights", version=1, flush=False))
    assert [WeightSpec.of(name, received[name]) for name in weights] == specs
    assert sum(tensor.nbytes for tensor in received.values()) == 15 + 12 + 14 + 4
    for name, tensor in weights.items():
        assert torch.equal(received[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


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


@pytest.mark.parametrize("case", list(wrong_weights(dict.fromkeys(
    ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"), torch.zeros(64, 64)
))))
def test_wrong_weights_are_refused_before_sending(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, case: str
) -> None:
    version, weights = engine.version, tiny_weights(tiny_model)
    buckets, message = wrong_weights(weights)[case]
    with pytest.raises(SyncError, match=message):
        engine_loop.run(engine.update_weights(version + 1, [WeightBucket.of(one) for one in buckets]))
    assert engine.is_healthy and engine.version == version
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    assert len(engine_loop.run(engine.generate([7, 8], max_tokens=3, ignore_stop=True))[0].response_ids) == 3


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "message"),
    [
        ([5, 512], 4, "token id 512"),
        ([5, -1], 4, "token id -1"),
        ([], 4, "empty prompt"),
        ([5] * 1000, 23, "together up to 1022"),
        ([5] * 1018, 1, "up to 1017"),
        ([5], 0, "max_tokens = 0"),
    ],
)
def test_prompts_that_would_kill_or_confuse_the_engine_are_refused(
    engine: RolloutEngine, engine_loop: BackgroundLoop, token_ids: list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        engine_loop.run(engine.generate(token_ids, max_tokens=max_tokens))
    assert len(engine_loop.run(engine.generate([5, 511], max_tokens=3, ignore_stop=True))[0].response_ids) == 3


def test_longest_request_that_fits(engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """SGLang keeps two of the model's 1,024 tokens, and would cut a longer answer without a word."""
    for prompt_length in (1000, 1017):
        completion = engine_loop.run(engine.generate([5] * prompt_length, max_tokens=1022 - prompt_length, ignore_stop=True))[0]
        assert len(completion.response_ids) == 1022 - prompt_length


def test_failed_update_makes_the_engine_dirty_until_a_whole_one(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    version, weights = engine.version, perturbed(tiny_weights(tiny_model), seed=5)

    async def breaks_off() -> AsyncIterator[WeightBucket]:
        for index, bucket in enumerate(buckets_of(weights, 4)):
            if index == 3:
                raise OSError("the learner went away")
            yield bucket

    async def run() -> list[Any]:
        running = [asyncio.ensure_future(engine.generate(p, max_tokens=900, ignore_stop=True)) for p in prompts(4, 6, seed=10)]
        await some_tokens(engine)
        with pytest.raises(SyncError, match="the learner went away"):
            await engine.update_weights(version + 1, breaks_off())
        with pytest.raises(EngineDirty, match="dirty"):
            await engine.generate([5, 6], max_tokens=2)
        return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)

    outcomes = engine_loop.run(run())
    assert all(isinstance(outcome, EngineDirty) and "update failed" in str(outcome) for outcome in outcomes)
    assert not engine.is_healthy and engine.version == version
    engine_loop.run(engine.update_weights(version + 1, [WeightBucket.of(weights)]))
    assert engine.is_healthy and engine.version == version + 1
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
    assert engine.is_healthy and engine.version == version
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}


def test_weights_by_broadcast_while_requests_run(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is one collective: of bytes, and of the tensor itself where it is the only one, so that it isn't held twice."""
    version, weights = engine.version, perturbed(tiny_weights(tiny_model), seed=6)
    largest = max(weights, key=lambda name: weights[name].nbytes)
    others = {name: tensor for name, tensor in weights.items() if name != largest}
    buckets = [WeightBucket.of({largest: weights[largest]}), *buckets_of(others, 2)]
    specs = [bucket.specs for bucket in buckets]
    calls, broadcast = [], dist.broadcast

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((tensor.dtype, tensor.nbytes))
        return broadcast(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "broadcast", counted)

    async def run() -> Trajectory:
        port = free_port()
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 2, "weights-1"))
        learner = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, 2, "weights-1", 20.0, torch.device("cpu"))
        await joining
        sampling = asyncio.ensure_future(engine.generate([5, 6, 7, 8], max_tokens=400, ignore_stop=True))
        await some_tokens(engine)
        receiving = asyncio.ensure_future(engine.receive_weights(version + 1, specs, group="weights-1"))
        for bucket in buckets:
            await asyncio.to_thread(learner.send, bucket.tensors())
        receipt = await receiving
        assert (receipt.version, receipt.buckets, receipt.tensors) == (version + 1, 3, len(weights))
        await engine.leave_weight_group("weights-1")
        learner.close()
        return (await sampling)[0]

    completion = engine_loop.run(run())
    assert [span.version for span in completion.version_spans] == [version, version + 1]
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    assert [size for _, size in calls] == [bucket.nbytes for bucket in buckets] and len(weights) > 2 * len(calls)
    assert [dtype for dtype, _ in calls] == [torch.float32, torch.uint8, torch.uint8]


def test_broadcast_that_never_comes_ends_and_the_engine_recovers(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """The group's time-out (10 s in this engine's settings) frees the scheduler; the next update comes as tensors."""
    version, weights = engine.version, tiny_weights(tiny_model)
    specs = [[WeightSpec.of(name, tensor) for name, tensor in weights.items()]]

    async def run() -> None:
        port = free_port()
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 2, "weights-2"))
        learner = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, 2, "weights-2", 20.0, torch.device("cpu"))
        await joining
        with pytest.raises(SyncError, match="dirty"):
            await engine.receive_weights(version + 1, specs, group="weights-2")
        learner.close()
        await engine.leave_weight_group("weights-2")

    engine_loop.run(run())
    assert not engine.is_healthy
    engine_loop.run(engine.update_weights(version + 1, [WeightBucket.of(weights)]))
    assert engine.is_healthy


def test_what_is_refused_are_arguments_of_sglang(engine: RolloutEngine) -> None:
    """A name that SGLang doesn't know would refuse nothing."""
    from sglang.srt.server_args import ServerArgs

    assert set(REFUSED_ARGUMENTS) | set(RESERVED_ARGUMENTS) <= set(ServerArgs.__struct_fields__)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
