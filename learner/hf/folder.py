"""A Hugging Face model folder: reads its config, tensors and other files, and writes weights in the same form."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from evenkeel.correction.errors import DataError, not_read
from evenkeel.engines.machine import without_model_classes
from evenkeel.learner.hf.families import OTHER_MODEL, HeadShape, ModelFamily, Rule, TensorLayout, family_of
from evenkeel.learner.hf.tensor_files import saving

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INIT_RECORD = "evenkeel_init.json"
"""File in the folder of a model that `evenkeel init-model` has made, and of its checkpoints, which says how it was made. `source`: of
published weights."""
PUT_BACK = "Put back a whole copy of the file"
"""What to do about a damaged file."""
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises: DataError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError; the last one: a thousand brackets
        raise not_read(path, error, f"damaged, no JSON can be read from it ({error})", remedy=PUT_BACK) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: damaged, it holds no JSON object", remedy=PUT_BACK)
    return content


def is_pretrained(folder: Path) -> bool:
    """Whether somebody has trained the weights before: so it is of all but those that init-model made from nothing. Raises: DataError."""
    record = folder / INIT_RECORD
    return not record.is_file() or read_json(record).get("source") is not None


def open_tensors(path: Path, *, kind: str = "pt") -> Any:
    """A safetensors file; it has to be as long as its header says. Its tensors are read when they are asked for.

    Args: kind: of the tensors that it gives: "pt" or "np", for which torch isn't imported.
    Raises: DataError naming the file.
    """
    try:
        with path.open("rb") as file:
            file.read(1 << 20)  # for the disk's cache: if the disk hangs, safetensors' own read keeps all other threads from running
        return safe_open(path, kind)
    except (OSError, SafetensorError) as error:
        is_there = isinstance(error, PermissionError) or path.exists()
        reason = f"damaged, no tensors can be read from it ({error})" if is_there else "is not there"
        raise not_read(path, error, reason, remedy=PUT_BACK) from error


def read_config(folder: str | os.PathLike[str]) -> Any:
    """The folder's transformers config.

    Raises: DataError if there is no config.json, or nothing that transformers knows in it.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise DataError(f"{folder}: no config.json; a model is a Hugging Face folder with config.json, *.safetensors and a tokenizer")
    read_json(path)
    try:
        return without_model_classes(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))  # unset, it asks at a terminal
    except Exception as error:  # each config class has checks of its own
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path}: transformers makes no model of it ({reason})", remedy=PUT_BACK) from error


def shapes_of(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by name, without torch. Raises: DataError as HFWeights and its `shapes`."""
    return HFWeights(folder, kind="np").shapes()


class HFWeights:
    """The tensors of a folder, each read from disk when it is asked for."""

    def __init__(self, folder: str | os.PathLike[str], *, kind: str = "pt"):
        """Args: kind: as open_tensors. Raises: DataError if the folder has no safetensors, or the file that lists them is damaged."""
        self.folder = Path(folder)
        self._kind = kind
        self._open: dict[str, Any] = {}
        index = self.folder / INDEX_FILE
        has_one = (self.folder / SINGLE_FILE).is_file()
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise DataError(f"{index}: damaged, it has no weight_map", remedy=PUT_BACK)
            self._file_of: dict[str, str] = weight_map
            if has_one and set(weight_map.values()) != {SINGLE_FILE}:
                raise _two_sets(self.folder, f"{SINGLE_FILE}, which transformers reads, and those of {INDEX_FILE}, which SGLang reads")
        elif has_one:
            self._file_of = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
            self._refuse_second_set()
        else:
            remedy = "convert the weights to safetensors (model.save_pretrained)"
            raise DataError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}", remedy=remedy)
        self._unread = set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        """Raises: DataError if the folder has no such tensor."""
        if name not in self._file_of:
            raise DataError(f"{self.folder}: no tensor {name}, which its config.json asks for")
        tensor: Tensor = self._part(name, lambda file: file.get_tensor(name))
        self._unread.discard(name)
        return tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name, from the headers of the files. Raises: DataError if one of those is damaged or missing."""
        return {name: tuple(self._part(name, lambda file, name=name: file.get_slice(name).get_shape())) for name in self._file_of}

    def _refuse_second_set(self) -> None:
        """SGLang reads every *.safetensors of a folder without an index; only Mistral's form, alone beside the one file, it leaves out."""
        others = sorted(path.name for path in self.folder.glob("*.safetensors") if path.name != SINGLE_FILE)
        for other in others if others != ["consolidated.safetensors"] else []:
            if self._file_of.keys() & set(self._file(other).keys()):
                raise _two_sets(self.folder, f"{SINGLE_FILE}, which transformers reads alone, and {other}, which SGLang reads after it")

    @property
    def unread(self) -> set[str]:
        """Tensors that nobody has asked for so far."""
        return set(self._unread)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = open_tensors(self.folder / name, kind=self._kind)
        return self._open[name]

    def _part(self, name: str, read: Any) -> Any:
        file = self._file_of[name]
        try:
            return read(self._file(file))
        except SafetensorError as error:
            raise DataError(f"{self.folder / file}: no tensor {name} in it ({error})", remedy=PUT_BACK) from error


def _two_sets(folder: Path, which: str) -> DataError:
    return DataError(f"{folder}: two sets of weights, {which}", remedy="Remove the one that isn't the model's")


def side_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Contents of the files that are neither weights nor code, by name: config, generation config, tokenizer, chat template."""
    files = (file for file in sorted(Path(folder).iterdir()) if file.is_file() and not file.name.endswith((*_WEIGHT_SUFFIXES, ".py")))
    return {file.name: file.read_bytes() for file in files}


def write_shards(folder: str | os.PathLike[str], shards: Iterable[dict[str, Tensor]]) -> None:
    """Write weights as safetensors, one shard in memory at a time; a single shard needs no index.

    Args:
        shards: HF name -> contiguous CPU tensor.
    Raises: OSError.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    written: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for number, tensors in enumerate(shards):
        path = target / f"shard-{number}.safetensors"
        with saving(path):
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


# ----------------------------------------------------------------------------------------------------------------------
# Whether the learner can train a model folder, from its config and the headers of its files: before anything is started.
#
# Neither torch nor transformers is imported, unless a folder's config has to be read by transformers (check_trainable).


def check_trainable(folder: str | os.PathLike[str], *, has_weights: bool = True) -> Any:
    """Check that the learner can train the model in a folder. Returns: its transformers config.

    Args: has_weights: False: the weights aren't there yet, and are checked when they are read.
    Raises: DataError naming the file and the option, family or tensor that can't be trained.
    """
    hf_config = read_config(folder)
    try:
        expected_shapes(hf_config)
    except DataError as error:
        raise DataError(f"{folder}: {error.reason}", remedy=OTHER_MODEL) from error
    except (ArithmeticError, AttributeError, TypeError) as error:  # sizes that make no model
        raise DataError(f"{folder}/config.json: its sizes make no model ({error})", remedy=PUT_BACK) from error
    if has_weights:
        check_weights(folder, hf_config)
    return hf_config


def check_weights(folder: str | os.PathLike[str], hf_config: Any) -> None:
    """Check that a folder's safetensors are those of its config, which has passed check_trainable.

    Args: hf_config: transformers' own, or plain_config.plain_sizes.
    Raises: DataError naming the file, or the tensor that doesn't fit.
    """
    expected, found = expected_shapes(hf_config), shapes_of(folder)
    wrong = [f"{name} has shape {found[name]} instead of {shape}" for name, shape in expected.items() if found.get(name, shape) != shape]
    missing = [f"{name} is missing" for name in expected if name not in found]
    surplus = [f"{name} has no place in the model" for name in found if name not in expected and not is_surplus_allowed(name, hf_config)]
    if problems := missing + wrong + surplus:
        more = f", and {len(problems) - 1} more tensors don't fit" if len(problems) > 1 else ""
        raise DataError(
            f"{folder}: its config.json and its safetensors describe different models: {problems[0]}{more}",
            remedy="Put back those that belong together",
        )


def is_surplus_allowed(name: str, hf_config: Any) -> bool:
    """Buffers that older folders hold; and a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (hf_config.tie_word_embeddings and name == "lm_head.weight")


def expected_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor that the learner reads of a folder with this config: HF name -> shape.

    Raises: DataError as `family_of`.
    """
    family, heads = family_of(hf_config), HeadShape.of(hf_config)
    layers, experts = range(hf_config.num_hidden_layers), range(hf_config.num_experts if family.experts else 0)
    expected: dict[str, tuple[int, ...]] = {}
    for rule in family.rules:
        numbers = [(layer, expert) for layer in layers for expert in (experts if rule.is_expert else (0,))]
        for template, shape in zip(rule.hf, _shapes(rule, family, heads, hf_config), strict=True):
            expected |= {template.format(layer=layer, expert=expert): shape for layer, expert in numbers}
    if hf_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    return expected


def _shapes(rule: Rule, family: ModelFamily, heads: HeadShape, hf_config: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the rule's HF tensors."""
    hidden, queries, keys = hf_config.hidden_size, heads.groups * heads.queries_per_group * heads.width, heads.groups * heads.width
    width = getattr(hf_config, family.experts.width) if family.experts else hf_config.intermediate_size
    is_of_attention = ".self_attention." in rule.megatron
    match rule.layout:
        case TensorLayout.VOCAB:
            return ((hf_config.vocab_size, hidden),)
        case TensorLayout.ROW:
            return ((hidden, queries if is_of_attention else width),)
        case TensorLayout.QKV:
            inputs = () if rule.megatron.endswith(".bias") else (hidden,)
            return tuple((rows, *inputs) for rows in (queries, keys, keys))
        case TensorLayout.GATE_UP:
            return ((2 * width // len(rule.hf), hidden),) * len(rule.hf)
        case TensorLayout.REPLICATED:
            of_heads = {"q_layernorm": queries, "k_layernorm": keys}
            leaf = rule.megatron.split(".")[-2]
            if leaf == "router":
                return ((hf_config.num_experts, hidden),)
            return ((hidden if leaf not in of_heads else of_heads[leaf] if family.qk_norm == "all_heads" else heads.width,),)
