"""Chat template to token ids, with the tiny model's own tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.rollout.config import ReasoningGymTask
from evenkeel.rollout.tasks.chat import ChatEncoder, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def test_ids_are_those_of_the_rendered_template(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, system_prompt="Be brief.")
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n"
    ids = encoder.encode("1 + 2")
    assert ids == tuple(tokenizer.encode(rendered, add_special_tokens=False))
    assert tokenizer.decode(list(ids)) == rendered


def test_without_a_template_the_text_stays_bare(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, apply_chat_template=False)
    assert tokenizer.decode(list(encoder.encode("1 + 2 ="))) == "1 + 2 ="


def test_a_demonstration_ends_with_the_token_that_ends_a_turn(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer)
    prompt_ids, answer_ids = encoder.encode_demonstration("1 + 2", "3")
    assert prompt_ids == encoder.encode("1 + 2")
    assert answer_ids == (*tokenizer.encode("3", add_special_tokens=False), tokenizer.eos_token_id)
    assert encoder.text_of(answer_ids) == "3"


def test_a_prompt_may_be_exactly_as_long_as_what_fits(tokenizer: Any) -> None:
    length = len(ChatEncoder(tokenizer).encode("1 + 2"))
    assert ChatEncoder(tokenizer, max_prompt_tokens=length).excess("1 + 2") is None
    reason = ChatEncoder(tokenizer, max_prompt_tokens=length - 1).excess("1 + 2")
    assert reason is not None and f"{length} tokens, more than the {length - 1}" in reason


def test_of_a_far_too_long_prompt_only_the_beginning_is_encoded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB of one row took half a minute, to learn what 2,000 characters say."""
    encoder, encoded = ChatEncoder(tokenizer, max_prompt_tokens=64), []
    encode = ChatEncoder.encode
    monkeypatch.setattr(ChatEncoder, "encode", lambda self, text: encoded.append(len(text)) or encode(self, text))
    reason = encoder.excess("word " * 1_000_000)
    assert reason is not None and "tokens, more than the 64 that fit" in reason and "over " in reason
    assert sum(encoded) < 10_000


def test_a_text_of_few_tokens_fits_however_many_characters_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may drop characters, blanks for instance: then all of the text has to be looked at."""

    class Blankless:
        chat_template, eos_token_id = None, 0

        def encode(self, text: str) -> list[int]:
            return [1] * len(text.split())

    encoder = ChatEncoder(Blankless(), max_prompt_tokens=10, apply_chat_template=False)
    assert encoder.excess(" " * 100_000 + "ten words " * 5) is None
    reason = encoder.excess(" " * 100_000 + "ten words " * 6)
    assert reason is not None and "its prompt has 12 tokens, more than the 10" in reason


def test_nothing_is_said_about_indexing_errors(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' own warning about a long text; here it is a row to be skipped, with its place."""
    fresh = load_tokenizer(tiny_model)
    fresh.model_max_length = 8
    with caplog.at_level("WARNING", logger="transformers"):
        logging.getLogger("transformers").propagate = True
        assert len(ChatEncoder(fresh).encode("word " * 20)) > 8
    assert "indexing errors" not in caplog.text


def test_the_tasks_settings_reach_the_encoder(tokenizer: Any) -> None:
    task = ReasoningGymTask(dataset="chain_sum", system_prompt="S", apply_chat_template=False, max_prompt_tokens=7)
    encoder = ChatEncoder.for_task(tokenizer, task)
    assert (encoder.system_prompt, encoder.apply_chat_template, encoder.max_prompt_tokens) == ("S", False, 7)
    assert ChatEncoder.for_task(tokenizer, task, max_prompt_tokens=5).max_prompt_tokens == 5


def test_a_missing_template_and_a_missing_tokenizer_are_named(tokenizer: Any, tmp_path: Path) -> None:
    class Untemplated:
        chat_template = None
        eos_token_id = 1

    with pytest.raises(ConfigError, match="apply_chat_template: false"):
        ChatEncoder(Untemplated())
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="unusable tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "None"}')
    with pytest.raises(DataError, match=r"one of: .* to have sentencepiece") as refused:  # transformers' text has four lines
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)
