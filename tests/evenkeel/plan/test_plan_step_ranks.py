"""Memory of a whole training step, and of a pass with other weights, on each of two ranks, and what a plan says of their stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.plan.memory import stage_memory
from evenkeel.plan.shape import ModelShape
from tests.evenkeel.plan.test_plan import held
from tests.evenkeel.plan.test_plan_step import (
    LARGE_LAYERS,
    LARGE_VOCABULARY,
    LONGEST,
    SIZES,
    TOKENS,
    most_in_the_passes,
    most_with_other_weights,
)
from tests.learner.learner_cases import TIS, run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow

TENSOR: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {"data_parallel": 2, "expert_parallel": 2}
OF_EXPERTS: dict[str, Any] = LARGE_LAYERS | {"num_hidden_layers": 2, "moe_intermediate_size": 160}


def bytes_of_a_step(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any], passes: int) -> tuple[int, int, int]:
    """(pipeline stage, bytes that the rank holds, most bytes of its passes on top of them)."""
    learner = LearnerRank(LearnerConfig(**settings), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    of_passes = most_in_the_passes(learner, TIS, passes)
    found = learner.placement.pipeline_rank, sum(held(learner)), of_passes
    learner.close()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("family", "sizes", "split", "passes"),
    [
        ("qwen3", LARGE_LAYERS, TENSOR, 1),
        ("qwen3", LARGE_VOCABULARY, TENSOR, 1),
        ("qwen3", LARGE_LAYERS, {"pipeline_parallel": 2}, 4),
        ("qwen3", LARGE_VOCABULARY, {"pipeline_parallel": 2}, 4),
        ("qwen3_moe", OF_EXPERTS, EXPERTS, 2),
    ],
    ids=["tensor-layers", "tensor-vocabulary", "pipeline-layers", "pipeline-vocabulary", "experts"],
)
def test_a_rank_s_step_takes_what_a_plan_says(
    tmp_path: Path, family: str, sizes: dict[str, Any], split: dict[str, Any], passes: int, recompute: bool
) -> None:
    """Within 3 % in all, and within 5 % of what comes on top of the state, which is equal to the byte. Experts' rows are where the experts
    are: there on average, and in all."""
    folder = save_tiny_model(tmp_path, family, tie=False, pad_token_id=None, **(SIZES | sizes))
    settings = {
        "device": "cpu", "dtype": "bfloat16", "tokens_per_microbatch": TOKENS, "logprob_chunk_tokens": 128, "shared_prompts": False,
        "recompute_activations": recompute,
    } | split  # fmt: skip
    found = run_ranks(bytes_of_a_step, folder, settings, passes)
    shape, config = ModelShape.read(folder), LearnerConfig(**settings).on_this_machine()
    measured, planned, on_top = [], [], []
    for stage, state, of_passes in found:
        memory = stage_memory(shape, config, stage, longest=LONGEST)
        assert state == memory.weights + memory.gradients + memory.optimizer
        measured.append(state + of_passes)
        planned.append(memory.total)
        on_top.append(of_passes / (memory.total - state))
    if split is EXPERTS:
        assert sum(measured) == pytest.approx(sum(planned), rel=0.03)
    else:
        assert measured == pytest.approx(planned, rel=0.03)
        assert on_top == pytest.approx([1.0, 1.0], rel=0.05)


def bytes_with_other_weights(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """(pipeline stage, most bytes of a forward pass with other weights)."""
    learner = LearnerRank(LearnerConfig(**settings), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = learner.placement.pipeline_rank, most_with_other_weights(learner, passes=2)
    learner.close()
    return found


@pytest.mark.parametrize(
    ("family", "sizes", "split"),
    [
        ("qwen3", LARGE_LAYERS, TENSOR),
        ("qwen3", LARGE_VOCABULARY, TENSOR),
        ("qwen3", LARGE_LAYERS, {"pipeline_parallel": 2}),
        ("qwen3_moe", OF_EXPERTS, EXPERTS),
    ],
    ids=["tensor-layers", "tensor-vocabulary", "pipeline-layers", "experts"],
)
def test_a_rank_s_pass_with_other_weights_takes_what_a_plan_says(
    tmp_path: Path, family: str, sizes: dict[str, Any], split: dict[str, Any]
) -> None:
    """Within 5 % of what comes on top of the state: the other weights and a forward pass with them. Of experts in all; each rank's peak is
    in the layer where its experts got most rows."""
    folder = save_tiny_model(tmp_path, family, tie=False, pad_token_id=None, **(SIZES | sizes))
    settings = {
        "device": "cpu", "dtype": "bfloat16", "tokens_per_microbatch": TOKENS, "logprob_chunk_tokens": 128, "shared_prompts": False,
    } | split  # fmt: skip
    shape, config = ModelShape.read(folder), LearnerConfig(**settings).on_this_machine()
    found = run_ranks(bytes_with_other_weights, folder, settings)
    planned = [stage_memory(shape, config, stage, longest=LONGEST, loads_other=True) for stage, _ in found]
    expected = [memory.other + memory.forward for memory in planned]
    if split is EXPERTS:
        assert sum(most for _, most in found) == pytest.approx(sum(expected), rel=0.05)
    else:
        assert [most for _, most in found] == pytest.approx(expected, rel=0.05)
