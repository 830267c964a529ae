"""A checkpoint of the learner: a folder that is either complete or not there.

    <folder>/manifest.json      sizes it was made with; written last
    <folder>/model-<t>.pt       weights, optimizer and schedule of tensor rank t (equal on all data ranks: one of them writes)
    <folder>/random-<r>.pt      random generators of rank r

It is written beside its place, flushed to disk, and renamed: a kill at any moment leaves earlier checkpoints as they were. With the same
sizes a run continues bit for bit on a CPU. data_parallel may differ (the generators then start anew); tensor_parallel may not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from correction.errors import DataError
from learner.megatron import DistributedDataParallel, get_cuda_rng_tracker
from learner.model import unwrap
from learner.optimizer import GuardedOptimizer
from learner.parallel import Placement

FORMAT = 1
"""Number of this layout; another one is refused."""
MANIFEST = "manifest.json"


def save(folder: str | os.PathLike[str], model: DistributedDataParallel, optimizer: GuardedOptimizer, placement: Placement) -> None:
    """Write a checkpoint; all ranks call.

    Raises: DataError if the folder exists.
    """
    target = Path(folder)
    if target.exists():
        raise DataError(f"{target}: exists already; a checkpoint is never written over another one")
    partial = target.with_name(f".{target.name}.partial")
    if placement.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
        partial.mkdir(parents=True)
    placement.barrier()
    if placement.data_rank == 0:
        _write(partial / _model_file(placement), {"weights": _weights(model), **optimizer.state_dict()})
    _write(partial / _random_file(placement), _random_state())
    placement.barrier()
    if placement.rank == 0:
        _publish(partial, target, placement)
    placement.barrier()


def restore(folder: str | os.PathLike[str], model: DistributedDataParallel, optimizer: GuardedOptimizer, placement: Placement) -> None:
    """Fill model, optimizer and generators from a checkpoint.

    Raises: DataError if it is incomplete, of another format or split, or of a model of other shapes.
    """
    source = Path(folder)
    manifest = _manifest(source)
    if manifest["tensor_parallel"] != placement.tensor_parallel:
        raise DataError(
            f"{source}: saved with tensor_parallel {manifest['tensor_parallel']}, but the learner has {placement.tensor_parallel}; "
            "resume with the same, or start from the Hugging Face folder beside it"
        )
    state = torch.load(source / _model_file(placement), map_location=placement.device, weights_only=True)
    _load_weights(model, state["weights"], source)
    optimizer.load_state_dict({"optimizer": state["optimizer"], "schedule": state["schedule"]})
    if manifest["data_parallel"] == placement.data_parallel:
        _set_random_state(torch.load(source / _random_file(placement), weights_only=True))


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is a checkpoint that `restore` takes."""
    return (Path(folder) / MANIFEST).is_file()


def _manifest(source: Path) -> dict[str, Any]:
    if not is_complete(source):
        raise DataError(f"{source}: no {MANIFEST}; not a complete checkpoint of the learner")
    manifest: dict[str, Any] = json.loads((source / MANIFEST).read_text())
    if manifest.get("format") != FORMAT:
        raise DataError(f"{source}: checkpoint format {manifest.get('format')}, but this version reads {FORMAT}")
    return manifest


def _weights(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in unwrap(model).named_parameters()}


@torch.no_grad()
def _load_weights(model: DistributedDataParallel, saved: dict[str, Tensor], source: Path) -> None:
    own = _weights(model)
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        differing = sorted(
            name for name in own.keys() | saved.keys() if getattr(own.get(name), "shape", 0) != getattr(saved.get(name), "shape", 0)
        )
        raise DataError(f"{source}: of another model than the one loaded; {len(differing)} tensors differ, the first is {differing[0]}")
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _model_file(placement: Placement) -> str:
    return f"model-{placement.tensor_rank}.pt"


def _random_file(placement: Placement) -> str:
    return f"random-{placement.rank}.pt"


def _write(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _publish(partial: Path, target: Path, placement: Placement) -> None:
    """Manifest last, then the rename, each made durable before the next."""
    manifest = {"format": FORMAT, "data_parallel": placement.data_parallel, "tensor_parallel": placement.tensor_parallel}
    with (partial / MANIFEST).open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
