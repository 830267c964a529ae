"""`evenkeel diff-engines`: with the mode no operator differs; where one operator of the learner adds in another order, it is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from evenkeel.cli import app
from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import DataError
from evenkeel.diff_engines import EngineDiff, capture_engine, diff_engines, norms_of
from evenkeel.engines.agreement import compare
from evenkeel.engines.capture import Capture, compare_captures
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import FAMILIES
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from tests.e2e.launch import evenkeel
from tests.e2e.on_policy_cases import save_model
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("diff") / "model", "qwen3")


@pytest.fixture(scope="module")
def captured(folder: Path) -> tuple[PackedBatch, Capture]:
    config = EngineConfig(device="cpu", max_total_tokens=8192, batch_invariant=True)
    return asyncio.run(capture_engine(folder, config, prompts=6, tokens=12, seed=1))


def flipped_product(x: Tensor, weight: Tensor) -> Tensor:
    """The same sums from the other end."""
    return x.flip(-1).contiguous() @ weight.flip(-1).contiguous().t()


def other_norm(self: torch.nn.Module, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def other_rotation(x: Tensor, angles: Tensor, *_: object, **__: object) -> Tensor:
    """In float64, so rounded once. x: [R, heads, width]; angles: [R, 1, 1, width]."""
    wide, angle = x.double(), angles.double().view(len(x), 1, -1)
    left, right = wide.chunk(2, -1)
    return (wide * angle.cos() + torch.cat([-right, left], -1) * angle.sin()).float()


def other_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[n, G, R, Q, width] of queries of that shape, bias [n, 1, 1, Q, K]."""
    heads = query.shape[2]
    k, v = (x.repeat_interleave(heads, 1) for x in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query.flatten(1, 2), k, v, attn_mask=bias[:, 0], scale=scale)
    return output.unflatten(1, (-1, heads)), query[..., 0]


SWITCHED_OFF: dict[str, tuple[str, Callable[..., object], str]] = {
    "norm": ("evenkeel.learner.model.layers.HFRMSNorm.forward", other_norm, "layers.0.norm"),
    "linear": (
        "evenkeel.learner.model.layers.BatchInvariantColumnLinear._forward_impl",
        lambda _, input, weight, *a, **k: flipped_product(input, weight),
        "layers.0.qkv",
    ),
    "rotary": ("megatron.core.transformer.attention.apply_rotary_pos_emb", other_rotation, "layers.0.rotary_q"),
    "attention": ("evenkeel.learner.model.layers.attention", other_attention, "layers.0.attention"),
    "silu": ("evenkeel.learner.model.model.silu", lambda x: x * torch.sigmoid(x), "layers.0.silu"),
    "head": ("evenkeel.learner.training.logprobs.head_logits", flipped_product, "logits"),
    "log_softmax": ("evenkeel.learner.training.logprobs.log_softmax", lambda z, t: torch.softmax(z / t, -1).log(), "logprobs"),
}  # fmt: skip
"""Operator -> what is replaced in the learner, by what, and where the two engines then part."""


def diff(captured: tuple[PackedBatch, Capture], folder: Path) -> EngineDiff:
    batch, of_engine = captured
    rank = LearnerRank(LearnerConfig(device="cpu", batch_invariant=True, tokens_per_microbatch=300))
    rank.load(folder)
    logprobs, of_learner = rank.capture(batch)
    return EngineDiff(compare_captures(of_engine, of_learner), compare(batch, logprobs), tuple(batch.offsets.tolist()))


def test_nothing_differs_in_the_mode(captured: tuple[PackedBatch, Capture], folder: Path) -> None:
    found = diff(captured, folder)
    assert found.parting is None, str(found)
    assert len(found.gaps) == 1 + 2 * 14 - 1 + 3, "embedding, 14 operators a layer without a first residual, and the end"
    read = captured[0].num_tokens - captured[0].num_sequences  # the last token of an answer is never read
    assert {gap.rows for gap in found.gaps if gap.place.operator != "logits"} == {read}
    assert str(found).startswith("equal: 31 operators, 72 sampled tokens")


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_the_operator_that_is_switched_off_is_named(
    captured: tuple[PackedBatch, Capture], folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target, replacement, place = SWITCHED_OFF[name]
    monkeypatch.setattr(target, replacement)
    if name == "head":
        monkeypatch.setattr("evenkeel.learner.learner_rank.head_logits", replacement)
    found = diff(captured, folder)
    assert found.parting == place
    assert place in str(found)
    if name != "log_softmax":
        at = next(gap for gap in found.gaps if str(gap.place) == place)
        assert 0 < at.largest < 1e-3 and 0 < at.differing <= at.rows


@pytest.mark.parametrize(("has_gpu", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_unless_asked_for_another_the_type_is_that_of_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, dtype: str
) -> None:
    """SGLang computes no attention in float32 on a GPU."""
    found: list[str] = []

    async def capture(model: Path, config: EngineConfig, **_: object) -> None:
        found.append(config.resolved_dtype)
        raise DataError("enough is known")

    monkeypatch.setattr("evenkeel.diff_engines.capture_engine", capture)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    done = CliRunner().invoke(app, ["diff-engines", str(folder), "--no-true-on-policy"])
    assert found == [dtype] and "enough is known" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_operators_are_those_of_the_family(tmp_path: Path, family: str) -> None:
    """Both engines have them, with their own kernels: what differs is rounding."""
    folder = save_tiny_model(save_tiny_tokenizer(tmp_path / "m"), family, tie=False)
    found = diff_engines(folder, true_on_policy=False, dtype="float32", prompts=3, tokens=4)
    kind = FAMILIES[family]
    shows_qk_norm = kind.qk_norm != "none" and family != "olmo2"  # SGLang's OLMo 2 doesn't call the modules
    in_a_layer = 5 + 2 * shows_qk_norm + 3 * (kind.experts is None) + len(norms_of(family))  # qkv, both turned ...
    before = [norm for norm in norms_of(family).values() if norm in ("norm", "mlp_norm")]
    residuals = 2 * len(before) - ("norm" in before)  # the first layer has none
    assert len(found.gaps) == 2 * in_a_layer + residuals + 4  # embedding, and three at the end
    assert max(gap.largest for gap in found.gaps) < 1e-3 and found.agreement.largest_difference < 1e-4, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "said"), [((), 0, "equal: "), (("--no-true-on-policy",), 4, "the engines part at layers.")])
def test_exit_codes_of_the_command(folder: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = evenkeel("diff-engines", str(folder), "--prompts", "3", "--tokens", "4", *words, timeout_s=300.0)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr
    assert "attention" in done.stdout
    steps = ("loading torch", "starting SGLang", "SGLang answers 3 random prompts", "into Megatron", "Megatron computes the same", "done")
    places = [done.stderr.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), "each step is said with its seconds, in order, while the command runs"
