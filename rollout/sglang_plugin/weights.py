"""What the engine holds, seen from its own process and in Hugging Face's names: shapes, dtypes and checksums.

SGLang fuses q, k, v and gate, up (and the experts) into one tensor each; these are cut apart here as views. The answers travel through
SGLang's own request `check_weights` (its checksum action needs CUDA and knows fused names only): two more actions are added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from correction.engines.checksum import tensor_checksum
from correction.engines.float8 import BLOCK, SCALE_SUFFIX
from correction.engines.processor import Processor
from rollout.sglang_plugin.hooks import CHECKSUMS, PROCESSOR, SPECS

GATE_AND_UP = ("gate_proj", "up_proj")
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
EXPERT_PARTS = {"mixtral": ("w1", "w3", "w2")}
"""What files of a model_type call an expert's gate, up and down projection, where not by the usual names."""
FUSED_IN_FILES = ("glm4",)
"""By model_type: gate and up projection are one tensor (gate_up_proj) in files, too."""


def register() -> None:
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _handle, HookType.AROUND)


def _handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    if action == PROCESSOR:
        return _answer(checker, asdict(Processor.of_this_process()), **kwargs)
    describe = {SPECS: _spec, CHECKSUMS: tensor_checksum}.get(action)
    if describe is None:
        return original(checker, action, *args, **kwargs)
    model = checker._get_model()
    return _answer(checker, {name: describe(tensor) for name, tensor in named_hf_tensors(model)}, **kwargs)


def _answer(checker: Any, texts: dict[str, str], **kwargs: Any) -> dict[str, Any]:
    """What SGLang's request carries back: some texts by name."""
    return {
        "checksums": texts,
        "per_gpu_checksum": "",                                     # SGLang's field for the whole; the caller compares tensor by tensor
        "parallelism_info": checker._parallelism_info(role=kwargs["role"]).model_dump(),
    }


def _spec(tensor: Tensor) -> str:
    """For example "float32:128,64"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}"


def named_hf_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of an SGLang model under the names of its Hugging Face folder, as views; a tied head is not repeated."""
    modules, config = dict(model.named_modules()), model.config
    kind: str = config.model_type  # type: ignore[union-attr,assignment]  # every model of SGLang's has its Hugging Face config
    for name, parameter in model.named_parameters():
        module_name, _, leaf = name.rpartition(".")
        yield from _unfused(modules[module_name], module_name, leaf, parameter.data, kind)


def _unfused(module: nn.Module, module_name: str, leaf: str, tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    parent = module_name.rpartition(".")[0]
    block = BLOCK if leaf == f"weight{SCALE_SUFFIX}" else 1          # rows of the matrix that share a row here
    if isinstance(module, QKVParallelLinear):
        sizes = [module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size]
        for part, rows in zip(QUERY_KEY_VALUE, torch.split(tensor, [size // block for size in sizes]), strict=True):
            yield f"{parent}.{part}.{leaf}", rows
    elif isinstance(module, MergedColumnParallelLinear) and kind not in FUSED_IN_FILES:
        for part, rows in zip(GATE_AND_UP, torch.split(tensor, [size // block for size in module.output_sizes]), strict=True):
            yield f"{parent}.{part}.{leaf}", rows
    elif isinstance(module, FusedMoE):
        yield from _experts(module_name, leaf, tensor, EXPERT_PARTS.get(kind, (*GATE_AND_UP, "down_proj")))
    elif isinstance(module, VocabParallelEmbedding):                # rows beyond the vocabulary are SGLang's padding
        yield f"{module_name}.{leaf}", tensor[: module.org_vocab_size]
    else:
        yield f"{module_name}.{leaf}", tensor


def _experts(module_name: str, leaf: str, tensor: Tensor, names: tuple[str, str, str]) -> Iterator[tuple[str, Tensor]]:
    """
    Args:
        tensor: w13_weight [experts, 2 x intermediate, hidden] or w2_weight [experts, hidden, intermediate].
        names: of gate, up and down projection.
    """
    for index, expert in enumerate(tensor):
        prefix = f"{module_name}.{index}"
        if leaf == "w13_weight":
            for part, rows in zip(names[:2], expert.chunk(2), strict=True):
                yield f"{prefix}.{part}.weight", rows
        else:
            yield f"{prefix}.{names[2]}.weight", expert
