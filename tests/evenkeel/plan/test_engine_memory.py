"""An engine's memory on a GPU against SGLang's own functions, which are told that they have one; and the bytes of a real KV cache."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.engines.machine import CONTEXT, PREFILL_TOKENS
from evenkeel.plan.hosts import route_cache_bytes
from evenkeel.plan.memory import cache_token_bytes, default_fraction, engine_memory, prefill_graphs
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B, save_config
from tests.evenkeel.plan.test_plan import recipe

pytestmark = pytest.mark.engine

SIZES = (16_384, 20_479, 20_480, 24_564, 35_839, 35_840, 40_960, 61_439, 61_440, 81_559, 143_771, 163_839, 163_840, 183_359)
"""MiB as nvidia-smi tells them, of real cards and on both sides of every limit."""
RANKS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
"""Of an engine, and the groups that share its requests."""
CHUNKS = (4, 30, 256, 300, 1024, 1100, 2048, 4096, 4500, 8192, 16_384)
POOLS = (("bfloat16", 1, "auto"), ("float32", 2, "auto"), ("bfloat16", 2, "fp8_e4m3"), ("bfloat16", 1, "fp8_e5m2"), ("float32", 1, "bf16"))
"""Type, ranks that share the key heads, and kv_cache_dtype."""
TOKENS, LAYERS = 1000, 3
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"chunked_prefill_size": 1024},
    {"chunked_prefill_size": 8192, "cuda_graph_max_bs_decode": 128},
    {"chunked_prefill_size": -1},
    {"chunked_prefill_size": -1, "max_prefill_tokens": 32_768},
    {"cuda_graph_max_bs_decode": 512, "tp_size": 8, "dp_size": 2, "enable_dp_attention": True},
    {"cuda_graph_bs_decode": [1, 8, 40]},
    {"cuda_graph_max_bs_prefill": 1024},
    {"cuda_graph_bs_prefill": [64, 256]},
    {"disable_cuda_graph": True},
    {"disable_decode_cuda_graph": True, "tp_size": 8, "dp_size": 2, "enable_dp_attention": True},
    {"disable_prefill_cuda_graph": True},
    {"max_total_tokens": 3000},
)
"""Of engines whose memory they change, as sglang.Engine is given them."""


def answer(asked: dict[str, Any], answers: Connection) -> None:
    """What SGLang's functions say, with stand-ins for what a CPU doesn't have: they stay, so this ends its process."""
    import sglang.srt.utils
    from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.state_capturer import base

    sglang.srt.utils.is_cuda = lambda: True  # where graphs of prefill are on by default
    configure_kv_cache_dtype.__globals__["current_platform"] = type("Gpu", (), {"is_cpu": staticmethod(lambda: False)})
    base.ALLOC_MEMORY_FUNCS["cuda"] = lambda dims, dtype, device, pin_memory, allocator: torch.empty(dims, dtype=dtype)  # not page-locked

    def resolved(mib: int, arguments: dict[str, Any]) -> list[Any]:
        memory_hook.get_device_memory_capacity = lambda device: float(mib)
        given = ServerArgs(device="cuda", dtype="bfloat16", **arguments)
        cuda_graph_hook.handle_cuda_graph_config(given)
        memory_hook.handle_gpu_memory_settings(given)
        graphs, fraction = resolving_view(given).cuda_graph_config, resolving_view(given).mem_fraction_static
        return [fraction, memory_hook.reserve_for_graph_mb(given), graphs.decode.max_bs, graphs.prefill.backend, len(graphs.prefill.bs)]

    def cache_bytes(tokens: int, page: int, dtype: str, given: str, heads: int, width: int, layers: int) -> int:
        options = {"model": None, "is_draft_worker": False, "is_dflash": False, "speculative_draft_attention_backend": ""}
        _, kind = configure_kv_cache_dtype(server_args_kv_cache_dtype=given, model_dtype=getattr(torch, dtype), **options)
        pool = MHATokenToKVPool(tokens, page, kind, heads, width, layers, "cpu", False)
        return int(sum(pool.get_kv_size_bytes()))

    torch.set_num_threads(1)  # a fork has none of the others
    graphs = [len(cuda_graph_hook.generate_prefill_cuda_graph_batch_sizes(chunk)) for chunk in asked["chunks"]]
    gpus, pools = [resolved(*one) for one in asked["gpus"]], [cache_bytes(*one) for one in asked["pools"]]
    routes = base.BaseHostCache(*asked["routes"], "routed_experts", "cuda").get_buffer_size_bytes()
    answers.send({"gpus": gpus, "graphs": graphs, "pools": pools, "routes": routes})


@pytest.fixture(scope="module")
def sglang(shared_engine: RolloutEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What its functions answer, in a fork of the process that owns the engine: SGLang takes many seconds to import.

    Of a GPU: the fraction, MiB for graphs, requests of the largest one of decoding, the kind of those of prefill, and their number.
    """
    folder = str(save_config(tmp_path_factory.mktemp("model"), QWEN3_8B | {"architectures": ["Qwen3ForCausalLM"]}))
    of_ranks = [{"tp_size": ranks} | ({"dp_size": groups, "enable_dp_attention": True} if groups > 1 else {}) for ranks, groups in RANKS]
    given = EngineConfig(device="cuda", dtype="bfloat16", gpu_share=0.35).with_context(2048).sglang_arguments(folder, 0)
    names = ("chunked_prefill_size", "mem_fraction_static", "disable_prefill_cuda_graph")
    shared = {name: given[name] for name in names if name in given}
    gpus = [(mib, one | {"model_path": folder}) for one in (*of_ranks, shared, *ARGUMENTS) for mib in SIZES]
    heads, width = QWEN3_8B["num_key_value_heads"], QWEN3_8B["head_dim"]
    pools = [(TOKENS, 1, dtype, given, heads // ranks, width, LAYERS) for dtype, ranks, given in POOLS]
    routes = TOKENS + 1, QWEN3_30B_A3B["num_hidden_layers"], QWEN3_30B_A3B["num_experts_per_tok"]
    context = multiprocessing.get_context("fork")
    answers, end = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=({"gpus": gpus, "chunks": CHUNKS, "pools": pools, "routes": routes}, end))
    process.start()
    end.close()  # a fork that fails leaves none of this end, and recv says so
    found: dict[str, Any] = answers.recv()
    process.join(60.0)
    kinds = (*RANKS, "shared", *range(len(ARGUMENTS)))
    found["gpus"] = {(kind, mib): found["gpus"][n * len(SIZES) + m] for n, kind in enumerate(kinds) for m, mib in enumerate(SIZES)}
    return found


@pytest.mark.parametrize(("ranks", "groups"), RANKS)
def test_the_fraction_is_sglang_s_own(sglang: dict[str, Any], ranks: int, groups: int) -> None:
    theirs = [sglang["gpus"][(ranks, groups), mib][0] for mib in SIZES]
    assert [default_fraction(mib << 20, ranks, groups) for mib in SIZES] == theirs


@pytest.mark.parametrize("number", range(len(ARGUMENTS)), ids=lambda number: " ".join(ARGUMENTS[number]))
def test_the_fraction_of_an_engine_s_further_arguments_is_sglang_s_own(sglang: dict[str, Any], number: int) -> None:
    own = {"tp_size", "dp_size", "enable_dp_attention", "max_total_tokens"}
    given = ARGUMENTS[number]
    further = {name: value for name, value in given.items() if name not in own}
    ranks, groups, most = given.get("tp_size", 1), given.get("dp_size", 1), given.get("max_total_tokens")
    ours = [default_fraction(mib << 20, ranks, groups, further, most) for mib in SIZES]
    assert ours == [sglang["gpus"][number, mib][0] for mib in SIZES]
    assert ours != [default_fraction(mib << 20, ranks, groups) for mib in SIZES], "it makes a difference"


def test_an_80_gb_gpu_keeps_58_graphs_of_prefill(sglang: dict[str, Any]) -> None:
    """464 MiB of its 81,559: without them the fraction would be 0.835."""
    assert sglang["gpus"][(1, 1), 81_559] == [0.83, 2 * 256 + 8 * 58, 256, "breakable", 58]


def test_graphs_of_prefill_are_those_of_sglang_s_list(sglang: dict[str, Any]) -> None:
    assert [prefill_graphs(chunk) for chunk in CHUNKS] == sglang["graphs"]


def test_an_engine_with_a_share_captures_no_graphs_of_prefill(sglang: dict[str, Any]) -> None:
    """Of its chunk they would be 42, 336 MiB that its share doesn't count: learner's and engine's shares are the whole GPU."""
    assert prefill_graphs(PREFILL_TOKENS) == 42
    for mib in SIZES:
        _, graphs_mib, requests, kind, _ = sglang["gpus"]["shared", mib]
        assert (graphs_mib, kind) == (2 * requests, "disabled")


def test_the_fraction_is_of_what_the_context_leaves(tmp_path: Path) -> None:
    """SGLang measures what is free when the process has its context (_profile_available_bytes)."""
    shape, gpu = ModelShape.of(QWEN3_30B_A3B), 81_559 << 20
    rollout = recipe("qwen3_8b_8gpu", save_config(tmp_path, QWEN3_30B_A3B)).rollout
    given = rollout.model_copy(update={"engine": rollout.engine.model_copy(update={"memory_fraction": 0.9})})
    for settings, fraction in ((rollout, 0.83), (given, 0.9)):
        memory = engine_memory(shape, settings, gpu)
        assert memory.weights + memory.cache == int((gpu - CONTEXT) * fraction)
        assert memory.weights + memory.cache + memory.outside_cache == gpu


def test_a_real_cache_has_the_bytes_of_its_tokens(sglang: dict[str, Any]) -> None:
    """SGLang's pool, which has a page more than it tells of: here one token."""
    shape = replace(ModelShape.of(QWEN3_8B), layers=LAYERS)
    for (dtype, ranks, given), theirs in zip(POOLS, sglang["pools"], strict=True):
        settings: dict[str, Any] = {"dtype": dtype, "tensor_parallel": ranks, "engine_args": {"kv_cache_dtype": given}}
        assert theirs == (TOKENS + 1) * cache_token_bytes(shape, EngineConfig(device="cpu", **settings)), given


def test_a_cache_in_float8_holds_twice_the_tokens(tmp_path: Path) -> None:
    """Given to a recipe, as a user would."""
    shape, gpu = ModelShape.of(QWEN3_8B), 81_559 << 20
    folder = save_config(tmp_path, QWEN3_8B)
    plain, float8 = (
        engine_memory(shape, recipe("qwen3_8b_8gpu", folder, *words).rollout, gpu)
        for words in ((), ("rollout.engine.engine_args.kv_cache_dtype=fp8_e5m2",))
    )
    assert (float8.cache, float8.token_bytes) == (plain.cache, plain.token_bytes // 2)
    assert float8.tokens // 2 == plain.tokens
    smaller = recipe("qwen3_8b_8gpu", folder, "rollout.engine.engine_args.chunked_prefill_size=16384").rollout
    assert engine_memory(shape, smaller, gpu).cache < plain.cache


def test_what_an_engine_keeps_of_its_tokens_experts_is_sglang_s_own(sglang: dict[str, Any]) -> None:
    assert route_cache_bytes(ModelShape.of(QWEN3_30B_A3B), TOKENS) == sglang["routes"]
