"""Ranks on gloo export the weights by few collectives. Ranks are processes of their own, for which rank functions stand at module level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from learner.config import LearnerConfig
from learner.learner_rank import LearnerRank
from tests.learner.learner_cases import (
    run_ranks,
    save_model,
    weights,
)
from tests.learner.test_learner_ranks import PIPELINE, SEQUENCE_PARALLEL

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "broadcast", "broadcast_object_list")


def exported_on_a_rank(
    rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any], most_bytes: int
) -> tuple[dict[str, Any], dict[str, int], float]:
    """The weights by the export, how often each collective was called for it, and the most memory that an expert's tensor keeps, as a
    multiple of its own size."""
    calls: dict[str, int] = {}

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **options)

        return call

    learner = LearnerRank(LearnerConfig(**split), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.weights.convert.GATHER_BYTES", most_bytes)
        patch.setattr("learner.weights.export.EXCHANGE_BYTES", most_bytes)
        for name in COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        found = weights(learner)
    kept = [t.untyped_storage().nbytes() / t.nbytes for piece in learner.weights() for name, t in piece.items() if ".experts." in name]
    learner.close()
    return found, calls, max(kept)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"data_parallel": 2, "expert_parallel": 2}, {"all_gather_into_tensor": 1}),
        (SEQUENCE_PARALLEL, {"all_gather_into_tensor": 1}),
        # Of each stage: what it has, its bytes, and that there is no more.
        (PIPELINE, {"broadcast": 2, "broadcast_object_list": 4}),
    ],
)
def test_weights_are_exported_many_at_a_time(tmp_path: Path, split: dict[str, Any], expected: dict[str, int]) -> None:
    """Not one collective for each of the model's tensors: a mixture of experts has tens of thousands. And many, if not all fit. An expert
    lies alone, or next to the other half of its first matrix, and not in the buffer of all that were gathered."""
    folder = save_model(tmp_path / "m", "qwen3_moe", tie=False)
    original = load_file(folder / "model.safetensors")
    for most_bytes in (2**26, 20_000):
        for found, calls, kept in run_ranks(exported_on_a_rank, folder, split, most_bytes):
            assert found.keys() == original.keys()
            assert all(torch.equal(found[name], original[name]) for name in original)
            assert kept <= 2 or "pipeline_parallel" in split
            assert calls == expected if most_bytes == 2**26 else sum(expected.values()) < sum(calls.values()) < len(original)
