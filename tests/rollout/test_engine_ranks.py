"""An engine of several ranks, without one: what it is refused, which part of a tensor each rank holds, and when an update counts.

What SGLang makes of it is asked in tests/e2e/test_tensor_parallel_engine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from evenkeel.correction.errors import EngineError, SyncError
from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum
from evenkeel.rollout.engine import weight_transfer
from evenkeel.rollout.engine.engine import GroupOfRanks, RolloutEngine
from evenkeel.rollout.engine.weight_transfer import UpdateCheck
from evenkeel.rollout.engine_settings.engine_arguments import REFUSED_OF_RANKS
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.engine_settings.engine_ranks import environment_of_ranks, free_ports, obstacles
from evenkeel.rollout.sglang_plugin import weight_parts
from evenkeel.rollout.sglang_plugin.weight_parts import RankParts, WeightPart, text_of


def test_sglang_is_told_of_ranks_only_if_there_are_several() -> None:
    assert "tp_size" not in EngineConfig(device="cpu").on_this_machine().with_context(64).sglang_arguments("folder", 0)
    assert EngineConfig(device="cpu", tensor_parallel=4).on_this_machine().with_context(64).sglang_arguments("folder", 0)["tp_size"] == 4


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pp_size", "rollout.engine.tensor_parallel"),
        ("dp_size", "rollout.engine.attention_data_parallel"),
        ("enable_dp_attention", "rollout.engine.attention_data_parallel"),
        ("load_balance_method", "rollout.engine.attention_data_parallel"),
        ("ep_size", "rollout.engine.expert_parallel"),
        ("moe_a2a_backend", "rollout.engine.expert_parallel"),
        ("enable_eplb", "rollout.engine.expert_parallel"),
        ("attn_cp_size", "rollout.engine.tensor_parallel"),
        ("nnodes", "rollout.workers for more nodes"),
        ("base_gpu_id", "rollout.gpus_per_worker"),
        ("disaggregation_mode", "rollout.workers"),
    ],
)
def test_other_ways_of_cutting_an_engine_are_refused_by_name(name: str, remedy: str) -> None:
    with pytest.raises(ValidationError, match=rf"engine_args\.{name} = 2: .*; use {remedy} instead"):
        EngineConfig(tensor_parallel=2, engine_args={name: 2})


def test_experts_are_divided_among_ranks_there_are() -> None:
    assert "ep_size" not in EngineConfig(device="cpu", tensor_parallel=4).on_this_machine().with_context(64).sglang_arguments("folder", 0)
    config = EngineConfig(device="cpu", tensor_parallel=4, expert_parallel=2).on_this_machine()
    given = config.with_context(64).sglang_arguments("folder", 0)
    assert (given["tp_size"], given["ep_size"]) == (4, 2)
    for ranks, groups in ((1, 2), (4, 3), (2, 4)):
        with pytest.raises(ValidationError, match=rf"expert_parallel = {groups} doesn't divide tensor_parallel = {ranks}"):
            EngineConfig(tensor_parallel=ranks, expert_parallel=groups)


@pytest.mark.parametrize(
    ("groups", "experts", "width", "on_cpu", "said"),
    [
        (4, 8, 768, False, []),
        (4, 8, 769, False, []),  # whole experts, of any width
        (4, 8, 96, True, ["= 4 doesn't divide the feed-forward width of 96 in multiples of 32"]),  # SGLang pads for all its ranks there
        (2, 8, 769, False, ["tensor_parallel = 4 over expert_parallel = 2 doesn't divide the feed-forward width of 769"]),
        (4, 6, 768, False, ["rollout.engine.expert_parallel = 4 doesn't divide the model's 6 experts"]),
        (4, 0, 768, False, ["rollout.engine.expert_parallel = 4: qwen3_moe has no experts"]),
    ],
)
def test_what_divides_experts(groups: int, experts: int, width: int, on_cpu: bool, said: list[str]) -> None:
    engine = EngineConfig(device="cpu" if on_cpu else "cuda", tensor_parallel=4, expert_parallel=groups)
    found = obstacles(engine, model_type="qwen3_moe", heads=8, key_heads=4, widths=[width], experts=experts)
    texts = [text for text, _ in found]
    assert len(texts) == len(said) and all(part in text for part, text in zip(said, texts, strict=True)), texts


def test_groups_of_ranks_share_the_requests() -> None:
    configs = (EngineConfig(device="cpu", tensor_parallel=4, attention_data_parallel=count) for count in (1, 2))
    plain, groups = (config.on_this_machine().with_context(64).sglang_arguments("folder", 0) for config in configs)
    differing = {name: value for name, value in groups.items() if plain.get(name) != value}
    assert differing == {"dp_size": 2, "enable_dp_attention": True, "sleep_on_idle": False}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel": 4, "attention_data_parallel": 3}, "= 3 doesn't divide tensor_parallel = 4"),
        ({"tensor_parallel": 1}, "= 2 doesn't divide tensor_parallel = 1"),
        ({"quantization": "float8_block", "dtype": "bfloat16"}, "= 2 with quantization: this combination .* or quantization to none"),
        ({"return_routed_experts": True}, "= 2 with learner.routing_replay: rollout: .* or learner.routing_replay to none"),
        ({"max_running_requests": 1}, "= 2 with max_running_requests = 1: "),
        ({"batch_invariant": True}, "tensor_parallel = 2 with batch_invariant"),
    ],
)
def test_groups_that_were_not_tried_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineConfig(**({"tensor_parallel": 2, "attention_data_parallel": 2} | settings))


@pytest.mark.parametrize(
    ("kind", "groups", "on_cpu", "said"),
    [
        ("qwen3", 2, False, []),  # four ranks a group for four key heads
        ("qwen3", 1, False, []),
        ("qwen3", 2, True, ["8 and the model's 4 key-value heads: on a CPU"]),
        ("llama", 2, False, ["attention_data_parallel = 2: SGLang cuts the attention of llama over all ranks whatever is set"]),
    ],
)
def test_heads_are_divided_among_a_group_s_ranks(kind: str, groups: int, on_cpu: bool, said: list[str]) -> None:
    shape: dict[str, Any] = {"model_type": kind, "heads": 8, "key_heads": 4, "widths": [768], "experts": 0}
    engine = EngineConfig(device="cpu" if on_cpu else "cuda", tensor_parallel=8, attention_data_parallel=groups)
    found = [text for text, _ in obstacles(engine, **shape)]
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True)), found
    of_twelve = EngineConfig(device="cuda", tensor_parallel=12, attention_data_parallel=2)
    odd = [text for text, _ in obstacles(of_twelve, **(shape | {"heads": 6, "key_heads": 6}))]
    assert [text for text in odd if "heads" in text] == [], "six of a group's six ranks each"


@pytest.mark.parametrize(("on_cpu", "groups", "experts"), [(True, 2, 2), (False, 2, 2), (True, 2, 1), (True, 1, 2)])
def test_on_a_cpu_groups_don_t_go_with_divided_experts(on_cpu: bool, groups: int, experts: int) -> None:
    shape: dict[str, Any] = {"model_type": "qwen3_moe", "heads": 8, "key_heads": 4, "widths": [768], "experts": 8}
    engine = EngineConfig(device="cpu" if on_cpu else "cuda", tensor_parallel=4, expert_parallel=experts, attention_data_parallel=groups)
    found = [text for text, _ in obstacles(engine, **shape)]
    refused = ["attention_data_parallel = 2 and expert_parallel = 2: SGLang hands"] if on_cpu and groups == experts == 2 else []
    assert len(found) == len(refused) and all(part in text for part, text in zip(refused, found, strict=True)), found


def test_a_prompt_and_all_its_answers_go_to_the_group_with_the_fewest() -> None:
    engine = RolloutEngine.__new__(RolloutEngine)
    engine._in_groups = [0, 0]
    with contextlib.ExitStack() as under_way:
        taken = [under_way.enter_context(engine._in_a_group(answers))["routed_dp_rank"] for answers in (8, 3, 4, 1)]
    assert taken == [0, 1, 1, 1] and engine._in_groups == [0, 0]
    session, where = GroupOfRanks(), list[int]()
    for others in ([0, 5], [9, 0], [3, 0]):
        engine._in_groups = others
        with engine._in_a_group(1, session) as routed:
            where.append(routed["routed_dp_rank"])
    assert where == [0, 0, 0], "a session's turns are where its first one is cached, whatever else is there"
    engine._in_groups = [0]
    with engine._in_a_group(8) as only:
        assert only == {}, "SGLang is told nothing where there is one group"


@pytest.mark.parametrize(("groups", "given", "steps"), [(1, {"nccl_port"}, [0]), (2, {"nccl_port", "port"}, [0, 13, 234])])
def test_all_ports_that_sglang_is_given_or_counts_from_there_are_free(groups: int, given: set[str], steps: list[int]) -> None:
    """Its own `nccl_port` is one that the kernel gives to any outgoing connection until the scheduler binds it, seconds later."""
    ports = free_ports(groups)
    assert ports.keys() == given
    assert all(20_000 <= port < 32_000 for port in ports.values()), "Linux gives those from 32,768 on to connections"
    first = ports["nccl_port"]
    assert set(free_ports(groups, first, first + 1).values()) == {first}
    for step in steps:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", first + step))
            with pytest.raises(EngineError, match="no port between"):
                free_ports(groups, first, first + 1)


def test_how_ranks_talk_is_handed_on() -> None:
    options = {"disable_custom_all_reduce": True, "enable_nccl_nvls": True, "dist_timeout": 600, "enable_flashinfer_allreduce_fusion": True}
    assert options.keys().isdisjoint(REFUSED_OF_RANKS)
    config = EngineConfig(device="cpu", tensor_parallel=2, engine_args=options).on_this_machine()
    given = config.with_context(64).sglang_arguments("folder", 0)
    assert {name: given[name] for name in options} == options


def test_batch_invariant_ranks_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"tensor_parallel = 2 with batch_invariant.*Set tensor_parallel: 1"):
        EngineConfig(tensor_parallel=2, batch_invariant=True)


@pytest.mark.parametrize(
    ("ranks", "on_cpu", "said"),
    [
        (1, True, []),
        (2, True, []),
        (2, False, []),
        (8, False, []),  # two ranks a key head
        (8, True, ["8 and the model's 4 key-value heads: on a CPU SGLang would add empty ones", "width of 192 in multiples of 32"]),
        (4, True, ["rollout.engine.tensor_parallel = 4 doesn't divide the feed-forward width of 192 in multiples of 32"]),
        (16, False, ["= 16 doesn't divide the model's 8 heads"]),
        (6, False, ["= 6 doesn't divide the model's 8 heads", "= 6 and the model's 4 key-value heads: neither divides the other"]),
        (36, False, ["8 heads", "width of 192", "width of 768"]),
    ],
)
def test_what_divides_a_model(ranks: int, on_cpu: bool, said: list[str]) -> None:
    engine = EngineConfig(device="cpu" if on_cpu else "cuda", tensor_parallel=ranks)
    found = [text for text, _ in obstacles(engine, model_type="qwen3", heads=8, key_heads=4, widths=[192, 768], experts=0)]
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True)), found


@pytest.mark.parametrize(("processors", "bound"), [([0, 1, 2, 3, 6], "0,1|2,3"), ([0, 1], "0|1"), ([5], "5|5"), ([], None)])
def test_ranks_share_the_processors(processors: list[int], bound: str | None) -> None:
    """SGLang wants a list for each rank where there are more ranks than NUMA nodes; on GPUs nothing."""
    variables = environment_of_ranks(2, processors)
    assert variables.get("SGLANG_CPU_OMP_THREADS_BIND") == bound
    assert ("TORCH_COMPILE_DISABLE" in variables) == (bound is not None), "on a CPU it takes a minute of the first request"
    assert variables["SYNC_TOKEN_IDS_ACROSS_TP"] == "1", "ranks must not draw different tokens"


WHOLE = torch.arange(8.0 * 6).reshape(8, 6)


@pytest.mark.parametrize(
    ("part", "text", "held"),
    [
        (WeightPart(0, 8, ((4, 8),)), "0:8:4-8", WHOLE[4:]),
        (WeightPart(1, 6, ((0, 3),)), "1:6:0-3", WHOLE[:, :3]),
        (WeightPart(0, 8, ((0, 2), (4, 6))), "0:8:0-2,4-6", WHOLE[[0, 1, 4, 5]]),  # gate and up projection in one tensor
        (WeightPart(1, 6, ()), "1:6:", WHOLE[:, :0]),  # another rank's expert
    ],
)
def test_a_part_is_told_and_cut(part: WeightPart, text: str, held: Tensor) -> None:
    assert (str(part), WeightPart.parse(text)) == (text, part)
    assert torch.equal(part.of(WHOLE), held)
    assert text_of(held.shape, "float32", part) == f"float32:8,6@{text}"
    assert WeightSpec.parse("w", text_of(held.shape, "float32", part).partition("@")[0]) == WeightSpec.of("w", WHOLE)


def answers(*parts: str, norm: str = "float32:6") -> list[dict[str, str]]:
    return [{"w": f"float32:8,6@{part}", "norm": norm} for part in parts]


def test_ranks_together_hold_the_model() -> None:
    found = RankParts.parse(answers("0:8:0-4", "0:8:4-8"), "engine")
    assert found.specs == {"w": WeightSpec("w", "float32", (8, 6)), "norm": WeightSpec("norm", "float32", (6,))}
    assert found.by_rank == ({"w": WeightPart(0, 8, ((0, 4),))}, {"w": WeightPart(0, 8, ((4, 8),))})
    RankParts.parse(answers("0:8:0-4", "0:8:0-4", "0:8:4-8", "0:8:4-8"), "engine")  # two ranks have one key head
    RankParts.parse(answers("0:8:", "0:8:0-8"), "engine")  # an expert of the second rank


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (answers("0:8:0-4", "0:8:0-4"), "engine: w: its ranks hold 0:8:0-4, 0:8:0-4, which is not all of it"),
        (answers("0:8:0-4", "0:8:5-8"), "which is not all of it"),
        (answers("0:8:", "0:8:"), "which is not all of it"),  # nobody's expert
        ([answers("0:8:0-4")[0], answers("0:8:4-8", norm="float32:12")[0]], r"norm is float32:6 to rank 0 and float32:12 to rank 1"),
        ([answers("0:8:0-4")[0], {"norm": "float32:6"}], r"w is float32:8,6 to rank 0 and unknown to rank 1"),
    ],
)
def test_ranks_that_hold_no_model_together_are_told(told: list[dict[str, str]], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        RankParts.parse(told, "engine")


def test_every_rank_s_part_is_compared_with_what_was_sent() -> None:
    parts, sent = RankParts.parse(answers("0:8:0-4", "0:8:4-8"), "engine"), {"w": WHOLE, "norm": torch.ones(6)}
    held = [{"w": tensor_checksum(rows), "norm": tensor_checksum(torch.ones(6))} for rows in (WHOLE[:4], WHOLE[4:])]
    buckets = [WeightBucket.of({name: tensor}) for name, tensor in sent.items()]
    assert parts.require_parts(buckets, held, "engine", {}) == {name: tensor_checksum(tensor) for name, tensor in sent.items()}
    with pytest.raises(SyncError, match="engine: rank 1 of 2 holds other bytes of w than were sent"):
        parts.require_parts(buckets, [held[0], held[1] | {"w": held[0]["w"]}], "engine", {})
    with pytest.raises(SyncError, match="rank 0 of 2 holds other bytes of norm"):
        parts.require_parts(buckets, [{"w": held[0]["w"]}, held[1]], "engine", {})


def test_a_tensor_whose_checksum_is_known_is_not_summed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has compared what came with what was to come; of the parts, those that two ranks have are summed once."""
    parts = RankParts.parse(answers("0:8:0-4", "0:8:0-4", "0:8:4-8"), "engine")
    verified = WeightBucket.of({"w": WHOLE, "norm": torch.ones(6)}).checksums()
    first = {"w": tensor_checksum(WHOLE[:4]), "norm": verified["norm"]}
    held, summed = [first, first, first | {"w": tensor_checksum(WHOLE[4:])}], []

    def noted(tensor: Tensor) -> str:
        summed.append(tuple(tensor.shape))
        return tensor_checksum(tensor)

    monkeypatch.setattr(weight_parts, "tensor_checksum", noted)
    assert parts.require_parts([WeightBucket.of({"w": WHOLE, "norm": torch.ones(6)})], held, "engine", verified) == verified
    assert summed == [(4, 6), (4, 6)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"buckets": "2", "version": "4", "failure": "", "unfinished": "0"}, None),
        ({"buckets": "1", "version": "4", "failure": "", "unfinished": "0"}, "rank 1 of 2 has loaded 1 of 2 buckets and holds v4"),
        ({"buckets": "2", "version": "3", "failure": "", "unfinished": "0"}, "rank 1 of 2 has loaded 2 of 2 buckets and holds v3"),
        ({"buckets": "1", "version": "3", "failure": "no memory"}, "rank 1 of 2 has loaded 1 of 2 buckets and holds v3: no memory"),
    ],
)
def test_an_update_counts_when_every_rank_has_it(second: dict[str, str], said: str | None) -> None:
    check = UpdateCheck("engine", 4, {name: WeightSpec(name, "float32", (2,)) for name in "ab"})
    for name in "ab":
        check.admit([WeightSpec(name, "float32", (2,))])
    receipts = [{"buckets": "2", "version": "4", "failure": "", "unfinished": "0"}, second]
    if said is None:
        check.require_all_ranks(4, receipts)
    else:
        with pytest.raises(SyncError, match=said):
            check.require_all_ranks(4, receipts)


class TwoRanks:
    """An engine whose SGLang is two ranks with a cache, of which the second loads as many buckets as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, update_mode: str) -> None:
        self.held = [{"buckets": "0", "version": "3", "failure": "", "unfinished": "0"} for _ in range(2)]
        """By rank: buckets of the last update, and the version."""
        self.cached = {"requests", "prefixes"}
        """What has keys and values of earlier weights."""
        self.second_misses = 0
        manager = SimpleNamespace(abort_request=lambda abort_all: self.cached.discard("requests"), max_req_input_len=8)
        process: Any = SimpleNamespace(raise_if_lost=lambda: None, wait=self._wait, engine=SimpleNamespace(tokenizer_manager=manager))
        config = EngineConfig.model_validate({"device": "cpu", "tensor_parallel": 2, "weight_update_mode": update_mode})
        self.engine = RolloutEngine("engine", config, process, vocab_size=8, version=3)
        self.engine._specs = {"w": WeightSpec.of("w", WHOLE), "v": WeightSpec.of("v", WHOLE)}

        async def begin(_: Any, mode: str) -> None:
            if mode == "retract":
                self.cached.discard("requests")
            for rank in self.held:
                rank["buckets"] = "0"

        async def send(_: Any, payloads: list[bytes], *, version: int | None, flush: bool) -> None:
            for number, (rank, payload) in enumerate(zip(self.held, payloads, strict=True)):
                if not (number == 1 and self.second_misses):
                    rank["buckets"] = str(int(rank["buckets"]) + 1)
                    rank["version"] = str(version or rank["version"])
                    assert payload
            self.second_misses = max(0, self.second_misses - 1)
            if flush:
                self.cached.discard("prefixes")

        monkeypatch.setattr(self.engine, "_inspect", lambda *_: asyncio.sleep(0, self.held))
        monkeypatch.setattr(weight_transfer, "pause_and_begin", begin)
        monkeypatch.setattr(weight_transfer, "send", send)
        monkeypatch.setattr(weight_transfer.SharedStaging, "payloads", lambda *_: [b"0", b"1"])
        monkeypatch.setattr(weight_transfer, "end", lambda _: asyncio.sleep(0))
        monkeypatch.setattr(weight_transfer, "resume", lambda _: asyncio.sleep(0))

    async def _wait(self, awaitable: Awaitable[Any], *_: Any, **__: Any) -> Any:
        return await awaitable

    async def update(self, version: int) -> None:
        await self.engine.update_weights(version, [WeightBucket.of({name: WHOLE}) for name in "wv"])

    def holds(self, version: int) -> bool:
        """Whole, in both ranks."""
        return self.held == [{"buckets": "2", "version": str(version), "failure": "", "unfinished": "0"}] * 2


@pytest.mark.parametrize("missed", [1, 2])
def test_a_rank_that_misses_a_bucket_makes_the_engine_dirty_until_a_whole_update(monkeypatch: pytest.MonkeyPatch, missed: int) -> None:
    """SGLang says success, which is its first rank's. Requests are aborted; ranks may differ in what they cached, so that goes as well."""

    async def scenario() -> None:
        scene = TwoRanks(monkeypatch, "in_place")
        await scene.update(4)
        assert scene.engine.version == 4 and scene.holds(4) and scene.cached == {"requests", "prefixes"}
        scene.second_misses = missed
        with pytest.raises(SyncError, match=rf"rank 1 of 2 has loaded {2 - missed} of 2 buckets.*dirty until a whole update succeeds"):
            await scene.update(5)
        assert scene.engine.version == 4 and scene.engine._dirty is not None and not scene.holds(5) and scene.cached == {"prefixes"}
        scene.cached.add("requests")  # they come again
        await scene.update(6)
        assert (scene.engine.version, scene.engine._dirty) == (6, None)
        assert scene.holds(6) and scene.cached == set()

    asyncio.run(scenario())
