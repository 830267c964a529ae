"""Which layers a model is made of, and that TransformerEngine's are the same tree of parameters as Megatron's own.

The choice is tested everywhere. The tree needs TransformerEngine itself, whose extension is built against CUDA: it is imported without a
GPU, and its modules are built here on the CPU, but they compute on a GPU only. What they compute is tested nowhere in this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from evenkeel.correction.errors import ConfigError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf import folder as hf_folder
from evenkeel.learner.model import layers, megatron, model, parallel
from evenkeel.learner.weights import convert
from tests.learner.learner_cases import run_ranks, save_model
from tests.learner.moe_cases import save_moe

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = LearnerConfig(dtype="bfloat16")


@pytest.mark.parametrize(
    ("settings", "device", "has_te", "chosen"),
    [
        ({"dtype": "float32"}, CPU, True, "local"),
        ({"dtype": "bfloat16"}, CPU, True, "local"),
        ({"dtype": "bfloat16"}, CUDA, False, "local"),
        ({"dtype": "bfloat16"}, CUDA, True, "transformer_engine"),
        ({"dtype": "bfloat16", "layers": "transformer_engine"}, CUDA, True, "transformer_engine"),
        ({"dtype": "bfloat16", "layers": "local"}, CUDA, True, "local"),
        ({"dtype": "float32"}, CUDA, True, "local"),  # in TF32 it would be far from the engine's float32
        ({"dtype": "bfloat16", "batch_invariant": True}, CUDA, True, "batch_invariant"),
        ({"batch_invariant": True}, CPU, False, "batch_invariant"),
    ],
)
def test_auto_takes_transformer_engine_only_where_it_can_serve(
    settings: dict[str, Any], device: torch.device, has_te: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "HAVE_TE", has_te)
    assert layers.choose(LearnerConfig(**settings), device) == chosen


def test_what_cannot_be_had_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LearnerConfig(dtype="bfloat16", layers="transformer_engine")
    with pytest.raises(ConfigError, match=r"learner\.layers = transformer_engine: its kernels need a GPU.* device cpu"):
        layers.choose(asked, CPU)
    monkeypatch.setattr(megatron, "HAVE_TE", False)
    with pytest.raises(ConfigError, match=r"package transformer-engine .*-c constraints-gpu\.txt -e '\.\[transformer-engine\]'"):
        layers.choose(asked, CUDA)
    for settings, reason in (({"batch_invariant": True}, "batch_invariant = true"), ({"dtype": "float32"}, "TF32")):
        with pytest.raises(ValidationError, match=reason):
            LearnerConfig(**{"dtype": "bfloat16", "layers": "transformer_engine"} | settings)
        monkeypatch.setattr(megatron, "HAVE_TE", True)
        with pytest.raises(ConfigError, match=reason):  # as true_on_policy sets batch_invariant, without validation
            layers.choose(asked.model_copy(update=settings), CUDA)


def test_a_person_is_told_which_layers_and_why_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.describe(LearnerConfig(dtype="float32"), CPU) == "local layers"
    assert "TF32" in layers.describe(LearnerConfig(dtype="float32"), CUDA)
    monkeypatch.setattr(megatron, "HAVE_TE", False)
    assert "transformer-engine isn't installed" in layers.describe(BF16, CUDA)
    assert layers.describe(BF16.model_copy(update={"layers": "local"}), CUDA) == "local layers"


def _needs_transformer_engine() -> Any:
    return pytest.importorskip(
        "transformer_engine.pytorch", reason="names and shapes of TransformerEngine's layers: its torch extension isn't installed"
    )


def _tree(policy: model.PolicyModel) -> dict[str, tuple[Any, ...]]:
    """What of each parameter conversion, gradient sums and norms go by."""
    marks = ("tensor_model_parallel", "partition_dim", "sequence_parallel", "allreduce")
    defaults = (False, -1, False, True)
    return {
        name: (tuple(p.shape), p.dtype, p.device, *(getattr(p, mark, default) for mark, default in zip(marks, defaults, strict=True)))
        for name, p in policy.named_parameters()
    }


def _trees_and_weights(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any]) -> Any:
    """Trees of the local model and of TransformerEngine's; kinds of the latter's modules; the folder's weights through it."""
    config = LearnerConfig(dtype="bfloat16", **settings).on_this_machine()
    placement = parallel.join(config, rank, ranks, "127.0.0.1", port)
    hf_config, weights = hf_folder.read_config(folder), hf_folder.HFWeights(folder)
    try:
        (local,) = model.build(hf_config, config.model_copy(update={"layers": "local"}), placement)
        with pytest.MonkeyPatch.context() as patch:
            # Its linear layers refuse to be built where torch sees no GPU, though that takes none.
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(layers, "choose", lambda *_: "transformer_engine")
            (other,) = model.build(hf_config, config, placement)
        convert.load(other, hf_config, weights.__getitem__, placement)
        through = {name: tensor.cpu().clone() for name, tensor in convert.export(other, hf_config, placement)}
        modules = {name: f"{type(m).__module__}.{type(m).__name__}" for name, m in other.named_modules()}
        return _tree(local), _tree(other), modules, through, {name: weights[name].to(torch.bfloat16) for name in through}
    finally:
        parallel.leave()


@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        ("qwen3", 1, {}),
        ("qwen2", 1, {}),
        ("llama", 2, {"tensor_parallel": 2}),
        ("qwen3", 2, {"tensor_parallel": 2, "sequence_parallel": True}),
        ("qwen3_moe", 2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    ],
)
def test_transformer_engine_has_the_parameters_of_the_local_layers(
    tmp_path: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    _needs_transformer_engine()
    folder = save_moe(tmp_path / "m") if family == "qwen3_moe" else save_model(tmp_path / "m", family)
    for local, other, modules, through, expected in run_ranks(_trees_and_weights, folder, settings, ranks=ranks):
        assert other == local and len(local) > 10
        assert modules["decoder.layers.0.self_attention.linear_qkv"].endswith("transformer_engine.TEColumnParallelLinear")
        assert modules["decoder.layers.0.self_attention.linear_proj"].endswith("transformer_engine.TERowParallelLinear")
        norms = [name for name in modules if name.endswith("layernorm") and f"{name}.weight" in other]
        assert {modules[name] for name in norms} == {"transformer_engine.pytorch.module.rmsnorm.RMSNorm"} and len(norms) >= 5
        assert modules["decoder.layers.0.self_attention.core_attention"] == "evenkeel.learner.model.attention.PackedAttention"
        assert all(torch.equal(through[name], expected[name]) for name in expected) and len(expected) > 10
