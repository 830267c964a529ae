"""Two real ranks on gloo, as Ray actors: what many readers of the weights cost the learner.

Behaviours locked here: whoever joins or exports at whatever moment, during forwards and steps, nothing hangs and the weights are, to the
last bit, those of a run that nobody joined; a join gives the ranks neither a call nor a checksum to compute. Ranks that live when the run
goes back to a checkpoint read it in the processes that they have, whatever is under way, and train on as if it had been the first time.

The fast suite has the parts: a join makes the learner do nothing (tests/actors/weights/test_weight_sync.py), an aborted step is agreed on
and leaves no trace (tests/learner/test_abort.py), a call is all ranks' or none's (tests/actors/ranks/test_learner_group.py), and two real
ranks publish weights to engines that sample with their very bits (tests/e2e/test_several_workers.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from evenkeel.actors.carriers import ExportPlan
from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.config import WeightSyncConfig
from evenkeel.actors.driver.parts import StartingPoint, start_learner
from evenkeel.actors.driver.recovery import Lost, end_parts, lost_answer
from evenkeel.actors.groups.tokens import checksums_of
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.weights.weight_sync import SyncCallbacks, SyncTarget, WeightSync
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.errors import StepAborted
from evenkeel.learner.config import LearnerConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import SyncReceipt
from lab.background_loop import BackgroundLoop
from tests.actors.cases import FakeActor
from tests.actors.on_two_nodes.batch_maker import BatchMaker
from tests.learner.learner_cases import TIS, random_batch, save_model, with_noisy_behavior

pytestmark = pytest.mark.slow

STEPS, JOINS = 10, 50
PLAN = ExportPlan(8_000, checksums=True)
UNHASHED = replace(PLAN, checksums=False)


@asynccontextmanager
async def learner(folder: Path, **settings: Any) -> AsyncIterator[LearnerGroup]:
    config = LearnerConfig(data_parallel=2, device="cpu", learning_rate=1e-2, collective_timeout_s=120.0, **settings)
    model = save_model(folder / "model")
    group, infos = await LearnerGroup.start(RankPlaces(config, {}), model, version=0, bind="127.0.0.1", start_s=300.0, step_s=120.0)
    assert [info.layers for info in infos] == ["local", "local"] and all(info.host for info in infos)
    try:
        yield group
    finally:
        group.kill()


@pytest.fixture(scope="module")
def started(cluster: Cluster, engine_loop: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LearnerGroup, Path]]:
    """Ranks for two tests, since they take seconds to start, and the checkpoint of their beginning. A step has many micro-batches.

    A process that computes checksums is there, too: while it starts, Ray would start others for the tasks that wait.
    """
    folder = tmp_path_factory.mktemp("ranks")
    ranks = learner(folder, tokens_per_microbatch=64)
    group = engine_loop.run(ranks.__aenter__())
    engine_loop.run(save(group, folder / "start"))
    engine_loop.run(sums_in_a_task(group))
    yield group, folder / "start"
    engine_loop.run(ranks.__aexit__(None, None, None))


@pytest.fixture
def group(started: tuple[LearnerGroup, Path], engine_loop: BackgroundLoop) -> LearnerGroup:
    """At their beginning."""
    engine_loop.run(started[0].restore(started[1], 0, deadline_s=60.0))
    return started[0]


@pytest.fixture
def start(started: tuple[LearnerGroup, Path]) -> Path:
    return started[1]


async def save(group: LearnerGroup, folder: Path) -> None:
    await group.begin_save(folder, folder.with_name(f"{folder.name}_hf"), deadline_s=60.0)
    await group.saved(deadline_s=60.0)


async def sums_in_a_task(group: LearnerGroup) -> None:
    await group.checksums((await group.export(UNHASHED)).buckets, deadline_s=60.0)


async def digest(group: LearnerGroup) -> str:
    """Of its weights."""
    exported = (await group.export(PLAN)).checksums
    assert exported is not None
    return exported.digest


class Engine:
    """Reads what it is sent, and says what it has got."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def update_weights(self, version: int, buckets: Sequence[Any], checksums: Any, _: int = 0) -> SyncReceipt:
        fetched = await asyncio.gather(*buckets)
        self.versions.append(version)
        return SyncReceipt(version, 1, 0.0, 0.0, checksums_of(*fetched)[1] if checksums else "")


class Joins:
    """Engines that come at random moments, some of which become dirty; every fifth moment somebody needs an export instead."""

    def __init__(self, group: LearnerGroup, sync: WeightSync) -> None:
        self.group, self.sync = group, sync
        self.targets: list[SyncTarget] = []
        self.exports = 0

    async def come(self) -> None:
        draw = random.Random(0)
        for moment in range(JOINS):
            await asyncio.sleep(0.04 * draw.random())
            self.targets.append(SyncTarget(str(moment), FakeActor(Engine())))
            self.sync.join(self.targets[-1])
            if moment % 3 == 0:
                self.sync.resync(draw.choice(self.targets), "the test says so")
            if moment % 5 == 0:
                self.exports += 1
                await self.group.export(UNHASHED)


def count_hashes(rank: Any) -> None:
    """For a rank: count the pieces of weights whose checksums it computes from now on."""
    from evenkeel.learner.weights import export

    rank.hashed, compute = 0, getattr(export.weight_checksums, "__wrapped__", export.weight_checksums)

    @wraps(compute)
    def counted(*arguments: Any) -> dict[str, str]:
        rank.hashed += 1
        return compute(*arguments)

    export.weight_checksums = counted


async def trained(group: LearnerGroup, *, joins: bool) -> tuple[dict[str, str], Joins]:
    """Checksums of the weights after some steps, each with a forward before it and a publish after it."""
    failures: list[str] = []
    sync = WeightSync(
        WeightSyncConfig(bucket_bytes=PLAN.bucket_bytes),
        EngineConfig(),
        group,
        SyncCallbacks(
            receipt=lambda _: None,
            probe=lambda *_: None,
            dirty=lambda target, reason: None if reason == "the test says so" else failures.append(reason),
            failure=lambda target, reason: failures.append(reason),
            loss=lambda error: failures.append(str(error)),
        ),
        probe_ids=[],
        sync_s=60.0,
    )
    calls = group._collective.calls
    await group.rank_zero.__ray_call__.remote(count_hashes)
    pieces = len((await sync.publish()).buckets)
    crowd = Joins(group, sync)
    coming = asyncio.create_task(crowd.come()) if joins else None
    for step in range(STEPS):
        batch = random_batch(step, groups=3)
        proximal = (await (await group.proximal(ray.put(batch), version=group.version))).logprobs
        batch = replace(with_noisy_behavior(batch, proximal, seed=step), proximal_logprobs=proximal)
        result = await group.step(correct(batch, TIS), TIS, step=step)
        assert result.optimizer_steps == 1
        await sync.publish()
    if coming is not None:
        await coming
    await sync.receipts(STEPS, deadline_s=60.0)
    assert failures == [] and all(target.version == STEPS and target.is_verified for target in crowd.targets)
    assert group._collective.calls - calls == 1 + 3 * STEPS + crowd.exports, "joins made no calls"
    hashed = await group.rank_zero.__ray_call__.remote(lambda rank: rank.hashed)
    assert hashed == pieces > 1, "of the first version, once; of the others by tasks for who joined"
    await sync.close()
    return await digest(group), crowd


def test_joins_during_forwards_and_steps_change_no_bit_and_hang_nothing(
    group: LearnerGroup, start: Path, engine_loop: BackgroundLoop
) -> None:
    async def scenario() -> None:
        alone, _ = await trained(group, joins=False)
        await group.restore(start, 0, deadline_s=60.0)
        joined, crowd = await trained(group, joins=True)
        assert len(crowd.targets) == JOINS and joined == alone
        await group.restore(start, 0, deadline_s=60.0)
        assert alone != await digest(group), "the steps moved the weights"

    engine_loop.run(scenario(), 400.0)


def test_a_step_that_is_aborted_leaves_the_ranks_agreed_and_able_to_save(
    group: LearnerGroup, start: Path, engine_loop: BackgroundLoop, tmp_path: Path
) -> None:
    """Whenever the end of a step of 23 micro-batches is asked for, and however far one rank is ahead of the other: it ends on both, or on
    neither. A step that is aborted changes no bit; what comes next is saved, and no further step is begun."""

    async def scenario() -> None:
        aborted = 0
        batch = defer(random_batch(9, groups=40), TIS)
        before = await digest(group)
        for attempt, after_s in enumerate((0.0, 0.0, 0.02, 0.1, 0.3)):
            step = asyncio.create_task(group.step(ray.put(batch), TIS, step=0))
            await asyncio.sleep(after_s)
            await asyncio.wait_for(group.abort(), 30.0)
            is_aborted = isinstance((await asyncio.gather(step, return_exceptions=True))[0], StepAborted)
            aborted += is_aborted
            now = await digest(group)
            assert (now == before) == is_aborted == (group.version == 0)
            with pytest.raises(StepAborted, match="not begun"):
                await group.step(ray.put(batch), TIS, step=1)
            await save(group, tmp_path / f"saved{attempt}")
            await group.restore(start, 0, deadline_s=60.0)
        assert aborted >= 2, "two of them are asked for as the step begins"
        assert (await group.step(ray.put(batch), TIS, step=0)).microbatches >= 20, "after a restore the ranks train again"

    engine_loop.run(scenario(), 400.0)


async def two_steps(group: LearnerGroup) -> list[str]:
    """The same two each time. Returns: digests of the weights after each."""
    found = []
    for step in (2, 3):
        await group.step(ray.put(defer(random_batch(step, groups=3), TIS)), TIS, step=step)
        found.append(await digest(group))
    return found


async def two_steps_and_back(group: LearnerGroup, folder: Path) -> list[str]:
    """Those two steps from a checkpoint in folder/learner, to which the ranks have gone back afterwards."""
    await group.begin_save(folder / "learner", folder / "hf", deadline_s=60.0)
    await group.saved(deadline_s=60.0)
    await group.restore(folder / "learner", 2, deadline_s=60.0)
    found = await two_steps(group)
    await group.restore(folder / "learner", 2, deadline_s=60.0)
    return found


async def after_a_rollback(group: LearnerGroup, parts: dict[str, Any], lost: str, folder: Path) -> LearnerGroup:
    """As a run does it: everything ends but the ranks, which read the checkpoint."""
    kept, left = await end_parts(parts | group.ranks, group, Lost((lost,)))
    assert kept is group and left == group.ranks, "the ranks live and have soon nothing under way"
    config: Any = SimpleNamespace(deadlines=SimpleNamespace(checkpoint_s=60.0, start_s=60.0, step_s=60.0))
    point = StartingPoint(folder, SimpleNamespace(state=folder), SimpleNamespace(weight_version=2))  # type: ignore[arg-type]
    again, infos = await start_learner(config, point, None, {}, kept)  # type: ignore[arg-type]
    assert again is group and infos == [] and group.version == 2
    return again


def test_ranks_that_live_go_back_in_the_middle_of_a_step_and_of_a_save(cluster: Cluster, tmp_path: Path) -> None:
    """First with a step and a checkpoint under way, which nobody waits for any more; then after the end of who was to make a step's batch,
    so that no rank has got the call. Each time the two steps after the checkpoint are done again, to the same bits."""

    async def scenario() -> None:
        async with learner(tmp_path) as group:
            pids = [await rank.__ray_call__.remote(lambda _: os.getpid()) for rank in group.ranks.values()]
            for step in range(2):
                await group.step(ray.put(defer(random_batch(step, groups=3), TIS)), TIS, step=step)
            await group.begin_save(tmp_path / "learner", tmp_path / "hf", deadline_s=60.0)
            await group.saved(deadline_s=60.0)
            first = await two_steps(group)
            assert first[0] != first[1]

            await group.begin_save(tmp_path / "later", tmp_path / "later_hf", deadline_s=60.0)
            step_under_way = asyncio.create_task(group.step(ray.put(defer(random_batch(9, groups=40), TIS)), TIS, step=4))
            await asyncio.sleep(0.05)
            step_under_way.cancel()
            group = await after_a_rollback(group, {}, "correction service", tmp_path)
            assert await two_steps(group) == first

            maker = ray.remote(BatchMaker).options(num_cpus=0, max_concurrency=2).remote()
            step_without_batch = asyncio.create_task(group.step(maker.make.remote(), TIS, step=4))
            os.kill(await maker.pid.remote(), signal.SIGKILL)
            with pytest.raises(ray.exceptions.RayError) as caught:
                await step_without_batch
            assert lost_answer(caught.value).startswith("an argument of a call is gone (")
            group = await after_a_rollback(group, {"correction service": maker}, "correction service", tmp_path)
            assert await two_steps(group) == first

            await group.begin_save(tmp_path / "last", tmp_path / "last_hf", deadline_s=60.0)
            await group.saved(deadline_s=60.0)
            await group.restore(tmp_path / "last", 4, deadline_s=60.0)
            assert await digest(group) == first[1], "what it saves after a return is whole"
            assert pids == [await rank.__ray_call__.remote(lambda _: os.getpid()) for rank in group.ranks.values()]

    asyncio.run(asyncio.wait_for(scenario(), 400.0))
