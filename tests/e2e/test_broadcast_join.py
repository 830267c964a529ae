"""A worker joins a broadcast group while the learner computes for as long as the test wants: a real rank and real engines, as Ray actors.

Behaviours locked here: the group is whole before the learner's call ends, with which it computes all the time; the publish after it
broadcasts to all members, and builds nothing; the engines hold the learner's weights then, to the bit. A member that dies in the rendezvous
costs a try, during the learner's call as well, and the next one is without it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.config import WeightSyncConfig
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.weights.weight_sync import SyncCallbacks, SyncTarget, WeightSync
from evenkeel.correction.correct import defer
from evenkeel.engines.weights import digest_of
from evenkeel.learner.config import LearnerConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import SyncReceipt
from tests.learner.learner_cases import TIS, random_batch
from tests.ray_sessions import leave_ray

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SYNC_S = 20.0


class Worker:
    """What a rollout worker does with weights. Used as a Ray actor (async)."""

    async def begin(self, folder: Path) -> None:
        from evenkeel.rollout.engine.engine import RolloutEngine

        self._folder = tempfile.TemporaryDirectory()
        config = EngineConfig(device="cpu", max_total_tokens=8_192, max_running_requests=8, weight_group_timeout_s=SYNC_S)
        self._engine = await RolloutEngine.start(folder, config, name="engine", has_weights=False)

    async def update_weights(self, version: int, buckets: Sequence[Any], checksums: Any, _: int = 0) -> SyncReceipt:
        receipt = await self._engine.update_weights(version, list(await asyncio.gather(*buckets)))
        return replace(receipt, digest=await self.digest() if checksums else "")

    async def join_weight_group(self, host: str, port: int, rank: int, world_size: int, name: str) -> None:
        await self._engine.join_weight_group(host, port, rank, world_size, name)

    async def receive_weights(self, version: int, specs: Any, group: str, generation: int) -> SyncReceipt:
        return await self._engine.receive_weights(version, specs, group=group)

    async def leave_weight_group(self, name: str) -> None:
        await self._engine.leave_weight_group(name)

    async def digest(self) -> str:
        return digest_of(await self._engine.weight_checksums())

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)


@pytest.fixture(scope="module", autouse=True)
def own_ray() -> Iterator[None]:
    environment = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}}
    folder = tempfile.mkdtemp(prefix="ek-")
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _temp_dir=folder, runtime_env=environment)
    yield
    leave_ray()


def compute_until(path: str) -> Any:
    """For a rank: a long step, that is forward passes, one after the other, until there is a file.

    Returns: how many there were.
    """

    def compute(rank: Any) -> int:
        count, batch = 0, random_batch(1, groups=3)
        while not Path(path).exists():
            rank._learner.logprobs(batch)
            count += 1
        return count

    return compute


class JoinScene:
    def __init__(self, group: LearnerGroup, model: Path) -> None:
        self.group, self.model = group, model
        self.dirty: list[str] = []
        self.sync = WeightSync(
            WeightSyncConfig(transport="broadcast", bucket_bytes=32 << 10),
            EngineConfig(),
            group,
            SyncCallbacks(
                receipt=lambda _: None,
                probe=lambda *_: None,
                dirty=lambda target, reason: self.dirty.append(f"{target.name}: {reason}"),
                failure=lambda target, reason: self.dirty.append(f"{target.name}: {reason}"),
                loss=lambda error: self.dirty.append(str(error)),
            ),
            probe_ids=list(range(20, 32)),
            sync_s=SYNC_S,
        )
        assert self.sync._broadcast is not None
        self.broadcast = self.sync._broadcast
        self.workers: list[Any] = []

    @property
    def members(self) -> list[str]:
        return [member.name for member in self.broadcast.members]

    async def start(self, count: int) -> None:
        started = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(count)]
        await asyncio.gather(*(worker.begin.remote(self.model) for worker in started))
        self.workers += started

    def join(self, number: int) -> None:
        self.sync.join(SyncTarget(str(number), self.workers[number]))

    async def meet(self, *names: str) -> None:
        while self.members != list(names):
            await asyncio.sleep(0.02)

    async def step(self) -> None:
        await self.group.step(ray.put(defer(random_batch(self.group.version, groups=3), TIS)), TIS, step=self.group.version)

    async def publish_by_broadcast(self, *numbers: int) -> None:
        built = self.broadcast._built
        snapshot = await self.sync.publish()
        assert snapshot.buckets == [] and not snapshot.broadcast_error and self.dirty == [], "by broadcast, and not stored as well"
        assert self.broadcast._built == built, "nothing was built for it"
        await self.sync.receipts(snapshot.version, deadline_s=SYNC_S)
        held = await asyncio.gather(*(self.workers[number].digest.remote() for number in numbers))
        stored = await self.group.export(replace(self.sync._plan, checksums=True))
        assert stored.checksums is not None and all(one == stored.checksums.digest for one in held)


@asynccontextmanager
async def scene_of(model: Path, *, workers: int) -> AsyncIterator[JoinScene]:
    config = LearnerConfig(device="cpu", learning_rate=1e-2)
    group, _ = await LearnerGroup.start(RankPlaces(config, {}), model, version=0, bind="127.0.0.1", start_s=300.0, step_s=120.0)
    scene = JoinScene(group, model)
    try:
        await scene.start(workers)
        await scene.sync.publish()
        scene.join(0)
        await scene.sync.receipts(0, deadline_s=SYNC_S)
        await scene.meet("0")
        yield scene
    finally:
        await scene.sync.close()
        await asyncio.gather(*(worker.stop.remote() for worker in scene.workers), return_exceptions=True)
        group.kill()


def test_a_worker_joins_during_a_long_step(tiny_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene_of(tiny_model, workers=2) as scene:
            end = tmp_path / "end"
            computing = asyncio.ensure_future(scene.group.rank_zero.__ray_call__.remote(compute_until(str(end))))
            stepping = asyncio.ensure_future(scene.step())
            scene.join(1)
            await scene.meet("0", "1")
            assert not computing.done() and not stepping.done(), "the learner has been at it from the first to the last"
            end.touch()
            assert await computing > 1, "forward passes meanwhile"
            await stepping
            await scene.publish_by_broadcast(0, 1)
            await scene.step()
            await scene.publish_by_broadcast(0, 1)

    asyncio.run(asyncio.wait_for(scenario(), 400.0))


def test_a_member_dies_in_the_rendezvous_during_a_long_step(tiny_model: Path, tmp_path: Path) -> None:
    """Nobody waits for it: neither the learner, nor a publish, nor the other's scheduler, which would stand until the group's time is
    over."""

    async def scenario() -> None:
        async with scene_of(tiny_model, workers=2) as scene:
            dies = asyncio.Event()

            class Dying:
                """Takes weights like the other one, and is killed before it would have joined."""

                def __getattr__(self, name: str) -> Any:
                    if name == "join_weight_group":
                        ray.kill(scene.workers[1])
                        dies.set()
                    return getattr(scene.workers[1], name)

            end = tmp_path / "end"
            computing = asyncio.ensure_future(scene.group.rank_zero.__ray_call__.remote(compute_until(str(end))))
            stepping = asyncio.ensure_future(scene.step())
            scene.sync.join(SyncTarget("1", Dying()))
            await dies.wait()
            scene.sync.leave("1")
            began = time.monotonic()
            await scene.meet("0")
            assert time.monotonic() - began < SYNC_S / 2
            assert scene.broadcast._built == 3 and not computing.done() and not stepping.done()
            end.touch()
            assert await computing > 1, "forward passes meanwhile"
            await stepping
            await scene.publish_by_broadcast(0)

    asyncio.run(asyncio.wait_for(scenario(), 400.0))
