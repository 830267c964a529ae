"""One SGLang engine: token ids in, token ids with logprobs and weight versions out, and new weights while requests run.

What it is not: it knows no prompts, rewards or groups (rollout.sampling does), and it decides nothing about staleness.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from correction.errors import ConfigError, DataError, EngineDirty, EngineError, EvenkeelError, SyncError
from correction.invariance import Processor
from correction.weight_spec import WeightSpec
from rollout import weight_transfer
from rollout.capabilities import EngineCapabilities
from rollout.completion import Completion, ExpertShape
from rollout.engine_config import EngineConfig
from rollout.engine_process import EngineProcess
from rollout.sglang_plugin.actions import CHECKSUMS, PROCESSOR, SPECS
from rollout.weight_bucket import UpdateCheck, UpdateReceipt
from rollout.weight_transfer import Bucket, UpdateMode


class RolloutEngine:
    """States: clean (serves `version`) -> updating -> clean; or dirty, when an update failed half-way; or lost, when its processes ended
    or gave no answer to an update in time.

    A dirty engine refuses to generate until a whole update succeeds; requests that were in flight end with an EngineDirty. A lost engine
    answers every call with an EngineError: shut it down and start another. All methods belong to the event loop that started the engine.
    """

    def __init__(
        self, name: str, config: EngineConfig, process: EngineProcess, vocab_size: int, version: int, experts: ExpertShape | None = None
    ) -> None:
        """Use RolloutEngine.start."""
        self.name = name
        self.config = config
        self.vocab_size = vocab_size
        """Token ids are below it."""
        self.longest_prompt: int = process.engine.tokenizer_manager.max_req_input_len - 1
        """Tokens; SGLang wants to be able to sample a few more than one."""
        self.context_length = self.longest_prompt + 5
        """Longest prompt and response together, tokens: SGLang keeps two of the model's context, or of the KV cache, for itself."""
        self._process = process
        self._experts = experts
        self._version = version
        self._dirty: str | None = None
        self._failed_updates = 0
        self._updating = asyncio.Lock()
        self._specs: dict[str, WeightSpec] | None = None
        self._requests = 0

    @classmethod
    async def start(
        cls, model_folder: str | Path, config: EngineConfig, *, version: int = 0, name: str = "engine", has_weights: bool = True
    ) -> RolloutEngine:
        """Start SGLang on a Hugging Face folder; the event loop stays free meanwhile (20 to 90 s on a CPU).

        Args:
            version: weight version of the folder.
            name: for messages, e.g. "rollout worker 3".
            has_weights: False: only config.json is read, and the engine is dirty until its first update.
        Raises: DataError for a folder without a model, ConfigError, EngineError, DeadlineExceeded; no process is left then.
        """
        vocab_size, model_context, experts = _read_model_config(Path(model_folder))
        if config.context_length is not None and config.context_length > model_context:
            raise ConfigError(
                f"rollout.engine.context_length = {config.context_length}: the model in {model_folder} was made for {model_context} "
                "tokens. Lower it, or leave it unset"
            )
        if config.return_routed_experts and experts is None:
            raise ConfigError(
                f"rollout.engine.return_routed_experts = true (learner.routing_replay: rollout): the model in {model_folder} has no "
                "experts. Set learner.routing_replay: none"
            )
        process = EngineProcess(name, config)
        await process.start(config.sglang_arguments(str(model_folder), model_context, version, has_weights=has_weights))
        engine = cls(name, config, process, vocab_size, version, experts if config.return_routed_experts else None)
        if not has_weights:
            engine._dirty = "it has had no weights yet"
        try:
            await engine.weight_specs()
            # Full garbage collections walk through all that the imports made: in this process a third of its time. Freeze it, everywhere.
            await engine._manager.freeze_gc()
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
        """Neither dirty nor lost."""
        return self._process.is_alive and self._dirty is None

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the installed SGLang offers."""
        return self._process.capabilities

    @property
    def requests_in_flight(self) -> int:
        return self._requests

    @property
    def process_ids(self) -> dict[str, int]:
        """Role -> process id of SGLang's children."""
        return dict(self._process.pids)

    async def shutdown(self) -> None:
        """End SGLang's processes; calls that still wait get an EngineError."""
        await self._process.shutdown()

    # Generation

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        samples: int = 1,
        seeds: Sequence[int] | None = None,
        topk: int = 0,
        ignore_stop: bool = False,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Sample from the whole distribution: no top-p, top-k or penalty can be asked for, since they would bias every ratio.

        Args:
            prompt_ids: after the chat template.
            temperature: of the behaviour policy; 0 is greedy, and its logprobs are those of temperature 1.
            samples: answers to this prompt. They share its keys and values: the prompt is prefilled once, before them (with 8 samples
                of 256 prompt tokens on a CPU that halves the time; SGLang's own n > 1 does the same, but can't be aborted).
            seeds: one for each sample, in [0, 2^63): its tokens then depend on the weights, the prompt and the seed alone, as far as the
                logits do (with fixed_order to the last bit). Unset: random ones.
            topk: most likely tokens to report at each position, with their logprobs, beside the sampled one; see check_topk.
            ignore_stop: go on to max_tokens whatever is sampled (for tests and benchmarks).
        Returns: one Completion for each sample.
        Raises: DataError for ids or lengths that the engine can't take, EngineDirty, EngineError if it is lost, DeadlineExceeded.
        """
        self._check_request(prompt_ids, max_tokens, temperature)
        if samples > 1 and self.config.prefix_cache:
            await self._request(prompt_ids, [{"max_new_tokens": 0, "temperature": 1.0}], deadline_s, "prefill a shared prompt")
        sampling = {"max_new_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_stop}
        options: dict[str, Any] = {"top_logprobs_num": topk} if topk else {}
        if self._experts is not None:
            options["return_routed_experts"] = True
        samplings = [sampling | ({"sampling_seed": seeds[i]} if seeds else {}) for i in range(samples)]
        answers = await self._request(prompt_ids, samplings, deadline_s, "generate", **options)
        return [Completion.from_sglang(answer, self.name, topk, self._experts) for answer in answers]

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
        (answer,) = await self._request(token_ids, [sampling], deadline_s, "score", logprob_start_len=0)
        return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _request(
        self, token_ids: Sequence[int], samplings: Sequence[dict[str, Any]], deadline_s: float | None, phase: str, **options: Any
    ) -> list[dict[str, Any]]:
        """The answers, in SGLang's form, to the same tokens under each of some sampling parameters.

        They are one batch to SGLang: to handle a call costs it about as much as to sample a short answer of a small model. All are aborted
        in the engine as soon as nobody waits for them, or one of them fails.
        """
        failed_updates = self._failed_updates
        request_ids = [uuid.uuid4().hex for _ in samplings]
        answers = self._process.engine.async_generate(
            input_ids=[list(token_ids)] * len(samplings), sampling_params=list(samplings), return_logprob=True, rid=request_ids, **options
        )
        phase = f"{phase}: {len(token_ids)} tokens, sent at weights v{self._version}"
        self._requests += len(samplings)
        try:
            result: list[dict[str, Any]] = await self._process.wait(answers, deadline_s or self.config.deadlines.generate_s, phase)
        except BaseException as error:
            if self._process.is_alive:
                for request_id in request_ids:
                    self._manager.abort_request(rid=request_id)
            if isinstance(error, Exception) and not isinstance(error, EvenkeelError):
                raise EngineError(f"{self.name}: SGLang refused a request ({phase}): {error}") from error
            raise
        finally:
            self._requests -= len(samplings)
        if self._failed_updates != failed_updates:
            raise EngineDirty(f"{self.name}: a weight update failed while this request ran, its tokens are of no version. Submit it again")
        return result

    def _check_request(self, token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        self._process.raise_if_lost()
        if self._dirty is not None:
            raise EngineDirty(f"{self.name} is dirty: {self._dirty}. Send it a whole weight update first")
        if not token_ids:
            raise DataError(f"{self.name}: an empty prompt: there is nothing to condition on. Give it at least one token")
        bad = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise DataError(
                f"{self.name}: token id {bad} in a prompt: the model's vocabulary has {self.vocab_size}, and SGLang dies of others. "
                "Use the tokenizer of the model's folder"
            )
        if max_tokens < 1 or len(token_ids) > self.longest_prompt or len(token_ids) + max_tokens > self.context_length:
            raise DataError(
                f"{self.name}: {len(token_ids)} prompt tokens and max_tokens = {max_tokens}: the engine takes up to "
                f"{self.longest_prompt} and at least 1, together up to {self.context_length} tokens. "
                "Shorten the prompt, or lower rollout.sampling.max_tokens"
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise DataError(f"{self.name}: temperature = {temperature}: give a finite number, 0 for greedy, 1.0 for the model itself")

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

    async def processor(self) -> Processor:
        """What the scheduler process computes with; for true on-policy it has to be what the learner computes with.

        Raises: EngineError if its products depend on the number of rows there.
        """
        return Processor(**await self._inspect(PROCESSOR))

    async def update_weights(
        self,
        version: int,
        buckets: Bucket | Iterable[Bucket] | AsyncIterable[Bucket],
        *,
        mode: UpdateMode | None = None,
        deadline_s: float | None = None,
    ) -> UpdateReceipt:
        """Replace all weights while requests run: pause, begin, buckets, flush (retract), end, continue. No request is aborted.

        Cancelling the caller does not stop an update that has begun.
        Args:
            version: of the new weights.
            buckets: HF name -> CPU tensor; one mapping, or several that together are the whole model. Each is checked before it is sent:
                a mapping, list or tuple as a whole, before the engine is paused; an iterator bucket by bucket.
            mode: overrides rollout.engine.weight_update_mode.
        Raises: SyncError, EngineError, DeadlineExceeded. If anything had been sent before, the engine is dirty, or lost.
        """
        self._process.raise_if_lost()
        held = await self.weight_specs()
        if isinstance(buckets, Mapping):
            buckets = [buckets]
        if isinstance(buckets, (list, tuple)):
            rehearsal = UpdateCheck(self.name, version, held)
            for bucket in buckets:
                rehearsal.admit(WeightSpec.of(name, tensor) for name, tensor in bucket.items())
            rehearsal.finish()
        check = UpdateCheck(self.name, version, held)

        async def transfer(flush: bool) -> None:
            async for bucket, is_last in weight_transfer.with_last(buckets):
                check.admit(WeightSpec.of(name, tensor) for name, tensor in bucket.items())
                if is_last:
                    check.finish()
                self._dirty = f"an update to v{version} has begun"
                await weight_transfer.send(self._manager, bucket, version=version if is_last else None, flush=flush and is_last)
            check.finish()                                          # an iterator without a single bucket

        return await self._update(version, check, transfer, mode, deadline_s)

    async def receive_weights(
        self,
        version: int,
        buckets: Sequence[Sequence[WeightSpec]],
        *,
        group: str,
        mode: UpdateMode | None = None,
        deadline_s: float | None = None,
    ) -> UpdateReceipt:
        """As update_weights, but rank 0 of the group broadcasts the tensors, one by one in the order of `buckets`.

        Args:
            buckets: what will be broadcast; checked as a whole before the engine is paused. One bucket at a time takes memory.
        """
        self._process.raise_if_lost()
        check = UpdateCheck(self.name, version, await self.weight_specs())
        for bucket in buckets:
            check.admit(bucket)
        check.finish()

        async def transfer(flush: bool) -> None:
            self._dirty = f"an update to v{version} has begun"
            async for bucket, is_last in weight_transfer.with_last(buckets):
                await weight_transfer.receive(self._manager, bucket, group, version=version if is_last else None, flush=flush and is_last)

        return await self._update(version, check, transfer, mode, deadline_s)

    async def join_weight_group(
        self, address: str, port: int, rank: int, world_size: int, name: str, *, deadline_s: float | None = None
    ) -> None:
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
        await self._control(self._manager.init_weights_update_group(request, None), phase, deadline_s)

    async def leave_weight_group(self, name: str, *, deadline_s: float | None = None) -> None:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        await self._control(self._manager.destroy_weights_update_group(request, None), f"leave weight group {name}", deadline_s)

    async def _update(
        self,
        version: int,
        check: UpdateCheck,
        transfer: Callable[[bool], Awaitable[None]],
        mode: UpdateMode | None,
        deadline_s: float | None,
    ) -> UpdateReceipt:
        """The update as a task of its own: half of one must not be left behind by a caller that is cancelled."""
        mode = mode or self.config.weight_update_mode
        update = self._update_in_turn(version, check, transfer, mode, deadline_s or self.config.deadlines.update_s)
        return await asyncio.shield(asyncio.ensure_future(update))

    async def _update_in_turn(
        self, version: int, check: UpdateCheck, transfer: Callable[[bool], Awaitable[None]], mode: UpdateMode, deadline_s: float
    ) -> UpdateReceipt:
        async with self._updating:
            self._process.raise_if_lost()
            phase = f"weight update v{self._version} -> v{version}, {mode}"
            started = time.perf_counter()
            steps = asyncio.ensure_future(self._replace_weights(mode, transfer))
            try:
                await self._process.wait(steps, deadline_s, phase, keep=True)
            except BaseException as error:
                if not steps.done():
                    self._process.declare_lost(f"{phase}: {error}")
                    raise
                await self._give_up(version, error)
                state = "The engine is dirty until a whole update succeeds" if self._dirty else "The engine still serves its old weights"
                raise SyncError(f"{self.name}: {phase}: {error}. {state}") from error
            self._version = version
            self._dirty = None
            return check.receipt(version, mode, time.perf_counter() - started)

    async def _replace_weights(self, mode: UpdateMode, transfer: Callable[[bool], Awaitable[None]]) -> None:
        await weight_transfer.pause_and_begin(self._manager, mode)
        await transfer(mode == "retract")
        await weight_transfer.end(self._manager)
        await weight_transfer.resume(self._manager)

    async def _give_up(self, version: int, error: BaseException) -> None:
        """After a failed update nobody hangs: SGLang's session is closed and sampling resumes, without what ran on half-new weights."""
        if self._dirty is not None:
            self._failed_updates += 1
            self._dirty = f"the update to v{version} failed ({type(error).__name__}: {error})"
            self._manager.abort_request(abort_all=True)
        for step in (weight_transfer.end, weight_transfer.resume):
            try:
                await self._process.wait(step(self._manager), self.config.deadlines.control_s, "close a failed weight update", keep=True)
            except SyncError:
                continue                                            # no session was open: the update failed before it began
            except EvenkeelError as second:
                self._process.declare_lost(f"a weight update failed ({error}), and so did closing it ({second})")
                raise

    async def _inspect(self, action: str, deadline_s: float | None = None) -> dict[str, str]:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self._process.raise_if_lost()
        call = self._manager.check_weights(CheckWeightsReqInput(action=action, selector="target"), None)
        success, message, ranks, _ = await self._process.wait(call, deadline_s or self.config.deadlines.control_s, action, keep=True)
        if not success:
            raise EngineError(f"{self.name}: {action}: {message}. Is evenkeel installed where SGLang runs, with its entry points?")
        return dict(ranks[0]["checksums"])

    async def _control(self, call: Coroutine[Any, Any, tuple[bool, str]], phase: str, deadline_s: float | None) -> None:
        success, message = await self._process.wait(call, deadline_s or self.config.deadlines.update_s, phase, keep=True)
        if not success:
            raise SyncError(f"{self.name}: {phase}: {message}")

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager: the owner's half of the engine."""
        self._process.raise_if_lost()
        return self._process.engine.tokenizer_manager


def _read_model_config(folder: Path) -> tuple[int, int, ExpertShape | None]:
    """(vocabulary, context length, experts) of a Hugging Face folder."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no config.json: not a Hugging Face model folder. Give a folder that transformers can load")
    config = AutoConfig.from_pretrained(folder).get_text_config()
    has_experts = getattr(config, "num_experts", None) is not None
    if has_experts and config.tie_word_embeddings:
        raise DataError(
            f"{folder}: tie_word_embeddings = true: SGLang's mixtures of experts have a head of their own, which stays unset. Save the "
            "model with its head (lm_head.weight) and tie_word_embeddings false"
        )
    experts = ExpertShape(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) if has_experts else None
    return int(config.vocab_size), int(config.max_position_embeddings), experts
