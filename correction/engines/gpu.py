"""What the contract would be on GPUs: the switches of SGLang's deterministic inference and of megatron-core's batch-invariant mode.

Never run: no GPU was at hand. The contract refuses cuda, and this says what is to be tried where there is one; a test gives the
configuration to the installed packages (SGLang 0.5.21, megatron-core 0.16.1). Both sides descend from one set of Triton kernels (Thinking
Machines' batch_invariant_ops), which take the place of aten::mm, addmm, _log_softmax and mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from correction.engines.contract import Contract


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Both sides' switches."""

    engine_arguments: dict[str, Any]
    """Of SGLang's ServerArgs."""
    engine_environment: dict[str, str]
    """Of SGLang's processes."""
    transformer_config: dict[str, Any]
    """Of megatron-core's TransformerConfig; attention_backend by its name in AttnBackend. The layers have to be TransformerEngine's: its
    products and norms, and torch's, are what the mode replaces."""
    learner_environment: dict[str, str]
    """Of the learner's ranks."""
    to_align: tuple[str, ...]
    """Where the switches alone leave the sides with different operators."""


def gpu_settings(contract: Contract) -> GpuSettings:
    """The contract's counterpart on GPUs, in bfloat16."""
    is_split = contract.tensor_parallel > 1
    return GpuSettings(
        engine_arguments={
            "enable_deterministic_inference": True,
            "attention_backend": "fa3",  # FlashAttention as in the learner, and one of those that keep the prefix cache
            "dtype": "bfloat16",
            "tp_size": contract.tensor_parallel,
        },
        # SGLang would take DeepGEMM's product for bfloat16; the learner has the Triton one only.
        engine_environment={"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"},
        transformer_config={
            "batch_invariant_mode": True,
            "attention_backend": "flash",  # megatron-core insists on it in this mode, and sets num_splits = 1
            "bf16": True,
            "tensor_model_parallel_size": contract.tensor_parallel,
        },
        # SGLang sets the same in its own processes when it is split; one tree of one shape, whatever the size of the message.
        learner_environment=(
            {"NCCL_ALGO": "allreduce:tree", "NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"} if is_split else {}
        ),
        to_align=(
            "norm: SGLang adds the residual in float32 and normalises the sum before it is rounded; megatron-core rounds it first",
            "batched products: SGLang replaces aten::bmm too, megatron-core does not; neither needs it in a dense model",
            "logprobs: the engine's by evenkeel's sampler, from float32 logits of a bfloat16 head; the learner's by the same log_softmax",
            "logits under tensor parallelism: gathered on both sides, never reduced",
        ),
    )
