"""Checks of a learner's checkpoint that need no Megatron: are its files there, whole, and of this model?"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.families import HeadShape
from evenkeel.learner.hf.folder import open_tensors, read_json
from evenkeel.learner.weights.file_sums import MANIFEST

FORMAT = 2
"""Number of this layout; another one is refused."""
RANK, RANDOM = "rank", "random"
"""Files that every rank writes."""
WEIGHT = "weight"
"""Kind of a tensor that is a weight; the other kinds are names of the optimizer's state."""


def file_name(kind: str, rank: int) -> str:
    """Name of a rank's file in a checkpoint."""
    return f"{kind}-{rank}.safetensors"


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder has all files of a checkpoint."""
    try:
        ranks = read_json(Path(folder) / MANIFEST).get("ranks", 0)
    except DataError:
        return False
    return all((Path(folder) / file_name(kind, rank)).is_file() for kind in (RANK, RANDOM) for rank in range(ranks))


def read_manifest(folder: str | os.PathLike[str], hf_config: Any) -> dict[str, Any]:
    """The manifest of a checkpoint of the model with this config.

    Raises: DataError if the checkpoint is incomplete, of another format, or of a model of other shapes.
    """
    source = Path(folder)
    if (source / MANIFEST).is_file():
        manifest = read_json(source / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise DataError(f"{source}: checkpoint format {manifest.get('format')}, but this version reads {FORMAT}")
        if absent := [name for name in ("model", "layout", "ranks", "schedule") if name not in manifest]:
            raise DataError(f"{source / MANIFEST}: damaged, it has no {absent[0]}")
        for name, value in model_shape(hf_config).items():
            if manifest["model"].get(name) != value:
                there = manifest["model"].get(name)
                raise DataError(f"{source}: of another model than the one loaded: {name} is {there} there, {value} here")
        if is_complete(source):
            return manifest
    raise DataError(f"{source}: not a complete checkpoint of the learner: {MANIFEST} or the file of a rank is missing")


def check_readable(folder: str | os.PathLike[str], hf_config: Any) -> None:
    """Check the manifest, and whether each rank's files are as long as their headers say.

    Raises: DataError as `read_manifest`, or naming the file that is damaged.
    """
    for rank in range(read_manifest(folder, hf_config)["ranks"]):
        for kind in (RANK, RANDOM):
            open_tensors(Path(folder) / file_name(kind, rank))


def model_shape(hf_config: Any) -> dict[str, Any]:
    """The options of config.json that decide which parameters there are, and their shapes."""
    names = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "tie_word_embeddings"]
    names += ["num_experts", "moe_intermediate_size"]
    return {name: getattr(hf_config, name, None) for name in names} | asdict(HeadShape.of(hf_config))
