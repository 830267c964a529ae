"""Every name of megatron-core that the learner uses, imported behind the CPU hook. The one place to look when its version changes."""

from __future__ import annotations

import logging
import warnings

from evenkeel.engines.machine import unimportable
from evenkeel.learner.model import cpu_hook

cpu_hook.install()

# Megatron's own inference, which nothing here uses, imports wandb where it is installed: half a second of each rank's start.
with warnings.catch_warnings(), unimportable("wandb"):
    # Apex and TransformerEngine are optional: torch's own linear layers and AdamW take their place. Where TransformerEngine can't be
    # imported, HAVE_TE is False and its names below are placeholders (layers.py looks first).
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|apex|transformer_engine).*")
    from megatron.core import optimizer as _optimizers
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, param_is_not_tensor_parallel_duplicate
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import Float16Module, param_is_not_shared
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

# Megatron takes the Adam of TransformerEngine or Apex where one is installed. These keep their number of steps apart from the averages,
# where no checkpoint of ours would find it; torch's fused AdamW is one kernel, too.
_optimizers.USING_PYTORCH_OPTIMIZER = True

# The caller logs one line a step. These loggers would repeat the settings of every buffer and every optimizer.
for _chatty in ("distributed", "optimizer", "optimizer_param_scheduler", "parallel_state", "num_microbatches_calculator"):
    logging.getLogger(f"megatron.core.{_chatty}").setLevel(logging.WARNING)

__all__ = [
    "HAVE_TE",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Float16Module",
    "GPTModel",
    "IdentityOp",
    "MoELayer",
    "ModuleSpec",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "RowParallelLinear",
    "SequentialMLP",
    "TEColumnParallelLinear",
    "TENorm",
    "TERowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "param_is_not_shared",
    "param_is_not_tensor_parallel_duplicate",
]
