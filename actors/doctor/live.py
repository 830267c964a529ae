"""The doctor's live layer: the learner's ranks and an engine, where the run would put them, on a model of two layers.

Ranks, their groups, the export and the engine are those of a run, called as a run calls them; but within the doctor's own limits, part by
part: a run's deadlines are for whole models and their downloads, and who looks for a hang should be told of it soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from actors.carriers import ExportPlan, WeightSnapshot
from actors.cluster.cluster import Cluster, lower_priority
from actors.cluster.placement import RankPlaces, on_their_nodes, reserve
from actors.config import RunConfig
from actors.doctor.cut_model import Reference, cut_config, make_model, reference, remove_model, write_config
from actors.doctor.deep_facts import COLLECTIVES, ENGINE_AND_LEARNER, AgreementFact, BroadcastFact, CollectiveFact, DeepFacts, UpdateFact
from actors.doctor.on_ranks import backward, collectives
from actors.metrics.exporter import node_address
from actors.plan.shape import ModelShape
from actors.processes.supervision import abandon, wait_for
from actors.ranks.learner_group import LearnerGroup
from actors.settings.devices import check_received
from actors.settings.environment import worker_environment
from actors.weights.broadcast_group import BroadcastGroup
from actors.weights.weight_sync import SyncTarget
from correction.engines.rendezvous import keep_nccl_on
from correction.errors import DeadlineExceeded, EvenkeelError, SyncError, one_line
from rollout.engine_settings.engine_config import EngineConfig
from rollout.trajectory import SyncReceipt

_TOKENS = 48
"""Tokens of each random sequence that both sides compute the logprobs of."""
_REQUESTS, _ANSWER = 8, 64
"""Requests in flight during a weight update, and tokens of each answer."""
_GRAPHS = ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "cuda_graph_config")
"""Arguments of SGLang that say which graphs of decoding it captures."""
_TENSOR_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
START_S = 240.0
"""Longest wait for room, the model of two layers, ranks or engine, seconds: imports from a cold disk, kernels that are compiled."""
PART_S = 60.0
"""Longest wait for anything that ranks or engine are asked then, seconds."""
_LONGER_ON_CPUS = 4
"""Times both: cores are shared with whatever else runs there, and a slow part isn't one that hangs."""
_BROADCAST_S = 40.0
"""Longest wait for a broadcast, seconds."""


class CheckedEngine:
    """A rollout worker's engine without task and reward. Used as a Ray actor (async)."""

    async def start(self, config: RunConfig, content: Mapping[str, Any]) -> None:
        from rollout.engine.engine import RolloutEngine

        rollout = config.rollout
        if rollout.engine.resolved_device == "cuda":
            check_received("the engine", rollout.gpus_of_a_worker, ray.get_gpu_ids())
            keep_nccl_on(node_address(), psutil.net_if_addrs())
        self._folder = tempfile.TemporaryDirectory(prefix="evenkeel-doctor-")
        folder = write_config(Path(self._folder.name), content)
        engine = checked_engine(rollout.engine, min(rollout.engine.weight_group_timeout_s, broadcast_s(config)))
        self._engine = await RolloutEngine.start(folder, engine, name="the engine", has_weights=False)

    async def take(self, version: int, buckets: Sequence[Any]) -> SyncReceipt:
        began = time.monotonic()
        receipt = await self._engine.update_weights(version, list(await asyncio.gather(*buckets)))
        return replace(receipt, seconds=time.monotonic() - began)

    async def join_weight_group(self, host: str, port: int, rank: int, world_size: int, name: str) -> None:
        await self._engine.join_weight_group(host, port, rank, world_size, name)

    async def receive_weights(self, version: int, specs: Any, group: str, generation: int) -> SyncReceipt:
        return await self._engine.receive_weights(version, specs, group=group)

    async def leave_weight_group(self, name: str) -> None:
        await self._engine.leave_weight_group(name)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def answer(self, prompt: Sequence[int]) -> list[list[int]]:
        """Token ids of _REQUESTS answers to a prompt, sampled with the same seeds at every call."""
        asked = {"max_tokens": _ANSWER, "samples": _REQUESTS, "seeds": list(range(_REQUESTS)), "ignore_stop": True}
        return [list(one.response_ids) for one in await self._engine.generate(list(prompt), **asked)]  # type: ignore[arg-type]

    async def stop(self) -> None:
        await self._engine.shutdown()
        self._folder.cleanup()


def checked_engine(engine: EngineConfig, group_timeout_s: float) -> EngineConfig:
    """The run's engine with the context of the two-layer model, and on a GPU with no more requests than the check has.

    SGLang captures a graph of decoding for each of its sizes up to max_running_requests of a group of ranks (get_batch_sizes_to_capture):
    of 1, 2, 4 and 8 requests here instead of 36 sizes up to 256, while somebody waits. Where a recipe names the graphs, they stay.
    """
    values: dict[str, Any] = {"weight_group_timeout_s": group_timeout_s}
    if engine.resolved_device == "cuda" and not engine.engine_args.keys() & set(_GRAPHS):
        values["max_running_requests"] = min(engine.max_running_requests, _REQUESTS * engine.attention_data_parallel)
    return engine.left_open("context_length").model_copy(update=values)


def deep_facts(config: RunConfig, content: Mapping[str, Any], notify: Callable[[str], None] = lambda _: None) -> DeepFacts:
    """Start ranks and an engine, measure, and stop them. What could not be measured is named in the facts.

    Args:
        config: with devices, types and deadlines.
        content: of the model's config.json.
        notify: takes each part that is done, in words.
    Raises: ConfigError, EngineError if Ray can't be started or joined.
    """
    with Cluster(config):
        notify("Ray is there")
        return asyncio.run(_Visit(config, content, notify).facts())


class _Visit:
    """The measurement in its parts."""

    def __init__(self, config: RunConfig, content: Mapping[str, Any], notify: Callable[[str], None]) -> None:
        self._say = notify
        on_cpus = "cpu" in (config.learner.resolved_device, config.rollout.engine.resolved_device)
        longer = _LONGER_ON_CPUS if on_cpus else 1
        self._start_s, self._part_s = min(config.deadlines.start_s, longer * START_S), longer * PART_S
        self._config = config.model_copy(update={"deadlines": config.deadlines.model_copy(update={"start_s": self._start_s})})
        self._content = cut_config(content, config.learner)
        self._dtype = config.learner.resolved_dtype
        self._whole = ModelShape.of(content.get("text_config", content)).weight_bytes(
            self._dtype, float8=config.rollout.engine.has_float8
        )
        self._folder = Path(tempfile.gettempdir()) / f"evenkeel-doctor-{uuid.uuid4().hex[:8]}"
        draw = random.Random(0)
        count = max(2, 2 * config.learner.data_parallel)
        self._sequences = [[draw.randrange(self._content["vocab_size"]) for _ in range(_TOKENS)] for _ in range(count)]
        self._broken: list[tuple[str, str]] = []
        self._collectives: list[CollectiveFact] = []
        self._agreements: list[AgreementFact] = []
        self._update: UpdateFact | None = None
        self._broadcast: BroadcastFact | None = None
        self._repeats = True
        self._group: LearnerGroup | None = None
        """All ranks that were made, whatever became of their start."""

    async def facts(self) -> DeepFacts:
        places: RankPlaces | None = None
        engine: Any = None
        try:
            places = await reserve(self._config)
            engine = _create_engine(self._config)
            start = engine.start.remote(self._config, self._content)
            starting = asyncio.ensure_future(wait_for(start, "start of the engine", deadline_s=self._start_s))
            made, group = await self._ask_the_ranks(places)
            snapshot = await self._exported(group) if group is not None else None
            if snapshot is not None and group is not None and made is not None:  # while the engine starts
                group = group if await self._compare_with(made, group, snapshot) else None
            answers = await self._ask_the_engine(engine, starting, snapshot)
            if answers and self._config.weight_sync.transport == "broadcast" and group is not None and snapshot is not None:
                self._broadcast = await self._broadcast_to(engine, group, snapshot)
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._failed("ranks and engine", error)
        finally:
            await self._end(places, engine)
        on_gpus = self._config.learner.resolved_device == "cuda"
        found = tuple(self._collectives), tuple(self._agreements), self._update, self._broadcast, self._repeats, tuple(self._broken)
        return DeepFacts(self._dtype, self._whole, on_gpus, *found)

    async def _ask_the_ranks(self, places: RankPlaces) -> tuple[Reference | None, LearnerGroup | None]:
        """Start the ranks and measure their collectives. Returns: what the reference says, and the ranks; None if they answer no more."""
        config = self._config
        try:
            limits = config.deadlines
            await on_their_nodes(places, make_model, self._folder, self._content, self._dtype, what="a model of two layers", limits=limits)
            wanted = on_their_nodes(places, reference, self._folder, self._sequences, what="reference", limits=limits, bundles=1)
            starts = LearnerGroup.start(
                places, self._folder, version=0, bind="127.0.0.1", start_s=self._start_s, step_s=self._part_s, made=self._keep
            )
            self._say("a model of two layers is made")
            references, (group, _) = await asyncio.gather(wanted, starts)
            self._say("the learner's ranks are up")
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._failed("start of the learner", error)
            return None, None
        try:
            nbytes = _TENSOR_BYTES[config.learner.resolved_device]
            by_rank = await self._each(group, collectives, nbytes)
            self._collectives = slowest([one for facts in by_rank for one in facts])
            self._say("collectives are measured")
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._failed(COLLECTIVES, error)
            if isinstance(error, DeadlineExceeded):  # ranks that wait for each other answer nothing else
                return None, None
        return references[0], group

    def _keep(self, group: LearnerGroup) -> None:
        self._group = group

    async def _exported(self, group: LearnerGroup) -> WeightSnapshot | None:
        """Export the learner's weights into the object store, with its logprobs of the first sequence.

        Twice: a run's first version also pays for page-locked memory and for kernels that are loaded, and the later ones count.
        """
        try:
            await group.export(self._plan())
            return await group.export(self._plan())
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._failed("export of the learner", error)
            return None

    async def _ask_the_engine(self, engine: Any, starting: asyncio.Future[Any], snapshot: WeightSnapshot | None) -> bool:
        """Give the engine the learner's weights by the object store, compare the probe, and measure an update during requests.

        Returns: False if the engine could not be asked.
        """
        probe = self._sequences[0]
        try:
            await starting
            self._say("the engine is up")
            if snapshot is None:
                return False
            await self._wait(engine.take.remote(1, snapshot.buckets), "first weights of the engine")
            scored = await self._wait(engine.score.remote(probe), "probe of the engine")
            self._agreements.append(compare_logprobs(ENGINE_AND_LEARNER, scored, snapshot.probe_logprobs))
            before = await self._wait(engine.answer.remote(probe), "answers of the engine")
            self._update = await self._update_under_requests(engine, snapshot)
            self._repeats = before == await self._wait(engine.answer.remote(probe), "answers of the engine")
            self._say("the engine has had the learner's weights, and answered")
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._failed("the engine", error)
            return False
        return True

    async def _update_under_requests(self, engine: Any, snapshot: WeightSnapshot) -> UpdateFact:
        under_way = asyncio.ensure_future(self._wait(engine.answer.remote(self._sequences[1]), "answers during an update"))
        receipt = await self._wait(engine.take.remote(2, snapshot.buckets), "an update under requests")
        await under_way
        return UpdateFact(receipt.bytes, snapshot.seconds, receipt.seconds, receipt.pause_s)

    async def _broadcast_to(self, engine: Any, group: LearnerGroup, snapshot: WeightSnapshot) -> BroadcastFact:
        """Broadcast the learner's present weights through a weight group during requests, and check by the probe that they arrived.

        A backward pass has changed the weights since the snapshot, of which only names and shapes are used.
        """
        rollout = self._config.rollout.engine
        fact = BroadcastFact(rollout.resolved_group_backend, rollout.tensor_parallel)
        members = BroadcastGroup(group, broadcast_s(self._config), 0, rollout.tensor_parallel)
        calls = [asyncio.ensure_future(self._wait(engine.answer.remote(self._sequences[1]), "answers during a broadcast"))]
        try:
            began = time.monotonic()
            await members.build([SyncTarget("the engine", engine)])
            join_s, began = time.monotonic() - began, time.monotonic()
            receiving = members.receiving(3, snapshot.specs)
            calls += [asyncio.ensure_future(call) for call in (self._broadcast_all(group), *receiving)]
            sent, receipt = await asyncio.gather(*calls[1:])
            send_s = time.monotonic() - began
            await calls[0]
            scored = await self._wait(engine.score.remote(self._sequences[0]), "probe of the engine")
            self._agreements.append(compare_logprobs("the engine after a broadcast and the learner", scored, sent.probe_logprobs))
            self._say("the learner has broadcast weights to the engine")
            return replace(fact, bytes=receipt.bytes, join_s=join_s, send_s=send_s, pause_s=receipt.pause_s)
        except (EvenkeelError, ray.exceptions.RayError) as error:
            return replace(fact, error=why_no_broadcast(error, self._config))
        finally:
            for call in calls:
                abandon(call)
            await members.close()

    async def _broadcast_all(self, group: LearnerGroup) -> WeightSnapshot:
        sent = await group.export(replace(self._plan(), stores=False, broadcasts=True), deadline_s=broadcast_s(self._config))
        if sent.broadcast_error:
            raise SyncError(sent.broadcast_error)
        return sent

    def _plan(self) -> ExportPlan:
        float8 = self._config.rollout.engine.has_float8
        return ExportPlan(self._config.weight_sync.bucket_bytes, probe_ids=tuple(self._sequences[0]), float8=float8)

    async def _compare_with(self, made: Reference, group: LearnerGroup, snapshot: WeightSnapshot) -> bool:
        """Compare a forward and backward pass with the reference. It changes the learner's weights, not those exported before.

        Returns: False if a rank hangs: then the ranks are asked nothing more.
        """
        try:
            norms = await self._each(group, backward, self._sequences)
            off = abs(norms[0] / made.gradient_norm - 1)
            self._agreements.append(compare_logprobs("the learner and float32 on a CPU", snapshot.probe_logprobs, made.logprobs, off))
            self._say("the learner is compared with float32")
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._failed("forward and backward pass of the learner", error)
            return not isinstance(error, DeadlineExceeded)
        return True

    async def _each(self, group: LearnerGroup, function: Any, *arguments: Any) -> list[Any]:
        """Call a function with each rank's actor in its process, all at the same time."""
        calls = {name: rank.__ray_call__.remote(function, *arguments) for name, rank in group.ranks.items()}
        return list(await asyncio.gather(*(self._wait(call, f"{function.__name__} <- {name}") for name, call in calls.items())))

    async def _wait(self, call: Any, what: str) -> Any:
        return await wait_for(call, what, deadline_s=self._part_s)

    def _failed(self, what: str, error: BaseException) -> None:
        late = f"{error.reason} (doctor --deep waits no longer)" if isinstance(error, DeadlineExceeded) else ""
        self._broken.append((what, late or one_line(error, last=True)))

    async def _end(self, places: RankPlaces | None, engine: Any) -> None:
        if engine is not None:
            stopping = engine.stop.remote()
            await asyncio.to_thread(ray.wait, [stopping], timeout=20.0)
            ray.kill(engine)
        if self._group is not None:
            self._group.kill()
        if places is not None and places.group is not None:
            with contextlib.suppress(EvenkeelError, ray.exceptions.RayError):  # a node that is gone has nothing to remove
                await on_their_nodes(places, remove_model, self._folder, what="end", limits=self._config.deadlines)
            await asyncio.to_thread(ray.util.remove_placement_group, places.group)


def _create_engine(config: RunConfig) -> Any:
    """The engine's actor, with the resources of a rollout worker."""
    on_gpu = config.rollout.engine.resolved_device == "cuda"
    engine = (
        ray.remote(CheckedEngine)
        .options(
            num_cpus=config.rollout.engine.tensor_parallel,
            num_gpus=config.rollout.gpus_of_a_worker if on_gpu else 0,
            resources={config.ray.rollout_resource: 1},
            max_concurrency=64,
            runtime_env={"env_vars": worker_environment(config)},
        )
        .remote()
    )
    lower_priority(engine)
    return engine


def broadcast_s(config: RunConfig) -> float:
    """Longest time for a weight group to be built, and again for a broadcast of the two-layer model, seconds."""
    return min(config.deadlines.sync_s, _BROADCAST_S)


def why_no_broadcast(error: BaseException, config: RunConfig) -> str:
    """The error in a sentence; for one of a deadline with the setting of that deadline."""
    if not isinstance(error, DeadlineExceeded):
        return one_line(error, last=True)
    limit = f"deadlines.sync_s = {config.deadlines.sync_s:g}"
    if broadcast_s(config) < config.deadlines.sync_s:
        limit = f"the doctor's own limit, below {limit}"
    return f"{error.reason}; a weight group has {broadcast_s(config):g} s here ({limit})"


def slowest(found: Sequence[CollectiveFact]) -> list[CollectiveFact]:
    """For each kind of group the slowest one, or one whose result was wrong."""
    kinds = {one.group: [other for other in found if other.group == one.group] for one in found}
    worst = [max(same, key=lambda one: one.seconds) for same in kinds.values()]
    wrong = {one.group: one for one in found if not one.is_right}
    return [wrong.get(one.group, one) for one in worst]


def compare_logprobs(sides: str, one: Sequence[float], other: Sequence[float], gradient: float | None = None) -> AgreementFact:
    """Args: one, other: logprobs of the same tokens."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    if not all(map(math.isfinite, differences)):
        return AgreementFact(sides, math.inf, math.inf, gradient)
    return AgreementFact(sides, max(differences), statistics.median(differences), gradient)
