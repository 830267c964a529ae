"""One rank of the learner as a Ray actor. actors/ranks/learner_group.py calls all of them together."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil
import ray

from evenkeel.actors.carriers import ActorInfo, ExportPlan, RankStep, WeightChecksums, WeightSnapshot
from evenkeel.actors.cluster.hub import model_folder
from evenkeel.actors.groups.tokens import read_now
from evenkeel.actors.metrics.exporter import MetricsEndpoint, listen_address, node_address
from evenkeel.actors.processes.lane import Lane
from evenkeel.actors.processes.part_heartbeat import OUT_OF_TURN, SequentialHeartbeatActor
from evenkeel.actors.ranks.collective_calls import NumberedRank, collective, names_failures
from evenkeel.actors.settings.devices import check_received
from evenkeel.correction.errors import DataError, EngineError, SyncError
from evenkeel.engines.machine import gc_paused
from evenkeel.engines.rendezvous import keep_nccl_on, rendezvous_store
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.results import SplitLogprobs
from evenkeel.rollout.stacks import register_stack_dump

if TYPE_CHECKING:  # torch and Megatron are imported when the rank starts
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

    from evenkeel.correction.batch import CorrectedBatch, PackedBatch
    from evenkeel.correction.config import CorrectionConfig
    from evenkeel.correction.wide import WidePlace
    from evenkeel.engines.agreement import Processor
    from evenkeel.engines.weights import WeightBucket
    from evenkeel.learner.results import Proximal, StepValues
    from evenkeel.learner.weights.broadcast import WeightBroadcaster
    from evenkeel.learner.weights.export import Staging


ABORTABLE = frozenset({"step", "proximal", "reference_logprobs", "at_sampling"})
"""Collective calls that can end before one of their micro-batches."""

M = TypeVar("M", bound=Callable[..., Any])


def _as_span(what: str) -> Callable[[M], M]:
    """Decorates a rank's method: each run of it is a span of this name, with the method for its `why`."""

    def decorated(method: M) -> M:
        @wraps(method)
        def call(rank: LearnerRankActor, *arguments: Any, **named: Any) -> Any:
            with rank.lane.span(what, version=rank.version, why=method.__name__):
                return method(rank, *arguments, **named)

        return cast(M, call)

    return decorated


class LearnerRankActor(NumberedRank, SequentialHeartbeatActor):
    """One Megatron rank in a process of its own. Calls run one after the other, as they arrive with their arguments.

    A collective call's first argument is its number (collective_calls.py). Rank 0 returns the answer, the others None.
    """

    def __init__(self, config: LearnerConfig, rank: int, *, bind: str) -> None:
        super().__init__(f"learner rank {rank}")
        self.lane = Lane(f"rank-{rank}", waits_for="the driver's next call")
        register_stack_dump()
        self._config, self._rank, self._bind = config, rank, bind
        self._version = 0
        self._broadcaster: WeightBroadcaster | None = None
        # Of the weight group that is joined: whether it is given up, and its name. And the name of the last one that was closed.
        self._opening, self._given_up, self._group_name, self._closed_group = threading.Lock(), threading.Event(), "", ""
        # Name and store of the weight group that is joined next.
        self._served: tuple[str, TCPStore] | None = None
        self._reserved: socket.socket | None = None
        self._staging: Staging | None = None
        self._processor: Processor | None = None
        # Wide fields of the batch that comes next, by reference.
        self._read: dict[Any, Any] = {}

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    @ray.method(concurrency_group=OUT_OF_TURN)
    def address(self) -> tuple[str, int]:
        """Address at which rank 0 will listen: this node, and a port that isn't given to anybody else until the next one is asked for."""
        return self._reserve()

    def _reserve(self) -> tuple[str, int]:
        host = node_address()
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who listens there sets it, too, and may
        self._reserved.bind((host, 0))
        return host, self._reserved.getsockname()[1]

    @names_failures
    @_as_span("start")
    def start(self, world_size: int, master: tuple[str, int], model: Path, version: int) -> ActorInfo:
        """Join the group and load the weights."""
        with gc_paused():
            from evenkeel.learner.kept_weights import KeptWeights
            from evenkeel.learner.learner_rank import LearnerRank
            from evenkeel.learner.model import layers

            if self._config.resolved_device == "cuda":
                check_received(f"learner rank {self._rank}", self._config.gpus_per_rank, ray.get_gpu_ids())
                keep_nccl_on(node_address(), psutil.net_if_addrs())
            self._learner = LearnerRank(self._config, self._rank, world_size, master[0], master[1])
        self._learner.load(model_folder(model))
        self._kept = KeptWeights(self._learner)
        self._version = version
        self._endpoint = MetricsEndpoint("learner", str(self._rank), bind=listen_address(self._bind))
        config, device = self._learner.config, self._learner.placement.device
        return ActorInfo(
            "learner",
            str(self._rank),
            os.getpid(),
            self._endpoint.target,
            detail=layers.describe(config, device),
            node=ray.get_runtime_context().get_node_id(),
            host=node_address(),
            layers=layers.choose(config, device),
        )

    @names_failures
    @_as_span("fetch")
    def fetch(
        self, batch: PackedBatch | CorrectedBatch, correction: CorrectionConfig | None, step: int, limit_s: float, *, everything: bool
    ) -> dict[int, str]:
        """Read the wide fields of the sequences that this rank will compute in the next call on this batch. Not a collective call: a rank
        that can't read its own must not let the others wait.

        Args: as LearnerGroup.fetch.
        Returns: why groups can't be read, by id.
        Raises: DataError for fields that don't fit their tokens.
        """
        packed: Any = getattr(batch, "batch", None) or batch
        assert packed.wide is not None
        count = range(packed.num_sequences)
        own = list(count) if everything else self._learner.sequences_read(batch, correction, step=step)
        references = {one: None for i in own for one in packed.wide[i].references}
        self._read, lost = read_now(list(references), limit_s)
        if not lost:
            packed.holding(self._read).select(own).check_wide_fields()
        return {int(packed.group_ids[i]): lost[one] for i in own for one in packed.wide[i].references if one in lost}

    @ray.method(concurrency_group="heartbeat")
    def hold(self, number: int) -> int | None:
        """As Abort.hold, for a collective call; answers while the call runs."""
        return self._learner.abort.hold(number)

    @ray.method(concurrency_group="heartbeat")
    def release(self, number: int, before: int | None) -> None:
        self._learner.abort.release(number, before)

    @collective
    def step(
        self, number: int, corrected: CorrectedBatch, correction: CorrectionConfig, step: int, rate_scale: float
    ) -> tuple[RankStep, StepValues | None]:
        """Train on a batch; the weight version grows by one, also when the guard skipped the update.

        Returns: the result without per-token values, with what the rank has done since the last step; and those values, which stay in the
        object store until they are fetched.
        """
        self._in_order(number, f"step {step}")
        began = time.monotonic()
        with self.lane.span("step", version=self._version), self._learner.abort.during(number):
            batch = corrected.holding(self._read) if self._read else corrected
            result = self._learner.step(batch, correction, step=step, rate_scale=rate_scale)
        self._read = {}
        self._version += 1
        self._endpoint.set("time/train_s", time.monotonic() - began)
        self._endpoint.set("weight_version", self._version)
        told = self.lane.report()
        return (RankStep(replace(result, values=None), told), result.values) if self._rank == 0 else (RankStep(None, told), None)

    @collective
    @_as_span("forward")
    def proximal(self, number: int, batch: PackedBatch, version: int) -> tuple[None, Proximal | None]:
        """Proximal logprobs at the weights of `version`. Two results: None, which the group waits for, and rank 0's answer, which stays in
        the object store."""
        self._begin(number, "proximal logprobs", version)
        with self._learner.abort.during(number):
            result = self._learner.proximal(batch.holding(self._read) if self._read else batch)
        if self._rank != 0:
            return None, None
        routes = result.routed_experts
        return None, result if routes is None else replace(result, routed_experts=None, route_places=self._stored(batch, routes))

    def _stored(self, batch: PackedBatch, routed_experts: Tensor) -> tuple[WidePlace, ...]:
        """[S] places of the routed experts in the object store, an object for each group."""
        from evenkeel.correction.wide import WideFields, WidePlace, route_keys

        bounds, places = batch.offsets.tolist(), dict[int, WidePlace]()
        for sequences in batch.sequences_of_groups().values():
            reference = ray.put(tuple(WideFields(routed_experts[bounds[i] : bounds[i + 1] - 1].clone()) for i in sequences))
            for number, i in enumerate(sequences):
                trained = batch.loss_mask[bounds[i] : bounds[i + 1]].nonzero()
                prompt = int(trained[0]) if len(trained) else 0
                keys = route_keys(routed_experts[bounds[i] : bounds[i] + prompt])
                places[i] = WidePlace(((reference, number),), keys)
        return tuple(places[i] for i in range(len(places)))

    @collective
    @_as_span("start")
    def load_reference(self, number: int, model: Path) -> None:
        self._in_order(number, "load of the reference policy")
        self._learner.load_reference(model_folder(model))

    @collective
    @_as_span("forward")
    def reference_logprobs(self, number: int, batch: PackedBatch, version: int) -> tuple[None, Tensor | None]:
        """As `proximal`."""
        self._begin(number, "reference logprobs", version)
        with self._learner.abort.during(number):
            result = self._learner.reference_logprobs(batch.holding(self._read) if self._read else batch)
        return None, result if self._rank == 0 else None

    @collective
    @_as_span("copy")
    def keep_weights(self, number: int, version: int, oldest: int) -> None:
        """Copy the weights of `version` for `at_sampling`."""
        self._begin(number, "copy of the weights to keep", version)
        self._kept.keep(version, oldest=oldest)

    @collective
    def forget_weights(self, number: int, before: int) -> None:
        """Free the copies of `keep_weights` that are older than `before`."""
        self._in_order(number, "freeing kept weights")
        self._kept.forget(before=before)

    @collective
    @_as_span("forward")
    def at_sampling(self, number: int, batch: PackedBatch, version: int, oldest: int, with_now: bool) -> tuple[None, SplitLogprobs | None]:
        """As `proximal`: logprobs at the weights that sampled each token, as KeptWeights.at_sampling, and at the present ones if asked."""
        self._begin(number, "logprobs at the weights that sampled", version)
        batch = batch.holding(self._read) if self._read else batch
        with self._learner.abort.during(number):
            now = self._learner.logprobs(batch) if with_now else None
            found = SplitLogprobs(self._kept.at_sampling(batch, oldest=oldest), now)
        return None, found if self._rank == 0 else None

    @collective
    @_as_span("publish")
    def export(self, number: int, version: int, plan: ExportPlan) -> WeightSnapshot | None:
        """One pass over the weights of `version`: every rank takes part in gathering, rank 0 alone copies, sends and answers.

        A broadcast that fails is reported in the answer; the learner goes on.
        """
        from evenkeel.engines.weights import WeightSpec, digest_of, in_float8
        from evenkeel.learner.weights.export import weight_checksums

        self._begin(number, "export of the weights", version)
        began = time.monotonic()
        references, specs, error = [], [], ""
        checksums: dict[str, str] = {}
        try:
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
        finally:  # a bucket may be read from the weights themselves, which the next step changes
            last = self._send(None) if plan.broadcasts and self._rank == 0 else ""
        error = error or last
        probe = self._score(plan.probe_ids) if plan.probe_ids else []
        if self._rank != 0:
            return None
        seconds = time.monotonic() - began
        sums = WeightChecksums(ray.put(checksums), digest_of(checksums)) if checksums else None
        return WeightSnapshot(self._version, references, specs, probe, sums, seconds, self._computes_with(), error)

    def _send(self, piece: Mapping[str, Tensor] | None) -> str:
        """Begin to broadcast a piece; None: wait until the last one is sent.

        Returns: why that failed, as far as is known; empty: it didn't. After a failure the other ranks still gather to the end.
        """
        if (broadcaster := self._broadcaster) is None:  # another thread may leave the group meanwhile
            return "the learner is in no weight group; open_broadcast comes first"
        try:
            broadcaster.finish() if piece is None else broadcaster.begin(piece)
        except SyncError as error:
            return str(error)
        return ""

    def _stage(self, piece: Mapping[str, Tensor]) -> WeightBucket:
        from evenkeel.learner.weights.export import Staging

        if self._staging is None:
            self._staging = Staging()
        return self._staging.bucket(piece)

    def _computes_with(self) -> Processor | None:
        if self._processor is None and self._config.batch_invariant:
            self._processor = self._learner.processor()
        return self._processor

    def _begin(self, number: int, what: str, version: int) -> None:
        """As `_in_order`. Raises: EngineError also for a call that is meant for other weights."""
        self._in_order(number, what)
        if version != self._version:
            raise EngineError(f"learner rank {self._rank}: {what} asked at version {version}, but the weights are of {self._version}")

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of a fixed sequence at temperature 1, from its second token on; as RolloutEngine.score."""
        import torch

        from evenkeel.learner.training.step import unsampled_batch

        ids, ends = torch.tensor(token_ids, dtype=torch.int64), torch.tensor([0, len(token_ids)])
        batch = unsampled_batch(ids, ends, torch.arange(len(ids)) > 0)
        return [float(value) for value in self._learner.logprobs(batch)[1:]]

    @collective
    @_as_span("save")
    def begin_save(self, number: int, folder: Path, hf_folder: Path) -> None:
        self._in_order(number, "copy for a checkpoint")
        self._learner.begin_save(folder, hf_folder)

    @ray.method(concurrency_group="heartbeat")
    @names_failures
    def is_saved(self) -> bool:
        """Whether this rank has written its part of a checkpoint. Not a collective call: each rank answers for itself, in the middle of
        a step, too, and can be asked again."""
        return self._learner.is_saved()

    def checkpoint_bytes(self) -> int:
        """Bytes that this rank would write. Not a collective call."""
        return self._learner.checkpoint_bytes()

    @collective
    @_as_span("restore")
    def restore(self, number: int, folder: Path, version: int) -> None:
        self._go_on_from(number)  # earlier calls may be lost with the owner of their arguments
        self._version = version
        with contextlib.suppress(DataError):  # what is being written may be a step that will be written again
            self._learner.is_saved(wait=True)
        self._learner.restore(folder)
        self._kept.forget()

    @ray.method(concurrency_group=OUT_OF_TURN)
    def serve_broadcast(self, world_size: int, name: str, join_s: float) -> tuple[str, int]:
        """Serve the store of a weight group (rank 0 of the learner only), before anybody is asked to join it: who doesn't find the store
        knows that the group is over.

        Returns: its address.
        """
        host, port = self._reserve()
        store = rendezvous_store(host, port, rank=0, world_size=world_size, timeout=timedelta(seconds=join_s), waits=False)
        with self._opening:
            self._served = name, store
        return host, port

    @ray.method(concurrency_group=OUT_OF_TURN)
    def open_broadcast(self, host: str, port: int, world_size: int, name: str, join_s: float, bucket_s: float | None = None) -> None:
        """Join the weight group as its rank 0, which serves its store; a step may run at the same time.

        Raises: SyncError if not all members come, or it is closed meanwhile.
        """
        from evenkeel.learner.weights.broadcast import WeightBroadcaster

        device, given_up = self._learner.placement.device, threading.Event()
        with self._opening:
            if name == self._closed_group:
                raise SyncError(f"weight group {name}: it was given up before the learner joined it")
            if (served := self._served) is None or served[0] != name:
                raise SyncError(f"weight group {name}: nobody serves its store; serve_broadcast comes first")
            self._given_up, self._group_name, self._served = given_up, name, None
        broadcaster = WeightBroadcaster(host, port, world_size, name, join_s, device, bucket_s=bucket_s, given_up=given_up, store=served[1])
        with self._opening:
            if not given_up.is_set():
                self._broadcaster = broadcaster
                return
        broadcaster.close()
        raise SyncError(f"weight group {name}: it was given up as the learner had joined it")

    @ray.method(concurrency_group="heartbeat")  # the thread of open_broadcast may wait for members that don't come
    def close_broadcast(self, name: str) -> None:
        """Leave the group, also while its members are still awaited, or before that."""
        with self._opening:
            self._closed_group = name
            if self._served is not None and self._served[0] == name:
                self._served = None
            if name != self._group_name:  # a late call, for one before
                return
            self._given_up.set()
            broadcaster, self._broadcaster = self._broadcaster, None
        if broadcaster is not None:
            broadcaster.close()
