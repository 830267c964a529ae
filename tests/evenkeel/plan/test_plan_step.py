"""Memory of a whole training step on a CPU, and of a forward pass with other weights, compared with RankMemory.total."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.correction.batch import CorrectedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import defer
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model import layers
from evenkeel.plan.memory import rank_memory
from evenkeel.plan.shape import ModelShape
from tests.evenkeel.plan.test_plan import held
from tests.learner.learner_cases import TIS, grouped_batch, learner_on
from tests.learner.test_learner_logprobs import LiveBytes
from tests.tiny_models import save_tiny_model

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
TOKENS, LONGEST = 256, 128
"""Two sequences of more tokens than float32's attention is widened for on a CPU."""
LARGE_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "intermediate_size": 1024, "vocab_size": 200}
LARGE_ATTENTION: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 200}
LARGE_VOCABULARY: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 12_000}


def all_in_the_loss(correction: CorrectionConfig, passes: int = 1) -> CorrectedBatch:
    """All tokens but the first of each sequence, as a plan takes it. Args: passes: micro-batches of TOKENS."""
    count = passes * TOKENS // LONGEST
    batch = grouped_batch([([1] * count, [LONGEST - 1] * count)])
    is_first = torch.zeros_like(batch.loss_mask).index_fill(0, batch.offsets[:-1], True)
    return defer(replace(batch, loss_mask=~is_first), correction)


def most_in_the_passes(learner: LearnerRank, correction: CorrectionConfig, passes: int = 1) -> int:
    """The most bytes alive before the update of a step, without the weights and their gradients.

    Args: passes: micro-batches of the step, over all data-parallel ranks.
    """
    parameters = [one for policy in learner._policies for one in policy.parameters()]
    with LiveBytes(*parameters, *(one.main_grad for one in parameters)) as probe:
        optimizer, peaks = learner.optimizer, list[int]()
        finish = optimizer.finish
        optimizer.finish = lambda *a, **k: (peaks.append(probe.peak), finish(*a, **k))[1]  # type: ignore[method-assign]
        done = learner.step(all_in_the_loss(correction, passes), correction, step=0)
    assert done.microbatches * learner.placement.data_parallel == passes
    return peaks[0]


class FromAnotherDevice:
    """A tensor of which `to` makes a copy, as it does on its way from the host to a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def to(self, device: torch.device) -> Tensor:
        return self._tensor.to(device, copy=True)


def most_with_other_weights(learner: LearnerRank, passes: int = 1) -> int:
    """The most bytes alive during a forward pass with weights from another device, without the model's own and their gradients."""
    parameters = [one for policy in learner._policies for one in policy.parameters()]
    others: list[Any] = [FromAnotherDevice(one) for one in learner.weights_copy()]
    batch = all_in_the_loss(TIS, passes).batch
    with LiveBytes(*parameters, *(one.main_grad for one in parameters)) as probe:
        learner.logprobs_with(others, batch)
    return probe.peak


def measured_and_planned(
    folder: Path,
    family: str,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    correction: CorrectionConfig = TIS,
    planned_for: str = "cpu",
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(what the rank holds, what a step takes in addition), in bytes, of a rank and of its plan.

    Args: planned_for: the plan's device, if the rank is made to compute as on another one.
    """
    save_tiny_model(folder, family, tie=False, pad_token_id=None, **(SIZES | sizes))
    settings = {"device": "cpu", "tokens_per_microbatch": TOKENS, "logprob_chunk_tokens": 128, "shared_prompts": False} | settings
    with learner_on(folder, **settings) as learner:
        of_passes = most_in_the_passes(learner, correction)
        measured = sum(held(learner)), of_passes
    planned = rank_memory(
        ModelShape.read(folder),
        LearnerConfig(**settings | {"device": planned_for}).on_this_machine(),
        longest=LONGEST,
        has_entropy_loss=correction.entropy_coefficient > 0,
    )
    state = planned.weights + planned.gradients + planned.optimizer
    return measured, (state, planned.total - state)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [LARGE_LAYERS, LARGE_VOCABULARY], ids=["layers", "vocabulary"])
def test_a_step_takes_what_a_plan_says(tmp_path: Path, sizes: dict[str, Any], dtype: str, recompute: bool) -> None:
    """With layers much larger than the head the peak is in the backward pass of the last, with a large vocabulary in the head. The
    state is equal to the byte, so that 2 % of the rest is less than 1 % of the whole."""
    settings = {"dtype": dtype, "recompute_activations": recompute}
    (state, passes), planned = measured_and_planned(tmp_path, "qwen3", sizes, settings)
    assert state == planned[0]
    assert passes == pytest.approx(planned[1], rel=0.02)
    assert state + passes == pytest.approx(sum(planned), rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_chunk_has_its_peak_where_entropy_in_the_loss_says(tmp_path: Path, dtype: str) -> None:
    """With all tokens in one chunk the tables of the logits are larger than the matrix's gradient: in float32 one and a part of a second in
    the forward pass, and again in the backward pass if entropy is in the loss."""
    settings = {"dtype": dtype, "logprob_chunk_tokens": TOKENS, "recompute_activations": True}
    found = []
    for name, correction in (("without", TIS), ("with", TIS.model_copy(update={"entropy_coefficient": 0.01}))):
        (_, passes), planned = measured_and_planned(tmp_path / name, "qwen3", LARGE_VOCABULARY, settings, correction)
        assert passes == pytest.approx(planned[1], rel=0.03)
        found.append(passes)
    assert found[1] > 1.05 * found[0], "by what a CPU has of a second table at a time"


WITH_OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "float32", LARGE_LAYERS),
    ("qwen3", "bfloat16", LARGE_LAYERS),
    ("qwen3", "bfloat16", LARGE_VOCABULARY),
    ("qwen3", "float32", LARGE_VOCABULARY),
    ("qwen3", "bfloat16", LARGE_ATTENTION),
    ("llama", "float32", LARGE_ATTENTION),
    ("glm4", "bfloat16", LARGE_LAYERS),
    ("qwen3_moe", "bfloat16", LARGE_LAYERS | {"moe_intermediate_size": 160}),
    ("qwen3_moe", "float32", LARGE_LAYERS | {"moe_intermediate_size": 512}),
]
RECOMPUTED = (0, 2, 7)
"""Of them, in the fast suite: a forward pass without gradients has nothing to recompute, and a step that has is that of the other tests."""


@pytest.mark.parametrize(
    ("family", "dtype", "sizes", "recompute"),
    [
        *((*case, False) for case in WITH_OTHERS),
        *(pytest.param(*case, True, marks=[] if i in RECOMPUTED else pytest.mark.slow) for i, case in enumerate(WITH_OTHERS)),
    ],
)
def test_other_weights_are_there_when_no_layer_s_activations_are(
    tmp_path: Path, family: str, dtype: str, sizes: dict[str, Any], recompute: bool
) -> None:
    """They are swapped in for a forward pass without gradients, and gone before the next step: the peak is the larger of the two."""
    save_tiny_model(tmp_path, family, tie=False, pad_token_id=None, **(SIZES | sizes))
    settings: dict[str, Any] = {"dtype": dtype, "recompute_activations": recompute, "device": "cpu", "tokens_per_microbatch": TOKENS}
    settings |= {"logprob_chunk_tokens": 128, "shared_prompts": False}
    with learner_on(tmp_path, **settings) as learner:
        with_others, training = most_with_other_weights(learner, passes=2), most_in_the_passes(learner, TIS)
        again = most_with_other_weights(learner)
        state = sum(held(learner))
    planned = rank_memory(ModelShape.read(tmp_path), LearnerConfig(**settings).on_this_machine(), longest=LONGEST, loads_other=True)
    assert with_others == pytest.approx(planned.other + planned.forward, rel=0.03)
    assert again == pytest.approx(with_others, rel=0.03), "neither a second pass nor the optimizer's state adds to it"
    assert state == planned.state
    assert state + max(with_others, training) == pytest.approx(planned.total, rel=0.03)
    assert planned.total < planned.state + planned.training + planned.other


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {}),
        ("qwen3", {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("qwen3", {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}),
        ("llama", {}),
        ("glm4", {}),
        ("olmo2", {}),
        ("qwen3_moe", {"moe_intermediate_size": 64}),
        ("qwen3_moe", {"moe_intermediate_size": 160}),
        ("mixtral", {"intermediate_size": 96}),
    ],
    ids=["plain", "few-heads", "many-heads", "llama", "norms-after", "no-norm-before", "experts", "wide-experts", "mixtral"],
)
def test_a_narrow_feed_forward_part_leaves_the_peak_to_others(
    tmp_path: Path, family: str, sizes: dict[str, Any], dtype: str, recompute: bool
) -> None:
    """To the end of the forward pass, to the norm before that part or after it, or to attention, whose gradients are all there; of narrow
    experts, whose rows are more than what is made of them, to their second product. Of what comes on top of the state."""
    settings = {"dtype": dtype, "recompute_activations": recompute}
    (state, passes), planned = measured_and_planned(tmp_path, family, LARGE_ATTENTION | sizes, settings)
    assert state == planned[0]
    assert passes == pytest.approx(planned[1], rel=0.03)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("family", "dtype"), [("glm4", "bfloat16"), ("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32")])
def test_norms_after_products_and_experts(tmp_path: Path, family: str, dtype: str, recompute: bool) -> None:
    """With a wide feed-forward part."""
    sizes = LARGE_LAYERS | {"num_hidden_layers": 2} | ({"moe_intermediate_size": 160} if family == "qwen3_moe" else {})
    settings = {"dtype": dtype, "recompute_activations": recompute}
    measured, planned = measured_and_planned(tmp_path, family, sizes, settings)
    assert measured[0] == planned[0]
    assert measured[1] == pytest.approx(planned[1], rel=0.03)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_experts_product_of_a_gpu(tmp_path: Path, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, which torch has on a CPU too. It reads the matrices of all experts in one piece, and gives their gradients so: with many
    experts that is the peak, and the loop's plan is too low by it."""
    monkeypatch.setattr(layers, "grouped_product", layers._by_kernel)
    sizes = LARGE_LAYERS | {"num_hidden_layers": 2, "moe_intermediate_size": 512, "num_experts": 32}
    settings = {"dtype": "bfloat16", "recompute_activations": recompute}
    measured, planned = measured_and_planned(tmp_path / "gpu", "qwen3_moe", sizes, settings, planned_for="cuda")
    assert measured[1] == pytest.approx(planned[1], rel=0.03)
    _, by_loop = measured_and_planned(tmp_path / "cpu", "qwen3_moe", sizes, settings)
    assert by_loop[1] < 0.9 * measured[1]
