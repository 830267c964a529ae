"""What the engine holds, seen from its own process and in Hugging Face's names: shapes, dtypes and checksums.

SGLang fuses q, k, v and gate, up (and the experts) into one tensor each; these are split here as views. In an engine of several ranks each
rank reports its own part. The answers travel through SGLang's own request `check_weights`, which collects them from all ranks (its checksum
action needs CUDA and knows fused names only): more actions are added to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from evenkeel.engines.agreement import Processor
from evenkeel.engines.float8_format import BLOCK, SCALE_SUFFIX
from evenkeel.engines.weights import tensor_checksum
from evenkeel.rollout.sglang_plugin.hooks import CHECKSUMS, FAILURE, PROCESSOR, RECEIPT, SPECS
from evenkeel.rollout.sglang_plugin.weight_parts import WeightPart, text_of

logger = logging.getLogger(__name__)
GATE_AND_UP = ("gate_proj", "up_proj")
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
EXPERT_PARTS = {"mixtral": ("w1", "w3", "w2")}
"""Names of an expert's gate, up and down projection in files, by model_type, where they are not the usual ones."""
FUSED_IN_FILES = ("glm4",)
"""Families, by model_type, whose gate and up projection are one tensor (gate_up_proj) in files, too."""


def register() -> None:
    receipts = RankReceipts()
    receipts.register()

    answers: dict[str, Callable[[Any], dict[str, str]]] = {
        PROCESSOR: lambda _: asdict(Processor.of_this_process()),
        RECEIPT: lambda _: receipts.receipt(),
        SPECS: lambda checker: {name: _spec(tensor, part) for name, tensor, part in held_parts(checker._get_model())},
        CHECKSUMS: lambda checker: {name: tensor_checksum(tensor) for name, tensor, _ in held_parts(checker._get_model())},
    }

    def handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        if action not in answers:
            return original(checker, action, *args, **kwargs)
        try:
            texts = answers[action](checker)
        except Exception as error:  # SGLang collects from all ranks next, and would wait for this one
            logger.exception("%s", action)
            texts = {FAILURE: f"{type(error).__name__}: {error}"}
        return _answer(checker, texts, **kwargs)

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND)


def _answer(checker: Any, texts: dict[str, str], **kwargs: Any) -> dict[str, Any]:
    """What SGLang's request carries back: some texts by name."""
    return {
        "checksums": texts,
        "per_gpu_checksum": "",  # SGLang's field for the whole; the caller compares tensor by tensor
        "parallelism_info": checker._parallelism_info(role=kwargs["role"]).model_dump(),
    }


def _spec(tensor: Tensor, part: WeightPart | None) -> str:
    return text_of(tensor.shape, str(tensor.dtype).removeprefix("torch."), part)


Held = tuple[str, Tensor, WeightPart | None]
"""HF name; a view of what this rank holds of the tensor; and which part of the tensor that is, None for all of it."""


def held_parts(model: nn.Module) -> Iterator[Held]:
    """Every parameter of an SGLang model under the names of its Hugging Face folder; a tied head is not repeated."""
    modules, config = dict(model.named_modules()), model.config
    kind: str = config.model_type  # type: ignore[union-attr,assignment]  # every model of SGLang's has its Hugging Face config
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_skip_weight_check", False):  # a float8 cache's scales, SGLang's own: files have none
            continue
        module_name, _, leaf = name.rpartition(".")
        yield from _unfused(modules[module_name], module_name, leaf, parameter.data, kind)


def _unfused(module: nn.Module, module_name: str, leaf: str, tensor: Tensor, kind: str) -> Iterator[Held]:
    parent = module_name.rpartition(".")[0]
    block = BLOCK if leaf == f"weight{SCALE_SUFFIX}" else 1  # rows of the matrix that share a row here
    if isinstance(module, QKVParallelLinear):
        yield from _query_key_value(module, parent, leaf, tensor, block)
    elif isinstance(module, MergedColumnParallelLinear):
        wholes = [size // block for size in module.output_sizes]
        sizes = [size // module.tp_size for size in wholes]
        parts = [_part(0, module.tp_rank * size, size, whole) for size, whole in zip(sizes, wholes, strict=True)]
        if kind in FUSED_IN_FILES:
            yield f"{module_name}.{leaf}", tensor, _below_each_other(parts, wholes)
        else:
            for name, rows, part in zip(GATE_AND_UP, torch.split(tensor, sizes), parts, strict=True):
                yield f"{parent}.{name}.{leaf}", rows, part
    elif isinstance(module, FusedMoE):
        yield from _experts(module, module_name, leaf, tensor, EXPERT_PARTS.get(kind, (*GATE_AND_UP, "down_proj")))
    elif isinstance(module, VocabParallelEmbedding):  # rows beyond the vocabulary are SGLang's padding
        first, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield f"{module_name}.{leaf}", tensor[: end - first], _part(0, first, end - first, module.org_vocab_size)
    elif isinstance(module, ColumnParallelLinear) or (isinstance(module, RowParallelLinear) and tensor.ndim == 2):
        dimension = 0 if isinstance(module, ColumnParallelLinear) else 1
        size = tensor.shape[dimension]
        yield f"{module_name}.{leaf}", tensor, _part(dimension, module.tp_rank * size, size, module.tp_size * size)
    else:
        yield f"{module_name}.{leaf}", tensor, None


def _part(dimension: int, first: int, size: int, whole: int) -> WeightPart | None:
    return None if size == whole else WeightPart(dimension, whole, ((first, first + size),))


def _below_each_other(parts: list[WeightPart | None], sizes: list[int]) -> WeightPart | None:
    """Parts of several tensors of these sizes as one part of the tensor in which they are stacked; None if all are whole."""
    ranges, start = [], 0
    for part, size in zip(parts, sizes, strict=True):
        if part is None:
            return None
        ranges += [(start + first, start + end) for first, end in part.ranges]
        start += size
    return WeightPart(0, start, tuple(ranges))


def _query_key_value(module: Any, parent: str, leaf: str, tensor: Tensor, block: int) -> Iterator[Held]:
    """Split a fused q, k, v tensor. If there are more ranks than key heads, several ranks hold the same head. Args: block: rows of the
    matrix for each row of the tensor (more than 1 for scales)."""
    keys_before = module.kv_tp_rank // module.num_kv_head_replicas
    key_heads = module.total_num_kv_heads
    sizes = [size // block for size in (module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size)]
    heads = [(module.total_num_heads, module.head_size), (key_heads, module.head_size), (key_heads, module.v_head_size)]
    before = [module.tp_rank, keys_before, keys_before]
    for name, rows, index, size, (count, width) in zip(QUERY_KEY_VALUE, torch.split(tensor, sizes), before, sizes, heads, strict=True):
        yield f"{parent}.{name}.{leaf}", rows, _part(0, index * size, size, count * width // block)


def _experts(module: Any, module_name: str, leaf: str, tensor: Tensor, names: tuple[str, str, str]) -> Iterator[Held]:
    """Split a fused tensor of experts. Yields the experts of other ranks too, as parts without rows.

    Args:
        leaf: w13_weight, w2_weight, or one with their scales (SCALE_SUFFIX).
        tensor: [experts, 2 x intermediate, hidden] of w13, [experts, hidden, intermediate] of w2, of this rank's experts; of scales blocks.
        names: of gate, up and down projection.
    """
    which, _, kind = leaf.partition("_")
    is_first = which == "w13"
    dimension, own = int(not is_first), range(module.moe_ep_rank * len(tensor), (module.moe_ep_rank + 1) * len(tensor))
    for index in range(len(tensor) * module.moe_ep_size):
        expert = tensor[index - own.start if index in own else 0]
        for name, matrix in zip(names[:2], expert.chunk(2), strict=True) if is_first else [(names[2], expert)]:
            size = matrix.shape[dimension]
            whole = module.moe_tp_size * size
            part = _part(dimension, module.moe_tp_rank * size, size, whole) if index in own else WeightPart(dimension, whole, ())
            yield f"{module_name}.{index}.{name}.{kind}", matrix if index in own else matrix.narrow(dimension, 0, 0), part


# What one rank of an engine has loaded, and what it has under way: SGLang answers for all of them with the result of the first.


class RankReceipts:
    """What this scheduler process has loaded since the weight update began."""

    def __init__(self) -> None:
        self._buckets = 0
        self._failure = ""
        self._unfinished = 0

    def register(self) -> None:
        """Follow SGLang's weight updates."""
        manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        HookRegistry.register(f"{manager}.begin_weight_update", self._begin, HookType.BEFORE)
        for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
            HookRegistry.register(f"{manager}.{name}", self._load, HookType.AFTER)
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.pause_generation", self._pause, HookType.AFTER)

    def receipt(self) -> dict[str, str]:
        """buckets: loaded so far; version: of the weights, as this rank has it; failure: why it missed one, or empty; unfinished: tokens
        sampled of the requests under way when it paused."""
        from sglang.srt.runtime_context import get_serving

        version, unfinished = str(get_serving().weight_version), str(self._unfinished)
        return {"buckets": str(self._buckets), "version": version, "failure": self._failure, "unfinished": unfinished}

    def _pause(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        batches = (batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None)
        under_way = [*scheduler.waiting_queue, *(req for batch in batches for req in batch.reqs)]
        self._unfinished = sum(len(req.output_ids) for req in {req.rid: req for req in under_way if not req.finished()}.values())

    def _begin(self, *_: Any, **__: Any) -> None:
        self._buckets, self._failure = 0, ""

    def _load(self, result: Any, *_: Any, **__: Any) -> None:
        if result.success:
            self._buckets += 1
        else:
            self._failure = self._failure or str(result.message)
