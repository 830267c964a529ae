"""GPU memory for weights on their way: what is alive on ranks of gloo while they export, and what the doctor says of large buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.doctor.paper_rules import on_paper
from actors.plan.bucket_memory import EXCHANGED, GATHERED, receiving_bytes, sending_bytes
from actors.plan.shape import ModelShape
from learner.config import LearnerConfig
from learner.learner_rank import LearnerRank
from learner.weights.convert import GATHER_BYTES
from learner.weights.export import EXCHANGE_BYTES
from tests.actors.doctor.test_doctor import DENSE, eight, paper
from tests.learner.learner_cases import run_ranks
from tests.learner.test_learner_logprobs import LiveBytes
from tests.tiny_models import save_tiny_model

BUCKET = 1 << 20
ONE_RANK = ("data_parallel", "tensor_parallel", "pipeline_parallel")


def alive_in_an_export(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> int:
    """The most bytes beside the model, with a loop like the one of a learner's actor."""
    learner = LearnerRank(LearnerConfig(**split, dtype="bfloat16"), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    parameters = [parameter for policy in learner._policies for parameter in policy.parameters()]
    with pytest.MonkeyPatch.context() as patch, LiveBytes(*parameters) as probe:
        patch.setattr("learner.weights.export.EXCHANGE_BYTES", BUCKET)
        patch.setattr("learner.weights.convert.GATHER_BYTES", BUCKET)
        for piece in learner.weights(BUCKET):
            assert piece
    learner.close()
    return probe.peak


DENSE_SIZES: dict[str, Any] = {"vocab_size": 8192, "intermediate_size": 512}
"""The embedding is four pieces."""
WIDE_SIZES: dict[str, Any] = {"vocab_size": 512, "intermediate_size": 8192}
"""Gate and up, one parameter of Megatron's, are eight; no tensor of the files is more than four."""
WIDE_EXPERTS: dict[str, Any] = {"vocab_size": 512, "moe_intermediate_size": 4096, "num_experts": 2}
"""Those of an expert are four."""


@pytest.mark.parametrize(
    ("split", "family", "sizes"),
    [
        ({"data_parallel": 2}, "qwen3", DENSE_SIZES),
        ({"tensor_parallel": 2}, "qwen3", DENSE_SIZES),
        ({"pipeline_parallel": 2}, "qwen3", DENSE_SIZES),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, "qwen3", DENSE_SIZES),
        ({"tensor_parallel": 2}, "qwen3", WIDE_SIZES),
        ({"data_parallel": 2, "expert_parallel": 2}, "qwen3_moe", WIDE_EXPERTS),
    ],
    ids=str,
)
def test_an_export_takes_no_more_than_is_counted(
    tmp_path: Path, split: dict[str, Any], family: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small pieces of a model whose largest parameters are several of them. Nor is it a loose bound: some of it is not at the same
    time."""
    assert (EXCHANGED, GATHERED) == (EXCHANGE_BYTES, GATHER_BYTES)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4} | sizes
    folder = save_tiny_model(tmp_path, family, tie=False, pad_token_id=None, **sizes)
    shape = ModelShape.read(folder)
    words = [f"learner.{name}={split.get(name, 1)}" for name in (*ONE_RANK, "expert_parallel")]
    for name in ("EXCHANGED", "GATHERED"):
        monkeypatch.setattr(f"actors.plan.bucket_memory.{name}", BUCKET)
    counted = sending_bytes(shape, eight(*words, f"weight_sync.bucket_bytes={BUCKET}", "learner.sequence_parallel=false"))
    found = run_ranks(alive_in_an_export, folder, split, ranks=LearnerConfig(**split).world_size)
    assert counted / 3 < max(found) <= counted


OF_ENGINE = ("fail", "an engine has 13.4 GiB beside its CUDA context")
OF_RANK = ("warn", "a learner rank has 30.9 GiB beside weights")


@pytest.mark.parametrize(
    ("transport", "size", "said"),
    [
        ("broadcast", 256 << 20, []),
        ("object_store", 256 << 20, []),
        # The whole version is one bucket of 15.3 GiB; a broadcast sends it end to end. An engine has two.
        ("broadcast", 20 * 10**9, [OF_ENGINE, OF_RANK]),
        ("object_store", 20 * 10**9, []),
        ("broadcast", 8 * 10**9, [OF_ENGINE]),
    ],
)
def test_buckets_that_no_gpu_has_room_for_are_told(transport: str, size: int, said: list[tuple[str, str]]) -> None:
    """Of a rank it is a warning: what is counted there is an upper bound."""
    config = eight(f"weight_sync.transport={transport}", f"weight_sync.bucket_bytes={size}")
    found = [one for one in on_paper(paper(), config) if " beside " in one.sentence]
    assert [(one.severity, one.sentence[: len(text)]) for one, (_, text) in zip(found, said, strict=True)] == said, found
    assert all("Lower weight_sync.bucket_bytes" in one.setting for one in found)


def test_an_engine_receives_a_bucket_twice_and_a_large_tensor_once() -> None:
    """The embedding of 1.16 GiB is a bucket by itself; from the object store it comes through the host's memory."""
    assert receiving_bytes(DENSE, eight("weight_sync.transport=broadcast")) == 2 * 151_936 * 4096
    assert receiving_bytes(DENSE, eight("weight_sync.transport=broadcast", "weight_sync.bucket_bytes=1000000000")) == 2 * 10**9
    assert receiving_bytes(DENSE, eight()) == 0
