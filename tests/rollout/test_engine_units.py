"""The engine's parts that need no engine: checksum, settings, update checks and answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from array import array
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from evenkeel.correction.errors import ConfigError, RequestError, SyncError
from evenkeel.engines import weights as checksum
from evenkeel.engines.weights import WeightSpec, tensor_checksum
from evenkeel.rollout.config import AnswerSampling, SamplingConfig, Truncation
from evenkeel.rollout.engine import engine as engine_module
from evenkeel.rollout.engine.engine import ExpertShape, RolloutEngine, trajectory_of
from evenkeel.rollout.engine.weight_transfer import UpdateCheck
from evenkeel.rollout.engine_settings.engine_capabilities import EngineCapabilities
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Group, KeptTokens, Prompt, Trajectory, VersionSpan


def checksum_by_integers(tensor: Tensor) -> str:
    """The same with Python's integers, word by word."""

    def mixed(x: int) -> int:
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 % 2**64
        return x ^ x >> 27

    golden = 0x9E3779B97F4A7C15
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for start in range(0, len(words), checksum.ROW_WORDS):
        row = words[start : start + checksum.ROW_WORDS]
        total = sum(mixed((word ^ mixed((place + 1) * golden % 2**64)) * golden % 2**64) for place, word in enumerate(row))
        digest.update((total % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("elements", [0, 1, 3, 64, 65, 1001])
def test_checksum_is_that_of_integers_however_many_rows_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, elements: int, at_once: int
) -> None:
    """Rows of 16 words, the last one cut; tensors of a number of bytes that 8 doesn't divide, or that begin anywhere."""
    monkeypatch.setattr(checksum, "ROW_WORDS", 16)
    monkeypatch.setattr(checksum, "ROWS_AT_ONCE", {"cpu": at_once})
    tensor = torch.cat([torch.tensor([-0.0, float("nan")]), torch.randn(1001)])[:elements]
    for one in (tensor, tensor.bfloat16(), tensor[1:], tensor.bfloat16()[1:], tensor.to(torch.float8_e4m3fn)):
        assert tensor_checksum(one) == checksum_by_integers(one)


def test_only_sums_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a GPU isn't copied to the host for it."""
    asked: list[int] = []
    monkeypatch.setattr(Tensor, "tolist", lambda tensor, own=Tensor.tolist: asked.append(tensor.numel()) or own(tensor))
    for name in ("cpu", "numpy", "to", "item"):
        monkeypatch.setattr(Tensor, name, lambda *_, **__: pytest.fail("the tensor is read"))
    tensor_checksum(torch.zeros(5 * checksum.ROW_WORDS, dtype=torch.float32))
    assert asked == [3]


def test_checksum_sees_one_bit_and_nothing_else() -> None:
    tensor = torch.randn(64, 48)
    same = torch.empty(48, 64).t().copy_(tensor)  # other strides, same elements
    assert not same.is_contiguous() and tensor_checksum(same) == tensor_checksum(tensor)
    next_float = tensor.clone()
    next_float.view(torch.int32)[63, 47] ^= 1
    others = [next_float, tensor.reshape(48, 64), tensor.bfloat16(), torch.zeros(2), -torch.zeros(2), torch.zeros(()), torch.zeros(0)]
    checksums = [tensor_checksum(tensor), *(tensor_checksum(other) for other in others)]
    assert len(set(checksums)) == len(checksums)


def test_checksum_sees_words_that_change_places() -> None:
    tensor = torch.arange(4 * checksum.ROW_WORDS)
    exchanged, moved = tensor.clone(), tensor.roll(checksum.ROW_WORDS)
    exchanged[:2] = tensor[:2].flip(0)
    assert len({tensor_checksum(one) for one in (tensor, exchanged, moved)}) == 3


def test_a_context_is_decided_beside_settings_that_no_recipe_may_have() -> None:
    """evenkeel diff-engines gives its engine hooks, which a recipe may not name."""
    hooked = EngineConfig(device="cpu").model_copy(update={"engine_args": {"forward_hooks": []}}).with_context(64)
    assert hooked.resolved_context == 64


def test_arguments_on_a_cpu_and_on_cuda() -> None:
    cpu = EngineConfig(device="cpu", max_running_requests=16).on_this_machine().with_context(1024).sglang_arguments("folder", 7)
    assert (cpu["dtype"], cpu["attention_backend"]) == ("float32", "torch_native")
    assert (cpu["max_total_tokens"], cpu["weight_version"]) == (16 * 1024, "7")
    cuda = EngineConfig(device="cuda", memory_fraction=0.6).on_this_machine().with_context(32768).sglang_arguments("folder", 0)
    assert (cuda["dtype"], cuda["mem_fraction_static"]) == ("bfloat16", 0.6)
    assert not {"attention_backend", "max_total_tokens", "disable_cuda_graph", "disable_overlap_schedule"} & cuda.keys()
    given = EngineConfig(device="cpu", engine_args={"chunked_prefill_size": 64}).on_this_machine()
    assert given.with_context(64).sglang_arguments("f", 0)["chunked_prefill_size"] == 64


@pytest.mark.parametrize("quantization", ["none", "float8_block"])
def test_experts_on_a_gpu_have_kernels_that_leave_their_weights_as_they_are_sent(quantization: str) -> None:
    """On Blackwell SGLang's own choice doesn't. What a recipe says is handed on (`doctor` judges it)."""
    on_gpu: dict[str, Any] = {"device": "cuda", "quantization": quantization}
    runner = "moe_runner_backend"
    for settings, has_experts, given in (
        (on_gpu, True, "triton"),
        (on_gpu, False, None),
        (on_gpu | {"engine_args": {runner: "auto"}}, True, "auto"),
        ({"device": "cpu", "dtype": "bfloat16", "quantization": quantization}, True, None),
    ):
        config = EngineConfig.model_validate(settings).on_this_machine()
        assert config.with_context(64).sglang_arguments("folder", 0, has_weights=False, has_experts=has_experts).get(runner) == given


def test_float32_on_a_gpu_is_refused_also_where_only_the_start_knows_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`diff-engines` decides no device before; a run has decided by then."""
    config = EngineConfig(dtype="float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert config.on_this_machine().with_context(64).sglang_arguments("folder", 0)["dtype"] == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype = float32 with device = cuda: SGLang's attention kernels"):
        config.on_this_machine().with_context(64).sglang_arguments("folder", 0)


def test_arguments_of_an_engine_without_weights() -> None:
    config = EngineConfig(device="cpu").on_this_machine().with_context(64)
    assert "load_format" not in config.sglang_arguments("folder", 0)
    assert config.sglang_arguments("folder", 0, has_weights=False)["load_format"] == "dummy"


def test_reserved_and_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"engine_args\.random_seed = 2: evenkeel sets this argument of SGLang itself; use seed"):
        EngineConfig(engine_args={"random_seed": 2})
    with pytest.raises(ValidationError, match="max_total_token"):
        EngineConfig(max_total_token=5)  # type: ignore[call-arg]


def test_update_check_follows_buckets() -> None:
    held = {name: WeightSpec(name, "float32", (2, 3)) for name in ("a.weight", "b.weight")}
    check = UpdateCheck("engine", 4, held)
    check.admit([WeightSpec.of("a.weight", torch.zeros(2, 3))])
    with pytest.raises(SyncError, match=r"engine: weights v4: 1 of 2 tensors were not sent, the first is b\.weight"):
        check.finish()
    with pytest.raises(SyncError, match=r"a\.weight comes twice"):
        check.admit([held["a.weight"]])
    check.admit([held["b.weight"]])
    check.finish()
    receipt = check.receipt(4, 0.5)
    assert (receipt.version, receipt.bytes, receipt.pause_s) == (4, 2 * 6 * 4, 0.5)


def test_spec_survives_its_text() -> None:
    for spec in (WeightSpec("n", "bfloat16", (3, 4, 5)), WeightSpec("n", "float32", (7,)), WeightSpec("n", "float32", ())):
        assert WeightSpec.parse("n", f"{spec.dtype}:{','.join(map(str, spec.shape))}") == spec


def answer(spans: list[tuple[str, int, int]], logprobs: list[float], tokens: int = 4) -> dict[str, object]:
    return {
        "output_ids": list(range(tokens)),
        "meta_info": {
            "output_token_logprobs": [(value, 0, None) for value in logprobs],
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
            "finish_reason": {"type": "length", "length": tokens},
        },
    }


def test_trajectory_reads_spans() -> None:
    trajectory = trajectory_of(answer([("3", 0, 1), ("5", 1, 4)], [-1.0] * 4), [7, 8, 9], "engine")
    assert trajectory.version_spans == (VersionSpan(3, 0, 1), VersionSpan(5, 1, 4))
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory_of(answer([("3", 0, 0)], [], 0), [7, 8, 9], "engine").version_spans == ()


@pytest.mark.parametrize(
    ("spans", "logprobs"),
    [
        ([("3", 0, 2)], [-1.0] * 4),  # the end is missing
        ([("3", 0, 1), ("4", 2, 4)], [-1.0] * 4),  # a gap
        ([("3", 1, 4)], [-1.0] * 4),  # the start is missing
        ([("3", 0, 4)], [-1.0] * 3),  # a logprob too few
        ([("3", 0, 4)], [-1.0, float("nan"), -1.0, -1.0]),
    ],
)
def test_trajectory_refuses_what_does_not_cover_the_tokens(spans: list[tuple[str, int, int]], logprobs: list[float]) -> None:
    with pytest.raises(RequestError):
        trajectory_of(answer(spans, logprobs), [7, 8, 9], "engine")


def routes(count: int) -> str:
    """As SGLang sends them: token t goes to expert t in layer 0 and to expert 1 in layer 1."""
    return base64.b64encode(array("i", [x for t in range(count) for x in (t, 1)]).tobytes()).decode()


def test_trajectory_reads_routes_of_all_tokens_but_the_last() -> None:
    """3 prompt tokens and 4 sampled ones: 6 were read. An aborted request may not have been read at all."""
    shape = ExpertShape(layers=2, experts=6, k=1)
    sent = answer([("3", 0, 4)], [-1.0] * 4)
    sent["meta_info"] |= {"prompt_tokens": 3, "routed_experts": routes(6)}  # type: ignore[operator]
    found = trajectory_of(sent, [7, 8, 9], "engine", experts=shape).routed_experts
    assert found is not None and found.ids.typecode == "B"
    assert found.ids.tolist() == [0, 1, 1, 1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert trajectory_of(sent, [7, 8, 9], "engine").routed_experts is None
    wide = trajectory_of(sent, [7, 8, 9], "engine", experts=replace(shape, experts=257)).routed_experts
    assert wide is not None and wide.ids.typecode == "h"
    for changes, wrong in (({"routed_experts": routes(5)}, shape), ({"routed_experts": None}, shape), ({}, replace(shape, experts=5))):
        with pytest.raises(RequestError, match="routed experts"):
            trajectory_of({**sent, "meta_info": {**sent["meta_info"], **changes}}, [7, 8, 9], "engine", experts=wrong)  # type: ignore[dict-item]
    aborted = {**sent["meta_info"], "finish_reason": {"type": "abort"}, "routed_experts": None}  # type: ignore[dict-item]
    unread = trajectory_of({**sent, "meta_info": aborted}, [7, 8, 9], "engine", experts=shape)
    assert unread.routed_experts is None and unread.error == "the engine aborted the request"
    assert unread.failure is FailureKind.ENGINE


def routed_sampler(asked: list[dict[str, Any]], text_of: Any) -> Sampler:
    """A sampler whose engine was started for routes: it notes what SGLang is `asked` for, and gets answers of 4 tokens."""

    async def sglang(*, input_ids: list[list[int]], **options: Any) -> list[dict[str, object]]:
        asked.append(options)
        sent = answer([("3", 0, 4)], [-1.0] * 4)
        meta: Any = sent["meta_info"]
        meta |= {"prompt_tokens": 3, "routed_experts": routes(6)} if options.get("return_routed_experts") else {}
        meta |= {"output_top_logprobs": [[(-1.0, 0, None), (-2.0, 1, None)]] * 4} if options.get("top_logprobs_num") else {}
        return [sent for _ in input_ids]

    async def score(sampled: tuple[Trajectory, ...], prompt: Prompt) -> tuple[Trajectory, ...]:
        return sampled

    async def wait(answers: Any, *_: Any) -> Any:
        return await answers

    manager = SimpleNamespace(max_req_input_len=100)
    process: Any = SimpleNamespace(
        raise_if_lost=lambda: None, wait=wait, generate=sglang, engine=SimpleNamespace(tokenizer_manager=manager)
    )
    config = EngineConfig(device="cpu", prefix_cache=False, return_routed_experts=True)
    engine = RolloutEngine("engine", config, process, 100, 3, ExpertShape(layers=2, experts=6, k=1))
    rewards: Any = SimpleNamespace(score=score)
    encoder: Any = SimpleNamespace(ends=SimpleNamespace(ids=(7, 9)), text_of=text_of)
    return Sampler(engine, {"": Player(encoder, rewards, SamplingConfig(samples_per_group=2, max_tokens=4))})


def test_answers_that_nothing_is_trained_on_come_without_wide_fields() -> None:
    """An engine that was started for routes, asked for a group with the 2 likeliest tokens and for an evaluation's answers: SGLang is asked
    for the group's wide fields alone. (It sends routes to whom it is asked by; a real one does in test_engine_moe.py.)"""
    asked: list[dict[str, Any]] = []
    sampler = routed_sampler(asked, lambda _: "text")
    prompt = Prompt("train/0/0", "3 + 4 =", (7, 8, 9), "7")
    group: Any = asyncio.run(sampler.group(prompt, group_id=0, admitted_version=3, topk=2))
    answers = asyncio.run(sampler.answer(prompt, AnswerSampling(samples=2, temperature=1.0)))
    assert all(len(one.routed_experts.ids) == 6 * 2 and len(one.top_logprobs.ids) == 4 * 2 for one in group.trajectories)
    assert [(one.routed_experts, one.top_logprobs) for one in answers] == [(None, None)] * 2
    assert [(one.text, len(one.response_ids), one.version_spans) for one in answers] == [("text", 4, (VersionSpan(3, 0, 4),))] * 2
    assert [("return_routed_experts" in one, "top_logprobs_num" in one) for one in asked] == [(True, True), (False, False)]
    assert [part["stop_token_ids"] for one in asked for part in one["sampling_params"]] == [[7, 9]] * 4, "the ends of the model, for both"


def test_an_answer_that_waited_when_it_was_handed_back_has_its_kept_sets() -> None:
    """SGLang sends none with an answer that new weights had put back into its queue and that is aborted there, though it has sent them to
    this process before, with the tokens."""
    states: dict[str, Any] = {}

    async def sglang(*, rid: list[str], **_: Any) -> list[dict[str, Any]]:
        (name,) = rid
        states[name] = SimpleNamespace(output_ids=[0, 1, 2], output_token_sampling_mask=[[0, 9], [], [4, 2]])
        await aborted.wait()
        sent = answer([("3", 0, 3)], [-1.0] * 3, 3)
        sent["meta_info"] |= {"finish_reason": {"type": "abort"}}
        del states[name]
        return [sent]

    async def run() -> list[Trajectory]:
        truncation = Truncation(top_p=0.9)
        asked = asyncio.ensure_future(engine.generate((7, 8, 9), max_tokens=40, truncation=truncation))
        while not states:
            await asyncio.sleep(0)
        await engine.hand_back()
        return await asked

    async def wait(answers: Any, *_: Any) -> Any:
        return await answers

    aborted = asyncio.Event()
    manager = SimpleNamespace(max_req_input_len=100, rid_to_state=states, abort_request=lambda **_: aborted.set())
    process: Any = SimpleNamespace(
        raise_if_lost=lambda: None, is_alive=True, wait=wait, generate=sglang, engine=SimpleNamespace(tokenizer_manager=manager)
    )
    engine = RolloutEngine("engine", EngineConfig(device="cpu", prefix_cache=False), process, 100, 3)
    (found,) = asyncio.run(run())
    assert found.kept_tokens == KeptTokens.of([[0, 9], []]), "all but the last token, which is sampled again"


@pytest.mark.parametrize(("sets", "is_right"), [([[0], [], [2, 5]], True), ([[0], []], False), ([[0], [], [5]], False), (None, False)])
def test_kept_sets_that_do_not_fit_the_tokens_are_refused(sets: Any, is_right: bool) -> None:
    sent = answer([("3", 0, 3)], [-1.0] * 3, 3)
    sent["meta_info"] |= {"output_token_sampling_mask": sets}
    with nullcontext() if is_right else pytest.raises(RequestError, match=r"3 tokens came with \d kept sets, or a token is not in its own"):
        assert trajectory_of(sent, (1, 2), "engine", has_sets=True).kept_tokens == KeptTokens.of(sets)


def test_reading_answers_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for a group of long answers with wide fields. Meanwhile the loop has heartbeats to answer, and SGLang to serve."""
    threads: dict[str, set[int]] = {}

    def noted(place: str, found: Any) -> Any:
        threads.setdefault(place, set()).add(threading.get_ident())
        return found

    monkeypatch.setattr(engine_module, "trajectory_of", lambda *args, **named: noted("tokens", trajectory_of(*args, **named)))
    sampler = routed_sampler([], lambda _: noted("text", "seven"))
    prompt = Prompt("train/0/0", "3 + 4 =", (7, 8, 9), "7")

    async def scenario() -> None:
        group = await sampler.group(prompt, group_id=0, admitted_version=3, topk=2)
        answers = await sampler.answer(prompt, AnswerSampling(samples=2, temperature=1.0))
        assert isinstance(group, Group) and [one.text for one in (*group.trajectories, *answers)] == ["seven"] * 4

    asyncio.run(scenario())
    assert threads.keys() == {"tokens", "text"} and threading.get_ident() not in set().union(*threads.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"sglang": "0.5.21+cu129"}, None),
        ({"device": "cuda"}, r"without SGLang's GPU kernels \(sglang-kernel\).*Install the extra gpu"),
        ({"sglang": "0.5.22"}, r"0\.5\.22 is installed.*Install that version"),
        ({"sglang": ""}, "none is installed"),
        ({"has_plugin": False}, "does not find evenkeel's plugin"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], message: str | None) -> None:
    fits = EngineCapabilities(device="cpu", sglang="0.5.21", torch="2", transformers="5", has_plugin=True, has_gpu_kernels=False)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        replace(fits, **changes).require()


def test_an_engine_in_float8_is_told_of_it_and_one_that_reads_a_folder_is_not() -> None:
    """Folders are in the learner's numbers: what is read from there (evenkeel eval) is served as it is."""
    for device in ("cpu", "cuda"):
        config = EngineConfig.model_validate({"device": device, "dtype": "bfloat16", "quantization": "float8_block"})
        arguments = config.with_context(512).sglang_arguments("folder", 0, has_weights=False)
        assert arguments["quantization"] == "fp8"
        told = json.loads(arguments["json_model_override_args"])["quantization_config"]
        assert (told["quant_method"], told["weight_block_size"], told["activation_scheme"]) == ("fp8", [128, 128], "dynamic")
        assert arguments.get("fp8_gemm_runner_backend") == ("triton" if device == "cuda" else None)
        assert "quantization" not in config.with_context(512).sglang_arguments("folder", 0)
    for settings, message in (
        ({"dtype": "float32"}, "float8_block with dtype = float32: it is made of bfloat16 weights. Set learner.dtype: bfloat16"),
        ({"batch_invariant": True}, "float8_block with batch_invariant: true: there are no batch-invariant products of float8"),
        ({"engine_args": {"json_model_override_args": "{}"}}, "in the engine alone, and the learner trains what the folder's says"),
        ({"quantization": "none", "engine_args": {"quantization": "fp8"}}, r"use rollout\.engine\.quantization instead"),
    ):
        with pytest.raises(ValidationError, match=message):
            EngineConfig.model_validate({"quantization": "float8_block", "device": "cpu"} | settings)
