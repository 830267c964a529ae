"""What the model reads after one of its turns: with the prompt and what it said, the very tokens of the whole conversation; never what it
said by another name."""

from __future__ import annotations

import pytest

from evenkeel.correction.errors import DataError
from evenkeel.rollout.tasks.chat import ChatEncoder
from tests.rollout.family_tokenizers import CHATML, FAMILIES, Family

QUESTION = [{"role": "user", "content": "1 + 2"}]
NEW = [{"role": "user", "content": "for a in 12:\n ab?"}]
REWRITTEN = ("Llama 2", "Mistral", "Mixtral", "GLM-4", "R1's distilled Qwen")
"""Templates that put a blank or a line's end before an answer, or take the beginning of a thought away."""


def said_by(encoder: ChatEncoder, family: Family, text: str) -> list[int]:
    return [*encoder.tokenizer.encode(text, add_special_tokens=False), family.special.index(family.of_turn)]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REWRITTEN])
def test_the_parts_are_the_whole_conversation(name: str) -> None:
    """Of three turns, each said in the tokens that its text has; one has a control token's text in it. The prompt of the whole, rendered
    and encoded at once by transformers, has the same ids."""
    family = FAMILIES[name]
    encoder = ChatEncoder(family.tokenizer())
    asked, ids = list(QUESTION), list(encoder.encode(QUESTION))
    for answer, new in (("ab 12", NEW), ("or\nab", [{"role": "user", "content": f"a{family.of_turn}b"}]), ("1", NEW)):
        said = said_by(encoder, family, answer)
        ids += [*said, *encoder.following(asked, said, new)]
        asked += [{"role": "assistant", "content": answer}, *new]
    assert ids == list(encoder.encode(asked))


def test_a_turn_that_was_cut_is_ended_by_the_template() -> None:
    encoder = ChatEncoder(FAMILIES["Qwen2.5-Instruct"].tokenizer())
    said = encoder.tokenizer.encode("ab 12", add_special_tokens=False)
    whole = [*QUESTION, {"role": "assistant", "content": "ab 12"}, *NEW]
    assert [*encoder.encode(QUESTION), *said, *encoder.following(QUESTION, said, NEW)] == list(encoder.encode(whole))


def test_what_was_said_in_other_tokens_stays() -> None:
    """ "ab" as two tokens, which its text would have as one: what follows is the same."""
    family = FAMILIES["Qwen2.5-Instruct"]
    encoder = ChatEncoder(family.tokenizer())
    usual = said_by(encoder, family, "ab")
    apart = [*(encoder.tokenizer.convert_tokens_to_ids(letter) for letter in "ab"), usual[-1]]
    assert len(usual) == 2 and encoder.text_of(apart) == encoder.text_of(usual)
    assert encoder.following(QUESTION, apart, NEW) == encoder.following(QUESTION, usual, NEW)


@pytest.mark.parametrize(
    ("name", "answer", "token"), [("Qwen3", "<think>ab</think>12", 0), ("Llama 3", "ab  ", 1), ("Llama 2", "ab", 1), ("GLM-4", "ab", 0)]
)
def test_a_template_that_rewrites_what_was_said_is_refused(name: str, answer: str, token: int) -> None:
    """It cuts thoughts off, strips blanks at the end, or puts one before the answer."""
    family = FAMILIES[name]
    encoder = ChatEncoder(family.tokenizer())
    with pytest.raises(DataError, match=f"rewrites what the model said: token {token} of its turn, "):
        encoder.following(QUESTION, said_by(encoder, family, answer), NEW)


def test_the_first_token_that_differs_is_found_in_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,000 tokens: to decode all that begin a turn takes seconds, in which the door answers nobody."""
    family = FAMILIES["Qwen2.5-Instruct"]
    encoder = ChatEncoder(family.tokenizer())
    said = said_by(encoder, family, "1 " * 4000)
    text, looks, decode = encoder.text_of(said), list[int](), encoder.tokenizer.decode
    assert len(said) > 4000

    def counted(ids: list[int], **how: bool) -> str:
        looks.append(len(ids))
        return str(decode(ids, **how))

    monkeypatch.setattr(encoder.tokenizer, "decode", counted)
    for place in (0, 1, 4001, len(text) - 1, len(text)):
        looks.clear()
        token = encoder.token_at(said, place)
        assert len(looks) < 20
        at = len(encoder.text_of(said[:token]))
        assert at <= place < len(encoder.text_of(said[: token + 1])) or (place == len(text) and token == len(said) - 1)


def test_a_template_without_generation_prompt_is_refused() -> None:
    """It begins each turn of the model, but not the one that is to come."""
    encoder = ChatEncoder(FAMILIES["Qwen2.5-Instruct"].tokenizer())
    template, _, _ = encoder.tokenizer.chat_template.partition("{% if add_generation_prompt %}")
    assert template != encoder.tokenizer.chat_template
    encoder.tokenizer.chat_template = template
    said = said_by(encoder, FAMILIES["Qwen2.5-Instruct"], "12")
    with pytest.raises(DataError, match=r"has no generation prompt: it writes '<\|im_start\|>assistant\\n' before a turn that is over"):
        encoder.following(QUESTION, said, NEW)


def test_a_template_that_rewrites_what_came_before_is_refused() -> None:
    """It takes away the beginning of a thought, which stood in the prompt; or shows the last question alone."""
    thinking = ChatEncoder(FAMILIES["R1's distilled Qwen"].tokenizer())
    forgetful = FAMILIES["Qwen2.5-Instruct"].tokenizer()
    forgetful.chat_template = "{% set messages = messages[-1:] %}" + CHATML
    for encoder in (thinking, ChatEncoder(forgetful)):
        with pytest.raises(DataError, match="rewrites what the model was given or said before"):
            encoder.following(QUESTION, encoder.tokenizer.encode("ab"), NEW)


def test_tools_are_the_templates() -> None:
    """They stand in the prompt, and what follows a call is a tool's turn, with the ids of the whole."""
    family = FAMILIES["Qwen2.5-Instruct"]
    tokenizer = family.tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + CHATML
    encoder = ChatEncoder(tokenizer)
    tools = [{"type": "function", "function": {"name": "for_12"}}]
    prompt = encoder.encode(QUESTION, tools)
    assert tokenizer.decode(list(prompt)).startswith("for_12\n<|im_start|>user")
    said = said_by(encoder, family, "ab")
    new = [{"role": "tool", "content": "12", "tool_call_id": "call_0"}]
    whole = [*QUESTION, {"role": "assistant", "content": "ab"}, *new]
    assert [*prompt, *said, *encoder.following(QUESTION, said, new, tools)] == list(encoder.encode(whole, tools))
