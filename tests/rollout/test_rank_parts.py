"""Which part of each tensor of a file an engine's rank holds, and what it answers, with stand-ins for SGLang's modules and no engine.

The ranks' tensors are cut here as SGLang's loaders cut them; what is told of them has to find the same parts in the whole tensors.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.correction.errors import EngineError
from evenkeel.engines.weights import WeightSpec, tensor_checksum
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sglang_plugin.hooks import CHECKSUMS, FAILURE, RECEIPT, SPECS
from evenkeel.rollout.sglang_plugin.weight_parts import RankParts

HEADS, KEY_HEADS, WIDTH, HIDDEN, FEED_FORWARD, EXPERTS, VOCABULARY = 8, 2, 4, 32, 64, 4, 515
PADDED = 576
"""Rows of the vocabulary in SGLang: a multiple of 64."""
PLUGIN = Path(__file__).parents[2] / "rollout" / "sglang_plugin"


class HeldPart(nn.Module):
    """A layer of SGLang's: a tensor, and what else is known of it."""

    def __init__(self, weight: Tensor, **known: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.__dict__.update(known)


class ColumnPart(HeldPart): ...


class MergedPart(ColumnPart): ...


class QueryPart(ColumnPart): ...


class RowPart(HeldPart): ...


class VocabularyPart(HeldPart): ...


class ExpertsPart(nn.Module):
    def __init__(self, wholes: dict[str, list[Tensor]], rank: int, ranks: int, groups: int) -> None:
        """Args: wholes: of all experts gates, ups and downs, by the last part of their names."""
        super().__init__()
        self.moe_tp_size, self.moe_ep_size = ranks // groups, groups
        self.moe_ep_rank, self.moe_tp_rank = divmod(rank, self.moe_tp_size)

        def part(experts: Tensor, dimension: int) -> Tensor:
            return experts.chunk(groups)[self.moe_ep_rank].chunk(self.moe_tp_size, dimension)[self.moe_tp_rank]

        for leaf, (gates, ups, downs) in wholes.items():
            setattr(self, f"w13_{leaf}", nn.Parameter(torch.cat([part(gates, 1), part(ups, 1)], 1)))
            setattr(self, f"w2_{leaf}", nn.Parameter(part(downs, 2)))


class Plugin:
    """rollout/sglang_plugin/weights.py over stand-ins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.version = "7"
        registry = SimpleNamespace(register=lambda name, hook, _: self.hooks.__setitem__(name.rpartition(".")[2], hook))
        kinds = SimpleNamespace(AROUND="around", AFTER="after", BEFORE="before")
        srt: dict[str, dict[str, Any]] = {
            "layers.linear": {
                "ColumnParallelLinear": ColumnPart,
                "MergedColumnParallelLinear": MergedPart,
                "QKVParallelLinear": QueryPart,
                "RowParallelLinear": RowPart,
            },
            "layers.moe.fused_moe_triton.layer": {"FusedMoE": ExpertsPart},
            "layers.vocab_parallel_embedding": {"VocabParallelEmbedding": VocabularyPart},
            "plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
            "runtime_context": {"get_serving": lambda: SimpleNamespace(weight_version=self.version)},
            "managers.io_struct": {"CheckWeightsReqInput": SimpleNamespace},
        }
        for name, content in srt.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
        self.weights: Any = _loaded("weights")
        self.weights.register()

    def ask(self, action: str, model: Callable[[], Any]) -> Any:
        info = SimpleNamespace(model_dump=dict)
        checker = SimpleNamespace(_get_model=model, _parallelism_info=lambda role: info)
        return self.hooks["handle"](lambda _, action, **__: f"SGLang's {action}", checker, action, role="target")

    def texts(self, action: str, model: nn.Module) -> dict[str, str]:
        return dict(self.ask(action, lambda: model)["checksums"])


def _loaded(name: str) -> ModuleType:
    """A module of its own, so that nobody else gets one over stand-ins."""
    spec = importlib.util.spec_from_file_location(f"{name}_over_stand_ins", PLUGIN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    return Plugin(monkeypatch)


def files(kind: str) -> dict[str, Tensor]:
    """A layer's tensors as the files of such a model have them; of experts with a scale for each block, here of 4 x 4."""
    shapes = {
        "embed_tokens": (VOCABULARY, HIDDEN),
        "norm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
        "self_attn.k_proj": (KEY_HEADS * WIDTH, HIDDEN),
        "self_attn.v_proj": (KEY_HEADS * WIDTH, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
    }
    if kind == "glm4":
        shapes["mlp.gate_up_proj"] = (2 * FEED_FORWARD, HIDDEN)
    elif kind == "qwen3":
        shapes |= {"mlp.gate_proj": (FEED_FORWARD, HIDDEN), "mlp.up_proj": (FEED_FORWARD, HIDDEN)}
    else:
        gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for index in range(EXPERTS):
            shapes |= {f"mlp.experts.{index}.{name}": (FEED_FORWARD, HIDDEN) for name in (gate, up)}
            shapes[f"mlp.experts.{index}.{down}"] = (HIDDEN, FEED_FORWARD)
    random = torch.Generator().manual_seed(1)
    weights = {f"{name}.weight": torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return weights | {f"{name}_scale_inv": weight[::4, ::4] for name, weight in weights.items() if ".experts." in name}


def rank_of(kind: str, whole: dict[str, Tensor], rank: int, ranks: int, groups: int = 1) -> nn.Module:
    """What a rank of SGLang's has after loading these files. Args: groups: of ranks, among which the experts are divided."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks)[rank]

    replicas = max(1, ranks // KEY_HEADS)
    key_rows = KEY_HEADS * WIDTH // min(ranks, KEY_HEADS)
    first_key = rank // replicas * key_rows
    keys, values = (whole[f"self_attn.{name}_proj.weight"][first_key : first_key + key_rows] for name in "kv")
    known = {"tp_rank": rank, "tp_size": ranks}
    heads = {"kv_tp_rank": rank, "num_kv_head_replicas": replicas, "total_num_heads": HEADS, "total_num_kv_heads": KEY_HEADS}
    sizes = {"q_proj_shard_size": HEADS * WIDTH // ranks, "kv_proj_shard_size": key_rows, "v_proj_shard_size": key_rows}
    query = torch.cat([rows(whole["self_attn.q_proj.weight"]), keys, values])
    model = nn.Module()
    model.config = SimpleNamespace(model_type=kind)  # type: ignore[assignment]
    model.self_attn, model.mlp = nn.Module(), nn.Module()
    model.self_attn.qkv_proj = QueryPart(query, head_size=WIDTH, v_head_size=WIDTH, **known, **heads, **sizes)
    model.self_attn.o_proj = RowPart(whole["self_attn.o_proj.weight"].chunk(ranks, 1)[rank], **known)
    model.norm = HeldPart(whole["norm.weight"])
    model.norm.k_scale = nn.Parameter(torch.ones(()))  # as of attention in float8: SGLang's own, and in no file
    model.norm.k_scale._skip_weight_check = True  # type: ignore[attr-defined]
    first, end = (min(VOCABULARY, PADDED // ranks * (rank + i)) for i in range(2))
    table = torch.zeros(PADDED // ranks, HIDDEN)
    table[: end - first] = whole["embed_tokens.weight"][first:end]
    places = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)
    model.embed_tokens = VocabularyPart(table, shard_indices=places, org_vocab_size=VOCABULARY)
    if "mlp.gate_up_proj.weight" in whole or "mlp.gate_proj.weight" in whole:
        fused = whole.get("mlp.gate_up_proj.weight")
        both = [whole[f"mlp.{name}_proj.weight"] for name in ("gate", "up")] if fused is None else fused.chunk(2)
        model.mlp.gate_up_proj = MergedPart(torch.cat([rows(one) for one in both]), output_sizes=[FEED_FORWARD] * 2, **known)
    else:
        gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        of = {
            leaf: [torch.stack([whole[f"mlp.experts.{index}.{name}.{leaf}"] for index in range(EXPERTS)]) for name in (gate, up, down)]
            for leaf in ("weight", "weight_scale_inv")
        }
        model.mlp.experts = ExpertsPart(of, rank, ranks, groups)
    return model


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (8, 1), (2, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("kind", ["qwen3", "glm4", "qwen3_moe", "mixtral"])
def test_ranks_tell_the_parts_of_the_files_that_they_hold(plugin: Plugin, kind: str, ranks: int, groups: int) -> None:
    """Fused projections, experts, a vocabulary of 515 rows, and, over 8 ranks, 2 key heads that four ranks have each."""
    whole = files(kind)
    models = [rank_of(kind, whole, rank, ranks, groups) for rank in range(ranks)]
    found = RankParts.parse([plugin.texts(SPECS, model) for model in models], "engine")
    assert found.specs == {name: WeightSpec.of(name, tensor) for name, tensor in whole.items()}
    for model, parts in zip(models, found.by_rank, strict=True):
        held = {name: tensor for name, tensor, _ in plugin.weights.held_parts(model)}
        assert held.keys() == whole.keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, parts[name].of(whole[name]) if name in parts else whole[name]), name
        of_one_rank = {name for name in whole if name == "norm.weight" or (ranks == groups and ".experts." in name and held[name].numel())}
        assert parts.keys() == (whole.keys() - of_one_rank if ranks > 1 else set())
    if ranks == 8:
        assert [str(parts["self_attn.k_proj.weight"]) for parts in found.by_rank] == ["0:8:0-4"] * 4 + ["0:8:4-8"] * 4
        assert str(found.by_rank[7]["embed_tokens.weight"]) == "0:515:504-515"
    if ranks == 2 and kind == "glm4":
        assert str(found.by_rank[1]["mlp.gate_up_proj.weight"]) == "0:128:32-64,96-128"
    if (ranks, groups, kind) == (8, 4, "qwen3_moe"):
        told = [str(parts["mlp.experts.1.down_proj.weight"]) for parts in found.by_rank]
        assert told == ["1:64:", "1:64:", "1:64:0-32", "1:64:32-64", *["1:64:"] * 4]
        told = [str(parts["mlp.experts.1.up_proj.weight_scale_inv"]) for parts in found.by_rank]
        assert told == ["0:16:", "0:16:", "0:16:0-8", "0:16:8-16", *["0:16:"] * 4]
        parts, answered = found.by_rank[2], plugin.texts(CHECKSUMS, models[2])
        assert answered == {name: tensor_checksum(parts[name].of(whole[name]) if name in parts else whole[name]) for name in whole}


def test_ranks_whose_files_miss_rows_are_no_model(plugin: Plugin) -> None:
    whole = files("qwen3")
    told = [plugin.texts(SPECS, rank_of("qwen3", whole, rank, 8)) for rank in range(8)]
    with pytest.raises(EngineError, match="which is not all of it"):
        RankParts.parse(told[:7], "engine")


def test_a_rank_counts_the_buckets_of_an_update(plugin: Plugin) -> None:
    loads = [plugin.hooks["update_weights_from_tensor"], plugin.hooks["update_weights_from_distributed"]]
    good, bad, worse = (SimpleNamespace(success=not text, message=text) for text in ("", "no memory", "later"))
    plugin.hooks["begin_weight_update"](None)
    for load in loads:
        load(good, None)
    assert plugin.texts(RECEIPT, nn.Module()) == {"buckets": "2", "version": "7", "failure": "", "unfinished": "0"}
    loads[0](bad, None)
    loads[0](worse, None)
    plugin.version = "8"
    first = {"buckets": "2", "version": "8", "failure": "no memory", "unfinished": "0"}
    assert plugin.texts(RECEIPT, nn.Module()) == first, "the first reason counts"
    plugin.hooks["begin_weight_update"](None)
    assert plugin.texts(RECEIPT, nn.Module()) == {"buckets": "0", "version": "8", "failure": "", "unfinished": "0"}


def test_a_rank_counts_the_tokens_that_it_has_under_way_when_it_pauses(plugin: Plugin) -> None:
    """Each request once, wherever it stands: waiting, running, or in the batch that runs next. One that has ended isn't under way."""
    waits, runs, both, over = (
        SimpleNamespace(rid=str(tokens), output_ids=[0] * tokens, finished=lambda tokens=tokens: tokens == 9) for tokens in (2, 30, 400, 9)
    )
    running, last = SimpleNamespace(reqs=[runs, both, over]), SimpleNamespace(reqs=[both])
    plugin.hooks["pause_generation"](None, SimpleNamespace(waiting_queue=[waits], running_batch=running, last_batch=last))
    assert plugin.texts(RECEIPT, nn.Module())["unfinished"] == "432"
    plugin.hooks["pause_generation"](None, SimpleNamespace(waiting_queue=[], running_batch=SimpleNamespace(reqs=[]), last_batch=None))
    assert plugin.texts(RECEIPT, nn.Module())["unfinished"] == "0"


@pytest.mark.parametrize("action", [SPECS, CHECKSUMS])
def test_a_rank_that_fails_answers_all_the_same(plugin: Plugin, action: str) -> None:
    """SGLang collects the answers of all ranks next: one that raised would leave the others waiting for it."""

    def fails() -> Any:
        raise RuntimeError("out of memory")

    assert plugin.ask(action, fails)["checksums"] == {FAILURE: "RuntimeError: out of memory"}
    assert plugin.ask("snapshot", fails) == "SGLang's snapshot", "SGLang's own actions are its own"


def test_the_rank_that_failed_is_named(plugin: Plugin) -> None:
    ranks = [{"checksums": {"w": "1"}}, {"checksums": {FAILURE: "RuntimeError: out of memory"}}]
    manager = SimpleNamespace(check_weights=lambda *_: None, max_req_input_len=8)
    wait = lambda *_, **__: asyncio.sleep(0, (True, "Success.", ranks, None))  # noqa: E731
    process: Any = SimpleNamespace(raise_if_lost=lambda: None, wait=wait, engine=SimpleNamespace(tokenizer_manager=manager))
    engine = RolloutEngine("engine", EngineConfig(device="cpu", tensor_parallel=2), process, vocab_size=8, version=0)
    with pytest.raises(EngineError, match=r"engine: evenkeel\.checksums failed in rank 1 of 2: RuntimeError: out of memory"):
        asyncio.run(engine.weight_checksums())
