"""Weights on their way out: under Hugging Face names and in pieces for the engines, and as folders that transformers loads."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from evenkeel.engines.weights import WeightBucket, WeightSpec, packed, packed_bytes, tensor_checksum
from evenkeel.learner.hf import folder as hf_folder
from evenkeel.learner.model.parallel import Placement
from evenkeel.learner.weights.convert import runs
from evenkeel.learner.weights.file_sums import leave_sum

SHARD_BYTES = 4 * 2**30
"""Largest file of weights in a saved folder."""
EXCHANGE_BYTES = 2**28
"""Bytes of weights that one pipeline stage sends at a time."""


def of_all_stages(weights: Iterator[tuple[str, Tensor]], placement: Placement) -> Iterator[tuple[str, Tensor]]:
    """The weights of the whole model on rank 0, those of its own stage on any other rank; EXCHANGE_BYTES are sent at a time.

    Only the pipeline group of rank 0 sends: the stages of the others are copies. They have to iterate as well, because parts and experts
    are gathered across these groups. A stage broadcasts within the group, over its communicator: of more than two stages those between
    receive a piece, too, and drop it.
    """
    if not placement.is_in_first_pipeline:
        yield from weights
        return
    if placement.rank == 0:
        yield from weights
    for stage in range(1, placement.pipeline_parallel):
        pieces = in_pieces(weights if stage == placement.pipeline_rank else (), EXCHANGE_BYTES)
        while True:
            own = next(pieces, {})
            specs = placement.from_stage(stage, tuple(WeightSpec.of(name, tensor) for name, tensor in own.items()))
            if not specs:
                break
            memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=placement.device)
            sent = {spec.name: _view(memory, place, spec) for spec, place in zip(specs, packed(specs), strict=True)}
            for name, tensor in own.items():
                sent[name].copy_(tensor)
            dist.broadcast(memory, group=placement.pipeline_group, group_src=stage)
            yield from (sent if placement.rank == 0 else own).items()


def _view(memory: Tensor, place: range, spec: WeightSpec) -> Tensor:
    return memory[place.start : place.stop].view(getattr(torch, spec.dtype)).view(spec.shape)


def in_pieces(weights: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The weights themselves, HF name -> tensor, together up to most_bytes; a larger one is a piece of its own.

    All of a piece exist at the same time, on the device where they are. Those that lie in the model take nothing more, those that are
    gathered from ranks up to most_bytes; those of other pipeline stages keep the EXCHANGE_BYTES with which they came.
    """
    return map(dict, runs(weights, most_bytes, lambda one: one[1].nbytes))


class Staging:
    """Host memory through which weights leave the learner's device, a bucket at a time.

    Every version uses it again: a copy into fresh memory takes several times as long, as the system has to find and clear each page first.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def bucket(self, tensors: Mapping[str, Tensor]) -> WeightBucket:
        """The tensors as one bucket, valid until the next call and until the weights change. Contiguous CPU tensors are not copied."""
        if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values()):
            return WeightBucket.over(tensors)
        size = packed_bytes(tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items()))
        if size > len(self._memory):
            # Page-locked where the weights come from a GPU: they are then copied at the full speed of its bus.
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return WeightBucket.of(tensors, self._memory)


def weight_checksums(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """HF name -> checksum of what an engine must hold."""
    return {name: tensor_checksum(weight) for name, weight in weights}


def hf_folder_of_copies(
    pieces: Iterator[dict[str, Tensor]], side_files: Mapping[str, bytes], target: str | os.PathLike[str], *, is_writer: bool
) -> Callable[[], None] | None:
    """Iterate over all weights, as every rank must; the writer copies them. Returns: on the writer a function that writes the folder."""
    if not is_writer:
        deque(pieces, maxlen=0)
        return None
    copies = {name: tensor for piece in pieces for name, tensor in WeightBucket.of(piece).tensors().items()}

    def write() -> None:
        write_hf_folder(copies.items(), side_files, target)
        for file in Path(target).glob("*.safetensors"):
            leave_sum(file)

    return write


def write_hf_folder(weights: Iterable[tuple[str, Tensor]], side_files: Mapping[str, bytes], target: str | os.PathLike[str]) -> None:
    """Write a folder of these weights and the model's other files (hf_folder.side_files).

    The files are written next to the target and put in place when all of them are complete.
    """
    target = Path(target)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
    partial.mkdir(parents=True)
    for name, content in side_files.items():
        (partial / name).write_bytes(content)
    on_cpu = ((name, weight.detach().cpu().contiguous()) for name, weight in weights)
    hf_folder.write_shards(partial, in_pieces(on_cpu, SHARD_BYTES))
    if not target.exists():
        partial.rename(target)
        return
    written = {file.replace(target / file.name) for file in partial.iterdir()}
    partial.rmdir()
    for file in {*target.glob("*.safetensors"), target / hf_folder.INDEX_FILE} - written:  # of weights that had another number of files
        file.unlink(missing_ok=True)
