"""Calls of tools as the families write them: each becomes a call for OpenAI's client, and is read by the model as it said it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tool_calls import calls_of, check_parser
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import AT_ONE, MODEL, Script, client, opened, post, scripted, user
from tests.rollout.family_tokenizers import Family

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {field: {"type": kind}}}}}
    for name, field, kind in (("add", "a", "integer"), ("look", "at", "string"))
]
CALLS = [("add", {"a": 1}), ("look", {"at": "[2]; here"})]
_NEXT = "{% if add_generation_prompt %}"
_OFFERED = "{% if tools %}{{ tools | tojson }}{% endif %}"


def _family(special: Sequence[str], end: str, template: str, bos: str | None = None) -> Family:
    return Family("", (*special, end), end, template, (end,), end, bos=bos)


@dataclass(frozen=True)
class Format:
    """How a family calls tools."""

    tokenizer: Family
    """With the shape of the published template."""
    said: str
    """CALLS."""
    no_calls: Sequence[str]
    """What isn't valid, or calls what isn't there."""


_QWEN = _family(
    ("<|endoftext|>", "<|im_start|>"), "<|im_end|>",
    "<|im_start|>system\n" + _OFFERED + "<|im_end|>\n{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT + "<|im_start|>assistant\n{% endif %}",
)  # fmt: skip
_LLAMA = _family(
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"), "<|eot_id|>",
    "{{ bos_token }}" + _OFFERED + "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}" + _NEXT + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    bos="<|begin_of_text|>",
)  # fmt: skip
_MISTRAL = _family(
    ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "</s>",
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    bos="<s>",
)  # fmt: skip
_DEEPSEEK = _family(
    (
        "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    ),
    "<｜end▁of▁sentence｜>",
    "{{ bos_token }}" + _OFFERED + "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
    "{% else %}{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}",
    bos="<｜begin▁of▁sentence｜>",
)  # fmt: skip
_KIMI = _family(
    (
        "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    ),
    "<|im_end|>",
    "<|im_system|>tool_declare<|im_middle|>" + _OFFERED + "<|im_end|>{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    + _NEXT + "<|im_assistant|>assistant<|im_middle|>{% endif %}",
)  # fmt: skip


def _called(call: str, joint: str, calls: Sequence[tuple[str, Any]] = CALLS) -> str:
    """Args: call: with NAME, ARGUMENTS and NUMBER."""
    filled = (
        call.replace("NAME", name).replace("ARGUMENTS", arguments if isinstance(arguments, str) else json.dumps(arguments))
        for name, arguments in calls
    )
    return joint.join(one.replace("NUMBER", str(number)) for number, one in enumerate(filled))


def _format(tokenizer: Family, call: str, *, joint: str = "", before: str = "", after: str = "") -> Format:
    whole = [before + _called(call, joint, calls) + after for calls in (CALLS, [("subtract", {})], [("add", '{"a": 1')])]
    half = before + call.partition("ARGUMENTS")[0].replace("NAME", "add").replace("NUMBER", "0") + '{"a": 1'
    return Format(tokenizer, whole[0], (*whole[1:], half))


FORMATS = {
    "qwen25": _format(_QWEN, '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', joint="\n"),
    "hermes": _format(_QWEN, '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', joint="\n"),
    "llama3": _format(_LLAMA, '{"name": "NAME", "parameters": ARGUMENTS}', joint=";", before="<|python_tag|>"),
    "mistral": _format(_MISTRAL, "[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    "deepseekv3": _format(
        _DEEPSEEK,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        joint="\n",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _format(
        _KIMI,
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_two_calls_at_once_and_what_the_model_reads_then(engine_loop: BackgroundLoop, name: str, is_streamed: bool) -> None:
    """The unmodified client gets both, and gives them back with their results; the model goes on from the very tokens that it said, and
    reads what transformers renders of the whole."""
    encoder = ChatEncoder(FORMATS[name].tokenizer.tokenizer())
    script = Script(encoder, FORMATS[name].said, "3")

    async def run() -> list[dict[str, Any]]:
        async with opened(encoder) as door:
            address = door.admit(scripted(script, encoder, calls=calls_of(name, "rollout.agent", encoder.tokenizer)), AT_ONE)
            messages: list[Any] = [user("1 + 2")]
            async with client(address) as asking:
                for finish in ("tool_calls", "stop"):
                    options: Any = {"model": MODEL, "tools": TOOLS, "stream": is_streamed, "messages": messages}
                    answer = await asking.chat.completions.create(**options)
                    chunks = [chunk.choices[0] async for chunk in answer] if is_streamed else answer.choices
                    assert chunks[-1].finish_reason == finish
                    message = chunks[0].delta if is_streamed else chunks[0].message
                    calls = [{"id": one.id, "type": "function", "function": one.function.model_dump()} for one in message.tool_calls or []]
                    messages.append({"role": "assistant", "content": message.content} | ({"tool_calls": calls} if calls else {}))
                    messages += [{"role": "tool", "tool_call_id": one["id"], "content": f"is {i}"} for i, one in enumerate(calls)]
            return messages

    _, called, *results, last = engine_loop.run(run())
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in called["tool_calls"]] == CALLS
    assert len(results) == 2 and last["content"] == "3"
    whole = [user("1 + 2"), {"role": "assistant", "content": FORMATS[name].said}, *results]
    expected = encoder.tokenizer.apply_chat_template(whole, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert script.read[1] == list(expected)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, one in FORMATS.items() for text in one.no_calls])
def test_what_looks_like_a_call_and_is_none_is_text(engine_loop: BackgroundLoop, name: str, text: str) -> None:
    """A tool that isn't there, JSON that isn't whole, half a call: the program reads what the model said, all of it."""
    encoder = ChatEncoder(FORMATS[name].tokenizer.tokenizer())

    async def run() -> dict[str, Any]:
        async with opened(encoder) as door:
            address = door.admit(scripted(Script(encoder, text), encoder, calls=calls_of(name, "rollout.agent", encoder.tokenizer)), AT_ONE)
            _, said = await post(address, {"messages": [user("1")], "tools": TOOLS})
            (choice,) = json.loads(said)["choices"]
            return dict(choice)

    choice = engine_loop.run(run())
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": text}, "stop")


def test_each_parser_of_the_installed_version_can_be_set(caplog: pytest.LogCaptureFixture) -> None:
    """And an unknown one is refused with their list."""
    tokenizer = _QWEN.tokenizer()
    with caplog.at_level(logging.WARNING, "evenkeel.tools"):
        for name in FunctionCallParser.ToolCallParserEnum:
            assert calls_of(name, "rollout.agent", tokenizer)("no call", TOOLS, 0) == ("no call", [])
    assert not [one for one in caplog.records if one.name == "evenkeel.tools"]
    with pytest.raises(ConfigError) as error:
        check_parser("qwen26", "rollout.agent")
    assert error.value.remedy.startswith("did you mean qwen25? It has ")
    assert set(error.value.remedy.partition("It has ")[2].split(", ")) == set(FunctionCallParser.ToolCallParserEnum)
