"""GPU memory of an engine for weights on their way."""

from __future__ import annotations

import pytest

from evenkeel.doctor.on_paper import on_paper
from evenkeel.plan.hosts import receiving_bytes
from tests.evenkeel.doctor.test_doctor import DENSE, eight, paper

OF_ENGINE = ("fail", "an engine has 13.4 GiB beside its CUDA context")


@pytest.mark.parametrize(
    ("transport", "size", "said"),
    [
        ("broadcast", 256 << 20, []),
        ("object_store", 256 << 20, []),
        # The whole version is one bucket of 15.3 GiB; a broadcast sends it end to end. An engine has two.
        ("broadcast", 20 * 10**9, [OF_ENGINE]),
        ("object_store", 20 * 10**9, []),
        ("broadcast", 8 * 10**9, [OF_ENGINE]),
    ],
)
def test_buckets_that_no_gpu_has_room_for_are_told(transport: str, size: int, said: list[tuple[str, str]]) -> None:
    config = eight(f"weight_sync.transport={transport}", f"weight_sync.bucket_bytes={size}")
    found = [one for one in on_paper(paper(), config) if " beside " in one.sentence]
    assert [(one.severity, one.sentence[: len(text)]) for one, (_, text) in zip(found, said, strict=True)] == said, found
    assert all("Lower weight_sync.bucket_bytes" in one.setting for one in found)


def test_an_engine_receives_a_bucket_twice_and_a_large_tensor_once() -> None:
    """The embedding of 1.16 GiB is a bucket by itself; from the object store it comes through the host's memory."""
    assert receiving_bytes(DENSE, eight("weight_sync.transport=broadcast")) == 2 * 151_936 * 4096
    assert receiving_bytes(DENSE, eight("weight_sync.transport=broadcast", "weight_sync.bucket_bytes=1000000000")) == 2 * 10**9
    assert receiving_bytes(DENSE, eight()) == 0
