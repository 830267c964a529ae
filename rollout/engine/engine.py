"""One SGLang engine: token ids in, token ids with logprobs and weight versions out, and new weights meanwhile (weight_transfer.py).

What it is not: it knows no prompts, rewards or groups (rollout.sampler does), and it decides nothing about staleness.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from array import array
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pybase64

from evenkeel.correction.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDirty,
    EngineError,
    EvenkeelError,
    NoRoomError,
    RequestError,
    SyncError,
)
from evenkeel.engines.agreement import Processor
from evenkeel.engines.contract import DENSE_FAMILIES, expert_count
from evenkeel.engines.machine import gc_paused
from evenkeel.engines.weights import WeightBucket, WeightSpec
from evenkeel.rollout.config import WHOLE_VOCABULARY, Truncation
from evenkeel.rollout.continuation import continued, is_begun, kept, unanswered, unsampled
from evenkeel.rollout.engine import weight_transfer
from evenkeel.rollout.engine.engine_metrics import EngineMetrics, request_histogram
from evenkeel.rollout.engine.engine_process import CONTROLLER, EngineProcess
from evenkeel.rollout.engine.heartbeat import SchedulerProbe, kernels_are_compiled, processor_seconds, until_engine_lost
from evenkeel.rollout.engine.weight_transfer import Receiving, Sending, UpdateCheck
from evenkeel.rollout.engine_settings.engine_config import EngineConfig, UpdateMode
from evenkeel.rollout.engine_settings.engine_ranks import UNREPORTED_ROUTES, obstacles
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths
from evenkeel.rollout.sglang_plugin.hooks import CHECKSUMS, FAILURE, PROCESSOR, RECEIPT, SPECS
from evenkeel.rollout.sglang_plugin.weight_parts import RankParts
from evenkeel.rollout.trajectory import (
    FinishReason,
    KeptTokens,
    RoutedExperts,
    SyncReceipt,
    TopLogprobs,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)

_HAND_BACK_S = 0.2
_READ_ONLY = {"max_new_tokens": 0, "temperature": 1.0}


@dataclass(slots=True)
class GroupOfRanks:
    """Where the turns of a session are sampled, if the engine has several groups of ranks (attention_data_parallel)."""

    number: int | None = None
    """None: its first turn is still to come."""


class RolloutEngine:
    """An engine that samples and scores, and takes new weights while requests run.

    States: clean (serves `version`) -> updating (requests wait) -> clean; or dirty, when an update failed half-way; or lost, when its
    processes ended or gave no answer to an update in time.

    A dirty engine has weights of no version until a whole update succeeds: it refuses requests, and those that were in flight end with an
    EngineDirty. Requests that come during an update wait for its end. They are of the new weights, or end with an EngineDirty if it fails.
    A lost engine answers every call with an EngineError: shut it down and start another. All methods belong to the event loop that started
    the engine.
    """

    def __init__(
        self, name: str, config: EngineConfig, process: EngineProcess, vocab_size: int, version: int, experts: ExpertShape | None = None
    ) -> None:
        """Use RolloutEngine.start."""
        self.name = name
        self.config = config
        self._process = process
        self._version = version
        # Why the engine is dirty; None if it isn't.
        self._dirty: str | None = None
        # Cleared while the engine is paused for new weights: requests that come now wait.
        self._no_update = asyncio.Event()
        self._no_update.set()
        self._failed_updates = 0
        self._updating = asyncio.Lock()
        self._specs: dict[str, WeightSpec] | None = None
        # What each rank holds, if there are several; known after `weight_specs`.
        self._parts: RankParts | None = None
        self._staging = weight_transfer.SharedStaging(config.tensor_parallel, config.copy_threads)
        self._request_seconds = request_histogram()
        self.silent_s = 0.0
        """Seconds of heartbeat_s that the engine had used up without a sign of life at its last probe."""
        # Response tokens of requests that have ended; and the most known to have been sampled so far.
        self._ended_tokens = self._seen_tokens = 0
        # Number of calls under way in which the scheduler waits for others or is busy for long. Each has a deadline of its own, and the
        # heartbeat isn't checked meanwhile.
        self._interruptions = 0
        self.vocab_size = vocab_size
        """Size of the vocabulary: token ids are below it."""
        self.lengths = RequestLengths.of_engine(process.engine.tokenizer_manager.max_req_input_len)
        """How long prompts and answers may be."""
        self._experts = experts
        self._requests = 0
        # SGLang's names of them.
        self._under_way = set[str]()
        # SGLang's states of those that are handed back: an answer that waited when it was aborted comes without its kept sets.
        self._aborted: dict[str, Any] = {}
        # Answers under way in each group of ranks.
        self._in_groups = [0] * config.attention_data_parallel
        self.is_leaving = False
        """True from `hand_back` on: requests in flight are handed back, and nothing is sampled any more."""

    @classmethod
    async def start(
        cls, model_folder: str | Path, config: EngineConfig, *, version: int = 0, name: str = "engine", has_weights: bool = True
    ) -> RolloutEngine:
        """Start SGLang on a Hugging Face folder; the event loop stays free meanwhile (seconds to a minute on a CPU).

        Args:
            version: weight version of the folder.
            name: for messages, e.g. "rollout worker 3".
            has_weights: False: only config.json is read, and the engine is dirty until its first update.
        Raises: DataError for a folder without a model, ConfigError, EngineError, DeadlineExceeded; no process is left then.
        """
        config = config.on_this_machine()
        vocab_size, model_context, has_experts, experts = _read_model_config(Path(model_folder), config)
        config = config.with_context(model_context)
        if config.return_routed_experts and experts is None:
            raise ConfigError(
                f"rollout.engine.return_routed_experts = true (learner.routing_replay: rollout): the model in {model_folder} has no "
                f"experts that SGLang reports (its models of {' and '.join(UNREPORTED_ROUTES)} don't). Set learner.routing_replay: none"
            )
        process = EngineProcess(name, config)
        of_model = {"has_weights": has_weights, "has_experts": has_experts}
        await process.start(config.sglang_arguments(str(model_folder), version, **of_model))
        engine = cls(name, config, process, vocab_size, version, experts if config.return_routed_experts else None)
        if not has_weights:
            engine._dirty = "it has had no weights yet"
        try:
            await engine.weight_specs()
            # Full garbage collections walk through all that the imports made: in this process a third of its time. Freeze it, everywhere.
            await engine._manager.freeze_gc()
            engine.watch_heartbeat()
        except BaseException:
            await process.shutdown()
            raise
        return engine

    @property
    def metrics(self) -> EngineMetrics:
        """For the endpoint of its owner."""
        return EngineMetrics(self._process.metrics_folder, self._request_seconds)

    @property
    def requests_in_flight(self) -> int:
        return self._requests

    @property
    def sampled_tokens(self) -> int:
        """Response tokens sampled since the start, those of requests under way included: as they were at the last weight update, or, of
        long answers, as SGLang has sent them since (every 50th token)."""
        states = map(self._process.engine.tokenizer_manager.rid_to_state.get, self._under_way)
        under_way = sum(len(state.output_ids) for state in states if state is not None)
        self._seen_tokens = max(self._seen_tokens, self._ended_tokens + under_way)
        return self._seen_tokens

    @property
    def process_ids(self) -> dict[str, int]:
        """Role -> process id of SGLang's children."""
        return dict(self._process.pids)

    async def shutdown(self) -> None:
        """End SGLang's processes; calls that still wait get an EngineError."""
        await self._process.shutdown()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        prompt_id: str = "",
        temperature: float = 1.0,
        truncation: Truncation = WHOLE_VOCABULARY,
        samples: int = 1,
        seeds: Sequence[int] | None = None,
        topk: int = 0,
        is_trained: bool = True,
        stop_ids: Sequence[int] = (),
        ignore_stop: bool = False,
        begun: Sequence[Trajectory] = (),
        deadline_s: float | None = None,
        session: GroupOfRanks | None = None,
    ) -> list[Trajectory]:
        """Sample from the whole distribution, or from what a truncation leaves of it, which is reported with each token. No penalty can be
        asked for: what it makes of the distribution isn't reported, and would bias every ratio.

        Args:
            prompt_ids: after the chat template.
            max_tokens: of all that follows the prompt, what `begun` has of it included.
            prompt_id: what the trajectories are to be called after.
            temperature: of the behaviour policy; 0 is greedy, and its logprobs are those of temperature 1.
            truncation: of which tokens each is drawn; its logprob is normalised over these.
            samples: answers to this prompt, which is prefilled once, before them (as by SGLang's own n > 1, which can't be aborted).
            seeds: one for each sample, in [0, 2^63): its tokens then depend on the weights, the prompt and the seed alone, as far as the
                logits do (with batch_invariant to the last bit). Unset: random ones.
            topk: most likely tokens to report at each position, with their logprobs, in addition to the sampled one; see check_topk.
            is_trained: report what a learner needs beside logprobs: the kept set of each token under a truncation, and routed experts, if
                the engine was started for them.
            stop_ids: tokens that end an answer, which has them as its last; those of config.json and generation_config.json end it, too.
            ignore_stop: go on to max_tokens whatever is sampled (for checks and benchmarks; answers of a run stop).
            begun: what there is of each sample (rollout.continuation): whole ones stay as they are, others are continued.
            session: of which this is a turn, so that it goes where the turns before it are cached.
        Returns: a trajectory for each sample, in the order of the seeds, without text and reward; an aborted one carries an error, and
            after `hand_back` the tokens that are kept of it.
        Raises: DataError for ids or lengths that the engine can't take; RequestError for an answer that can't be used, DeadlineExceeded,
            and the engine goes on; EngineDirty, EngineError if it is lost.
        """
        self._check_request(prompt_ids, max_tokens, temperature)
        found = list(begun) or [unsampled(prompt_ids, prompt_id)] * samples
        todo = [i for i, answer in enumerate(found) if is_begun(answer)]
        truncation = truncation.of(self.vocab_size)
        sampling = {"temperature": temperature, "ignore_eos": ignore_stop, "stop_token_ids": list(stop_ids)} | truncation.request
        experts, has_sets = self._experts if is_trained else None, is_trained and truncation.is_partial
        options: dict[str, Any] = ({"top_logprobs_num": topk} if topk else {}) | ({"return_routed_experts": True} if experts else {})
        options |= {"return_sampling_mask": True} if has_sets else {}
        inputs = [found[i].token_ids for i in todo]
        rooms = [max_tokens + len(prompt_ids) - len(read) for read in inputs]
        for read, room in zip(inputs, rooms, strict=True):
            if len(read) > len(prompt_ids):
                self._check_request(read, room, temperature)
        samplings = [
            sampling | {"max_new_tokens": room} | ({"sampling_seed": seeds[i]} if seeds else {})
            for i, room in zip(todo, rooms, strict=True)
        ]
        with self._in_a_group(len(todo), session) as routed:
            if len(todo) > 1:
                await self.read(prompt_ids, deadline_s=deadline_s, **routed)
            if not todo or self.is_leaving:
                return found
            answers = await self._request(inputs, samplings, deadline_s, "generate", **options, **routed)
        self._ended_tokens += sum(len(answer["output_ids"]) for answer in answers)
        for seconds in (answer["meta_info"].get("e2e_latency") for answer in answers):
            if seconds is not None:  # what is aborted while it waits has none
                self._request_seconds.observe(seconds)
        of_answer = partial(trajectory_of, engine_name=self.name, prompt_id=prompt_id, topk=topk, experts=experts, has_sets=has_sets)
        rests = await in_answer_thread(lambda: list(map(of_answer, answers, inputs)))
        for i, rest in zip(todo, rests, strict=True):
            whole = continued(found[i], rest) if found[i].response_ids else rest
            found[i] = kept(whole, self.lengths.prompt) if self.is_leaving and is_begun(whole) else whole
        return found

    async def read(self, prompt_ids: Sequence[int], *, deadline_s: float | None = None, **routed: int) -> None:
        """Have the prefix cache hold a prompt with which several requests will begin. Raises: as generate."""
        if self.config.prefix_cache and not self.is_leaving:
            self._check_request(prompt_ids, 1, 1.0)
            await self._request([prompt_ids], [_READ_ONLY], deadline_s, "prefill a shared prompt", **routed)

    @contextlib.contextmanager
    def _in_a_group(self, answers: int, session: GroupOfRanks | None = None) -> Iterator[dict[str, int]]:
        """SGLang's argument that sends a prompt and all of its answers to the group of ranks with the fewest answers under way; later turns
        of a session to that of its first: each group has a prefix cache of its own."""
        if len(self._in_groups) == 1:
            yield {}
            return
        group = session.number if session is not None else None
        if group is None:
            group = self._in_groups.index(min(self._in_groups))
        if session is not None:
            session.number = group
        self._in_groups[group] += answers
        try:
            yield {"routed_dp_rank": group}
        finally:
            self._in_groups[group] -= answers

    async def hand_back(self) -> None:
        """Stop sampling for good: calls of `generate`, present and later ones, return what there is of each sample. Returns when no request
        is in flight."""
        self.is_leaving = True
        while self._requests:
            self._aborted |= {name: state for name in self._under_way if (state := self._manager.rid_to_state.get(name)) is not None}
            self._manager.abort_request(abort_all=True)
            await asyncio.sleep(_HAND_BACK_S)  # what was on its way to the scheduler meanwhile is aborted next time

    def check_topk(self, topk: int) -> None:
        """Raises: ConfigError if the model has fewer tokens than are to be reported at each position."""
        if topk > self.vocab_size:
            raise ConfigError(
                f"correction.topk = {topk}: the model's vocabulary has {self.vocab_size} tokens, so there are no {topk} most likely ones. "
                "Lower it, or take the binary form of the divergence"
            )

    async def score(self, token_ids: Sequence[int], *, deadline_s: float | None = None) -> list[float]:
        """Logprobs of a fixed sequence at temperature 1, by a prefill from scratch: the probe of a weight sync.

        Args:
            token_ids: at least two.
        Returns: len(token_ids) - 1 natural logs; the first token has none.
        Raises: as generate.
        """
        self._check_request(token_ids, 1, 1.0)
        sampling = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        deadline_s = deadline_s or self.config.deadlines.control_s
        (answer,) = await self._request([token_ids], [sampling], deadline_s, "score", logprob_start_len=0)
        return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _request(
        self, inputs: Sequence[Sequence[int]], samplings: Sequence[dict[str, Any]], deadline_s: float | None, phase: str, **options: Any
    ) -> list[dict[str, Any]]:
        """The answers, in SGLang's form, to each of the inputs under its sampling parameters.

        They go to SGLang as one batch, because handling a call takes it about as long as sampling a short answer of a small model. All of
        them are aborted in the engine as soon as nobody waits for them, or one of them fails.
        """
        self._requests += len(samplings)
        try:
            await self._until_updated(deadline_s or self.config.deadlines.generate_s, phase)
            failed_updates = self._failed_updates
            result = await self._answers(inputs, samplings, deadline_s or self.config.deadlines.generate_s, phase, options)
        finally:
            self._requests -= len(samplings)
        if self._failed_updates != failed_updates:
            raise EngineDirty(f"{self.name}: a weight update failed while this request ran, its tokens are of no version. Submit it again")
        return result

    async def _until_updated(self, deadline_s: float, phase: str) -> None:
        """Wait for the end of an update under way. SGLang would keep the request, too, but sample it on half-new weights if that fails."""
        if not self._no_update.is_set():
            await self._process.wait(self._no_update.wait(), deadline_s, f"{phase}: waiting for new weights")
            self._raise_if_dirty()

    async def _answers(
        self,
        inputs: Sequence[Sequence[int]],
        samplings: Sequence[dict[str, Any]],
        deadline_s: float,
        phase: str,
        options: dict[str, Any],
    ) -> list[dict[str, Any]]:
        request_ids = [uuid.uuid4().hex for _ in samplings]
        options |= {"input_ids": [list(token_ids) for token_ids in inputs], "sampling_params": list(samplings)}
        answers = self._process.generate(return_logprob=True, rid=request_ids, **options)
        phase = f"{phase}: {max(map(len, inputs))} tokens, sent at weights v{self._version}"
        try:
            self._under_way.update(request_ids)
            result: list[dict[str, Any]] = await self._process.wait(answers, deadline_s, phase)
            for name, answer in zip(request_ids, result, strict=True):
                if (state := self._aborted.pop(name, None)) is not None:
                    answer["meta_info"].setdefault("output_token_sampling_mask", state.output_token_sampling_mask)
            return result
        except BaseException as error:
            if self._process.is_alive:
                for request_id in request_ids:
                    self._manager.abort_request(rid=request_id)
            if isinstance(error, Exception) and not isinstance(error, EvenkeelError):
                raise RequestError(f"{self.name}: SGLang refused a request ({phase}): {error}") from error
            raise
        finally:
            self._under_way.difference_update(request_ids)

    def _raise_if_dirty(self) -> None:
        if self._dirty is not None:
            raise EngineDirty(f"{self.name} is dirty: {self._dirty}. Send it a whole weight update first")

    def _check_request(self, token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        self._process.raise_if_lost()
        if self._no_update.is_set():
            self._raise_if_dirty()
        if not token_ids:
            raise DataError(f"{self.name}: an empty prompt: there is nothing to condition on. Give it at least one token")
        bad = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise DataError(
                f"{self.name}: token id {bad} in a prompt: the model's vocabulary has {self.vocab_size}, and any other id crashes SGLang. "
                "Use the tokenizer of the model's folder"
            )
        if max_tokens < 1 or len(token_ids) > self.lengths.longest_prompt(max_tokens):
            raise NoRoomError(
                f"{self.name}: {len(token_ids)} prompt tokens and max_tokens = {max_tokens}: the engine takes up to "
                f"{self.lengths.prompt} and at least 1, together up to {self.lengths.together} tokens. "
                "Shorten the prompt, or lower rollout.sampling.max_tokens"
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise DataError(f"{self.name}: temperature = {temperature}: give a finite number, 0 for greedy, 1.0 for the model itself")

    # -- weights -----------------------------------------------------------------------------------------------------

    def watch_heartbeat(self) -> None:
        """Have the engine count as lost, from now on, as soon as it misses its heartbeat."""
        process, limit_s = self._process, self.config.deadlines.heartbeat_s

        def silent(seconds: float) -> None:
            self.silent_s = seconds

        process.watch_heartbeat(
            until_engine_lost(
                SchedulerProbe(self._manager, is_paused=self._updating.locked),
                lambda: processor_seconds(pid for role, pid in process.pids.items() if role != CONTROLLER),
                limit_s=limit_s,
                is_excused=lambda: self._interruptions > 0,
                compiles=kernels_are_compiled if self.config.resolved_device == "cuda" else lambda: False,
                silent=silent,
            )
        )

    @property
    def is_lost(self) -> bool:
        """Whether its processes have ended, or answer nothing any more."""
        return not self._process.is_alive

    @property
    def is_dirty(self) -> bool:
        """Whether its weights are of no version."""
        return self._dirty is not None

    def raise_if_lost(self) -> None:
        """Raises: EngineError."""
        self._process.raise_if_lost()

    @property
    def version(self) -> int:
        """Version of the weights that the next request is sampled with."""
        return self._version

    async def weight_specs(self) -> dict[str, WeightSpec]:
        """Every tensor that the engine holds, by Hugging Face name, whole; asked once, they don't change."""
        if self._specs is None:
            answers = await self._inspect(SPECS)
            if self.config.tensor_parallel > 1:
                self._parts = RankParts.parse(answers, self.name)
                self._specs = dict(self._parts.specs)
            else:
                self._specs = {name: WeightSpec.parse(name, text) for name, text in answers[0].items()}
        return self._specs

    async def weight_checksums(
        self, sent: Sequence[WeightBucket] = (), verified: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, str]:
        """HF name -> engines.weights.tensor_checksum of what the engine holds now, in its dtype.

        Args:
            sent: the weights that it should hold. An engine of several ranks has no whole tensor: each rank's parts are compared with
                those of `sent`, whose checksums are returned if all agree.
            verified: checksums of tensors in `sent` that have been compared with it already; they are not computed again.
        Raises: SyncError naming the first tensor and rank that differ.
        """
        held = await self._inspect(CHECKSUMS)
        if self._parts is None:
            return held[0]
        return await asyncio.to_thread(self._parts.require_parts, sent, held, self.name, verified)

    async def processor(self) -> Processor:
        """What the scheduler process computes with; for true on-policy it has to be what the learner computes with.

        Raises: EngineError if its products depend on the number of rows there.
        """
        return Processor(**(await self._inspect(PROCESSOR))[0])

    async def update_weights(
        self,
        version: int,
        buckets: Iterable[WeightBucket] | AsyncIterable[WeightBucket],
        *,
        mode: UpdateMode | None = None,
    ) -> SyncReceipt:
        """Replace all weights while requests run: pause, begin, buckets, flush (retract), end, continue. No request is aborted.

        The engine is paused when the first bucket is ready to be loaded. Cancelling the caller does not stop an update that has begun.
        Args:
            version: of the new weights.
            buckets: together the whole model. Each is checked before it is sent: a list or tuple as a whole, before the engine is paused;
                an iterator bucket by bucket, and the engine stands still while it waits for the second and later ones.
            mode: overrides rollout.engine.weight_update_mode.
        Raises: SyncError, EngineError, DeadlineExceeded. If anything had been sent before, the engine is dirty, or lost.
        """
        self._process.raise_if_lost()
        held = await self.weight_specs()
        if isinstance(buckets, (list, tuple)):
            rehearsal = UpdateCheck(self.name, version, held)
            for bucket in buckets:
                rehearsal.admit(bucket.specs)
            rehearsal.finish()
        check = UpdateCheck(self.name, version, held)

        def admit(bucket: WeightBucket, is_last: bool) -> None:
            check.admit(bucket.specs)
            if is_last:
                check.finish()

        return await self._update(version, check, Sending(buckets, self._staging, admit), mode or self.config.weight_update_mode)

    async def receive_weights(self, version: int, buckets: Sequence[Sequence[WeightSpec]], *, group: str) -> SyncReceipt:
        """As update_weights, but rank 0 of the group broadcasts the buckets, each at once, in this order.

        Args:
            buckets: what will be broadcast; checked as a whole before the engine is paused. One bucket at a time takes memory: SGLang takes
                twice its bytes while it receives.
        """
        self._process.raise_if_lost()
        check = UpdateCheck(self.name, version, await self.weight_specs())
        for bucket in buckets:
            check.admit(bucket)
        check.finish()

        return await self._update(version, check, Receiving(buckets, group), self.config.weight_update_mode)

    async def join_weight_group(self, address: str, port: int, rank: int, world_size: int, name: str) -> None:
        """Join the learner's torch.distributed group for receive_weights; returns when all members are there. Rank 0 is the learner.

        The scheduler samples nothing while it waits for the others.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=port,
            rank_offset=rank,
            world_size=world_size,
            group_name=name,
            backend=self.config.resolved_group_backend,
        )
        phase = f"join weight group {name} as rank {rank} of {world_size}"
        await self._control(self._manager.init_weights_update_group(request, None), phase)

    async def leave_weight_group(self, name: str) -> None:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        await self._control(self._manager.destroy_weights_update_group(request, None), f"leave weight group {name}")

    async def _update(self, version: int, check: UpdateCheck, transfer: Sending | Receiving, mode: UpdateMode) -> SyncReceipt:
        """The update as a task of its own: it runs to its end even if the caller is cancelled."""
        return await asyncio.shield(asyncio.ensure_future(self._update_in_turn(version, check, transfer, mode)))

    async def _update_in_turn(self, version: int, check: UpdateCheck, transfer: Sending | Receiving, mode: UpdateMode) -> SyncReceipt:
        waits = self._interrupted() if isinstance(transfer, Receiving) else contextlib.nullcontext()
        async with self._updating:
            self._process.raise_if_lost()
            if self._dirty is not None and self.config.tensor_parallel > 1:
                mode = "retract"  # its ranks may differ in what they have cached: that goes
            phase = f"weight update v{self._version} -> v{version}, {mode}"
            try:
                await self._prepare(transfer, check, phase)
                self._no_update.clear()
                with waits:
                    pause_s = await self._replace_weights(version, mode, transfer, check, phase)
                self._version = version
                self._dirty = None
                return check.receipt(version, pause_s)
            finally:
                self._no_update.set()
                await transfer.close()

    async def _prepare(self, transfer: Sending | Receiving, check: UpdateCheck, phase: str) -> None:
        """What fails here leaves the engine as it was: it samples on."""
        deadline_s = self.config.deadlines.update_s
        try:
            await asyncio.wait_for(transfer.prepare(), deadline_s)
            if check.is_empty:
                check.finish()  # an iterator without a single bucket
        except TimeoutError as error:
            said = f"{self.name}: {phase}: the weights were not there in {deadline_s:g} s; {self._state}"
            raise DeadlineExceeded(said, what=f"{self.name}: {phase}", seconds=deadline_s) from error
        except Exception as error:
            raise SyncError(f"{self.name}: {phase}: {error}. {self._state}") from error

    async def _replace_weights(
        self, version: int, mode: UpdateMode, transfer: Sending | Receiving, check: UpdateCheck, phase: str
    ) -> float:
        """Returns: lower bound of the pause, seconds, from the engine's answer to `begin` until it is told to continue. Two message delays
        are not included.

        SGLang doesn't answer `pause`: its scheduler reads it after the forward under way, and `begin` after that, so the tokens of that
        forward come before the pause.
        """
        deadline_s = self.config.deadlines.update_s

        async def steps() -> float:
            await weight_transfer.pause_and_begin(self._manager, mode)
            stopped = time.perf_counter()
            self._dirty = f"an update to v{version} has begun"
            await transfer.load(self._manager, version, flush=mode == "retract")
            receipts = await self._inspect(RECEIPT, deadline_s)
            check.require_all_ranks(version, receipts)
            copies = self.config.tensor_parallel // self.config.attention_data_parallel
            self._seen_tokens = max(self._seen_tokens, self._ended_tokens + sum(int(r["unfinished"]) for r in receipts) // copies)
            await weight_transfer.end(self._manager)
            await weight_transfer.resume(self._manager)
            return time.perf_counter() - stopped

        replacing = asyncio.ensure_future(steps())
        try:
            return await self._process.wait(replacing, deadline_s, phase, keep=True)
        except BaseException as error:
            if not replacing.done():  # its weights are here, and a broadcast ends by weight_group_timeout_s: the engine's own fault
                self._process.declare_lost(f"{phase}: {error}")
                raise
            await self._give_up(version, error)
            raise SyncError(f"{self.name}: {phase}: {error}. {self._state}") from error

    @property
    def _state(self) -> str:
        return "The engine is dirty until a whole update succeeds" if self._dirty else "The engine still serves its old weights"

    async def _give_up(self, version: int, error: BaseException) -> None:
        """Have nobody hang after a failed update: SGLang's session is closed and sampling resumes, without what ran on half-new weights."""
        if self._dirty is not None:
            self._failed_updates += 1
            self._dirty = f"the update to v{version} failed ({type(error).__name__}: {error})"
            self._manager.abort_request(abort_all=True)
        for step in (weight_transfer.end, weight_transfer.resume):
            try:
                await self._process.wait(step(self._manager), self.config.deadlines.control_s, "close a failed weight update", keep=True)
            except SyncError:
                continue  # no session was open: the update failed before it began
            except EvenkeelError as second:
                self._process.declare_lost(f"a weight update failed ({error}), and so did closing it ({second})")
                raise

    async def _inspect(self, action: str, deadline_s: float | None = None) -> list[dict[str, str]]:
        """The answer of each rank. Raises: EngineError naming the first that has none."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self._process.raise_if_lost()
        call = self._manager.check_weights(CheckWeightsReqInput(action=action, selector="target"), None)
        with self._interrupted():
            success, message, ranks, _ = await self._process.wait(call, deadline_s or self.config.deadlines.control_s, action, keep=True)
        if not success:
            raise EngineError(f"{self.name}: {action}: {message}. Is evenkeel installed where SGLang runs, with its entry points?")
        answers = [dict(rank["checksums"]) for rank in ranks[: self.config.tensor_parallel]]  # each group answers for all ranks
        for rank, answer in enumerate(answers):
            if FAILURE in answer:
                raise EngineError(f"{self.name}: {action} failed in rank {rank} of {len(answers)}: {answer[FAILURE]}. Its log says where")
        return answers

    async def _control(self, call: Coroutine[Any, Any, tuple[bool, str]], phase: str) -> None:
        with self._interrupted():
            success, message = await self._process.wait(call, self.config.deadlines.update_s, phase, keep=True)
        if not success:
            raise SyncError(f"{self.name}: {phase}: {message}")

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        self._interruptions += 1
        try:
            yield
        finally:
            self._interruptions -= 1

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager: the owner's half of the engine."""
        self._process.raise_if_lost()
        return self._process.engine.tokenizer_manager


def _read_model_config(folder: Path, engine: EngineConfig) -> tuple[int, int, bool, ExpertShape | None]:
    """(vocabulary, context length, whether it has experts, those that can be reported) of a Hugging Face folder.

    Raises: DataError, ConfigError.
    """
    with gc_paused():
        from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no config.json: not a Hugging Face model folder. Give a folder that transformers can load")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    number = _experts(config)
    if number and config.tie_word_embeddings:
        raise DataError(
            f"{folder}: tie_word_embeddings = true: SGLang's mixtures of experts have a head of their own, which stays unset. Save the "
            "model with its head (lm_head.weight) and tie_word_embeddings false"
        )
    if engine.tensor_parallel > 1:
        _require_divisible(folder, config, engine)
    reports = number > 0 and config.model_type not in UNREPORTED_ROUTES
    experts = ExpertShape(config.num_hidden_layers, number, config.num_experts_per_tok) if reports else None
    return int(config.vocab_size), int(config.max_position_embeddings), number > 0, experts


def _experts(config: Any) -> int:
    """Experts of each layer; 0: the model is dense. Args: config: of transformers."""
    return expert_count(config.model_type, getattr(config, "num_experts", None))


def _require_divisible(folder: Path, config: Any, engine: EngineConfig) -> None:
    """Args: config: of transformers, of the text model. Raises: ConfigError unless the ranks can share the model."""
    names = ("intermediate_size",) if config.model_type in DENSE_FAMILIES else ("intermediate_size", "moe_intermediate_size")
    widths = {width for name in names if (width := getattr(config, name, None)) is not None}
    for obstacle, remedy in obstacles(
        engine,
        model_type=config.model_type,
        heads=config.num_attention_heads,
        key_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        widths=sorted(widths),
        experts=_experts(config),
    ):
        raise ConfigError(f"{folder}: {obstacle}. {remedy}")


# --- SGLang's answers ------------------------------------------------------------------------------------------------
# One thread reads them, decodes their text and takes wide fields apart, which for a long answer takes a good part of a second. Most of that
# work holds Python's lock, so more threads finish it no sooner, and the event loop, which also serves SGLang's requests and the heartbeat,
# gets its turn later. It isn't one of asyncio's own threads: weight updates wait for none of it there.

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="answers")


async def in_answer_thread(work: Callable[[], T]) -> T:
    """Do work in the one thread that handles answers, in the order of the calls. Returns: its result. Raises: its error."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model's mixture of experts."""

    layers: int
    """Number of layers that have experts."""
    experts: int
    """Number of experts in each of these layers."""
    k: int
    """Experts that a token is sent to."""


def trajectory_of(
    answer: dict[str, Any],
    prompt_ids: Sequence[int],
    engine_name: str,
    *,
    prompt_id: str = "",
    topk: int = 0,
    experts: ExpertShape | None = None,
    has_sets: bool = False,
) -> Trajectory:
    """The engine's answer to one request: without text and reward, and with an error if it was aborted.

    Args:
        topk: most likely tokens that were asked for at each position.
        experts: of the model, if routes were asked for.
        has_sets: kept sets were asked for.
    Raises: RequestError if logprobs, version spans, kept sets or routes do not cover the tokens one to one, or a logprob is not finite.
    """
    meta = answer["meta_info"]
    response_ids = ids_of(answer["output_ids"])
    logprobs = logprobs_of(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
    if len(logprobs) != len(response_ids) or not all(math.isfinite(value) for value in logprobs):
        raise RequestError(
            f"{engine_name}: {len(response_ids)} tokens came with {len(logprobs)} logprobs, or one is not finite: the weights hold a "
            "NaN, or SGLang's answer has another form than in 0.5.21"
        )
    reason = FinishReason((meta.get("finish_reason") or {"type": "abort"})["type"])
    is_aborted = reason is FinishReason.ABORT
    wants_routes = experts is not None and not is_aborted  # an aborted request may not have been read at all
    found = Trajectory(
        prompt_id=prompt_id,
        prompt_ids=ids_of(prompt_ids),
        response_ids=response_ids,
        behavior_logprobs=logprobs,
        version_spans=_version_spans(meta, len(response_ids), engine_name),
        finish_reason=reason,
        cached_tokens=int(meta.get("cached_tokens", 0)),
        retractions=int(meta.get("num_retractions", 0)),
        top_logprobs=_top_logprobs(meta, len(response_ids), topk, engine_name) if topk else None,
        kept_tokens=_kept_tokens(meta, response_ids, engine_name) if has_sets else None,
        routed_experts=_routed_experts(meta, len(response_ids), experts, engine_name) if experts and wants_routes else None,
    )
    return unanswered(found) if is_aborted else found


def _version_spans(meta: dict[str, Any], tokens: int, engine_name: str) -> tuple[VersionSpan, ...]:
    spans = tuple(
        VersionSpan(int(span["version"]), span["start"], span["end"])
        for span in meta.get("weight_versions") or ()
        if span["end"] > span["start"]
    )
    bounds = [0, *(span.end for span in spans)]
    if bounds[-1] != tokens or [span.start for span in spans] != bounds[:-1]:
        raise RequestError(
            f"{engine_name}: version spans {spans} do not cover {tokens} tokens: SGLang's answer has another form than in 0.5.21"
        )
    return spans


def _top_logprobs(meta: dict[str, Any], tokens: int, topk: int, engine_name: str) -> TopLogprobs:
    rows = meta.get("output_top_logprobs") or ()
    found = TopLogprobs.of(topk, rows)
    if len(rows) != tokens or len(found.ids) != tokens * topk or any(map(math.isnan, found.logprobs)):  # outside of a kept set -inf
        raise RequestError(
            f"{engine_name}: {tokens} tokens came with {len(rows)} rows and {len(found.ids)} entries of the top {topk} logprobs, or one is "
            "no number: the weights hold a NaN, or SGLang's answer has another form than in 0.5.21"
        )
    return found


def _kept_tokens(meta: dict[str, Any], response_ids: array[int], engine_name: str) -> KeptTokens:
    rows = meta.get("output_token_sampling_mask") or ()
    if len(rows) != len(response_ids) or not all(not row or token in row for token, row in zip(response_ids, rows, strict=True)):
        raise RequestError(
            f"{engine_name}: {len(response_ids)} tokens came with {len(rows)} kept sets, or a token is not in its own: SGLang's answer has "
            "another form than in 0.5.21"
        )
    return KeptTokens.of(rows)


def _routed_experts(meta: dict[str, Any], tokens: int, shape: ExpertShape, engine_name: str) -> RoutedExperts:
    """SGLang sends int32 [prompt + response - 1, layers, k], base64: tens of MB, over which Python's own decoder holds the interpreter."""
    wide = np.frombuffer(pybase64.b64decode(meta.get("routed_experts") or ""), np.int32)
    expected = (int(meta["prompt_tokens"]) + tokens - 1) * shape.layers * shape.k
    if len(wide) != expected or wide.min() < 0 or wide.max() >= shape.experts:
        raise RequestError(
            f"{engine_name}: {meta['prompt_tokens']} + {tokens} tokens came with {len(wide)} routed experts instead of {expected}, or one "
            f"is not below {shape.experts}: the engine was started without rollout.engine.return_routed_experts, or SGLang's answer has "
            "another form than in 0.5.21"
        )
    code, narrow = ("B", np.uint8) if shape.experts <= 256 else ("h", np.int16)
    return RoutedExperts(shape.layers, shape.k, array(code, wide.astype(narrow).tobytes()))
