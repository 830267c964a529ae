"""A checkpoint of the learner: a folder from which any layout of ranks can go on. An incomplete one is ignored.

    <folder>/manifest.json           the model's sizes, the layout of the ranks that wrote it, the learning-rate schedule
    <folder>/rank-<r>.safetensors    rank r's part of weights, master weights and Adam's averages
    <folder>/random-<r>.safetensors  random generators of rank r

Each rank copies what it has and goes on training, while a thread writes the copy to a temporary file, flushes it to disk and
renames it. The folder is complete when the manifest and every rank's file are there: a kill at any moment leaves earlier checkpoints as
they were.

A tensor's name is kind/part/start/parameter: the tensor-parallel part that it belongs to, the first of its elements in that part laid flat
(the distributed optimizer cuts anywhere), and the first Hugging Face tensor of the parameter. With the same layout a run continues bit for
bit on a CPU. With another one the parts are joined and cut anew by the rules of convert.py, which only move elements; the random generators
then start anew.

Why not megatron-core's dist_checkpointing (torch_dist): it was tried on a CPU with gloo, version 0.16.1. Without the distributed optimizer
it is exact and reshards. But loading unpickles the folder's .metadata without restriction, so that a checkpoint from elsewhere runs what
it likes; a vocabulary that is padded for other ranks doesn't fit; and with the distributed optimizer over torch's AdamW the default format
can't be saved (`ShardedTensor.flattened_range is not supported`), fully_reshardable can't be loaded (`KeyError: 'step'`), and
dp_reshardable doesn't reshard (`Global shape mismatch`), unless private functions are replaced.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.families import HeadShape, Rule, family_of
from evenkeel.learner.hf.folder import open_tensors
from evenkeel.learner.hf.tensor_files import saving
from evenkeel.learner.model.megatron import DistributedDataParallel, get_cuda_rng_tracker
from evenkeel.learner.model.model import unwrap
from evenkeel.learner.model.parallel import Placement
from evenkeel.learner.training.optimizer import GuardedOptimizer
from evenkeel.learner.weights import convert
from evenkeel.learner.weights.checkpoint_files import (
    FORMAT,
    RANDOM,
    RANK,
    WEIGHT,
    file_name,
    is_complete,
    model_shape,
    read_manifest,
)
from evenkeel.learner.weights.file_sums import MANIFEST, flush_to_disk, leave_sum


class _TensorPiece(NamedTuple):
    """Which part of which parameter a tensor in a rank's file holds. As text it is the tensor's name in the file."""

    kind: str
    part: int
    """Number of the tensor-parallel part."""
    start: int
    """Index of its first element in that part laid flat."""
    parameter: str
    """Name of the parameter's first Hugging Face tensor."""

    @classmethod
    def parse(cls, name: str) -> _TensorPiece:
        kind, part, start, parameter = name.split("/", 3)
        return cls(kind, int(part), int(start), parameter)

    def __str__(self) -> str:
        return "/".join(map(str, self))


def save(
    folder: str | os.PathLike[str],
    chunks: Sequence[DistributedDataParallel],
    optimizer: GuardedOptimizer,
    hf_config: Any,
    placement: Placement,
    *,
    afterwards: Callable[[], None] | None = None,
) -> Future[None]:
    """Begin to write a checkpoint; all ranks call. It writes a copy of the present state, so training may go on at once.

    Args:
        afterwards: called in this rank's thread when its own files are written.
    Returns: a future that is done when this rank's files are on disk, or has failed with the reason why they aren't.
    Raises: DataError if the folder is a complete checkpoint.
    """
    target = Path(folder)
    if is_complete(target):
        raise DataError(f"{target}: exists already; a checkpoint is never written over another one")
    placement.barrier()  # no rank begins before all have checked
    if placement.rank == 0:
        shutil.rmtree(target, ignore_errors=True)  # of a save that was killed
    placement.barrier()
    held = {str(piece): _copy(tensor) for piece, tensor in _held_tensors(chunks, optimizer, hf_config, placement)}
    generators = {name: _copy(state) for name, state in _random_state().items()}
    manifest = {
        "format": FORMAT,
        "model": model_shape(hf_config),
        "layout": placement.layout,
        "ranks": placement.world_size,
        "schedule": optimizer.schedule_state(),
    }

    def write() -> None:
        target.mkdir(parents=True, exist_ok=True)  # here: a rank whose disk fails must not leave the others at a barrier
        _write(target / file_name(RANK, placement.rank), lambda path: save_file(held, path))
        _write(target / file_name(RANDOM, placement.rank), lambda path: save_file(generators, path))
        if placement.rank == 0:
            _write(target / MANIFEST, lambda path: path.write_text(json.dumps(manifest)))
        if afterwards:
            afterwards()

    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    try:
        return executor.submit(write)
    finally:
        executor.shutdown(wait=False)


def size_of(chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer, hf_config: Any, placement: Placement) -> int:
    """Bytes that this rank will write, and its share of a Hugging Face folder."""
    held = list(_held_tensors(chunks, optimizer, hf_config, placement))
    return sum(tensor.nbytes * (1 + (piece.kind == WEIGHT)) for piece, tensor in held)


def restore(
    folder: str | os.PathLike[str],
    chunks: Sequence[DistributedDataParallel],
    optimizer: GuardedOptimizer,
    hf_config: Any,
    placement: Placement,
) -> None:
    """Fill model, optimizer and generators from a checkpoint, one parameter at a time.

    Raises: DataError if it is incomplete, damaged, of another format, or of a model of other shapes.
    """
    source = Path(folder)
    manifest = read_manifest(source, hf_config)
    saved = _Saved(source, manifest["ranks"], hf_config, placement)
    with torch.no_grad():
        for rule, parameter in _bound(chunks, hf_config, placement):
            states = saved.read(rule, parameter)
            parameter.copy_(states.pop(WEIGHT))
            optimizer.set_state(parameter, states)
    optimizer.load_schedule_state(manifest["schedule"])
    if manifest["layout"] == placement.layout:
        _set_random_state(load_file(source / file_name(RANDOM, placement.rank)))


# What a rank holds


def _bound(chunks: Sequence[DistributedDataParallel], hf_config: Any, placement: Placement) -> Iterator[tuple[Rule, torch.nn.Parameter]]:
    for chunk in chunks:
        yield from convert.bind(unwrap(chunk), family_of(hf_config), placement.expert_rank)


def _held_tensors(
    chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer, hf_config: Any, placement: Placement
) -> Iterator[tuple[_TensorPiece, Tensor]]:
    """The tensors that this rank writes. Each element of the model's state is written by exactly one rank."""
    for rule, parameter in _bound(chunks, hf_config, placement):
        part = placement.tensor_rank if rule.is_split else 0
        if getattr(parameter, "shared", False) or (placement.tensor_rank > 0 and not rule.is_split and not rule.is_expert):
            continue  # the last stage's copy of a tied embedding; what tensor-parallel ranks have alike
        start, states = optimizer.state_of(parameter)
        if is_first := placement.is_first_copy(parameter):
            yield _TensorPiece(WEIGHT, part, 0, rule.hf[0]), parameter
        if is_first or optimizer.is_distributed:
            for kind, tensor in states.items():
                yield _TensorPiece(kind, part, start, rule.hf[0]), tensor


class _Saved:
    """The parameters of a checkpoint, read from its ranks' files on request, and cut as this rank needs them."""

    def __init__(self, folder: Path, files: int, hf_config: Any, placement: Placement):
        self._placement, self._heads, self._vocab_size = placement, HeadShape.of(hf_config), hf_config.vocab_size
        self._files: list[Any] = [open_tensors(folder / file_name(RANK, rank)) for rank in range(files)]
        # [parameter, kind][part] -> its pieces: start, number of the file, name in it.
        self._pieces: dict[tuple[str, str], dict[int, list[tuple[int, int, str]]]] = defaultdict(lambda: defaultdict(list))
        for number, file in enumerate(self._files):
            for name in file.keys():  # noqa: SIM118  # it is no dict
                piece = _TensorPiece.parse(name)
                self._pieces[piece.parameter, piece.kind][piece.part].append((piece.start, number, name))

    def read(self, rule: Rule, parameter: Tensor) -> dict[str, Tensor]:
        """Everything that was saved of a parameter, by kind, cut to this rank's part of it."""
        kinds = [kind for name, kind in self._pieces if name == rule.hf[0]]
        return {kind: self._in_this_cut(rule, self._pieces[rule.hf[0], kind], parameter) for kind in kinds}

    def _in_this_cut(self, rule: Rule, parts: dict[int, list[tuple[int, int, str]]], parameter: Tensor) -> Tensor:
        part = self._placement.tensor_rank if rule.is_split else 0
        if len(parts) == (self._placement.tensor_parallel if rule.is_split else 1):
            return self._joined(rule, parts[part], part)
        every = [self._joined(rule, parts[i], i) for i in range(len(parts))]
        if every[0].dim() == 0:
            return every[0]
        whole = convert.to_hf(rule, every, self._heads, self._vocab_size)
        return convert.to_megatron(rule, whole, self._heads, parameter.shape[0], self._placement)

    def _joined(self, rule: Rule, pieces: list[tuple[int, int, str]], part: int) -> Tensor:
        """A part put together from its pieces, in the shape of its weight; a scalar as it is."""
        tensors: list[Tensor] = [self._files[number].get_tensor(name) for _, number, name in sorted(pieces)]
        if tensors[0].dim() == 0:
            return tensors[0]
        ((_, number, name),) = self._pieces[rule.hf[0], WEIGHT][part]
        shape: list[int] = self._files[number].get_slice(name).get_shape()
        return torch.cat([tensor.flatten() for tensor in tensors]).view(shape)


# Random generators


def _random_state() -> dict[str, Tensor]:
    version, numbers, gauss = random.getstate()
    gauss_numbers = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    states = {"torch": torch.get_rng_state(), "python": torch.tensor([version, *numbers]), "gauss": gauss_numbers}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"megatron/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return states


def _set_random_state(states: dict[str, Tensor]) -> None:
    version, *numbers = states["python"].tolist()
    random.setstate((version, tuple(numbers), next(iter(states["gauss"].tolist()), None)))
    torch.set_rng_state(states["torch"])
    prefix = "megatron/"
    get_cuda_rng_tracker().set_states({name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)})
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# Files


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write a file that is either complete or absent, also after a power cut. Raises: OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with saving(partial):
        fill(partial)
    flush_to_disk(partial)
    partial.rename(path)
    leave_sum(path)
    flush_to_disk(path.parent)
