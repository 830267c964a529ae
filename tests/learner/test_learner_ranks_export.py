"""Ranks on gloo export the weights by few collectives. Ranks are processes of their own, for which rank functions stand at module level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from tests.learner.learner_cases import (
    exported_by,
    run_ranks,
    save_model,
    weights,
)
from tests.learner.test_learner_ranks import INTERLEAVED, PIPELINE, SEQUENCE_PARALLEL

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "broadcast", "broadcast_object_list")


STAGES: dict[str, Any] = {"pipeline_parallel": 2, "data_parallel": 2}
"""Of two pipelines: ranks 0 and 2, 1 and 3."""
GATHERED = {"all_gather_into_tensor": 1}
EXCHANGED = {"broadcast": 1, "broadcast_object_list": 2}
"""Of a stage but the first: what it has, its bytes, and that there is no more."""


def exported_on_a_rank(
    rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any], most_bytes: int
) -> tuple[dict[str, Any], dict[str, int], float, int]:
    """The weights by the export, how often each collective was called for it, the most memory that an expert's tensor keeps, as a
    multiple of its own size, and the bytes that were broadcast."""
    calls: dict[str, int] = {}
    sent = [0]

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            sent[0] += args[0].nbytes if name == "broadcast" else 0
            return original(*args, **options)

        return call

    learner = LearnerRank(LearnerConfig(**split), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenkeel.learner.weights.convert.GATHER_BYTES", most_bytes)
        patch.setattr("evenkeel.learner.weights.export.EXCHANGE_BYTES", most_bytes)
        for name in COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        found = weights(learner)
    kept = [t.untyped_storage().nbytes() / t.nbytes for piece in learner.weights() for name, t in piece.items() if ".experts." in name]
    learner.close()
    return found, calls, max(kept), sent[0]


@pytest.mark.parametrize(
    ("split", "model", "of_first", "of_others"),
    [
        ({"data_parallel": 2, "expert_parallel": 2}, {}, GATHERED, GATHERED),
        (SEQUENCE_PARALLEL, {}, GATHERED, GATHERED),
        (PIPELINE, {}, EXCHANGED, {}),
        (INTERLEAVED, {"tie": True, "num_hidden_layers": 4}, EXCHANGED, {}),
        ({"pipeline_parallel": 4}, {"num_hidden_layers": 4}, {name: 3 * calls for name, calls in EXCHANGED.items()}, {}),
        (STAGES, {}, EXCHANGED, {}),
        (STAGES | {"expert_parallel": 2}, {}, EXCHANGED | GATHERED, GATHERED),
        (SEQUENCE_PARALLEL | PIPELINE, {}, EXCHANGED | GATHERED, GATHERED),
    ],
    ids=str,
)
def test_weights_are_exported_many_at_a_time(
    tmp_path: Path, split: dict[str, Any], model: dict[str, Any], of_first: dict[str, int], of_others: dict[str, int]
) -> None:
    """Not one collective for each of the model's tensors: a mixture of experts has tens of thousands. And many, if not all fit. An expert
    lies alone, or next to the other half of its first matrix, and not in the buffer of all that were gathered. Stages are sent within one
    pipeline alone, and rank 0's not at all: of_first says what its ranks call, of_others what those of the other pipelines do."""
    folder = save_model(tmp_path / "m", "qwen3_moe", **{"tie": False} | model)
    original = load_file(folder / "model.safetensors")
    config = LearnerConfig(**split)
    ranks, stages = config.world_size, config.pipeline_parallel
    of_stages = [exported_by(stage * ranks // stages, original, split) for stage in range(1, stages)]
    exchanged = sum(original[name].nbytes for names in of_stages for name in names)
    for most_bytes in (2**26, 16_000):
        for rank, (found, calls, kept, sent) in enumerate(run_ranks(exported_on_a_rank, folder, split, most_bytes, ranks=ranks)):
            is_in_first = rank % (ranks // stages) == 0 if stages > 1 else True
            assert found.keys() == exported_by(rank, original, split), "rank 0 has all, the others their stage"
            assert all(torch.equal(found[name], original[name]) for name in found)
            assert kept <= 2 or stages > 1
            assert sent == (exchanged if is_in_first else 0)
            expected = of_first if is_in_first else of_others
            if most_bytes == 2**26:
                assert calls == expected
            else:
                assert sum(expected.values()) < sum(calls.values()) < len(original) or calls == expected == {}
