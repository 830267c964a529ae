"""Measures the way of new weights from the learner to the engines, against a copy of the same bytes and against a step's time.

    python benchmarks/weight_sync.py [--engines 1 2 4] [--replaying 50] [--steps 25] [--bucket-mib 256]

The parts are a run's own: learner rank, weight sync through the object store, rollout workers with real engines (idle; a model of 60M
parameters in float32). The copy is one thread's, from memory to memory that both have been used before. Both take turns, a training step
between two versions left out. Replaying receivers do all that a rollout worker does up to the engine: they fetch, check and copy into
shared memory; there are ten in a process.

Then a short run of the nano recipe: the engine's pause as a share of the step. And how many bytes of the weights in bfloat16 an update
leaves as they were: that model on random batches, at the recipe's learning rate and at one that is usual for large models.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch

from benchmarks.sides import NANO_RECIPE, ROOT, TimeRatio, evenkeel, options, seconds_of, steps_of
from benchmarks.workloads import lengths_of_groups, random_batch, save_model
from evenkeel.actors.carriers import WeightChecksums
from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.config import WeightSyncConfig
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.weights.weight_sync import SyncCallbacks, SyncTarget, WeightSync
from evenkeel.correction import CorrectedBatch, CorrectionConfig, defer
from evenkeel.correction.errors import counted
from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine.weight_transfer import SharedStaging
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import SyncReceipt

CORRECTION = CorrectionConfig(preset="tis-token")
MODEL, VOCABULARY = "60M", 300
IN_A_PROCESS = 10
"""Replaying receivers."""
WARM_UP_STEPS = 5
REPLAYED_BUCKET = 16 << 20
"""Bytes, at most, for replaying receivers: each of the fifty holds two buckets in shared memory."""
USUAL_RATE = 1e-6
USUAL_BUCKET = WeightSyncConfig().bucket_bytes
"""Bytes, of a run whose recipe says nothing of it."""


def corrected() -> CorrectedBatch:
    return defer(random_batch(lengths_of_groups(4, 4, (8, 16), (4, 16)), 4, VOCABULARY), CORRECTION)


class BareWorker(RolloutWorker):
    """A rollout worker's way of weights, without tasks and rewards."""

    def __init__(self) -> None:
        rollout = SimpleNamespace(engine=EngineConfig(device="cpu"))
        super().__init__("engine", SimpleNamespace(rollout=rollout, weights_fetch_s=60.0))  # type: ignore[arg-type]
        self._endpoint = SimpleNamespace(set=lambda *_: None)  # type: ignore[assignment]

    async def start_engine(self, model: Path, dtype: str = "float32") -> None:
        config = EngineConfig.model_validate({"device": "cpu", "max_total_tokens": 4096, "dtype": dtype})
        engine = await RolloutEngine.start(model, config, has_weights=False)
        living = {"succeeded": lambda: asyncio.sleep(0), "lost_of": "", "has_its_weights": lambda: None}
        self._sampler = SimpleNamespace(engine=engine, busy_s=0.0, up_s=0.0, generated_tokens=0, **living)  # type: ignore[assignment]

    async def stop_engine(self) -> None:
        await self._sampler.engine.shutdown()


class Replaying:
    """A rollout worker's way of weights up to the engine."""

    def __init__(self) -> None:
        self._staging: dict[int, SharedStaging] = {}

    async def update_weights(
        self, receiver: int, version: int, buckets: Sequence[Any], checksums: WeightChecksums | None, generation: int
    ) -> SyncReceipt:
        began = time.monotonic()
        fetched: list[WeightBucket] = list(await asyncio.gather(*buckets))
        staging = self._staging.setdefault(receiver, SharedStaging())
        for bucket in fetched:
            await asyncio.to_thread(staging.copy, bucket)
        size = sum(bucket.nbytes for bucket in fetched)
        found = checksums.digest if checksums is not None else ""  # the engines compare; here there is nothing to hold
        return SyncReceipt(version, size, 0.0, time.monotonic() - began, found, None, generation)


class OneOfMany:
    """The handle of one receiver of a `Replaying` process, as the sync calls a worker."""

    def __init__(self, process: Any, number: int) -> None:
        self.update_weights = SimpleNamespace(remote=lambda *arguments: process.update_weights.remote(number, *arguments))


async def versions(
    learner: LearnerGroup, targets: Sequence[SyncTarget], turns: int, bucket_bytes: int, copy: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of a turn: of the copy, of the whole way to all targets, of the export in that, and the longest pause of an engine."""
    pauses: list[float] = []
    sync = WeightSync(
        WeightSyncConfig(bucket_bytes=bucket_bytes),
        EngineConfig(),
        learner,
        SyncCallbacks(
            receipt=lambda receipt: pauses.append(receipt.pause_s),
            probe=lambda *_: None,
            dirty=lambda target, reason: sys.exit(f"{target.name}: {reason}"),
            failure=lambda target, reason: sys.exit(f"{target.name}: {reason}"),
            loss=lambda error: sys.exit(str(error)),
        ),
        probe_ids=[],
        sync_s=300.0,
    )
    found: dict[str, list[float]] = {"copy": [], "sync": [], "export": [], "pause": []}
    for turn in range(turns + 2):
        await learner.step(corrected(), CORRECTION, step=turn)
        found["copy"].append(seconds_of(copy))
        pauses.clear()
        began = time.perf_counter()
        snapshot = await sync.publish()
        if turn == 0:
            for target in targets:
                sync.join(target)
        await sync.receipts(learner.version, deadline_s=600.0)
        found["sync"].append(time.perf_counter() - began)
        found["export"].append(snapshot.seconds)
        found["pause"].append(max(pauses))
    await sync.close()
    return {name: values[2:] for name, values in found.items()}  # the first compares checksums, the second makes shared memory


def print_way(name: str, count: int, size: int, found: Mapping[str, Sequence[float]]) -> None:
    times = TimeRatio.of(found["sync"], found["copy"])
    mean = {key: statistics.fmean(values) for key, values in found.items()}
    print(
        f"{name:24s}{times!s:>24s} times the copy{count * size / mean['sync'] / 2**30:8.2f} GiB/s to all together; "
        f"export {mean['export'] / mean['sync']:4.0%} of it, longest pause {mean['pause'] / mean['sync']:4.0%}",
        flush=True,
    )


async def ways(model: Path, engines: Sequence[int], replaying: int, turns: int, bucket_bytes: int) -> None:
    """The way of weights to some engines, then to replaying receivers."""
    learner_config = LearnerConfig(learning_rate=USUAL_RATE, device="cpu")
    learner, _ = await LearnerGroup.start(RankPlaces(learner_config, {}), model, version=0, bind="127.0.0.1", start_s=600.0, step_s=600.0)
    size = sum(p.numel() * 4 for p in _parameters(model))
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    print(f"{size / 2**20:.0f} MiB of weights; median of the ratios of {turns} versions (quartiles)")

    async def measure(name: str, handles: Sequence[Any], bucket_bytes: int = bucket_bytes) -> None:
        targets = [SyncTarget(str(number), handle) for number, handle in enumerate(handles)]
        print_way(name, len(handles), size, await versions(learner, targets, turns, bucket_bytes, lambda: target.copy_(source)))

    async def all_of(calls: Sequence[Awaitable[Any]]) -> None:
        await asyncio.gather(*calls)

    started: list[Any] = []
    for count in engines:
        for _ in range(count - len(started)):  # one after the other: a start takes all cores
            started.append(ray.remote(BareWorker).options(num_cpus=0, max_concurrency=64).remote())
            await started[-1].start_engine.remote(model)
        await measure(f"{counted(count, 'engine')}", started[:count])
    await all_of([engine.stop_engine.remote() for engine in started])
    for engine in started:
        ray.kill(engine)
    processes = [ray.remote(Replaying).options(num_cpus=0, max_concurrency=64).remote() for _ in range(-(-replaying // IN_A_PROCESS))]
    if replaying:
        receivers = [OneOfMany(processes[i // IN_A_PROCESS], i) for i in range(replaying)]
        await measure(f"{replaying} replaying", receivers, min(bucket_bytes, REPLAYED_BUCKET))
    learner.kill()


def _parameters(model: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [tensor for file in model.glob("*.safetensors") for tensor in load_file(file).values()]


def pause_share(folder: Path, steps: int) -> tuple[float, float]:
    """(median, largest) share of a step in which an engine of the nano recipe is paused."""
    settings = ("evaluation.problems=32", "evaluation.every_steps=0", "checkpoint.every_steps=0")
    evenkeel("train", NANO_RECIPE, f"steps={steps}", f"run_dir={folder}", *settings)
    shares = [line["time/pause_s"] / line["time/step_s"] for line in steps_of(folder)[WARM_UP_STEPS:] if "time/pause_s" in line]
    return statistics.median(shares), max(shares)


def unchanged_share(model: Path, learning_rate: float, steps: int = 8) -> tuple[float, float]:
    """(elements, bytes): shares of the weights in bfloat16 that an update leaves as they were; the mean of the later half of the steps."""
    learner = LearnerRank(LearnerConfig(learning_rate=learning_rate, warmup_steps=0, device="cpu"))
    learner.load(model)
    before, shares = half(learner), []
    for step in range(steps):
        batch = random_batch(lengths_of_groups(16, 8, (16, 24), (4, 8)), 8, 50)
        learner.step(defer(batch, CORRECTION), CORRECTION, step=step)
        after = half(learner)
        same = before == after
        shares.append((float(same.view(-1, 2).all(1).float().mean()), float(same.float().mean())))
        before = after
    learner.close()
    elements, numbers = zip(*shares[steps // 2 :], strict=True)
    return statistics.fmean(elements), statistics.fmean(numbers)


def half(learner: LearnerRank) -> torch.Tensor:
    """[bytes] uint8: all weights in bfloat16, end to end."""
    pieces = [tensor for piece in learner.weights() for tensor in piece.values()]
    return torch.cat([tensor.detach().reshape(-1).to(torch.bfloat16).view(torch.uint8) for tensor in pieces])


def asked(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4], help="numbers of real engines")
    parser.add_argument("--replaying", type=int, default=50, help="receivers without an engine; 0: none")
    parser.add_argument("--turns", type=int, default=7, help="versions for each number; at least 2, for the quartiles")
    parser.add_argument("--steps", type=int, default=25, help="of the short run; 0: leave it out")
    parser.add_argument("--bucket-mib", type=int, default=USUAL_BUCKET >> 20, help="size of the buckets in which the weights travel")
    parser.add_argument("--ray-temp-dir", type=Path, help="where Ray keeps its session")
    arguments = parser.parse_args(words)
    if arguments.turns < 2:
        parser.error(f"--turns {arguments.turns}: quartiles need at least 2 versions")
    return arguments


def main() -> None:
    arguments = asked()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model, MODEL, VOCABULARY)
        environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONWARNINGS": "ignore"}}
        temp = {"_temp_dir": str(arguments.ray_temp_dir)} if arguments.ray_temp_dir else {}
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, runtime_env=environment, **temp)
        try:
            asyncio.run(ways(model, sorted(arguments.engines), arguments.replaying, arguments.turns, arguments.bucket_mib << 20))
        finally:
            ray.shutdown()
        evenkeel("init-model", NANO_RECIPE, "--if-missing")
        if arguments.steps:
            median, largest = pause_share(Path(folder) / "run", arguments.steps)
            print(f"an engine of the nano recipe is paused for {median:.1%} of a step (median; the longest {largest:.1%})")
        for rate in (3e-4, USUAL_RATE):
            elements, numbers = unchanged_share(ROOT / "models" / "nano-spell-backward", rate)
            print(f"at a rate of {rate:g} an update leaves {elements:.1%} of the bfloat16 elements alone, {numbers:.1%} of the bytes")


if __name__ == "__main__":
    main()
