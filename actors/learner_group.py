"""The learner as Ray actors, one a rank, and the handle that drives them together.

In a collective call every rank waits for the others: two callers whose calls reach the ranks in different orders would let them wait for
each other for ever, or mix up their numbers. So there is one `LearnerGroup`, in the controller's process; it numbers its collective calls
and hands each to all ranks before the next, and a rank refuses a call that isn't the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from actors.carriers import ActorInfo, ExportPlan, WeightSnapshot
from actors.devices import check_received
from actors.exporter import MetricsEndpoint, listen_address, node_address
from actors.hub import model_folder
from actors.payloads import checksums_of
from actors.placement import RankPlaces
from actors.supervision import USUAL_START, kill, wait_for
from correction.engines.quick_imports import uncollected
from correction.errors import ActorLost, ActorUnavailable, DataError, DeadlineExceeded, EngineError, SyncError
from learner.config import LearnerConfig
from rollout.stacks import tell_stacks

if TYPE_CHECKING:  # torch and Megatron are imported in the ranks' own processes
    from torch import Tensor

    from correction.batch import CorrectedBatch, PackedBatch
    from correction.config import CorrectionConfig
    from correction.engines.processor import Processor
    from correction.engines.weight_bucket import WeightBucket
    from learner.broadcast import WeightBroadcaster
    from learner.export import Staging
    from learner.results import Proximal, StepResult, StepValues


_SAVED_POLL_S = 0.2
"""Between two questions whether a checkpoint is written; a rank answers between its steps."""


class LearnerRankActor:
    """One Megatron rank in a process of its own. Calls run one after the other, in the order of arrival.

    Collective ones say first which number they have among those of their caller. Rank 0 answers them; the others return nothing.
    """

    def __init__(self, config: LearnerConfig, rank: int, *, bind: str) -> None:
        tell_stacks()
        self._config, self._rank, self._bind = config, rank, bind
        self._version = 0
        self._calls = 0
        self._broadcaster: WeightBroadcaster | None = None
        self._reserved: socket.socket | None = None
        self._staging: Staging | None = None
        self._processor: Processor | None = None

    def address(self) -> tuple[str, int]:
        """Where rank 0 will listen: this node and a port that nobody else is given until the next one is asked for."""
        host = node_address()
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who listens there sets it, too, and may
        self._reserved.bind((host, 0))
        return host, self._reserved.getsockname()[1]

    def start(self, world_size: int, master: tuple[str, int], model: Path, version: int) -> ActorInfo:
        """Join the group and load the weights."""
        with uncollected():
            from learner import layers
            from learner.kept_weights import KeptWeights
            from learner.learner_rank import LearnerRank

            if self._config.resolved_device == "cuda":
                check_received(f"learner rank {self._rank}", self._config.gpus_per_rank, ray.get_gpu_ids())
            self._learner = LearnerRank(self._config, self._rank, world_size, master[0], master[1])
        self._learner.load(model_folder(model))
        self._kept = KeptWeights(self._learner)
        self._version = version
        self._endpoint = MetricsEndpoint("learner", str(self._rank), bind=listen_address(self._bind))
        detail = layers.describe(self._config, self._learner.placement.device)
        return ActorInfo("learner", str(self._rank), os.getpid(), self._endpoint.target, detail)

    def step(
        self, number: int, corrected: CorrectedBatch, correction: CorrectionConfig, step: int
    ) -> tuple[StepResult | None, StepValues | None]:
        """Train on a batch; the weight version grows by one, also when the guard skipped the update.

        Returns: the result without what it says of each token, and that, which stays where it is until somebody computes with it.
        """
        self._in_order(number, f"step {step}")
        began = time.monotonic()
        result = self._learner.step(corrected, correction, step=step)
        self._version += 1
        self._endpoint.set("time/train_s", time.monotonic() - began)
        self._endpoint.set("weight_version", self._version)
        return (replace(result, values=None), result.values) if self._rank == 0 else (None, None)

    def proximal(self, number: int, batch: PackedBatch, version: int) -> tuple[None, Proximal | None]:
        """Proximal logprobs at the weights of `version`: nothing for who waits, and the answer for who has asked."""
        self._in_order(number, "proximal logprobs", version)
        result = self._learner.proximal(batch)
        return None, result if self._rank == 0 else None

    def load_reference(self, number: int, model: Path) -> None:
        self._in_order(number, "load of the reference policy")
        self._learner.load_reference(model_folder(model))

    def reference_logprobs(self, number: int, batch: PackedBatch, version: int) -> tuple[None, Tensor | None]:
        """As `proximal`."""
        self._in_order(number, "reference logprobs", version)
        result = self._learner.reference_logprobs(batch)
        return None, result if self._rank == 0 else None

    def keep_weights(self, number: int, version: int, oldest: int) -> None:
        """Copy the weights of `version` for `at_sampling`."""
        self._in_order(number, "copy of the weights to keep", version)
        self._kept.keep(version, oldest=oldest)

    def at_sampling(self, number: int, batch: PackedBatch, version: int, oldest: int) -> tuple[None, tuple[Tensor, Tensor] | None]:
        """As `proximal`: logprobs at the weights that sampled each token, as KeptWeights.at_sampling, and at the present ones."""
        self._in_order(number, "logprobs at the weights that sampled", version)
        found = self._kept.at_sampling(batch, oldest=oldest), self._learner.logprobs(batch)
        return None, found if self._rank == 0 else None

    def export(self, number: int, version: int, plan: ExportPlan) -> WeightSnapshot | None:
        """One pass over the weights of `version`: every rank takes part in gathering, rank 0 alone copies, sends and answers.

        A broadcast that fails is told in the answer; the learner goes on.
        """
        from correction.engines.float8 import in_float8
        from correction.engines.weight_spec import WeightSpec
        from learner.export import weight_checksums

        self._in_order(number, "export of the weights", version)
        began = time.monotonic()
        references, specs, error = [], [], ""
        checksums: dict[str, str] = {}
        for piece in self._learner.weights(plan.bucket_bytes):
            if self._rank != 0:
                continue
            piece = in_float8(piece) if plan.float8 else piece
            specs.append([WeightSpec.of(name, tensor) for name, tensor in piece.items()])
            if plan.broadcasts and not error:
                error = self._send(piece)
            if plan.stores:
                references.append(ray.put(self._stage(piece)))
                checksums |= weight_checksums(piece.items()) if plan.checksums else {}  # where the piece is
        probe = self._score(plan.probe_ids) if plan.probe_ids else []
        if self._rank != 0:
            return None
        seconds = time.monotonic() - began
        return WeightSnapshot(self._version, references, specs, probe, checksums, seconds, self._computes_with(), error)

    def _send(self, piece: Mapping[str, Tensor]) -> str:
        """Why it could not be broadcast; the other ranks gather to the end all the same. Empty: it could."""
        if self._broadcaster is None:
            return "the learner is in no weight group; open_broadcast comes first"
        try:
            self._broadcaster.send(piece)
        except SyncError as error:
            return str(error)
        return ""

    def _stage(self, piece: Mapping[str, Tensor]) -> WeightBucket:
        from learner.export import Staging

        if self._staging is None:
            self._staging = Staging()
        return self._staging.bucket(piece)

    def _computes_with(self) -> Processor | None:
        if self._processor is None and self._config.batch_invariant:
            self._processor = self._learner.processor()
        return self._processor

    def _in_order(self, number: int, what: str, version: int | None = None) -> None:
        """Raises: EngineError for a call that isn't the next, or is meant for other weights."""
        due = self._calls + 1
        if number != due:
            raise EngineError(
                f"learner rank {self._rank}: {what} came as collective call {number}, but {due} is the next: the ranks would wait for each "
                "other in different calls. Only one LearnerGroup may call them; resume the run from its last checkpoint"
            )
        self._calls = number
        if version is not None and version != self._version:
            raise EngineError(f"learner rank {self._rank}: {what} asked at version {version}, but the weights are of {self._version}")

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of a fixed sequence at temperature 1, from its second token on; as RolloutEngine.score."""
        import torch

        from learner.optimizer_steps import unsampled_batch

        ids, ends = torch.tensor(token_ids, dtype=torch.int64), torch.tensor([0, len(token_ids)])
        batch = unsampled_batch(ids, ends, torch.arange(len(ids)) > 0)
        return [float(value) for value in self._learner.logprobs(batch)[1:]]

    def begin_save(self, number: int, folder: Path, hf_folder: Path) -> None:
        self._in_order(number, "copy for a checkpoint")
        self._learner.begin_save(folder, hf_folder)

    def is_saved(self) -> bool:
        """No collective call: each rank answers for itself."""
        return self._learner.is_saved()

    def checkpoint_bytes(self) -> int:
        """No collective call either."""
        return self._learner.checkpoint_bytes()

    def restore(self, number: int, folder: Path, version: int) -> None:
        self._calls, self._version = number, version  # in no order: calls before it may be lost with who made their arguments
        with contextlib.suppress(DataError):  # what is being written may be a step that will be written again
            self._learner.is_saved(wait=True)
        self._learner.restore(folder)
        self._kept.forget()

    def open_broadcast(self, host: str, port: int, world_size: int, name: str, timeout_s: float) -> None:
        """Join the weight group of a fixed pool as its rank 0 (rank 0 of the learner only)."""
        from learner.broadcast import WeightBroadcaster

        self._broadcaster = WeightBroadcaster(host, port, world_size, name, timeout_s, self._learner.placement.device)

    def close_broadcast(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
            self._broadcaster = None


class LearnerGroup:
    """All ranks of the learner, driven together: the one caller of their collective calls. It stays in the process that made it."""

    def __init__(self, ranks: list[Any], *, version: int, step_s: float) -> None:
        self._ranks, self.step_s = ranks, step_s
        self._calls = 0
        self._missed = ""
        """Why some rank may lack a call that others have: it takes no other one until a restore. Empty: none does."""
        self._version = version
        self.start_took_s = 0.0

    @classmethod
    async def start(
        cls, places: RankPlaces, model: Path, *, version: int, bind: str, start_s: float, step_s: float,
        made: Callable[[LearnerGroup], None] = lambda _: None,
    ) -> tuple[LearnerGroup, list[ActorInfo]]:
        """Start the ranks and load the model.

        Args: made: is given the group while its ranks start; one that doesn't come up has to be ended, too.
        Returns: the group, and for each rank its process id and metrics endpoint.
        """
        config, world_size, actor = places.config, places.config.world_size, ray.remote(LearnerRankActor)
        ranks: list[Any] = [actor.options(**places.options(rank)).remote(config, rank, bind=bind) for rank in range(world_size)]
        group, began = cls(ranks, version=version, step_s=step_s), time.monotonic()
        made(group)
        usual_s = USUAL_START * start_s
        master = await wait_for(ranks[0].address.remote(), "learner rank 0 -> a process", deadline_s=start_s, usual_s=usual_s)
        starts = [r.start.remote(world_size, master, model, version) for r in ranks]
        infos = await group._all(starts, "learner start", start_s, usual_s=usual_s, is_collective=False)
        group.start_took_s = time.monotonic() - began
        return group, infos

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LearnerGroup stays in its process: calls from a second one would reach the ranks in another order")

    @property
    def rank_zero(self) -> Any:
        """For calls that concern no other rank."""
        return self._ranks[0]

    @property
    def version(self) -> int:
        """Of the weights when all that has been called so far is done."""
        return self._version

    async def step(self, corrected: Any, correction: CorrectionConfig, *, step: int) -> StepResult:
        """Train on a batch; the version grows by one.

        Args: corrected: reference to a CorrectedBatch.
        Returns: the result with a reference to its values.
        """
        pairs = self._submit("step", corrected, correction, step, results=2)
        self._version += 1
        result: StepResult = (await self._all([done for done, _ in pairs], f"learner step {step}"))[0]
        return replace(result, values=pairs[0][1])

    async def proximal(self, batch: Any, *, version: int) -> Any:
        """log pi of the batch's tokens at the weights of `version`, and where they were sent if training is to follow.

        Args:
            batch: reference to a PackedBatch.
        Returns: reference to a Proximal; only who computes with it needs it in its process.
        """
        return await self._found("proximal", batch, version, what=f"proximal logprobs v{version}")

    async def load_reference(self, model: Path) -> None:
        await self._all(self._submit("load_reference", model), "reference policy")

    async def reference_logprobs(self, batch: Any, *, version: int) -> Any:
        """The same under the reference's weights, from references to references; `version` is that of the learner."""
        return await self._found("reference_logprobs", batch, version, what=f"reference logprobs v{version}")

    async def keep_weights(self, version: int, *, oldest: int) -> None:
        """Every rank keeps a copy of its weights, which are those of `version`, and frees copies older than `oldest`."""
        await self._all(self._submit("keep_weights", version, oldest), f"copy of the weights v{version} to keep")

    async def at_sampling(self, batch: Any, *, version: int, oldest: int) -> Any:
        """From a reference to a reference, as `proximal`: log pi of the trained tokens at the weights that sampled them (not a number where
        those aren't kept), and at the present ones."""
        return await self._found("at_sampling", batch, version, oldest, what=f"logprobs at the weights that sampled, v{version}")

    async def export(self, plan: ExportPlan, *, deadline_s: float | None = None) -> WeightSnapshot:
        """The weights of `version`, to where the plan says, in one pass."""
        version = self._version
        asked = self._submit("export", version, plan)
        snapshot: WeightSnapshot = (await self._all(asked, f"copy of the weights v{version}", deadline_s))[0]
        return snapshot

    async def checksums(self, buckets: Sequence[Any], *, deadline_s: float) -> dict[str, str]:
        """Of weights in the object store, HF name -> checksum, computed where they lie, by no rank.

        Args:
            buckets: references to WeightBuckets.
        """
        compute = ray.remote(num_cpus=0)(checksums_of)
        return await wait_for(compute.remote(*buckets), "checksums of the weights", deadline_s=deadline_s)

    async def begin_save(self, folder: Path, hf_folder: Path, *, deadline_s: float) -> None:
        """Copy all that a checkpoint holds; the ranks write it beside their next steps."""
        await self._all(self._submit("begin_save", folder, hf_folder), "copy for a checkpoint", deadline_s)

    async def checkpoint_bytes(self, *, deadline_s: float) -> int:
        """Size of a checkpoint of now."""
        sizes = [rank.checkpoint_bytes.remote() for rank in self._ranks]
        return sum(await self._all(sizes, "size of a checkpoint", deadline_s, is_collective=False))

    async def saved(self, *, deadline_s: float) -> None:
        """Wait until every rank has written what it copied. Raises: DataError if one could not; DeadlineExceeded."""
        ends = time.monotonic() + deadline_s
        while True:
            is_late = time.monotonic() > ends
            # A rank answers between two steps, so that the answer may take as long as one.
            asked, limit_s = [rank.is_saved.remote() for rank in self._ranks], deadline_s + self.step_s
            if all(await self._all(asked, "end of a checkpoint", limit_s, is_collective=False)):
                return
            if is_late:
                raise DeadlineExceeded(f"checkpoint <- learner: not on disk after {deadline_s:g} s (deadlines.checkpoint_s)")
            await asyncio.sleep(_SAVED_POLL_S)

    async def restore(self, folder: Path, version: int, *, deadline_s: float) -> None:
        """Go on from a checkpoint, whose weights are of this version."""
        self._missed = ""
        calls = self._submit("restore", folder, version)
        self._version = version
        await self._all(calls, f"restoring {folder}", deadline_s)

    @property
    def ranks(self) -> dict[str, Any]:
        """Their actors, by what they are called in sentences."""
        return {f"learner rank {number}": rank for number, rank in enumerate(self._ranks)}

    def kill(self) -> None:
        kill(*self._ranks)

    def _submit(self, method: str, *arguments: Any, results: int = 1) -> list[Any]:
        """A collective call, handed to every rank before anything else is: Ray keeps the order of one caller. Raises: ActorLost."""
        if self._missed:
            raise ActorLost(f"{self._missed}; its ranks can be called again after a restore")
        self._calls += 1
        return [getattr(rank, method).options(num_returns=results).remote(self._calls, *arguments) for rank in self._ranks]

    async def _found(self, method: str, *arguments: Any, what: str) -> Any:
        """Reference to what rank 0 has found, when all ranks are done."""
        pairs = self._submit(method, *arguments, results=2)
        await self._all([done for done, _ in pairs], what)
        return pairs[0][1]

    async def _all(
        self, references: list[Any], what: str, deadline_s: float | None = None, *, usual_s: float = 0.0, is_collective: bool = True
    ) -> list[Any]:
        """The answers of all ranks; the first error of any of them at once, not after the others' deadline."""
        limit_s = deadline_s or self.step_s
        named = [wait_for(r, f"{what} <- rank {i}", deadline_s=limit_s, usual_s=usual_s) for i, r in enumerate(references)]
        waits = [asyncio.ensure_future(wait) for wait in named]
        try:
            return list(await asyncio.gather(*waits))
        except ActorUnavailable as error:
            self._missed = str(error) if is_collective else self._missed
            raise
        finally:
            for wait in waits:
                wait.cancel()
