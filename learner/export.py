"""Weights on their way out: buckets under Hugging Face names for the engines, and folders that transformers loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from correction.checksum import tensor_checksum
from learner import hf_folder
from learner.parallel import Placement

SHARD_BYTES = 4 * 2**30
"""Largest file of weights in a saved folder."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of a version's weights, as they were when the bucket was made."""

    index: int
    """Place among the version's buckets, from 0."""
    tensors: dict[str, Tensor]
    """HF name -> contiguous copy."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def of_all_stages(weights: Iterator[tuple[str, Tensor]], placement: Placement) -> Iterator[tuple[str, Tensor]]:
    """From the weights of each pipeline stage those of the model, on every rank, with one tensor on its way at a time."""
    if placement.pipeline_parallel == 1:
        yield from weights
        return
    for stage in range(placement.pipeline_parallel):
        is_mine, has_more = stage == placement.pipeline_rank, True
        while has_more:
            own = next(weights, None) if is_mine else None
            head = placement.from_stage(stage, own and (own[0], own[1].shape, own[1].dtype))
            has_more = head is not None
            if head is not None:
                name, shape, dtype = head
                tensor = torch.empty(shape, dtype=dtype, device=placement.device) if own is None else own[1].contiguous()
                dist.broadcast(tensor, group=placement.pipeline_group, group_src=stage)
                yield name, tensor


def weight_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device | str = "cpu") -> Iterator[WeightBucket]:
    """Copies of the weights, together up to bucket_bytes; a larger tensor is a bucket of its own.

    Args:
        device: where the copies go.
    """
    index, size = 0, 0
    tensors: dict[str, Tensor] = {}
    for name, weight in weights:
        if tensors and size + weight.nbytes > bucket_bytes:
            yield WeightBucket(index, tensors)
            index, size, tensors = index + 1, 0, {}
        tensors[name] = weight.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        size += weight.nbytes
    if tensors:
        yield WeightBucket(index, tensors)


def weight_checksums(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """HF name -> checksum of what an engine must hold."""
    return {name: tensor_checksum(weight) for name, weight in weights}


def write_hf_folder(weights: Iterable[tuple[str, Tensor]], side_files: Mapping[str, bytes], target: str | os.PathLike[str]) -> None:
    """A folder of these weights and what else belongs to a model (hf_folder.side_files).

    The files are written beside the target and put in place when all of them are complete.
    """
    target = Path(target)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    partial.mkdir(parents=True)
    for name, content in side_files.items():
        (partial / name).write_bytes(content)
    hf_folder.write_shards(partial, (bucket.tensors for bucket in weight_buckets(weights, SHARD_BYTES)))
    if not target.exists():
        partial.rename(target)
        return
    for file in partial.iterdir():
        file.replace(target / file.name)
    partial.rmdir()
