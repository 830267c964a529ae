"""A Hugging Face model folder: its config, its tensors by name, and a folder like it with other weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from correction.errors import DataError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def read_config(folder: str | os.PathLike[str]) -> Any:
    """The folder's transformers config.

    Raises: DataError if there is no config.json.
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise DataError(f"{folder}: no config.json; a model is a Hugging Face folder with config.json, *.safetensors and a tokenizer")
    return AutoConfig.from_pretrained(folder)


class HFWeights:
    """The tensors of a folder, read from disk one by one as they are asked for."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Raises: DataError if the folder has no safetensors."""
        self.folder = Path(folder)
        index = self.folder / INDEX_FILE
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self.folder / SINGLE_FILE).is_file():
            with safe_open(self.folder / SINGLE_FILE, "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), SINGLE_FILE)
        else:
            raise DataError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; convert the weights to safetensors (model.save_pretrained)")
        self._open: dict[str, Any] = {}
        self._unread = set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        """Raises: DataError if the folder has no such tensor."""
        if name not in self._file_of:
            raise DataError(f"{self.folder}: no tensor {name}, which its config.json asks for")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        self._unread.discard(name)
        return tensor

    def unread(self, *, ignore: tuple[str, ...] = ()) -> set[str]:
        """Tensors that nobody has asked for so far, but for those whose names end in `ignore`."""
        return {name for name in self._unread if not name.endswith(ignore)}


def copy_side_files(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy what is not weights: config, generation config, tokenizer, chat template."""
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, Path(target) / file.name)


def write_shards(folder: str | os.PathLike[str], shards: Iterable[dict[str, Tensor]]) -> None:
    """Write weights as safetensors, one shard in memory at a time; a single shard needs no index.

    Args:
        shards: HF name -> contiguous CPU tensor.
    """
    target = Path(folder)
    written: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for number, tensors in enumerate(shards):
        path = target / f"shard-{number}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        written.append((path, list(tensors)))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(written) == 1:
        written[0][0].rename(target / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written):
        final = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        path.rename(target / final)
        weight_map |= dict.fromkeys(names, final)
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2))
