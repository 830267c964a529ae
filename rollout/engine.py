"""One SGLang engine: token ids in, token ids with logprobs and weight versions out, and new weights while requests run.

What it is not: it knows no prompts, rewards or groups (rollout.sampling does), and it decides nothing about staleness.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from correction.errors import ConfigError, DataError, EngineError, EvenkeelError, SyncError
from rollout.engine_config import EngineConfig
from rollout.engine_process import EngineProcess
from rollout.sglang_plugin.actions import CHECKSUMS, SPECS
from rollout.trajectory import FinishReason, VersionSpan
from rollout.weight_bucket import UpdateCheck, UpdateReceipt, WeightSpec

T = TypeVar("T")
UpdateMode = Literal["retract", "in_place"]
Bucket = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled sequence, as the engine gives it."""

    token_ids: tuple[int, ...]
    """The stop token included when there is one."""
    logprobs: tuple[float, ...]
    """log_softmax(logits / temperature) of each token, natural log."""
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose keys and values were already there."""
    retractions: int
    """Times that its KV cache was dropped and computed again: by weight updates, or for want of memory."""


class RolloutEngine:
    """States: clean (serves `version`) -> updating -> clean, or dirty when an update failed half-way.

    A dirty engine refuses to generate until a whole update succeeds. Requests in flight when an update fails end with an EngineError.
    All methods belong to the event loop that started the engine.
    """

    def __init__(self, name: str, config: EngineConfig, process: EngineProcess, vocab_size: int, context_length: int, version: int) -> None:
        """Use RolloutEngine.start."""
        self.name = name
        self.config = config
        self.vocab_size = vocab_size
        """Token ids are below it."""
        self.context_length = context_length
        """Longest prompt and response together, tokens."""
        self._process = process
        self._version = version
        self._dirty: str | None = None
        self._failed_updates = 0
        self._updating = asyncio.Lock()
        self._specs: dict[str, WeightSpec] | None = None
        self._requests = 0

    @classmethod
    async def start(cls, model_folder: str | Path, config: EngineConfig, *, version: int = 0, name: str = "engine") -> RolloutEngine:
        """Start SGLang on a Hugging Face folder.

        Args:
            version: weight version of the folder.
            name: for messages, e.g. "rollout worker 3".
        Raises: DataError for a folder without a model, ConfigError, EngineError, DeadlineExceeded.
        """
        vocab_size, model_context = _read_model_config(Path(model_folder))
        if config.context_length is not None and config.context_length > model_context:
            raise ConfigError(
                f"rollout.engine.context_length = {config.context_length}: the model in {model_folder} was made for {model_context} tokens. "
                "Lower it, or leave it unset"
            )
        process = EngineProcess(name, config)
        await process.start(config.sglang_arguments(str(model_folder), model_context, version))
        engine = cls(name, config, process, vocab_size, config.context_length or model_context, version)
        try:
            await engine.weight_specs()
        except BaseException:
            await process.shutdown()
            raise
        return engine

    @property
    def version(self) -> int:
        """Of the weights that the next request is sampled with."""
        return self._version

    @property
    def is_healthy(self) -> bool:
        """Alive and not dirty."""
        return self._process.is_alive and self._dirty is None

    @property
    def requests_in_flight(self) -> int:
        return self._requests

    @property
    def process_ids(self) -> dict[str, int]:
        """Role -> process id of SGLang's children."""
        return dict(self._process.pids)

    # Generation

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        samples: int = 1,
        ignore_stop: bool = False,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Sample from the whole distribution: no top-p, top-k or penalty can be asked for, since they would bias every ratio.

        Args:
            prompt_ids: after the chat template.
            temperature: of the behaviour policy; 0 is greedy, and its logprobs are those of temperature 1.
            samples: answers to this prompt; they share its keys and values.
            ignore_stop: go on to max_tokens whatever is sampled (for tests and benchmarks).
        Returns: one Completion for each sample.
        Raises: DataError for ids or lengths that the engine can't take, EngineError if it is dirty or dies, DeadlineExceeded.
        """
        self._check_request(prompt_ids, max_tokens, temperature)
        sampling = {"max_new_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_stop}
        answers = await asyncio.gather(*(self._request(prompt_ids, sampling, deadline_s, "generate") for _ in range(samples)))
        return [_completion(answer, self.name) for answer in answers]

    async def score(self, token_ids: Sequence[int], *, deadline_s: float | None = None) -> list[float]:
        """Logprobs of a fixed sequence at temperature 1: len(token_ids) - 1 values, the first token has none. The probe of a weight sync."""
        self._check_request(token_ids, 1, 1.0)
        sampling = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        deadline_s = deadline_s or self.config.deadlines.control_s
        answer = await self._request(token_ids, sampling, deadline_s, "score", logprob_start_len=0)
        return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _request(
        self, token_ids: Sequence[int], sampling: dict[str, Any], deadline_s: float | None, phase: str, **options: Any
    ) -> dict[str, Any]:
        failed_updates = self._failed_updates
        request_id = uuid.uuid4().hex
        manager = self._process.engine.tokenizer_manager
        request = self._process.engine.async_generate(
            input_ids=list(token_ids), sampling_params=sampling, return_logprob=True, rid=request_id, **options
        )
        self._requests += 1
        try:
            phase = f"{phase}, weights v{self._version}, {len(token_ids)} tokens"
            answer = await self._process.wait(request, deadline_s or self.config.deadlines.generate_s, phase)
        except BaseException:
            if self._process.is_alive:
                manager.abort_request(rid=request_id)               # nobody waits for it any more
            raise
        finally:
            self._requests -= 1
        if self._failed_updates != failed_updates:
            raise EngineError(f"{self.name}: a weight update failed while this request ran, its tokens are of no version. Submit it again")
        return answer

    def _check_request(self, token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        self._process.raise_if_dead()
        if self._dirty is not None:
            raise EngineError(f"{self.name} is dirty: {self._dirty}. Send it a whole weight update first")
        if not token_ids:
            raise DataError(f"{self.name}: an empty prompt: there is nothing to condition on. Give it at least one token")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise DataError(
                f"{self.name}: token id {bad} in a prompt: the model's vocabulary has {self.vocab_size}, and SGLang dies of others. "
                "Use the tokenizer of the model's folder"
            )
        if max_tokens < 1 or len(token_ids) + max_tokens > self.context_length:
            raise DataError(
                f"{self.name}: {len(token_ids)} prompt tokens and max_tokens = {max_tokens}: together they must be at most the context of "
                f"{self.context_length}, and max_tokens at least 1. Shorten the prompt, or lower rollout.sampling.max_tokens"
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise DataError(f"{self.name}: temperature = {temperature}: give a finite number, 0 for greedy, 1.0 for the model's own distribution")

    # Weights

    async def weight_specs(self) -> dict[str, WeightSpec]:
        """Every tensor that the engine holds, by Hugging Face name; asked once, they don't change."""
        if self._specs is None:
            answer = await self._inspect(SPECS)
            self._specs = {name: WeightSpec.parse(name, text) for name, text in answer.items()}
        return self._specs

    async def weight_checksums(self, *, deadline_s: float | None = None) -> dict[str, str]:
        """HF name -> correction.checksum.tensor_checksum of what the scheduler process holds now, in the engine's dtype."""
        return await self._inspect(CHECKSUMS, deadline_s)

    async def update_weights(
        self,
        version: int,
        buckets: Bucket | Iterable[Bucket] | AsyncIterable[Bucket],
        *,
        mode: UpdateMode | None = None,
        deadline_s: float | None = None,
    ) -> UpdateReceipt:
        """Replace all weights while requests run: pause, begin, update, flush (retract), end, continue. No request is aborted.

        Args:
            version: of the new weights.
            buckets: HF name -> CPU tensor; one mapping, or several that together are the whole model. Each is checked before it is sent.
                A mapping, list or tuple is checked as a whole before the engine is paused; an iterator, bucket by bucket.
            mode: overrides rollout.engine.weight_update_mode.
        Raises: SyncError, EngineError, DeadlineExceeded. If anything had been sent before, the engine is dirty.
        """
        held = await self.weight_specs()
        check = UpdateCheck(self.name, version, held)
        if isinstance(buckets, Mapping):
            buckets = [buckets]
        if isinstance(buckets, (list, tuple)):
            rehearsal = UpdateCheck(self.name, version, held)
            for bucket in buckets:
                rehearsal.admit(WeightSpec.of(name, tensor) for name, tensor in bucket.items())
            rehearsal.finish()

        async def send(flush: bool) -> None:
            async for bucket, is_last in _with_last(buckets):
                check.admit(WeightSpec.of(name, tensor) for name, tensor in bucket.items())
                check.bytes += sum(tensor.nbytes for tensor in bucket.values())
                if is_last:
                    check.finish()
                payload = await asyncio.to_thread(_serialize, bucket)
                self._dirty = f"an update to v{version} has begun"
                await self._send_bucket(payload, str(version) if is_last else None, flush and is_last)

        return await self._update(version, check, send, mode, deadline_s)

    async def join_weight_group(self, address: str, port: int, rank: int, world_size: int, name: str, *, deadline_s: float | None = None) -> None:
        """Join the learner's torch.distributed group for receive_weights; returns when all members are there.

        Args:
            rank: of this engine's first GPU; a tensor-parallel engine takes as many ranks as it has GPUs. Rank 0 is the learner.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=address, master_port=port, rank_offset=rank, world_size=world_size, group_name=name, backend=self._group_backend
        )
        await self._control("init_weights_update_group", request, f"join weight group {name} as rank {rank} of {world_size}", deadline_s)

    async def leave_weight_group(self, name: str, *, deadline_s: float | None = None) -> None:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        await self._control("destroy_weights_update_group", DestroyWeightsUpdateGroupReqInput(group_name=name), f"leave weight group {name}", deadline_s)

    async def receive_weights(
        self,
        version: int,
        buckets: Sequence[Sequence[WeightSpec]],
        *,
        group: str,
        mode: UpdateMode | None = None,
        deadline_s: float | None = None,
    ) -> UpdateReceipt:
        """As update_weights, but the tensors come by broadcast from rank 0 of the group, one by one in this order.

        Args:
            buckets: what rank 0 broadcasts; checked as a whole before the engine is paused. Memory for one bucket at a time is needed.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        check = UpdateCheck(self.name, version, await self.weight_specs())
        for bucket in buckets:
            check.admit(bucket)
        check.finish()
        check.bytes = sum(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for bucket in buckets for spec in bucket)

        async def receive(flush: bool) -> None:
            self._dirty = f"an update to v{version} has begun"
            for index, bucket in enumerate(buckets):
                is_last = index == len(buckets) - 1
                request = UpdateWeightsFromDistributedReqInput(
                    names=[spec.name for spec in bucket],
                    dtypes=[spec.dtype for spec in bucket],
                    shapes=[list(spec.shape) for spec in bucket],
                    group_name=group,
                    flush_cache=flush and is_last,
                    weight_version=str(version) if is_last else None,
                )
                _raise_unless(await self._process.engine.tokenizer_manager.update_weights_from_distributed(request, None))

        return await self._update(version, check, receive, mode, deadline_s)

    async def shutdown(self) -> None:
        """End SGLang's processes; calls that still wait get an EngineError."""
        await self._process.shutdown()

    async def _update(
        self, version: int, check: UpdateCheck, transfer: Callable[[bool], Awaitable[None]], mode: UpdateMode | None, deadline_s: float | None
    ) -> UpdateReceipt:
        mode = mode or self.config.weight_update_mode
        phase = f"weight update v{self._version} -> v{version}, {mode}"
        async with self._updating:
            self._process.raise_if_dead()
            started = time.perf_counter()
            try:
                await self._process.wait(self._replace_weights(mode, transfer), deadline_s or self.config.deadlines.update_s, phase)
            except BaseException as error:
                await self._give_up(version, error)
                if isinstance(error, (EvenkeelError, asyncio.CancelledError)):
                    raise
                raise SyncError(f"{self.name}: {phase}: {error}. The engine is dirty until a whole update succeeds") from error
            self._version = version
            self._dirty = None
            return check.receipt(version, mode, time.perf_counter() - started)

    async def _replace_weights(self, mode: UpdateMode, transfer: Callable[[bool], Awaitable[None]]) -> None:
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            ContinueGenerationReqInput,
            EndWeightUpdateReqInput,
            PauseGenerationReqInput,
        )

        manager = self._process.engine.tokenizer_manager
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        _raise_unless(await manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all"), None))
        await transfer(mode == "retract")
        _raise_unless(await manager.end_weight_update(EndWeightUpdateReqInput(), None))
        await manager.continue_generation(ContinueGenerationReqInput())

    async def _give_up(self, version: int, error: BaseException) -> None:
        """After a failed update: what was in flight is of no version, so it is aborted; the scheduler's session is closed; nobody hangs."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, EndWeightUpdateReqInput

        if self._dirty is not None:
            self._failed_updates += 1
            self._dirty = f"the update to v{version} failed ({type(error).__name__}: {error})"
        if not self._process.is_alive:
            return
        manager = self._process.engine.tokenizer_manager
        if self._dirty is not None:
            manager.abort_request(abort_all=True)
        ending = manager.end_weight_update(EndWeightUpdateReqInput(), None)
        try:
            await self._process.wait(ending, self.config.deadlines.control_s, "close a failed weight update")
        except EvenkeelError as second:
            self._dirty = f"the update to v{version} failed ({error}), and so did closing it ({second})"
        finally:
            await manager.continue_generation(ContinueGenerationReqInput())

    async def _send_bucket(self, payload: bytes, weight_version: str | None, flush: bool) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self.config.tensor_parallel,
            load_format="flattened_bucket",
            flush_cache=flush,
            weight_version=weight_version,
        )
        _raise_unless(await self._process.engine.tokenizer_manager.update_weights_from_tensor(request, None))

    async def _inspect(self, action: str, deadline_s: float | None = None) -> dict[str, str]:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        if self.config.tensor_parallel > 1:
            raise ConfigError(
                f"{self.name}: rollout.engine.tensor_parallel = {self.config.tensor_parallel}: shapes and checksums of a sharded engine "
                "can't be compared yet. Use 1"
            )
        self._process.raise_if_dead()
        call = self._process.engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action, selector="target"), None)
        success, message, ranks, _ = await self._process.wait(call, deadline_s or self.config.deadlines.control_s, action)
        if not success:
            raise EngineError(f"{self.name}: {action}: {message}. Is evenkeel installed where SGLang runs, with its entry points?")
        return dict(ranks[0]["checksums"])

    async def _control(self, method: str, request: Any, phase: str, deadline_s: float | None) -> None:
        self._process.raise_if_dead()
        call = getattr(self._process.engine.tokenizer_manager, method)(request, None)
        success, message = await self._process.wait(call, deadline_s or self.config.deadlines.update_s, phase)
        if not success:
            raise SyncError(f"{self.name}: {phase}: {message}")

    @property
    def _group_backend(self) -> str:
        if self.config.weight_group_backend != "auto":
            return self.config.weight_group_backend
        return "gloo" if self.config.resolved_device == "cpu" else "nccl"


def _read_model_config(folder: Path) -> tuple[int, int]:
    """(vocabulary, context length) of a Hugging Face folder."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no config.json: not a Hugging Face model folder. Give a folder that transformers can load")
    config = AutoConfig.from_pretrained(folder).get_text_config()
    return int(config.vocab_size), int(config.max_position_embeddings)


def _completion(answer: dict[str, Any], engine_name: str) -> Completion:
    meta = answer["meta_info"]
    token_ids = tuple(answer["output_ids"])
    logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"] or ())
    if len(logprobs) != len(token_ids) or not all(math.isfinite(value) for value in logprobs):
        raise EngineError(
            f"{engine_name}: {len(token_ids)} tokens came with {len(logprobs)} logprobs, or one is not finite: the weights hold a NaN or an "
            "infinity, or SGLang's answer has another form than 0.5.21's"
        )
    spans = tuple(VersionSpan(int(span["version"]), span["start"], span["end"]) for span in meta.get("weight_versions") or () if span["end"] > span["start"])
    if [span.start for span in spans] != [0, *(span.end for span in spans)][: len(spans)] or (spans[-1].end if spans else 0) != len(token_ids):
        raise EngineError(f"{engine_name}: version spans {spans} do not cover {len(token_ids)} tokens: SGLang's answer has another form than 0.5.21's")
    reason = FinishReason((meta["finish_reason"] or {}).get("type", "abort"))
    return Completion(token_ids, logprobs, spans, reason, int(meta.get("cached_tokens", 0)), int(meta.get("num_retractions", 0)))


def _raise_unless(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise SyncError(message)


def _serialize(bucket: Bucket) -> bytes:
    """One flat copy of all tensors in shared memory, in SGLang's bucket format."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=[(name, tensor.detach().contiguous()) for name, tensor in bucket.items()])
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()})


async def _with_last(buckets: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[tuple[T, bool]]:
    """Each item, and whether it is the last: known by looking one ahead."""
    held: list[T] = []
    async for bucket in _iterate(buckets):
        if held:
            yield held.pop(), False
        held.append(bucket)
    if held:
        yield held.pop(), True


async def _iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
