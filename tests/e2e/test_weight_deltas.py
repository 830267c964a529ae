"""Weights by deltas to a real engine on another node, from a real learner rank, both in bfloat16.

After each of several versions every tensor that the engine's own process holds has the checksum of the learner's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.placement import RankPlaces
from actors.config import WeightSyncConfig
from actors.ranks.learner_group import LearnerGroup
from actors.weights.weight_sync import SyncCallbacks, SyncTarget, WeightSync
from benchmarks.weight_sync import BareWorker
from correction.correct import defer
from learner.config import LearnerConfig
from rollout.engine_settings.engine_config import EngineConfig
from rollout.trajectory import SyncReceipt
from tests.actors.two_nodes import two_nodes
from tests.e2e.cluster import ray_cluster
from tests.e2e.launch import RECIPE, Run
from tests.learner.learner_cases import TIS, random_batch

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STEPS = 6


def test_an_engine_that_takes_version_after_version_by_deltas_holds_the_learners_bits(tiny_model: Path) -> None:
    receipts: list[SyncReceipt] = []
    troubles: list[str] = []

    async def scenario(far: str) -> None:
        config = LearnerConfig(device="cpu", dtype="bfloat16", learning_rate=1e-5, warmup_steps=0)
        learner, _ = await LearnerGroup.start(RankPlaces(config, {}), tiny_model, version=0, bind="127.0.0.1", start_s=300.0, step_s=120.0)
        place = NodeAffinitySchedulingStrategy(far, soft=False)
        engine = ray.remote(BareWorker).options(num_cpus=0, max_concurrency=64, scheduling_strategy=place).remote()
        await engine.start_engine.remote(tiny_model, "bfloat16")
        sync = WeightSync(
            WeightSyncConfig(deltas=True, bucket_bytes=64 << 10),
            EngineConfig(),
            learner,
            SyncCallbacks(
                receipt=receipts.append,
                probe=lambda *_: None,
                dirty=lambda target, reason: troubles.append(reason),
                failure=lambda target, reason: troubles.append(reason),
                loss=lambda error: troubles.append(str(error)),
            ),
            probe_ids=[],
            sync_s=120.0,
        )
        target = SyncTarget("far", engine, node=far)
        await sync.publish()
        sync.join(target)
        await sync.receipts(0, deadline_s=300.0)
        for step in range(STEPS):
            await learner.step(defer(random_batch(step, groups=3), TIS), TIS, step=step)
            target.is_verified = False  # so that checksums are compared
            await sync.publish()
            await sync.receipts(step + 1, deadline_s=300.0)
        await sync.close()
        await engine.stop_engine.remote()
        learner.kill()

    with two_nodes() as cluster:
        (node,) = cluster.worker_nodes
        asyncio.run(asyncio.wait_for(scenario(node.node_id), 500.0))
    assert troubles == [] and [receipt.version for receipt in receipts] == list(range(STEPS + 1))
    assert receipts[0].delta_bytes is None and all(receipt.digest for receipt in receipts)
    assert len({receipt.digest for receipt in receipts}) == STEPS + 1, "each step moved the weights"
    shares = [receipt.delta_bytes / receipt.bytes for receipt in receipts[1:] if receipt.delta_bytes is not None]
    assert len(shares) == STEPS and max(shares) < 0.25, shares


def test_a_run_on_two_nodes_tells_what_it_saved(small_model: Path, tmp_path: Path) -> None:
    """The probe of every version agrees: the engine computes with the learner's weights.

    Without staleness no step begins before the engine has the weights of the one before, however short steps are.
    """
    run_dir = tmp_path / "run"
    with ray_cluster("--num-cpus=8", "--resources={}") as cluster:
        cluster.add_node("127.0.0.2", "--num-cpus=2")  # the engine's, and one for which Ray keeps the process that makes weights
        words = [f"model={small_model}", f"run_dir={run_dir}", "weight_sync.deltas=true", f"steps={STEPS}"]
        words += ["max_staleness=0", "deadlines.sync_s=180", "learner.learning_rate=1e-5"]
        words += ["checkpoint.every_steps=0", "evaluation.problems=4"]
        run = Run(run_dir, str(RECIPE), *words, address=cluster.address, **cluster.variables)
        try:
            assert run.wait(400.0) == 0, run.output()[-4000:]
        finally:
            run.close()
    lines = run.metrics()
    rebuilt = [line for line in lines if "sync/rebuilt" in line]
    assert len(rebuilt) >= STEPS - 2 and all(line["sync/rebuilt"] == line["sync/receipts"] == 1 for line in rebuilt)
    assert all(0 < line["sync/delta_bytes"] < line["sync/bytes"] for line in rebuilt)
    assert all(line.get("sync/probe_max_abs_difference", 0.0) < 2e-5 for line in lines)
    assert "fetches the whole" not in run.output()
