"""One SGLang engine: token ids in, token ids with logprobs and weight versions out, and new weights meanwhile (weight_update.py).

What it is not: it knows no prompts, rewards or groups (rollout.sampler does), and it decides nothing about staleness.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from correction.engines.expert_count import DENSE_FAMILIES, expert_count
from correction.engines.quick_imports import gc_paused
from correction.errors import ConfigError, DataError, EngineDirty, EvenkeelError, RequestError
from rollout.continuation import continued, is_begun, kept, unsampled
from rollout.engine.answer_thread import in_answer_thread
from rollout.engine.engine_process import EngineProcess
from rollout.engine.sglang_answer import ExpertShape, trajectory_of
from rollout.engine.weight_update import UpdatableEngine
from rollout.engine_settings.engine_config import EngineConfig
from rollout.engine_settings.engine_ranks import UNREPORTED_ROUTES, obstacles
from rollout.engine_settings.request_lengths import RequestLengths
from rollout.trajectory import Trajectory

_HAND_BACK_S = 0.2
_READ_ONLY = {"max_new_tokens": 0, "temperature": 1.0}


class RolloutEngine(UpdatableEngine):
    """An engine that samples and scores. While it is dirty it refuses requests, and those that were in flight end with an EngineDirty.

    Requests that come during an update wait for its end. They are of the new weights, or end with an EngineDirty if it fails.
    """

    def __init__(
        self, name: str, config: EngineConfig, process: EngineProcess, vocab_size: int, version: int, experts: ExpertShape | None = None
    ) -> None:
        """Use RolloutEngine.start."""
        super().__init__(name, config, process, version)
        self.vocab_size = vocab_size
        """Size of the vocabulary: token ids are below it."""
        self.lengths = RequestLengths.of_engine(process.engine.tokenizer_manager.max_req_input_len)
        """How long prompts and answers may be."""
        self._experts = experts
        self._requests = 0
        self._under_way = set[str]()
        """SGLang's names of them."""
        self._in_groups = [0] * config.attention_data_parallel
        """Answers under way in each group of ranks."""
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
        top_p: float = 1.0,
        samples: int = 1,
        seeds: Sequence[int] | None = None,
        topk: int = 0,
        has_routes: bool = True,
        stop_ids: Sequence[int] = (),
        ignore_stop: bool = False,
        begun: Sequence[Trajectory] = (),
        deadline_s: float | None = None,
    ) -> list[Trajectory]:
        """Sample from the whole distribution: no top-k or penalty can be asked for, since they would bias every ratio.

        Args:
            prompt_ids: after the chat template.
            prompt_id: what the trajectories are to be called after.
            temperature: of the behaviour policy; 0 is greedy, and its logprobs are those of temperature 1.
            top_p: for answers that nothing is trained on: below 1 tokens come from the likeliest ones that hold this share, while their
                logprobs stay those of the whole distribution.
            samples: answers to this prompt, which is prefilled once, before them (as by SGLang's own n > 1, which can't be aborted).
            seeds: one for each sample, in [0, 2^63): its tokens then depend on the weights, the prompt and the seed alone, as far as the
                logits do (with batch_invariant to the last bit). Unset: random ones.
            topk: most likely tokens to report at each position, with their logprobs, in addition to the sampled one; see check_topk.
            has_routes: report routed experts, if the engine was started for them; False for answers that nothing is trained on.
            stop_ids: tokens that end an answer, which has them as its last; those of config.json and generation_config.json end it, too.
            ignore_stop: go on to max_tokens whatever is sampled (for checks and benchmarks; answers of a run stop).
            begun: what another engine has of each sample (rollout.continuation): whole ones stay as they are, others are continued.
        Returns: a trajectory for each sample, in the order of the seeds, without text and reward; an aborted one carries an error, and
            after `hand_back` the tokens that are kept of it.
        Raises: DataError for ids or lengths that the engine can't take; RequestError for an answer that can't be used, DeadlineExceeded,
            and the engine goes on; EngineDirty, EngineError if it is lost.
        """
        self._check_request(prompt_ids, max_tokens, temperature)
        found = list(begun) or [unsampled(prompt_ids, prompt_id)] * samples
        todo = [i for i, answer in enumerate(found) if is_begun(answer)]
        sampling = {"temperature": temperature, "top_p": top_p, "ignore_eos": ignore_stop, "stop_token_ids": list(stop_ids)}
        experts = self._experts if has_routes else None
        options: dict[str, Any] = ({"top_logprobs_num": topk} if topk else {}) | ({"return_routed_experts": True} if experts else {})
        inputs = [[*prompt_ids, *found[i].response_ids] for i in todo]
        samplings = [
            sampling | {"max_new_tokens": max_tokens - len(found[i].response_ids)} | ({"sampling_seed": seeds[i]} if seeds else {})
            for i in todo
        ]
        with self._in_a_group(len(todo)) as routed:
            if len(todo) > 1 and self.config.prefix_cache and not self.is_leaving:
                await self._request([prompt_ids], [_READ_ONLY], deadline_s, "prefill a shared prompt", **routed)
            if not todo or self.is_leaving:
                return found
            answers = await self._request(inputs, samplings, deadline_s, "generate", **options, **routed)
        self._ended_tokens += sum(len(answer["output_ids"]) for answer in answers)
        of_answer = partial(trajectory_of, engine_name=self.name, prompt_id=prompt_id, topk=topk, experts=experts)
        rests = await in_answer_thread(lambda: list(map(of_answer, answers, inputs)))
        for i, rest in zip(todo, rests, strict=True):
            whole = continued(found[i], rest) if found[i].response_ids else rest
            found[i] = kept(whole, self.lengths.prompt) if self.is_leaving and is_begun(whole) else whole
        return found

    @contextlib.contextmanager
    def _in_a_group(self, answers: int) -> Iterator[dict[str, int]]:
        """SGLang's argument that sends a prompt and all of its answers to the group of ranks with the fewest answers under way."""
        if len(self._in_groups) == 1:
            yield {}
            return
        group = self._in_groups.index(min(self._in_groups))
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
        answers = self._process.engine.async_generate(return_logprob=True, rid=request_ids, **options)
        phase = f"{phase}: {max(map(len, inputs))} tokens, sent at weights v{self._version}"
        try:
            self._under_way.update(request_ids)
            result: list[dict[str, Any]] = await self._process.wait(answers, deadline_s, phase)
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
            raise DataError(
                f"{self.name}: {len(token_ids)} prompt tokens and max_tokens = {max_tokens}: the engine takes up to "
                f"{self.lengths.prompt} and at least 1, together up to {self.lengths.together} tokens. "
                "Shorten the prompt, or lower rollout.sampling.max_tokens"
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise DataError(f"{self.name}: temperature = {temperature}: give a finite number, 0 for greedy, 1.0 for the model itself")


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
