"""A GGUF file becomes a model folder: weights by gguf's own arithmetic, logits and token ids of the model that it was made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf import gguf_folder
from evenkeel.learner.hf.gguf_folder import read_facts, write_folder
from evenkeel.learner.hf.tensor_files import save_model

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = [
    "What is  20 + 3?\n\n\tThe sum is 23.",
    "Zwölf Boxkämpfer; 数学 12 345, naïve café",
    "don't   stop   007   now 's",
    "<|im_start|>user\nhi<|im_end|>",
]
SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "pad_token_id": None,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""As llama.cpp names them, written down here and not read from the package that the conversion reads."""


def published_tokenizer(cut: str) -> Tokenizer:
    """Cut as the published tokenizer.json of the family, with merges learned from a few texts."""
    tokenizer = Tokenizer(models.BPE())
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    digits = r"\p{N}" if cut == "qwen2" else r"\p{N}{1,3}"
    rest = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if cut != "smollm":
        from tokenizers import Regex

        first = pre_tokenizers.Split(Regex(rest), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(CONTROL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp stores them: a head's channels in pairs that turn together, (0, 1), (2, 3) ..., in place of halves."""
    width = weight.shape[0] // heads
    order = [head * width + half * (width // 2) + pair for head in range(heads) for pair in range(width // 2) for half in (0, 1)]
    return np.ascontiguousarray(weight[order])


def gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, inner = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[inner]}.{ending}"
    return f"{NAMES[stem]}.{ending}"


def write_gguf(
    path: Path, model: Any, architecture: str, tokenizer: Tokenizer, cut: str, *,
    kinds: Iterable[gguf.GGMLQuantizationType] = (), change: Callable[[gguf.GGUFWriter], None] = lambda _: None, skip: str = "",
) -> None:  # fmt: skip
    """Args: kinds: storage types of the matrices, in turn; none: float32. change: adds keys. skip: eos or a tensor, to be left out."""
    writer, config = gguf.GGUFWriter(path, architecture), model.config
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(16)
    if architecture == "qwen3":
        writer.add_key_length(16)
        writer.add_value_length(16)
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    if cut:
        writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["merges"]])
    writer.add_bos_token_id(1)
    if skip != "eos":
        writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}")
    change(writer)
    queue = list(kinds)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or gguf_name(name) == skip:
            continue
        array = tensor.float().numpy()
        if architecture == "llama" and any(part in name for part in ("q_proj", "k_proj")):
            array = rotated(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if queue and array.ndim == 2 and array.shape[1] % gguf.GGML_QUANT_SIZES[queue[0]][0] == 0:  # a row is whole blocks
            queue.append(kind := queue.pop(0))
            writer.add_tensor(gguf_name(name), stored(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The matrix in this type; where gguf can only read it, any blocks: of bytes below 0x7c, so that no scale (float16) is infinite."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        size, width = gguf.GGML_QUANT_SIZES[kind]
        return np.random.default_rng(7).integers(0, 0x7C, (array.shape[0], array.shape[1] // size * width), np.uint8)


def tiny(architecture: str, vocabulary: int, *, tied: bool, width: int = 64) -> Any:
    torch.manual_seed(5)
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }  # fmt: skip
    config, model = classes[architecture]
    shape = SHAPE | {"hidden_size": width, "intermediate_size": width, "num_attention_heads": width // 16}
    made = model(config(vocab_size=vocabulary, tie_word_embeddings=tied, **shape)).eval()
    for name, parameter in made.named_parameters():  # norms of ones and biases of zeros would hide a mistake
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, *((0.5, 1.5) if "norm" in name else (-0.5, 0.5)))
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.parametrize(
    ("architecture", "cut", "tied"), [("llama", "smollm", True), ("qwen2", "qwen2", False), ("qwen3", "llama-bpe", True)]
)
def test_logits_and_token_ids_are_those_of_the_model_that_the_file_was_made_of(
    tmp_path: Path, architecture: str, cut: str, tied: bool
) -> None:
    """Float32 in the file, so nothing is lost: a missing rotation, a norm or bias left out, a lost tie each change the logits by 1e-2 and
    more. The ids are those of the tokenizer as it is published, runs of spaces before digits and control words included."""
    tokenizer = published_tokenizer(cut)
    model = tiny(architecture, tokenizer.get_vocab_size(), tied=tied)
    write_gguf(tmp_path / "m.gguf", model, architecture, tokenizer, cut)
    facts = write_folder(tmp_path / "m.gguf", tmp_path / "hf")
    ids = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    made = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert [made.encode(text) for text in TEXTS] == [tokenizer.encode(text).ids for text in TEXTS]
    assert [made.decode(made.encode(text)) for text in TEXTS] == TEXTS
    assert (made.bos_token, made.eos_token, made.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert made.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    config, generation = (json.loads((tmp_path / "hf" / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, tied)  # 9.999999747378752e-06 in the file
    assert config["eos_token_id"] == generation["eos_token_id"] == made.eos_token_id == 2
    assert (facts.license, facts.folder_bytes) == ("apache-2.0", 4 * sum(parameter.numel() for parameter in model.parameters()))


def without_rotation(model: Any) -> None:
    query = model.model.layers[1].self_attn.q_proj.weight
    query.copy_(torch.from_numpy(rotated(query.numpy(), 4)))


def without_a_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight.fill_(1.0)


def without_the_tie(model: Any) -> None:
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.nn.init.normal_(torch.empty_like(model.lm_head.weight), std=0.2))


@pytest.mark.parametrize("mistake", [without_rotation, without_a_norm, without_the_tie])
def test_each_mistake_of_a_conversion_changes_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Any], None]
) -> None:
    """What the comparison above is worth: each of these is a thousand times its tolerance, in one of two layers."""

    def save(model: Any, folder: Path) -> None:
        with torch.no_grad():
            mistake(model)
        save_model(model, folder)

    monkeypatch.setattr(gguf_folder, "save_model", save)
    tokenizer = published_tokenizer("smollm")
    model = tiny("llama", tokenizer.get_vocab_size(), tied=True)
    write_gguf(tmp_path / "m.gguf", model, "llama", tokenizer, "smollm")
    write_folder(tmp_path / "m.gguf", tmp_path / "hf")
    ids = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    with torch.no_grad():
        assert (AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits - model(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("width", "names"),
    [
        (64, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "IQ4_NL")),
        (256, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")),
    ],
)
def test_quantised_weights_are_what_gguf_itself_makes_of_them(tmp_path: Path, width: int, names: Sequence[str]) -> None:
    """All storage types of the files that are published of SmolLM2 and its family, blocks of 32 weights and of 256."""
    kinds = [gguf.GGMLQuantizationType[name] for name in names]
    tokenizer = published_tokenizer("smollm")
    model = tiny("qwen2", tokenizer.get_vocab_size(), tied=True, width=width)
    write_gguf(tmp_path / "m.gguf", model, "qwen2", tokenizer, "smollm", kinds=kinds)
    facts = write_folder(tmp_path / "m.gguf", tmp_path / "hf")
    assert len({file.stat().st_mode for file in (tmp_path / "hf").iterdir()}) == 1, "who may read one of the files may read all"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, weight in weights.items():
        if name != "lm_head.weight":
            tensor = stored[gguf_name(name)]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
            assert np.array_equal(weight.numpy(), expected), (name, tensor.tensor_type.name)
    assert set(facts.types) == {kind.name for kind in kinds} | {"F32"}


@pytest.mark.parametrize(
    ("architecture", "cut", "change", "skip", "named"),
    [
        ("gemma3", "smollm", lambda _: None, "", "general.architecture = gemma3"),
        ("llama", "smollm", lambda writer: writer.add_expert_count(8), "", "llama.expert_count"),
        ("llama", "smollm", lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)), "", "rope_freqs.weight"),
        ("llama", "smollm", lambda _: None, "blk.1.ffn_norm.weight", "no tensor blk.1.ffn_norm.weight"),
        ("llama", "smollm", lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "", "tensor blk.0.attn_q.bias"),
        ("llama", "tekken", lambda _: None, "", "tokenizer.ggml.pre = tekken"),
        ("llama", "", lambda _: None, "", "tokenizer.ggml.pre = none"),
        ("llama", "smollm", lambda _: None, "eos", "tokenizer.ggml.eos_token_id"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, architecture: str, cut: str, change: Callable[[gguf.GGUFWriter], None], skip: str, named: str
) -> None:
    """At the header, before weights are read: a folder made of it would be another model without a word."""
    tokenizer = published_tokenizer("smollm")
    model = tiny("llama", tokenizer.get_vocab_size(), tied=True)
    write_gguf(tmp_path / "m.gguf", model, architecture, tokenizer, cut, change=change, skip=skip)
    with pytest.raises(DataError, match=r"m\.gguf") as refused:
        read_facts(tmp_path / "m.gguf")
    assert named in str(refused.value)


def test_a_file_that_is_no_whole_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    tokenizer = published_tokenizer("smollm")
    write_gguf(tmp_path / "m.gguf", tiny("llama", tokenizer.get_vocab_size(), tied=True), "llama", tokenizer, "smollm")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    for name in ("text.gguf", "cut.gguf", "missing.gguf"):
        with pytest.raises(DataError, match=name):
            read_facts(tmp_path / name)
