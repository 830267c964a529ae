"""A weight sync between a learner and engines that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from evenkeel.actors.carriers import ExportPlan, WeightChecksums, WeightSnapshot
from evenkeel.actors.config import WeightSyncConfig
from evenkeel.actors.weights.weight_sync import SyncCallbacks, SyncTarget, WeightSync
from evenkeel.engines.weights import compare_checksums, digest_of
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import SyncReceipt
from tests.actors.cases import FakeActor

SUMS = {"a": "1", "b": "2"}
CHECKSUMS = WeightChecksums(SUMS, digest_of(SUMS))


class Learner:
    """Weights whose version the test sets. `gate` holds up what it exports."""

    def __init__(self) -> None:
        self.version = 0
        self.exported: list[tuple[int, ExportPlan]] = []
        self.hashed: list[list[Any]] = []
        self.gate: asyncio.Event | None = None
        self.fails = ""
        self.step_s = 100.0
        self.group: list[tuple[int, int]] = []
        """(rank, members) that each was told, the learner first."""
        self.rank_zero = FakeActor(self)

    async def export(self, plan: ExportPlan, *, deadline_s: float | None = None) -> WeightSnapshot:
        version = self.version
        self.exported.append((version, plan))
        await (self.gate.wait() if self.gate else asyncio.sleep(0))
        buckets = [f"v{version}"] if plan.stores else []
        return WeightSnapshot(
            version,
            buckets,
            [["spec"]],
            [-1.0, -2.0],
            CHECKSUMS if plan.checksums else None,
            0.0,
            None,
            self.fails,  # type: ignore[list-item]
        )

    async def checksums(self, buckets: Sequence[Any], *, deadline_s: float) -> WeightChecksums:
        self.hashed.append(list(buckets))
        await asyncio.sleep(0.01)
        return CHECKSUMS

    async def serve_broadcast(self, *_: Any) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def open_broadcast(self, host: str, port: int, world_size: int, *_: Any) -> None:
        self.group.append((0, world_size))

    async def close_broadcast(self, name: str) -> None: ...


def receipt(version: int, digest: str = "") -> SyncReceipt:
    return SyncReceipt(version, bytes=8, pause_s=0.1, seconds=0.1, digest=digest)


class Engine:
    """Takes weights as the test's script says: None for well, an error to raise, or something (or seconds) to wait for first."""

    def __init__(
        self, *script: Exception | Awaitable[Any] | float | None, checksums: dict[str, str] | None = None, shows: str = ""
    ) -> None:
        """Args: checksums: of what it holds; None: as they are sent. shows: as their digest; empty: the right one."""
        self.script, self.shows = list(script), shows
        self.checksums = checksums or SUMS
        self.taken: list[tuple[int, bool]] = []
        """(version, with checksums) of each attempt."""
        self.received: list[int] = []
        """Versions that came by broadcast."""
        self.probes: list[Awaitable[Any]] = []
        """What the next answers to the probe wait for."""

    async def update_weights(self, version: int, buckets: list[Any], checksums: WeightChecksums | None, generation: int = 0) -> SyncReceipt:
        assert buckets == [f"v{version}"], "the stored copy of this version"
        self.taken.append((version, checksums is not None))
        await self._play()
        if checksums is None:
            return receipt(version)
        compare_checksums("w", checksums.by_name, self.checksums, version=version)
        return receipt(version, self.shows or digest_of(self.checksums))

    async def probe(self, token_ids: list[int]) -> list[float]:
        if self.probes:
            await self.probes.pop(0)
        return [-1.0, -2.5]

    async def join_weight_group(self, *_: Any) -> None: ...

    async def leave_weight_group(self, *_: Any) -> None: ...

    async def receive_weights(self, version: int, *_: Any) -> SyncReceipt:
        await self._play()
        self.received.append(version)
        return receipt(version)

    async def _play(self) -> None:
        part = self.script.pop(0) if self.script else None
        if isinstance(part, Exception):
            raise part
        if isinstance(part, float):
            await asyncio.sleep(part)
        elif part is not None:
            await part


class SyncScene:
    """A sync with a learner and named engines, and what it reported."""

    def __init__(
        self,
        sync_s: float = 5.0,
        transport: str = "object_store",
        every_steps: int = 1,
        float8: bool = False,
        ranks: int = 1,
        generation: int = 0,
        **engines: Engine,
    ) -> None:
        self.learner = Learner()
        self.taken: list[SyncReceipt] = []
        self.differences: list[tuple[str, int, float]] = []
        self.dirty: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []
        self.losses: list[str] = []
        self.sync = WeightSync(
            WeightSyncConfig.model_validate({"transport": transport, "every_steps": every_steps}),
            EngineConfig.model_validate({"tensor_parallel": ranks, "quantization": "float8_block" if float8 else "none"}),
            self.learner,  # type: ignore[arg-type]
            SyncCallbacks(
                receipt=self.taken.append,
                probe=lambda target, version, differences: self.differences.append((target.name, version, max(differences))),
                dirty=lambda target, reason: self.dirty.append((target.name, reason)),
                failure=lambda target, reason: self.failures.append((target.name, reason)),
                loss=lambda error: self.losses.append(str(error)),
            ),
            probe_ids=[1, 2, 3],
            sync_s=sync_s,
            generation=generation,
        )
        self.targets = {name: SyncTarget(name, FakeActor(engine)) for name, engine in engines.items()}

    @property
    def receipts(self) -> list[int]:
        return [one.version for one in self.taken]

    async def join(self) -> None:
        await self.sync.publish()
        for target in self.targets.values():
            self.sync.join(target)
        await self.sync.receipts(0, deadline_s=10.0)
        await self.grouped()

    async def grouped(self) -> None:
        """Until there is a broadcast group, and it is of all engines."""
        await asyncio.sleep(1.0)

    async def publish(self, version: int) -> None:
        self.learner.version = version
        await self.sync.publish()


def plans(scene: SyncScene) -> list[tuple[int, bool, bool]]:
    """(version, into the store, by broadcast) of each pass over the weights."""
    return [(version, plan.stores, plan.broadcasts) for version, plan in scene.learner.exported]
