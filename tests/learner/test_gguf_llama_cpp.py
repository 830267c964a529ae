"""Logits of a converted GGUF file against llama.cpp, which reads the file with code of its own, where its Python package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer

from evenkeel.learner.hf.gguf_folder import write_folder
from tests.learner.test_gguf_folder import TEXTS, published_tokenizer, tiny, write_gguf
from tests.real_model import gguf_file

llama_cpp = pytest.importorskip("llama_cpp", reason="without llama.cpp (pip install llama-cpp-python, which compiles it)")


def logits_of_llama_cpp(path: Path, ids: list[int]) -> Any:
    """[tokens, V], float32, of a key-value cache in float32."""
    f32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, logits_all=True, type_k=f32, type_v=f32, flash_attn=False, verbose=False)
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0", "Q5_0"])
def test_logits_are_those_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    """In float32 to rounding. Of stored integers llama.cpp multiplies blocks with activations rounded to 8 bits: up to 3% of the logits'
    spread here."""
    tokenizer = published_tokenizer("smollm")
    model = tiny("llama", tokenizer.get_vocab_size(), tied=True)
    write_gguf(tmp_path / "m.gguf", model, "llama", tokenizer, "smollm", kinds=[GGMLQuantizationType[kind]] if kind != "F32" else [])
    write_folder(tmp_path / "m.gguf", tmp_path / "hf")
    ids = tokenizer.encode(TEXTS[0]).ids
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(torch.tensor([ids])).logits[0].numpy()
    expected = logits_of_llama_cpp(tmp_path / "m.gguf", ids)
    error, spread = np.sqrt(np.mean((found - expected) ** 2)), expected.std()
    assert error < (1e-5 if kind == "F32" else 0.1) * spread


@pytest.mark.slow
def test_the_real_model_s_logits_and_token_ids_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Its stored integers against float32: the likeliest next token is the same at most places of a text."""
    text = "The capital of France is Paris. It lies on the Seine, and 2,102,650 people lived there in 2023. Its oldest bridge is called"
    write_folder(gguf_file(), tmp_path / "hf")
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf").encode(text)
    assert llama_cpp.Llama(str(gguf_file()), vocab_only=True, verbose=False).tokenize(text.encode(), add_bos=False) == ids
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(torch.tensor([ids])).logits[0].numpy()
    expected = logits_of_llama_cpp(gguf_file(), ids)
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.1 * expected.std()
    assert np.mean(found.argmax(1) == expected.argmax(1)) > 0.8
