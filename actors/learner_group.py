"""The learner as Ray actors, one a rank, and the handle that drives them together."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors.carriers import ActorInfo, WeightSnapshot
from actors.exporter import MetricsEndpoint, listen_address, node_address
from actors.supervision import USUAL_START, wait_for
from correction.config import CorrectionConfig
from correction.engines.weight_bucket import WeightBucket
from correction.errors import DeadlineExceeded, SyncError
from learner.config import LearnerConfig

if TYPE_CHECKING:  # torch and Megatron are imported in the ranks' own processes
    from torch import Tensor

    from correction.batch import CorrectedBatch, PackedBatch
    from correction.engines.weight_spec import WeightSpec
    from learner.broadcast import WeightBroadcaster
    from learner.learner_rank import Proximal
    from learner.step import StepResult


_SAVED_POLL_S = 0.2
"""Between two questions whether a checkpoint is written; a rank answers between its steps."""


class LearnerRankActor:
    """One Megatron rank in a process of its own. Calls run one after the other, in the order of arrival."""

    def __init__(self, config: LearnerConfig, rank: int, *, bind: str) -> None:
        self._config, self._rank, self._bind = config, rank, bind
        self._version = 0
        self._broadcaster: WeightBroadcaster | None = None

    def address(self) -> tuple[str, int]:
        """Where rank 0 listens: this node and a port that is free now."""
        host = node_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def start(self, world_size: int, master: tuple[str, int], model: Path, version: int) -> ActorInfo:
        """Join the group and load the weights."""
        from learner import layers
        from learner.kept_weights import KeptWeights
        from learner.learner_rank import LearnerRank

        self._learner = LearnerRank(self._config, self._rank, world_size, master[0], master[1])
        self._learner.load(model)
        self._kept = KeptWeights(self._learner)
        self._version = version
        self._endpoint = MetricsEndpoint("learner", str(self._rank), bind=listen_address(self._bind))
        gc.freeze()  # a full garbage collection need not walk through all that the imports made
        detail = layers.describe(self._config, self._learner.placement.device)
        return ActorInfo("learner", str(self._rank), os.getpid(), self._endpoint.target, detail)

    def step(self, corrected: CorrectedBatch, correction: CorrectionConfig, step: int) -> StepResult:
        """Train on a batch; the weight version grows by one, also when the guard skipped the update."""
        began = time.monotonic()
        result = self._learner.step(corrected, correction, step=step)
        self._version += 1
        self._endpoint.set("time/train_s", time.monotonic() - began)
        self._endpoint.set("weight_version", self._version)
        return result

    def proximal(self, batch: PackedBatch, version: int) -> Proximal:
        """Proximal logprobs at the weights of `version`, which have to be the present ones."""
        self._check_version("logprobs", version)
        return self._learner.proximal(batch)

    def load_reference(self, model: Path) -> None:
        self._learner.load_reference(model)

    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        return self._learner.reference_logprobs(batch)

    def keep_weights(self, version: int, oldest: int) -> None:
        """Copy the weights, which have to be those of `version`, for `at_sampling`."""
        self._check_version("a copy of the weights", version)
        self._kept.keep(version, oldest=oldest)

    def at_sampling(self, batch: PackedBatch, version: int, oldest: int) -> tuple[Tensor, Tensor]:
        """Logprobs at the weights that sampled each token, as KeptWeights.at_sampling, and at the present ones, those of `version`."""
        self._check_version("logprobs", version)
        return self._kept.at_sampling(batch, oldest=oldest), self._learner.logprobs(batch)

    def _check_version(self, what: str, version: int) -> None:
        if version != self._version:
            raise RuntimeError(f"learner rank {self._rank}: {what} at version {version} asked, the weights are {self._version}")

    def weights(self, bucket_bytes: int, probe_ids: Sequence[int], with_checksums: bool) -> WeightSnapshot | None:
        """Copy the weights into the object store. Every rank takes part in gathering; rank 0 answers."""
        began = time.monotonic()
        references = []
        for piece in self._learner.weights(bucket_bytes):
            if self._rank == 0:
                references.append(ray.put(WeightBucket.of(piece)))
        probe = self._score(probe_ids) if probe_ids else []
        checksums = self._learner.weight_checksums() if with_checksums else {}
        if self._rank != 0:
            return None
        processor = self._learner.processor() if with_checksums and self._config.fixed_order else None
        return WeightSnapshot(self._version, references, probe, checksums, time.monotonic() - began, processor)

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of a fixed sequence at temperature 1, from its second token on; as RolloutEngine.score."""
        import torch

        from correction.batch import PackedBatch

        n = len(token_ids)
        mask = torch.ones(n, dtype=torch.bool)
        mask[0] = False
        batch = PackedBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            offsets=torch.tensor([0, n]),
            loss_mask=mask,
            behavior_logprobs=torch.zeros(n),
            advantages=torch.zeros(n),
            weight_versions=torch.full((n,), -1, dtype=torch.int32),
            group_ids=torch.zeros(1, dtype=torch.int64),
        )
        return [float(value) for value in self._learner.logprobs(batch)[1:]]

    def begin_save(self, folder: Path, hf_folder: Path) -> None:
        self._learner.begin_save(folder, hf_folder)

    def is_saved(self) -> bool:
        return self._learner.is_saved()

    def restore(self, folder: Path, version: int) -> None:
        self._learner.restore(folder)
        self._version = version

    def open_broadcast(self, host: str, port: int, world_size: int, name: str, timeout_s: float) -> None:
        """Join the weight group of a fixed pool as its rank 0 (rank 0 of the learner only)."""
        from learner.broadcast import WeightBroadcaster

        self._broadcaster = WeightBroadcaster(host, port, world_size, name, timeout_s)

    def broadcast(self, bucket_bytes: int) -> None:
        """Send the weights through the group; raises SyncError when it failed, the learner goes on. Every rank takes part in gathering."""
        if self._broadcaster is None and self._rank == 0:
            raise SyncError("the learner is in no weight group; open_broadcast comes first")
        failure: SyncError | None = None
        for piece in self._learner.weights(bucket_bytes):
            if self._broadcaster is not None and failure is None:
                try:
                    self._broadcaster.send(piece)
                except SyncError as error:
                    failure = error  # the other ranks gather to the end
        if failure is not None:
            raise failure

    def weight_specs(self, bucket_bytes: int) -> list[list[WeightSpec]]:
        """Names, dtypes and shapes, bucket by bucket, in the order in which `broadcast` sends them."""
        return self._learner.weight_specs(bucket_bytes)

    def close_broadcast(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
            self._broadcaster = None


def is_on_gpu(config: LearnerConfig) -> bool:
    """Whether each rank asks for a GPU. Decided where the run starts: a rank's own process sees only what Ray gives it."""
    if config.device != "auto":
        return config.device == "cuda"
    import torch

    return torch.cuda.is_available()


class LearnerGroup:
    """All ranks of the learner, driven together. Handles only: it may be sent to other actors."""

    def __init__(self, ranks: list[Any], *, step_s: float) -> None:
        self._ranks, self._step_s = ranks, step_s

    @classmethod
    async def start(
        cls, config: LearnerConfig, model: Path, *, version: int, bind: str, start_s: float, step_s: float
    ) -> tuple[LearnerGroup, list[ActorInfo]]:
        """Start the ranks and load the model.

        Returns: the group, and for each rank its process id and metrics endpoint.
        """
        world_size = config.world_size
        actor = ray.remote(LearnerRankActor).options(
            num_cpus=1,
            num_gpus=1 if is_on_gpu(config) else 0,
            max_restarts=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.threads)}},
        )
        ranks: list[Any] = [actor.remote(config, rank, bind=bind) for rank in range(world_size)]
        group = cls(ranks, step_s=step_s)
        usual_s = USUAL_START * start_s
        master = await wait_for(ranks[0].address.remote(), "learner rank 0 -> a process", deadline_s=start_s, usual_s=usual_s)
        starts = [r.start.remote(world_size, master, model, version) for r in ranks]
        infos = await group._all(starts, "learner start", start_s, usual_s=usual_s)
        return group, infos

    @property
    def rank_zero(self) -> Any:
        return self._ranks[0]

    async def step(self, corrected: CorrectedBatch, correction: CorrectionConfig, *, step: int) -> StepResult:
        reference = ray.put(corrected)
        results = await self._all([r.step.remote(reference, correction, step) for r in self._ranks], f"learner step {step}")
        result: StepResult = results[0]
        return result

    async def proximal(self, batch: PackedBatch, *, version: int) -> Proximal:
        """log pi of the batch's tokens at the learner's present weights, and where they were sent if training is to follow."""
        reference = ray.put(batch)
        results: list[Proximal] = await self._all(
            [r.proximal.remote(reference, version) for r in self._ranks], f"proximal logprobs v{version}"
        )
        return results[0]

    async def load_reference(self, model: Path) -> None:
        await self._all([r.load_reference.remote(model) for r in self._ranks], "reference policy")

    async def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        reference = ray.put(batch)
        calls = [r.reference_logprobs.remote(reference) for r in self._ranks]
        results: list[Tensor] = await self._all(calls, "reference logprobs")
        return results[0]

    async def keep_weights(self, version: int, *, oldest: int) -> None:
        """Every rank keeps a copy of its weights, which are those of `version`, and frees copies older than `oldest`."""
        await self._all([r.keep_weights.remote(version, oldest) for r in self._ranks], f"copy of the weights v{version}")

    async def at_sampling(self, batch: PackedBatch, *, version: int, oldest: int) -> tuple[Tensor, Tensor]:
        """log pi of the trained tokens at the weights that sampled them (not a number where those aren't kept), and at the present ones."""
        reference = ray.put(batch)
        calls = [r.at_sampling.remote(reference, version, oldest) for r in self._ranks]
        results: list[tuple[Tensor, Tensor]] = await self._all(calls, f"logprobs at the weights that sampled, v{version}")
        return results[0]

    async def weights(self, bucket_bytes: int, *, probe_ids: Sequence[int] = (), with_checksums: bool = False) -> WeightSnapshot:
        calls = [r.weights.remote(bucket_bytes, list(probe_ids), with_checksums) for r in self._ranks]
        snapshots: list[WeightSnapshot] = await self._all(calls, "copy of the weights")
        return snapshots[0]

    async def weight_specs(self, bucket_bytes: int, *, deadline_s: float) -> list[list[WeightSpec]]:
        """What `broadcast` sends, bucket by bucket."""
        calls = [r.weight_specs.remote(bucket_bytes) for r in self._ranks]
        specs: list[list[list[WeightSpec]]] = await self._all(calls, "weight specs", deadline_s)
        return specs[0]

    async def broadcast(self, bucket_bytes: int, *, deadline_s: float) -> None:
        """Send the weights through the group that rank 0 is in. Raises: SyncError when it failed."""
        await self._all([r.broadcast.remote(bucket_bytes) for r in self._ranks], "broadcast of the weights", deadline_s)

    async def begin_save(self, folder: Path, hf_folder: Path, *, deadline_s: float) -> None:
        """Copy all that a checkpoint holds; the ranks write it beside their next steps."""
        await self._all([r.begin_save.remote(folder, hf_folder) for r in self._ranks], "copy for a checkpoint", deadline_s)

    async def saved(self, *, deadline_s: float) -> None:
        """Wait until every rank has written what it copied. Raises: DataError if one could not; DeadlineExceeded."""
        ends = time.monotonic() + deadline_s
        while True:
            is_late = time.monotonic() > ends
            # A rank answers between two steps, so that the answer may take as long as one.
            if all(await self._all([r.is_saved.remote() for r in self._ranks], "end of a checkpoint", deadline_s + self._step_s)):
                return
            if is_late:
                raise DeadlineExceeded(f"checkpoint <- learner: not on disk after {deadline_s:g} s (deadlines.checkpoint_s)")
            await asyncio.sleep(_SAVED_POLL_S)

    async def restore(self, folder: Path, version: int, *, deadline_s: float) -> None:
        await self._all([r.restore.remote(folder, version) for r in self._ranks], f"restoring {folder}", deadline_s)

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    async def _all(self, references: list[Any], what: str, deadline_s: float | None = None, *, usual_s: float = 0.0) -> list[Any]:
        """The answers of all ranks; the first error of any of them at once, not after the others' deadline."""
        limit_s = deadline_s or self._step_s
        waits = [
            asyncio.ensure_future(wait_for(r, f"{what} <- rank {i}", deadline_s=limit_s, usual_s=usual_s))
            for i, r in enumerate(references)
        ]
        try:
            return list(await asyncio.gather(*waits))
        finally:
            for wait in waits:
                wait.cancel()
