"""Fixtures that every package's tests share: a tiny Qwen3 folder, and one SGLang engine for the whole session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3 of 2 layers, hidden 64, 512 tokens, tied embeddings, random weights, with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    save_tiny_tokenizer(folder)
    save_tiny_qwen3(folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"{a} + {b} = {a + b}" for a in range(60) for b in range(60)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_tiny_qwen3(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = True) -> None:
    """About 115,000 parameters; matrices of standard deviation 0.15, so that the distributions are far from uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)


class BackgroundLoop:
    """An event loop in a thread, as in a Ray async actor; tests call it from outside."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 300.0) -> T:
        return self.start(coroutine).result(timeout_s)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin; the result is waited for later."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        self.loop.close()


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path, engine_loop: BackgroundLoop) -> Iterator[Any]:
    """One RolloutEngine on `tiny_model`; tests that change its weights use `engine`, which restores them."""
    from rollout.engine import RolloutEngine
    from rollout.engine_config import EngineConfig

    config = EngineConfig(device="cpu", max_total_tokens=65_536, max_running_requests=64, weight_group_timeout_s=10.0)
    engine = engine_loop.run(RolloutEngine.start(tiny_model, config, name="test engine"))
    yield engine
    engine_loop.run(engine.shutdown())


@pytest.fixture
def engine(shared_engine: Any, engine_loop: BackgroundLoop, tiny_model: Path) -> Iterator[Any]:
    """The shared engine; when a test has changed its weights, those of `tiny_model` come back under a new version."""
    version = shared_engine.version
    yield shared_engine
    if shared_engine.version != version or not shared_engine.is_healthy:
        from safetensors.torch import load_file

        engine_loop.run(shared_engine.update_weights(shared_engine.version + 1, load_file(tiny_model / "model.safetensors")))
