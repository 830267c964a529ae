"""Families whose layers differ from Qwen3's are trained as Hugging Face and autograd would train them: norms after attention and the
feed-forward part, norms over all heads, other rotary angles, other experts. Logits and round trips: test_learner_model.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenkeel.correction.correct import correct
from evenkeel.correction.errors import ConfigError
from evenkeel.engines.capture import OperatorPlace
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.folder import HFWeights, read_config
from evenkeel.learner.model_fit import check_model
from tests.learner.learner_cases import TIS, gradients, hf_model, largest_difference, learner_on, off_policy_batch, random_batch, save_model
from tests.learner.moe_cases import expert_gradients
from tests.learner.test_learner_step import ppo_with_truncated_weights

MIXTRAL_NAMES = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""In files, for those in memory."""


def as_in_files(name: str, family: str) -> str:
    for ours, theirs in MIXTRAL_NAMES.items() if family == "mixtral" else ():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("family", ["mistral", "olmo2", "glm4", "mixtral", "olmoe"])
def test_gradient_equals_hugging_face_and_autograd(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "m", family, tie=False)
    reference = hf_model(folder)
    with learner_on(folder, learning_rate=0.0, clip_grad=0.0, tokens_per_microbatch=90) as learner:
        batch = off_policy_batch(learner)
        learner.step(correct(batch, TIS), TIS, step=0)
        ours = gradients(learner)
    ppo_with_truncated_weights(reference, batch)[0].backward()
    in_memory = {name: parameter.grad for name, parameter in reference.named_parameters()}
    theirs: dict[str, Tensor] = expert_gradients(reference) if family in ("mixtral", "olmoe") else in_memory
    theirs = {as_in_files(name, family): gradient for name, gradient in theirs.items()}
    assert ours.keys() == theirs.keys()
    assert largest_difference(ours, theirs) < 2e-5
    norms = [gradient for name, gradient in ours.items() if "norm" in name]
    assert norms and all(float(gradient.abs().max()) > 0 for gradient in norms)


@pytest.mark.parametrize("family", ["olmo2", "olmoe"])
def test_norms_over_all_heads_are_refused_on_several_tensor_parallel_ranks(tmp_path: Path, family: str) -> None:
    hf_config = read_config(save_model(tmp_path / "m", family, tie=False))
    check_model(LearnerConfig(data_parallel=2), hf_config)
    with pytest.raises(ConfigError, match=rf"tensor_parallel = 2: {family} normalises queries and keys over the channels of all heads"):
        check_model(LearnerConfig(tensor_parallel=2), hf_config)


def test_a_norm_after_a_product_is_in_its_type(tmp_path: Path) -> None:
    """In bfloat16 as well: logprobs stay within its rounding of Hugging Face's in float32."""
    folder = save_model(tmp_path / "m", "olmo2", tie=False)
    with learner_on(folder) as exact, learner_on(folder, dtype="bfloat16") as rounded:
        batch = off_policy_batch(exact)
        difference = (exact.logprobs(batch) - rounded.logprobs(batch))[batch.loss_mask].abs()
    assert 0 < float(difference.median()) < 0.05 and torch.isfinite(difference).all()


IN_EVERY_LAYER = {"qkv", "rotary_q", "rotary_k", "attention", "projection"}
BEFORE = {"residual", "norm", "mlp_residual", "mlp_norm"}
DENSE = {"gate_up", "silu", "down"}
QK_NORM = {"q_norm", "k_norm"}


@pytest.mark.parametrize(
    ("family", "operators"),
    [
        ("llama", IN_EVERY_LAYER | BEFORE | DENSE),
        ("olmo2", IN_EVERY_LAYER | QK_NORM | DENSE | {"attention_norm", "feed_forward_norm"}),
        ("glm4", IN_EVERY_LAYER | BEFORE | DENSE | {"attention_norm", "feed_forward_norm"}),
        ("qwen3_moe", IN_EVERY_LAYER | BEFORE | QK_NORM),
    ],
)
def test_a_capture_has_the_operators_that_the_family_has(tmp_path: Path, family: str, operators: set[str]) -> None:
    """As Hugging Face's module of a layer names them, which SGLang follows: a place that only one engine shows can't be compared. A product
    with a norm after it is what enters the norm."""
    with learner_on(save_model(tmp_path / "m", family, tie=False)) as learner:
        _, found = learner.capture(random_batch(0, groups=1))
    assert {place.operator for place in found if place.layer == 1} == operators
    assert {place.operator for place in found if place.layer is None} == {"embedding", "final_residual", "final_norm", "logits"}
    if "attention_norm" in operators:
        product, normalised = (found[OperatorPlace(name, 1)].values for name in ("projection", "attention_norm"))
        weight = learner_norm(tmp_path / "m", family)
        assert torch.allclose(normalised, torch.nn.functional.rms_norm(product, weight.shape, weight, 1e-6), atol=1e-5)


def learner_norm(folder: Path, family: str) -> Tensor:
    """Weight of the norm after the attention in layer 1, as the folder has it."""
    name = "post_attention_layernorm" if family == "olmo2" else "post_self_attn_layernorm"
    return HFWeights(folder)[f"model.layers.1.{name}.weight"]
