"""A GGUF file (llama.cpp's form of a model) becomes a Hugging Face model folder with float32 weights.

transformers reads the config and the weights, undoing the quantisation with the package gguf. The tokenizer is built here: transformers'
own reading of a GGUF file leaves out by which rule text is cut before its merges, and takes the token that begins a text for the one that
ends it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import DataError, one_line
from evenkeel.learner.hf.tensor_files import save_model

# Names of GGUF whose conversion is compared with an independent one; Mistral's files are called llama, too.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_LAYER_OF_ITS_OWN = {"qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"), "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight")}
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Types of tokens (tokenizer.ggml.token_type) that are looked for in a text before it is cut.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a file's header says of its model."""

    architecture: str
    name: str
    license: str
    """License as the file names it; empty: it doesn't."""
    parameters: int
    types: dict[str, int]
    """Storage type, such as Q4_1, -> tensors that have it."""

    @property
    def folder_bytes(self) -> int:
        """Size of the weights in float32, an embedding that is also the head counted once."""
        return 4 * self.parameters


def read_facts(path: Path) -> GgufFacts:
    """Raises: DataError if the file is missing, damaged, or of a model that can't be converted."""
    return _facts(path, _open(path))


def _facts(path: Path, reader: Any) -> GgufFacts:
    kind = _value(reader, "general.architecture", "")
    if kind not in _ARCHITECTURES:
        raise _refused(path, f"general.architecture = {kind}", f"files of {', '.join(_ARCHITECTURES)} are converted")
    if _value(reader, f"{kind}.expert_count", 0):
        raise _refused(path, f"{kind}.expert_count", "files of a mixture of experts aren't converted")
    names, layers = {tensor.name for tensor in reader.tensors}, range(_value(reader, f"{kind}.block_count", 0))
    if "rope_freqs.weight" in names or _value(reader, f"{kind}.rope.scaling.type", "none") not in ("none", ""):
        raise _refused(path, "scaled rotary angles (rope_freqs.weight or rope.scaling)", "the file doesn't say what a config.json has to")
    of_layer = [f"{name}.weight" for name in _LAYER] + [*_LAYER_OF_ITS_OWN.get(kind, ())]
    expected = {"token_embd.weight", "output_norm.weight"} | {f"blk.{layer}.{name}" for layer in layers for name in of_layer}
    if lacking := sorted(expected - names):  # transformers would draw it at random
        raise DataError(f"{path}: no tensor {lacking[0]}, which a model of this architecture has", remedy="Take a whole file")
    if others := sorted(names - expected - {"output.weight"}):  # transformers would leave it out
        raise _refused(path, f"tensor {others[0]}", "it has no place in the models of this architecture that are converted")
    _tokenizer_kind(path, reader)
    if reader.get_field("tokenizer.ggml.eos_token_id") is None:
        raise _refused(path, "no tokenizer.ggml.eos_token_id", "no answer of the model could end")
    return GgufFacts(
        architecture=kind,
        name=_value(reader, "general.name", ""),
        license=_value(reader, "general.license", ""),
        parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
        types=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
    )


def write_folder(path: Path, folder: Path, *, say: Callable[[str], None] = lambda _: None) -> GgufFacts:
    """Write config.json, generation_config.json, float32 safetensors and the tokenizer with its chat template.

    Args:
        path: the GGUF file.
        folder: made if it is missing.
        say: takes a sentence before the weights are read, which takes seconds.
    Returns: what the file's header says. Raises: DataError as read_facts; OSError.
    """
    reader = _open(path)
    facts = _facts(path, reader)
    folder.mkdir(parents=True, exist_ok=True)
    size = f"{facts.folder_bytes / 1e6:.0f} MB of float32"
    say(f"{path.name}: {facts.parameters / 1e6:.1f}M weights ({', '.join(facts.types)}) become {size}")
    with _quiet():
        model = _model_of(path, _value(reader, f"{facts.architecture}.attention.key_length", None))
        save_model(model, folder)
    _tokenizer(path, reader).save_pretrained(folder)
    _write_ends(folder, reader)
    return facts


def _model_of(path: Path, head_dim: int | None) -> Any:
    """Args: head_dim: channels of a head as the file names them, which transformers doesn't read of every architecture."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    how = {"gguf_file": path.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(path.parent, **how)
        if head_dim is not None:
            config.head_dim = head_dim
        return AutoModelForCausalLM.from_pretrained(path.parent, config=config, dtype=torch.float32, **how)
    except (KeyError, ValueError, RuntimeError) as error:
        raise DataError(f"{path}: transformers makes no model of it ({one_line(error)})", remedy="Take another file") from error


def _write_ends(folder: Path, reader: Any) -> None:
    """Name the special tokens in both configs as the file does, and write the numbers that GGUF keeps as float32 as they were published."""
    ends = {f"{name}_token_id": _value(reader, f"tokenizer.ggml.{_GGUF_NAMES[name]}_token_id", None) for name in ("bos", "eos", "pad")}
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {key: number for key, number in ends.items() if number is not None}
        if "rms_norm_eps" in content:
            content["rms_norm_eps"] = _shortest(content["rms_norm_eps"])
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _shortest(value: float) -> float:
    """The decimal number with the fewest digits of all that are this one in float32: 1e-05 for 9.999999747378752e-06."""
    import numpy

    return float(str(numpy.float32(value)))


# --- tokenizer ------------------------------------------------------------------------------------------------------

_GGUF_NAMES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _tokenizer_kind(path: Path, reader: Any) -> str:
    """The rule by which text is cut before merges. Raises: DataError for one that isn't known here."""
    model, cut = _value(reader, "tokenizer.ggml.model", ""), _value(reader, "tokenizer.ggml.pre", "")
    if model != "gpt2" or cut not in ("smollm", "qwen2", "llama-bpe"):
        reason = "byte-level tokenizers that cut text as smollm, qwen2 or llama-bpe are converted"
        raise _refused(path, f"tokenizer.ggml.model = {model} with tokenizer.ggml.pre = {cut or 'none'}", reason)
    return str(cut)


def read_tokenizer(path: Path) -> Any:
    """The published tokenizer, transformers' own: byte-level merges, cut as `tokenizer.ggml.pre` names it; the file's special tokens and
    chat template. Raises: DataError as read_facts."""
    return _tokenizer(path, _open(path))


def _tokenizer(path: Path, reader: Any) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    cut = _tokenizer_kind(path, reader)
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens", [])
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    if cut == "smollm":
        pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        by_words = pre_tokenizers.Split(Regex(_QWEN2 if cut == "qwen2" else _LLAMA3), behavior="isolated")
        pieces = [by_words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.normalizer = normalizers.NFC() if cut == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(token, normalized=False) for token, its in zip(tokens, kinds, strict=True) if its == kind])
    named = {name: _value(reader, f"tokenizer.ggml.{gguf}_token_id", None) for name, gguf in _GGUF_NAMES.items()}
    if named["bos"] is not None and _value(reader, "tokenizer.ggml.add_bos_token", cut == "llama-bpe"):
        first = tokens[named["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, named["bos"])]
        )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        **{f"{name}_token": tokens[number] for name, number in named.items() if number is not None},
        model_max_length=_value(reader, f"{_value(reader, 'general.architecture', '')}.context_length", None),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _value(reader, "tokenizer.chat_template", None)
    return fast


# --- the file -------------------------------------------------------------------------------------------------------


def _open(path: Path) -> Any:
    """The file's header, its tensors mapped into memory. Raises: DataError."""
    from gguf import GGUFReader

    if not path.is_file():
        raise DataError(f"{path}: no such file", remedy="Name a GGUF file in init.gguf")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        reason = one_line(error)
        raise DataError(f"{path}: no GGUF file, or a damaged one ({reason})", remedy="Put back a whole copy of the file") from error


def _value(reader: Any, key: str, default: Any) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _refused(path: Path, what: str, reason: str) -> DataError:
    return DataError(f"{path}: {what}: {reason}", remedy="Take the model's own safetensors folder instead (docs/models.md)")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block without transformers' bars of a file that is there at once; its bar of the tensors is for a terminal alone."""
    from transformers.utils import logging

    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
