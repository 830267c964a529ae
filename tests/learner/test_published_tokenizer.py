"""Token ids of the tokenizer that a GGUF file becomes, against the one that is published for SmolLM2."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from evenkeel.learner.hf.gguf_folder import read_tokenizer
from tests.real_model import gguf_file

PUBLISHED = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
"""SHA-256 of the tokenizer.json of SmolLM2-135M-Instruct (2,104,556 bytes), as others have noted it who took it from the hub."""
DIGITS = {"type": "Digits", "individual_digits": True}


def bytes_with(space: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}


POOLS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", "àéîõüßçñøåœžłİıſ", "абвгдежзийклмнопрстуфхцчшщъыьэюя",
    "αβγδεζηθικλμνξοπρστυφχψωάέ", "ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "אבגדהוזחטיכלמנסעפצקרשת", "अआइईउऊकखगघचछजझटठडढणतथ्ािी", "กขคงจฉชซญฎฏฐำเแโ่้",
    "你好世界数学计算机语言模型", "こんにちはカタカナ", "안녕하세요한국어", "٠١٢٣٤५६७८²③Ⅷ½",
    "😀👍🏽👨‍👩‍👧🇩🇪❤️", "\u0301\u0308\u200d\u200b\ufeff\u00ad",
    "\ue000\U000f0000\U0010fffd\U000e0041\u0378", "\x00\x01\x07\x1b\x7f\x85",
    ".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+~`", "'s't're've'll", " ", "\t\n\r\v\f",
    "\u00a0\u2003\u3000\u2028",
)  # fmt: skip
"""Alphabets, digits of several scripts, joined and combining characters, characters that no vocabulary has, controls, spaces."""


NUMBERS = "BbHhIif?  QqdX"
"""Formats of GGUF's types of values by their number; 8 is a string, 9 an array."""


def header(path: Path) -> dict[str, Any]:
    """Keys and values of a GGUF file, read as its specification says. gguf's own reading takes seconds."""
    data, at = path.read_bytes()[: 1 << 23], 24

    def take(kind: int) -> Any:
        nonlocal at
        if kind == 9:
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            return [take(inner) for _ in range(count)]
        if kind == 8:
            start, size = at + 8, struct.unpack_from("<Q", data, at)[0]
            at = start + size
            return data[start:at].decode()
        (value,) = struct.unpack_from(form := f"<{NUMBERS[kind]}", data, at)
        at += struct.calcsize(form)
        return value

    return {take(8): take(take(4)) for _ in range(struct.unpack_from("<Q", data, 16)[0])}


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    """The published file, written anew of the GGUF file's tokens and merges: by its checksum the same to the last byte."""
    values = header(gguf_file())
    tokens, kinds, merges = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model |= {"vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}
    content = {"version": "1.0", "truncation": None, "padding": None}
    content |= {"added_tokens": [{"id": number, "content": tokens[number]} | how for number, kind in enumerate(kinds) if kind == 3]}
    content |= {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, bytes_with(False)]}}
    content |= {"post_processor": None, "decoder": bytes_with(True), "model": model}
    written = json.dumps(content, indent=2, ensure_ascii=False)
    assert hashlib.sha256(written.encode()).hexdigest() == PUBLISHED
    return content


@pytest.fixture(scope="module")
def made() -> Any:
    return read_tokenizer(gguf_file())


def texts(count: int, control: list[str]) -> list[str]:
    """Strings of 1 to 12 pieces: runs from one pool, words of several, control words whole and cut."""
    draw = random.Random(11)

    def piece() -> str:
        pool = draw.choice(POOLS)
        match draw.randrange(8):
            case 0:
                return draw.choice(control)
            case 1:
                return draw.choice(control)[: draw.randrange(1, 9)]
            case 2:
                return " " * draw.randrange(1, 9) + draw.choice(pool)
            case _:
                return "".join(draw.choice(pool) for _ in range(draw.randrange(1, 9))) + draw.choice(["", " ", "  ", "\n\n"])

    return ["".join(piece() for _ in range(draw.randrange(1, 13))) for _ in range(count)]


def ids_of(tokenizer: dict[str, Any], strings: list[str]) -> list[list[int]]:
    """Args: tokenizer: content of a tokenizer.json."""
    return [one.ids for one in Tokenizer.from_str(json.dumps(tokenizer)).encode_batch(strings, add_special_tokens=False)]


def test_token_ids_are_those_of_the_published_tokenizer(published: dict[str, Any], made: Any) -> None:
    strings = ["", *texts(4000, list(made.get_added_vocab()))]
    expected = ids_of(published, strings)
    assert [made.encode(text) for text in strings] == expected
    assert [made.decode(ids) for ids in expected] == strings
    seen = {number for ids in expected for number in ids}
    assert set(range(17)) <= seen, "each control word"
    assert len({token for token in made.convert_ids_to_tokens(list(seen)) if len(token) == 1}) > 150, "what no word has is spelled in bytes"


@pytest.mark.parametrize("change", [{"pre_tokenizer": bytes_with(False)}, {"added_tokens": []}])
def test_a_tokenizer_with_one_rule_less_gives_other_ids(published: dict[str, Any], made: Any, change: dict[str, Any]) -> None:
    """Digits in one token, as transformers' own reading of the file has them; control words spelled out."""
    strings = texts(100, list(made.get_added_vocab()))
    assert ids_of(published | change, strings) != [made.encode(text) for text in strings]
