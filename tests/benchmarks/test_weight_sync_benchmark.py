"""The benchmark of the way of weights measures what a run does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from evenkeel.actors.carriers import WeightChecksums
from evenkeel.actors.config import WeightSyncConfig
from evenkeel.actors.groups.tokens import checksums_of
from evenkeel.engines.weights import WeightBucket
from evenkeel.rollout.trajectory import SyncReceipt


def test_weights_travel_in_the_buckets_of_a_run_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB, the default of another day, made 14 calls of a version that a run sends in one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the benchmark sets it where it isn't set, and this process goes on
    from benchmarks.weight_sync import asked

    assert asked([]).bucket_mib << 20 == WeightSyncConfig().bucket_bytes == 256 << 20
    assert asked(["--bucket-mib", "16"]).bucket_mib == 16


def test_its_worker_gives_receipts_as_a_rollout_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It set the fields of a rollout worker one by one, and lacked those that came later: each update failed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from benchmarks import weight_sync

    monkeypatch.setattr(weight_sync, "RolloutEngine", Engine)
    bucket = WeightBucket.of({"w": torch.arange(4.0)})
    by_name, digest = checksums_of(bucket)

    async def on_its_way() -> WeightBucket:
        return bucket

    async def scenario() -> None:
        worker = weight_sync.BareWorker()
        await worker.start_engine(Path("model"))
        for version, checksums in enumerate((WeightChecksums(by_name, digest), None)):
            receipt = await worker.update_weights(version, [on_its_way()], checksums)
            shown = digest if checksums else ""
            assert (receipt.version, receipt.bytes, receipt.digest) == (version, 16, shown)
            assert receipt.load is not None and receipt.load.requests_in_flight == 0
        await worker.stop_engine()

    asyncio.run(scenario())


class Engine:
    """In the place of a RolloutEngine: holds what it is sent."""

    requests_in_flight, silent_s, metrics = 0, 0.0, CollectorRegistry()

    @classmethod
    async def start(cls, *_: Any, **__: Any) -> Engine:
        return cls()

    async def update_weights(self, version: int, buckets: Sequence[WeightBucket]) -> SyncReceipt:
        return SyncReceipt(version, sum(bucket.nbytes for bucket in buckets), 0.0)

    async def weight_checksums(self, sent: Sequence[WeightBucket], verified: Mapping[str, str]) -> dict[str, str]:
        return checksums_of(*sent)[0]

    def raise_if_lost(self) -> None: ...

    async def shutdown(self) -> None: ...
