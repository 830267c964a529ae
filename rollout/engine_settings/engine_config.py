"""Settings of one SGLang engine, and what they become as SGLang's own arguments."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from evenkeel.correction.errors import ConfigError
from evenkeel.correction.settings.base import Settings
from evenkeel.engines.float8_format import CONFIG
from evenkeel.engines.machine import PREFILL_TOKENS, Backend, Device, Dtype, decided, device_of, dtype_of, group_backend_of, is_open
from evenkeel.rollout.engine_settings.engine_arguments import refusal
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths

UpdateMode = Literal["retract", "in_place"]
"""What becomes of requests in flight when weights are updated: see EngineConfig.weight_update_mode."""
RESERVED_ARGUMENTS = {
    "model_path": "the run's model folder",
    "device": "rollout.engine.device",
    "dtype": "rollout.engine.dtype",
    "tp_size": "rollout.engine.tensor_parallel",
    "ep_size": "rollout.engine.expert_parallel",
    "dp_size": "rollout.engine.attention_data_parallel",
    "enable_dp_attention": "rollout.engine.attention_data_parallel",
    "max_total_tokens": "rollout.engine.max_total_tokens",
    "mem_fraction_static": "rollout.engine.memory_fraction",
    "max_running_requests": "rollout.engine.max_running_requests",
    "context_length": "rollout.engine.context_length",
    "attention_backend": "rollout.engine.attention_backend",
    "disable_radix_cache": "rollout.engine.prefix_cache",
    "random_seed": "seed, at the top of the recipe (each request has a seed of its own)",
    "log_level": "rollout.engine.log_level",
    "enable_return_routed_experts": "learner.routing_replay: rollout",
    "skip_tokenizer_init": "nothing: evenkeel works on token ids",
    "load_format": "nothing: a run's engines get their weights from the learner",
    "quantization": "rollout.engine.quantization",
    "weight_version": "nothing: evenkeel numbers the versions",
    "sampling_mask_max_tokens": "nothing: kept sets have any size",
    "sampling_backend": "nothing: behaviour logprobs come from evenkeel's sampler",
}
"""SGLang arguments that evenkeel sets itself, and what to set instead of each."""
# Arguments of an engine with a share of a GPU, so that all of its memory can be counted (engines/machine.py): a small prefill chunk, and no
# CUDA graphs of prefill, of which that chunk would have 42, 336 MiB by SGLang's own estimate.
_OF_A_SHARE = {"chunked_prefill_size": PREFILL_TOKENS, "disable_prefill_cuda_graph": True}

# Argument of an engine of experts on a GPU: kernels that leave weights as files have them, and as updates write them. SGLang's auto is the
# same on all GPUs but sm_10x (Blackwell), of bfloat16 (layers/quantization/unquant.py) and of float8 in blocks (fp8.py, as long as no
# moe_a2a_backend is DeepEP's, which is refused). There it is flashinfer_trtllm (arg_groups/model_overrides/qwen3_moe.py), which lays
# weights out in blocks of its own.
_RUNNER = {"moe_runner_backend": "triton"}
# Most tokens in the KV cache of a CPU, unless the setting says another number.
_CPU_CACHE_TOKENS = 65_536
COPY_THREADS = 4
"""Threads that copy weights for a GPU: as many as fill its bus, at 5 GB/s a thread and 20 GB/s of PCIe 4 x16: assumptions."""
_NO_FLOAT32 = (
    "rollout.engine.dtype = float32 with device = cuda: SGLang's attention kernels for GPUs compute in half precision alone. Set "
    "learner.dtype and rollout.engine.dtype to bfloat16, or device: cpu"
)


class EngineDeadlines(Settings):
    """Longest waits of one engine, seconds. In a run most grow with the model's bytes and the answers' length (settings/deadlines.py)."""

    ALWAYS_DERIVED: ClassVar[frozenset[str]] = frozenset({"start_s", "generate_s", "update_s", "control_s", "shutdown_s"})

    heartbeat_s: float = Field(default=30.0, gt=0)
    """An engine that answers no health check for this long and computes nothing is lost; one that is computing, or may be waiting for a
    kernel to compile, is lost after ten times as long. One that answers is lost only if a weight update exceeds update_s."""
    start_s: float = Field(default=300.0, gt=0)
    """From the first import to the first answer; a large model on a cold disk needs more."""
    generate_s: float = Field(default=120.0, gt=0)
    """One request, including its wait for earlier requests and weight updates. When it is exceeded the request has failed, not the
    engine."""
    update_s: float = Field(default=120.0, gt=0)
    """One weight update from pause to continue, once the weights are on the engine's node; an engine that takes longer is lost. Also limits
    joining and leaving the broadcast group."""
    control_s: float = Field(default=60.0, gt=0)
    """Any other request: specs, checksums, scores."""
    shutdown_s: float = Field(default=15.0, gt=0)
    """Until the engine's processes have ended."""


class EngineConfig(Settings):
    """One SGLang engine. Device and backend are settings; the code is the same for both."""

    DERIVED: ClassVar[frozenset[str]] = frozenset(
        {
            *("dtype", "weight_group_backend", "max_running_requests", "max_total_tokens", "gpu_share", "context_length"),
            *("batch_invariant", "projection_parts", "return_routed_experts", "threads"),
        }
    )
    ALWAYS_DERIVED: ClassVar[frozenset[str]] = frozenset({"weight_group_timeout_s"})

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; auto is cuda where this machine, or the cluster of ray.address, has a GPU. A run decides that when it
    starts, as learner.device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; auto is the learner's (learner.dtype), also for `evenkeel eval` and `evenkeel filter`."""
    quantization: Literal["none", "float8_block"] = "none"
    """float8_block: the engine gets its projections in float8 e4m3, with a scale for each 128 x 128 of the learner's bfloat16 weights. Half
    the bytes of a version and of the engine's weights, more mismatch to correct. Not for true_on_policy."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs of one node over which the engine splits its model, if one GPU can't hold it; on a CPU, processes. Must divide the number of
    attention heads."""
    expert_parallel: int = Field(default=1, ge=1, le=64)
    """For a mixture of experts on several GPUs: number of groups of ranks among which the experts are divided. A group's ranks,
    tensor_parallel over this many, have a part of each of its experts; with as many groups as ranks each has whole ones. 1: every rank
    has a part of all."""
    attention_data_parallel: int = Field(default=1, ge=1, le=64)
    """On several GPUs: groups of ranks, each with requests and a KV cache of its own (SGLang's dp_size with enable_dp_attention). A group's
    ranks, tensor_parallel over this many, share the heads; the rest of the model is cut over all ranks. 1: one group."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of the engine's tensor operations on a CPU, in each of its ranks. Unset: as learner.threads, over the engines' ranks."""
    max_running_requests: int = Field(default=64, ge=1, le=10**5)
    """Requests decoded together; more wait in the engine's queue. A run on GPUs has 256 unless this is set."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the KV cache holds. Unset: by memory_fraction on cuda; max_running_requests x context, at most 65,536, on a CPU."""
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """For weights and KV cache: share of the GPU memory that is free when the engine starts, or, with rollout.gpus_per_worker below 1, of
    the whole memory. Unset: SGLang's choice, or what CUDA context, graphs and sampler leave of the worker's share. Not used on a CPU."""
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a GPU's whole memory within which the engine keeps all that it allocates. In a run rollout.gpus_per_worker, unless this is
    set to less."""
    context_length: int | None = Field(default=None, ge=2)
    """Longest prompt and response together, tokens. Unset: max_position_embeddings of the model's config.json, also where SGLang by itself
    would take more because of rope scaling."""
    attention_backend: str | None = None
    """SGLang's name of an attention backend. Unset: SGLang's choice on cuda, evenkeel's own on a CPU ("stock" is SGLang's)."""
    batch_invariant: bool = False
    """Batch-invariant operators, for true on-policy training. In a run this follows from true_on_policy, for engines and learner alike."""
    projection_parts: int = Field(default=1, ge=1, le=10**4)
    """With batch_invariant: number of partial products of which the output projections of attention and MLP are the sum, one for each of
    the learner's tensor-parallel ranks. In a run this follows from learner.tensor_parallel."""
    return_routed_experts: bool = False
    """Return with each answer the experts that its tokens were routed to. In a run this follows from learner.routing_replay: rollout."""
    prefix_cache: bool = True
    """Keep keys and values of shared prefixes; those of an older weight version are never reused."""
    weight_update_mode: UpdateMode = "retract"
    """What becomes of requests in flight: retract recomputes their KV cache, so each token's logprob is its own version's, exactly;
    in_place keeps it, is quicker, and its later tokens belong to no single policy."""
    weight_group_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """torch.distributed backend of the broadcast transport; auto is nccl on cuda, gloo on a CPU."""
    weight_group_timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a broadcast collective and of joining its group, seconds. Below deadlines.update_s, after which the engine counts as
    lost."""
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    """Level of SGLang's own log lines; its warnings are mostly about models and kernels that are not there."""
    deadlines: EngineDeadlines = EngineDeadlines()
    """Longest waits."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of sglang.Engine, as its ServerArgs names them."""

    @model_validator(mode="after")
    def _refuse_reserved(self) -> EngineConfig:
        for name in self.engine_args:
            if name in RESERVED_ARGUMENTS:
                raise ValueError(
                    f"rollout.engine.engine_args.{name} = {self.engine_args[name]!r}: evenkeel sets this argument of SGLang itself; "
                    f"use {RESERVED_ARGUMENTS[name]} instead"
                )
            if (refused := refusal(name)) is not None:
                reason, remedy = refused
                raise ValueError(f"rollout.engine.engine_args.{name} = {self.engine_args[name]!r}: {reason}; use {remedy} instead")
        return self

    @model_validator(mode="after")
    def _refuse_what_ranks_cant_do(self) -> EngineConfig:
        if self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"rollout.engine.expert_parallel = {self.expert_parallel} doesn't divide tensor_parallel = {self.tensor_parallel}: the "
                "engine's ranks share its experts. Set expert_parallel to a divisor of it, or tensor_parallel to a multiple"
            )
        if (groups := self.attention_data_parallel) > 1:
            setting = f"rollout.engine.attention_data_parallel = {groups}"
            if self.tensor_parallel % groups:
                raise ValueError(
                    f"{setting} doesn't divide tensor_parallel = {self.tensor_parallel}: groups of its ranks share the requests. Set "
                    "attention_data_parallel to a divisor of it, or to 1"
                )
            if self.has_float8 or self.return_routed_experts or self.max_running_requests < groups:
                if self.max_running_requests < groups:
                    what, instead = f"max_running_requests = {self.max_running_requests}", f"max_running_requests to {groups} or more"
                elif self.has_float8:
                    what, instead = "quantization", "quantization to none"
                else:
                    what, instead = "learner.routing_replay: rollout", "learner.routing_replay to none or recompute"
                raise ConfigError(
                    f"{setting} with {what}: this combination is untested", remedy=f"Set attention_data_parallel to 1, or {instead}"
                )
        if self.batch_invariant and self.tensor_parallel > 1:
            raise ValueError(
                f"rollout.engine.tensor_parallel = {self.tensor_parallel} with batch_invariant: the sums over ranks are SGLang's, not the "
                "learner's, and their bits differ. Set tensor_parallel: 1, or true_on_policy: false"
            )
        return self

    @model_validator(mode="after")
    def _refuse_float32_on_gpus(self) -> EngineConfig:
        if self.device == "cuda" and self.dtype == "float32":  # what is auto is decided later, and looked at again
            raise ValueError(_NO_FLOAT32)
        return self

    @model_validator(mode="after")
    def _refuse_float8_of_others(self) -> EngineConfig:
        if self.quantization == "none":
            return self
        if self.dtype != "bfloat16" and not is_open(self.dtype):
            raise ValueError(
                f"rollout.engine.quantization = {self.quantization} with dtype = {self.dtype}: it is made of bfloat16 weights. Set "
                "learner.dtype: bfloat16"
            )
        if self.batch_invariant:
            raise ValueError(
                f"rollout.engine.quantization = {self.quantization} with batch_invariant: true: there are no batch-invariant products of "
                "float8. Set one of them"
            )
        return self

    @property
    def has_float8(self) -> bool:
        """Whether the learner sends its projections in float8."""
        return self.quantization == "float8_block"

    @property
    def copy_threads(self) -> int:
        """Threads that copy a bucket of weights into the engine's shared memory: COPY_THREADS before a GPU, one on a CPU, whose cores load
        the bucket before. Raises: as resolved_device."""
        return COPY_THREADS if self.resolved_device == "cuda" else 1

    @property
    def resolved_device(self) -> Device:
        """The device, once it is decided. Raises: ConfigError before."""
        return decided(self.device, "rollout.engine.device")

    @property
    def resolved_dtype(self) -> Dtype:
        """The dtype, once it is decided. (SGLang's own auto turns a float32 folder into float16.) Raises: ConfigError before."""
        return decided(self.dtype, "rollout.engine.dtype")

    @property
    def resolved_group_backend(self) -> Backend:
        """The backend, resolved as resolved_device."""
        return decided(self.weight_group_backend, "rollout.engine.weight_group_backend")

    def on_this_machine(self) -> EngineConfig:
        """These settings for an engine without a run: what is auto decided by what this process finds, the dtype by its own device.

        Raises: ConfigError for float32 on a GPU.
        """
        if not is_open(self.device, self.dtype, self.weight_group_backend):
            return self
        device = device_of(self.device)
        if device == "cuda" and self.dtype == "float32":
            raise ConfigError(_NO_FLOAT32)
        values = {"dtype": dtype_of(self.dtype, device), "weight_group_backend": group_backend_of(self.weight_group_backend, device)}
        return self.model_copy(update={"device": device} | values)

    def with_context(self, model_context: int) -> EngineConfig:
        """These settings with the context length decided, and on a CPU the size of the KV cache, which by itself SGLang would make most of
        the memory.

        Args: model_context: context length of the model's config, tokens.
        Raises: ConfigError if the given one is longer.
        """
        context = self.context_length or model_context
        if context > model_context:
            raise ConfigError(
                f"rollout.engine.context_length = {context} is more than the model's context of {model_context} tokens "
                "(max_position_embeddings in its config.json)",
                remedy="Lower it, or set it to null",
            )
        values = {"context_length": context}
        if self.device == "cpu" and self.max_total_tokens is None:
            values["max_total_tokens"] = min(self.max_running_requests * context, _CPU_CACHE_TOKENS)
        return self.model_copy(update=values)  # unchecked: a capture's engine has arguments that a recipe may not name

    @property
    def resolved_context(self) -> int:
        """Longest prompt and response together, tokens, once it is decided. Raises: ConfigError before."""
        if self.context_length is None:
            raise ConfigError("rollout.engine.context_length isn't decided yet", remedy="Decide it by the model's: with_context()")
        return self.context_length

    @property
    def lengths(self) -> RequestLengths:
        """How long prompts and answers may be. Raises: as resolved_context."""
        return RequestLengths.within(min(self.resolved_context, self.max_total_tokens or self.resolved_context))

    @property
    def room_text(self) -> str:
        """What limits `lengths`, for people. Raises: as resolved_context."""
        cache = self.max_total_tokens
        if cache is not None and cache < self.resolved_context:
            return f"the KV cache of {cache} tokens (rollout.engine.max_total_tokens), of which SGLang keeps some for itself"
        return f"the engine's context of {self.resolved_context} tokens, of which SGLang keeps some for itself"

    @property
    def has_stock_attention(self) -> bool:
        """Whether a CPU's engine takes SGLang's loop over the sequences, in place of evenkeel's kernel for all of them at once."""
        return self.attention_backend == "stock" or self.attention_data_parallel > 1

    @property
    def has_compiled_attention(self) -> bool:
        """Whether the engine's attention is rollout/sglang_plugin/attention.c. It can't take padded steps, which groups of ranks have."""
        has_own = self.attention_backend is None and not self.batch_invariant and self.attention_data_parallel == 1
        return self.resolved_device == "cpu" and has_own

    def sglang_arguments(self, model_folder: str, version: int, *, has_weights: bool = True, has_experts: bool = False) -> dict[str, Any]:
        """Keyword arguments for sglang.Engine, of settings whose device, types and context are decided.

        Args:
            version: weight version of the folder.
            has_weights: False: only the folder's config is read. Only such an engine can be quantised, because the folder's weights aren't.
            has_experts: the model is a mixture of experts.
        Raises: ConfigError if something isn't decided.
        """
        on_cpu = self.resolved_device == "cpu"
        arguments: dict[str, Any] = {
            "model_path": model_folder,
            "device": self.resolved_device,
            "dtype": self.resolved_dtype,
            "max_running_requests": self.max_running_requests,
            "context_length": self.resolved_context,
            "disable_radix_cache": not self.prefix_cache,
            "sampling_backend": "pytorch",  # rollout.sglang_plugin.seeded_sampler answers to this name
            "sampling_mask_max_tokens": 2**30,  # SGLang's number for no top_k, which it then lets pass; our sampler needs no limit
            "skip_tokenizer_init": True,
            "sleep_on_idle": True,  # an idle scheduler would spin, and take a core from the learner
            "weight_version": str(version),
            "log_level": self.log_level,
        }
        if on_cpu:
            arguments |= {
                "attention_backend": "torch_native" if self.attention_backend in (None, "stock") else self.attention_backend,
                "grammar_backend": "none",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,  # overlap hides the GPU's time; here it is a step too many a request
                "max_total_tokens": self.max_total_tokens,
            }
        else:
            arguments |= self._gpu_arguments(has_experts=has_experts)
        if self.tensor_parallel > 1:
            arguments["tp_size"] = self.tensor_parallel
        if self.expert_parallel > 1:
            arguments["ep_size"] = self.expert_parallel
        if self.attention_data_parallel > 1:  # groups compute in step: one that sleeps would hold up the others
            arguments |= {"dp_size": self.attention_data_parallel, "enable_dp_attention": True, "sleep_on_idle": False}
        if self.return_routed_experts:
            arguments["enable_return_routed_experts"] = True
        if not has_weights:
            arguments["load_format"] = "dummy"
            if self.has_float8:
                arguments |= {"quantization": "fp8", "json_model_override_args": json.dumps({"quantization_config": CONFIG})}
                # Others re-arrange weights and scales after loading, which then aren't those that were sent.
                arguments |= {} if on_cpu else {"fp8_gemm_runner_backend": "triton"}
        return arguments | self.engine_args

    def _gpu_arguments(self, *, has_experts: bool) -> dict[str, Any]:
        optional = {
            "attention_backend": self.attention_backend,
            "max_total_tokens": self.max_total_tokens,
            "mem_fraction_static": self.memory_fraction,
        }
        arguments = {name: value for name, value in optional.items() if value is not None} | (_RUNNER if has_experts else {})
        if self.gpu_share < 1:  # the plugin sizes the cache; SGLang wants a value
            arguments |= _OF_A_SHARE | {"mem_fraction_static": self.memory_fraction or self.gpu_share}
        return arguments
