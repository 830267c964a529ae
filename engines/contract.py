"""What makes sampled and trained logprobs equal bit by bit: one object from which both sides' settings come, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenkeel.correction.errors import ConfigError

COMPARED_FAMILIES = ("qwen3", "qwen2", "llama")
"""Dense architectures (model_type) whose layers the two engines compute in the same order."""
DTYPES = ("float32", "bfloat16")
MOST_THREADS = 2
"""Threads for which products are known not to depend on the number of rows."""
FORBIDDEN_ENGINE_ARGUMENTS = {
    "kv_cache_dtype": "keys and values must have the learner's type",
    "quantization": "the learner's weights are not quantized",
    "enable_torch_compile": "a compiler fuses operations, and rounds elsewhere",
    "speculative_algorithm": "draft tokens are verified by another attention",
    "enable_lora": "the learner has no adapters",
    "enable_fp32_lm_head": "the batch-invariant head takes its place",
}
"""Arguments of SGLang (rollout.engine.engine_args) that change what is computed, and why that can't be honoured."""


@dataclass(frozen=True, slots=True)
class SideSettings:
    """One side's settings, as the run's configuration has them."""

    name: str
    """Their place in the configuration: "rollout.engine" or "learner"."""
    device: str
    """cpu or cuda."""
    dtype: str
    """Type of weights and activations: float32, bfloat16 or float16."""
    threads: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    """Learner: ranks share the rows of a pass between the matrices."""
    attention_backend: str | None = None
    """Engine: another attention than its own choice."""
    weight_update_mode: str = "retract"
    """Engine: what becomes of the keys of requests in flight."""
    arguments: Mapping[str, Any] | None = None
    """Engine: further arguments of SGLang."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Both sides compute, on a CPU, in float32 or in bfloat16 with sums in float32:

    attention by `operators.attention` in blocks of BLOCK keys, after q and k norms where the family has them; linear layers by
    `operators.linear`, bias added afterwards; RMSNorm as x * rsqrt(mean(x^2) + eps), rounded, then times the weight; residuals added, and
    rounded, before the norm; rotary angles from float32 tables, halves rotated (not neighbours); SiLU by `operators.silu`; the head by
    `operators.linear` over a vocabulary padded to COLUMN_MULTIPLE, logits in float32; logprobs by log_softmax(logits / temperature) over
    the whole vocabulary. If the learner's matrices are split over ranks, the projections back to the residual are sums of as many products,
    added in the order of the ranks in float32 and rounded once; the engine, which is not split, computes the same products and adds them
    so, and the logits of all ranks are laid side by side.
    """

    tensor_parallel: int = 1
    """The learner's ranks that share each matrix."""
    dtype: str = "float32"
    """Type of weights and activations on both sides."""

    @classmethod
    def of(cls, model: Mapping[str, Any], engine: SideSettings, learner: SideSettings) -> Contract:
        """The contract of a model and a layout.

        Args:
            model: a Hugging Face config.json.
        Raises: ConfigError that names everything that can't be honoured.
        """
        problems = [*_model_problems(model), *_side_problems(engine), *_side_problems(learner), *_engine_problems(engine)]
        if engine.dtype != learner.dtype:
            problems.append(f"{engine.name}.dtype = {engine.dtype}, {learner.name}.dtype = {learner.dtype}: set both to one of them")
        if problems:
            raise ConfigError(f"true_on_policy: true can't be honoured. {'. '.join(problems)}", remedy="Or set true_on_policy: false")
        return cls(learner.tensor_parallel, learner.dtype)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """What rollout.engine is set to."""
        return {"batch_invariant": True, "dtype": self.dtype, "projection_parts": self.tensor_parallel}

    @property
    def learner_settings(self) -> dict[str, Any]:
        """What learner is set to."""
        return {"batch_invariant": True, "dtype": self.dtype}


def _model_problems(model: Mapping[str, Any]) -> list[str]:
    found = []
    kind = model.get("model_type")
    stated = model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts")
    if experts := expert_count(str(kind), stated):
        found.append(
            f"model: {kind} has {experts} experts: rows grouped by expert, and ties of the router, have no batch-invariant operators yet. "
            "Take a dense model"
        )
    elif kind not in COMPARED_FAMILIES:
        compared = ", ".join(COMPARED_FAMILIES)
        found.append(f"model: model_type = {kind}: the order of its layers was compared for {compared} only. Take one of them")
    if model.get("use_sliding_window"):
        found.append("model: use_sliding_window = true: the batch-invariant attention has no window. Take a model with full attention")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind_of_rope = rope.get("rope_type", rope.get("type", "default"))
    if kind_of_rope != "default":
        found.append(f"model: rope_type = {kind_of_rope}: the two engines scale angles by code of their own. Take a model without scaling")
    return found


def _side_problems(side: SideSettings) -> list[str]:
    found = []
    if side.device != "cpu":
        found.append(
            f"{side.name}.device = {side.device}: the batch-invariant operators were compared on CPUs only; on a GPU SGLang's "
            f"deterministic inference and megatron-core's batch-invariant kernels would have to be aligned first. "
            f"Set {side.name}.device: cpu"
        )
    if side.dtype not in DTYPES:
        found.append(f"{side.name}.dtype = {side.dtype}: only {' and '.join(DTYPES)} have been compared. Set {side.name}.dtype: float32")
    if side.threads > MOST_THREADS:
        found.append(
            f"{side.name}.threads = {side.threads}: with more than {MOST_THREADS} a thread's share of a product can be small enough to get "
            f"another kernel. Set {side.name}.threads: {MOST_THREADS} or 1"
        )
    if side.sequence_parallel:
        found.append(
            f"{side.name}.sequence_parallel = true: the sum over the ranks would have to be scattered, for which no batch-invariant "
            f"operator is built. Set {side.name}.sequence_parallel: false"
        )
    return found


def _engine_problems(engine: SideSettings) -> list[str]:
    found = []
    if engine.tensor_parallel > 1:
        found.append(
            f"{engine.name}.tensor_parallel = {engine.tensor_parallel}: an engine's ranks add their sums by SGLang's own code, whose bits "
            f"are not the learner's. Set {engine.name}.tensor_parallel: 1"
        )
    if engine.attention_backend is not None:
        found.append(f"{engine.name}.attention_backend = {engine.attention_backend}: the mode has an attention of its own. Leave it unset")
    if engine.weight_update_mode != "retract":
        found.append(
            f"{engine.name}.weight_update_mode = {engine.weight_update_mode}: keys of older weights would stay, and later tokens belong to "
            "no single policy. Set it to retract"
        )
    found += [
        f"{engine.name}.engine_args.{name} = {value!r}: {FORBIDDEN_ENGINE_ARGUMENTS[name]}. Remove it"
        for name, value in (engine.arguments or {}).items()
        if name in FORBIDDEN_ENGINE_ARGUMENTS and value
    ]
    return found


# Whether a model is a mixture of experts: one answer for plan, learner and engine.

DENSE_FAMILIES = ("glm4", "llama", "mistral", "olmo2", "qwen2", "qwen3")
"""Families, by model_type, that are trained and have no experts, whatever sizes of experts a config.json has left over."""


def expert_count(model_type: str, stated: int | None) -> int:
    """Experts of each layer; 0: the model is dense.

    Args: stated: their number in config.json; None: it has none.
    """
    return 0 if model_type in DENSE_FAMILIES else stated or 0
