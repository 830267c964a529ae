"""What each of several ranks holds is what a plan says, byte by byte but for the padding of a shared optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.correct import correct
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.plan.memory import state_bytes
from evenkeel.plan.shape import ModelShape
from tests.evenkeel.plan.test_plan import held
from tests.learner.learner_cases import TIS, off_policy_batch, run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow


def bytes_of_a_rank(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> tuple[int, tuple[int, int, int]]:
    """(pipeline stage, bytes of weights, gradients and optimizer)."""
    learner = LearnerRank(LearnerConfig(device="cpu", **split), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    learner.step(correct(off_policy_batch(learner), TIS), TIS, step=0)
    found = learner.placement.pipeline_rank, held(learner)
    learner.close()
    return found


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
        ("llama", {"pipeline_parallel": 2, "dtype": "float32"}),
        ("qwen3", {"data_parallel": 2, "distributed_optimizer": True, "dtype": "bfloat16"}),
        ("qwen3_moe", {"data_parallel": 2, "expert_parallel": 2, "dtype": "bfloat16"}),
        ("qwen3_moe", {"data_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True, "dtype": "bfloat16"}),
        ("qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
        ("qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": True, "dtype": "bfloat16"}),
    ],
)
def test_every_rank_holds_what_was_planned(tmp_path: Path, family: str, split: dict[str, Any]) -> None:
    folder, config = save_tiny_model(tmp_path, family, tie=False, pad_token_id=None), LearnerConfig(device="cpu", **split).on_this_machine()
    shape = ModelShape.read(folder)
    found = run_ranks(bytes_of_a_rank, folder, split)
    for stage, (weights, gradients, _) in found:
        assert (weights, gradients) == state_bytes(shape, config, stage)[:2]
    optimizers = [optimizer for _, (_, _, optimizer) in found]
    planned = [state_bytes(shape, config, stage)[2] for stage, _ in found]
    if config.distributed_optimizer:  # ranks share a buffer at places that are multiples of 128 elements
        assert sum(optimizers) == pytest.approx(sum(planned), rel=0.001)
    else:
        assert optimizers == planned
