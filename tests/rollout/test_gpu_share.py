"""An engine and a learner on one GPU: what it takes follows from its share, whoever comes first. Facts are made up: no GPU is needed."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.engines.machine import CONTEXT, SUMMED, allocator_fraction, engine_budget, outside_cache
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sglang_plugin import gpu_share
from evenkeel.rollout.sglang_plugin.gpu_share import TARGET, cache_bytes

GIB = 1 << 30
TOTAL, WEIGHTS, WORDS = 24 * GIB, int(1.2 * GIB), 151_936
ENGINE = EngineConfig(gpu_share=0.35, max_running_requests=128)


def test_the_cache_is_the_same_whoever_comes_first() -> None:
    """A learner of 15 GiB that comes before the engine, between its start and its cache, or later. SGLang's own rule would give the engine
    0.35 x 23.25 GiB, 0.35 x 8.25 GiB, or less than nothing: free less what the others took meanwhile."""
    before = TOTAL - CONTEXT - WEIGHTS
    caches = {cache_bytes(ENGINE, free, TOTAL, WEIGHTS, WORDS) for free in (before, before - 15 * GIB)}
    assert len(caches) == 1
    assert caches.pop() + WEIGHTS + outside_cache(128, WORDS) == int(0.35 * TOTAL), "all of it is in the share"


def test_what_the_sampler_takes_has_a_place() -> None:
    """128 requests x 151,936 words x (logits, logprobs, probabilities: 12 bytes), and of 32,768 of the words number, probability and a sum
    in float64, are 0.3 GiB; a small vocabulary is summed as a whole."""
    assert outside_cache(128, WORDS) - outside_cache(128, 0) >= 128 * (WORDS * 12 + SUMMED * (8 + 4 + 8))
    assert outside_cache(128, 1000) - outside_cache(128, 0) == 128 * 1000 * (16 + 20)


def test_both_shares_together_are_the_gpu_contexts_included() -> None:
    learner = allocator_fraction(TOTAL, 0.65) * TOTAL + CONTEXT
    engine = engine_budget(TOTAL, 0.35, None, 128, WORDS) + outside_cache(128, WORDS)
    assert learner + engine == pytest.approx(TOTAL)
    assert allocator_fraction(TOTAL, 1.0) == 1.0


def test_a_fraction_is_of_the_whole_gpu_and_never_more_than_the_share() -> None:
    assert engine_budget(TOTAL, 0.35, 0.2, 128, WORDS) == int(0.2 * TOTAL)
    assert engine_budget(TOTAL, 0.35, 0.9, 128, WORDS) == engine_budget(TOTAL, 0.35, None, 128, WORDS)


def test_what_has_no_room_is_said_with_numbers() -> None:
    with pytest.raises(RuntimeError, match=r"of 24 GiB the engine has 0\.35, its weights take 8 GiB, .* sampler 1\.87\. Raise roll"):
        cache_bytes(ENGINE, TOTAL, TOTAL, 8 * GIB, WORDS)
    with pytest.raises(RuntimeError, match=r"still has 6\.4\d GiB to take, but 1\.5 are free: others on it have taken more than theirs"):
        cache_bytes(ENGINE, 3 * GIB // 2, TOTAL, WEIGHTS, WORDS)


def test_a_small_shortfall_makes_the_cache_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts may be larger than was estimated: what is missing of the share is taken from the cache, and said."""
    told: list[str] = []
    monkeypatch.setattr(gpu_share.logger, "warning", lambda text, *values: told.append(text % values))
    whole = cache_bytes(ENGINE, TOTAL, TOTAL, WEIGHTS, WORDS)
    needed = whole + outside_cache(128, WORDS) - CONTEXT
    assert cache_bytes(ENGINE, needed, TOTAL, WEIGHTS, WORDS) == whole and not told
    assert cache_bytes(ENGINE, needed - GIB // 2, TOTAL, WEIGHTS, WORDS) == whole - GIB // 2
    assert f"The KV cache has {(whole - GIB // 2) / GIB:.3g} GiB instead of {whole / GIB:.3g}" in told[0]


def test_it_takes_the_place_of_sglang_s_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is there in the installed version, and its object knows what the hook asks of it."""
    from sglang.srt.plugins import hook_registry

    module, name, method = TARGET.rsplit(".", 2)
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent.parent.joinpath(*module.split(".")).with_suffix(".py")  # its own imports are for GPUs
    (owner,) = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    assert method in {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    assert {"gpu_id", "model_config"} <= {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign)}  # type: ignore[attr-defined]
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(hook_registry.HookRegistry, "register", lambda target, hook, kind: hooks.__setitem__(target, hook))
    gpu_share.register(ENGINE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: WEIGHTS)
    configurator = type("Configurator", (), {"gpu_id": 0, "model_config": type("Model", (), {"vocab_size": WORDS})})()
    assert hooks[TARGET](None, configurator, 20.0) == cache_bytes(ENGINE, 20 * GIB, TOTAL, WEIGHTS, WORDS)


def test_only_an_engine_with_a_share_is_sized_by_it() -> None:
    shared = EngineConfig(device="cuda", gpu_share=0.35).on_this_machine().with_context(2048).sglang_arguments("folder", 0)
    assert (shared["mem_fraction_static"], shared["chunked_prefill_size"], shared["disable_prefill_cuda_graph"]) == (0.35, 2048, True)
    whole = EngineConfig(device="cuda").on_this_machine().with_context(2048).sglang_arguments("folder", 0)
    assert not {"mem_fraction_static", "chunked_prefill_size", "disable_prefill_cuda_graph"} & whole.keys()
