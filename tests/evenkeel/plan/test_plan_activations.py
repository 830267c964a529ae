"""Activations of each of two ranks, whose rows, heads, stages and experts are parts: what autograd keeps there is what a plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.correction.correct import defer
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.plan.memory import layer_activations, stage_memory
from evenkeel.plan.shape import ModelShape
from tests.evenkeel.plan.test_plan import kept_for_backward
from tests.learner.learner_cases import TIS, grouped_batch, run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
TOKENS = 256


def kept_on_a_rank(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any]) -> int:
    learner = LearnerRank(LearnerConfig(device="cpu", **settings), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = kept_for_backward(learner, TOKENS)
    learner.close()
    return found


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("qwen3", {"tensor_parallel": 2}),
        ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
        ("llama", {"tensor_parallel": 2, "sequence_parallel": True, "recompute_activations": True}),
        ("qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    ],
)
def test_what_two_ranks_keep_of_a_layer_more(tmp_path: Path, family: str, split: dict[str, Any]) -> None:
    """On average: an expert's rows are where it is."""
    settings = split | {"dtype": "bfloat16"}
    folders = [save_tiny_model(tmp_path / str(n), family, tie=False, num_hidden_layers=n, **SIZES) for n in (1, 2)]
    one, two = (sum(run_ranks(kept_on_a_rank, folder, settings)) / 2 for folder in folders)
    planned = layer_activations(ModelShape.read(folders[0]), LearnerConfig(device="cpu", **settings).on_this_machine()) * TOKENS
    assert two - one == pytest.approx(planned, rel=0.03)


class Kept:
    """What autograd keeps at a time, in bytes: a storage counts as long as a tensor of it is kept."""

    def __init__(self, learner: LearnerRank) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for chunk in learner._policies for parameter in chunk.parameters()}
        self._uses: dict[int, int] = {}
        self._now = self.most = 0

    def pack(self, tensor: Tensor) -> Any:
        return One(self, tensor)

    def add(self, storage: Any, uses: int) -> None:
        key = storage.data_ptr()
        if key in self._weights:
            return
        before = self._uses.get(key, 0)
        self._uses[key] = before + uses
        self._now += storage.nbytes() * ((before + uses > 0) - (before > 0))
        self.most = max(self.most, self._now)


class One:
    """A tensor for as long as autograd has it."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor, self._kept, self._storage = tensor, kept, tensor.untyped_storage()
        kept.add(self._storage, 1)

    def __del__(self) -> None:
        self._kept.add(self._storage, -1)


def most_in_a_step(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """(pipeline stage, most bytes kept at a time) of a step of eight passes of 64 tokens."""
    config = LearnerConfig(device="cpu", tokens_per_microbatch=64, shared_prompts=False, **settings)
    learner = LearnerRank(config, rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    kept, batch = Kept(learner), defer(grouped_batch([([16] * 4, [16] * 4)] * 4), TIS)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda one: one.tensor):
        result = learner.step(batch, TIS, step=0)
    assert result.microbatches == 8
    learner.close()
    return learner.placement.pipeline_rank, kept.most


@pytest.mark.parametrize("virtual", [1, 2])
def test_an_early_stage_keeps_passes_whose_way_back_is_to_come(tmp_path: Path, virtual: int) -> None:
    """Of two layers a stage more."""
    settings: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline": virtual, "dtype": "bfloat16"}
    config = LearnerConfig(device="cpu", tokens_per_microbatch=64, **settings)
    folders = [save_tiny_model(tmp_path / str(n), tie=False, num_hidden_layers=n, **SIZES) for n in (4, 8)]
    four, eight = (dict(run_ranks(most_in_a_step, folder, settings)) for folder in folders)
    for stage in range(2):
        planned = [stage_memory(ModelShape.read(folder), config, stage, longest=32).activations for folder in folders]
        assert eight[stage] - four[stage] == pytest.approx(planned[1] - planned[0], rel=0.03), f"stage {stage}"
