"""The benchmark of the way of weights measures what a run does."""

from __future__ import annotations

import pytest

from actors.config import WeightSyncConfig


def test_weights_travel_in_the_buckets_of_a_run_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB, the default of another day, made 14 calls of a version that a run sends in one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the benchmark sets it where it isn't set, and this process goes on
    from benchmarks.weight_sync import asked

    assert asked([]).bucket_mib << 20 == WeightSyncConfig().bucket_bytes == 256 << 20
    assert asked(["--bucket-mib", "16"]).bucket_mib == 16
