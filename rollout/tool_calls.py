"""Calls of tools in what a model said, read by SGLang's own parsers for the families that have one."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenkeel.correction.errors import ConfigError

log = logging.getLogger("evenkeel.tools")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that stands in what the model said."""

    id: str
    """In the form that templates of the family ask for."""
    name: str
    arguments: str
    """JSON, as the model wrote it or the parser read it."""


Calls = Callable[[str, Sequence[Mapping[str, Any]], int], tuple[str, list[ToolCall]]]
"""Finds the calls of tools in what the model said: (text, tools offered, number of earlier calls) -> rest of the text, calls."""


def no_calls(text: str, tools: Sequence[Mapping[str, Any]], earlier: int) -> tuple[str, list[ToolCall]]:
    """For models whose calls nobody parses: all is text."""
    return text, []


def check_parser(parser: str, section: str) -> None:
    """Args: section: that has tool_parser. Raises: ConfigError for a name that SGLang doesn't have."""
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES

    if parser not in TOOL_CALL_PARSER_NAMES:
        near = difflib.get_close_matches(parser, TOOL_CALL_PARSER_NAMES, n=1)
        remedy = (f"did you mean {near[0]}? " if near else "") + f"It has {', '.join(TOOL_CALL_PARSER_NAMES)}"
        raise ConfigError(f"{section}.tool_parser = {parser}: SGLang has no such parser", remedy=remedy)


def calls_of(parser: str | None, section: str, tokenizer: Any = None) -> Calls:
    """What finds the calls.

    Args:
        parser: SGLang's name of the family's format; None: all is text.
        section: that has tool_parser.
        tokenizer: of the model, by which one family's parser tells its dialects apart.
    Raises: as check_parser.
    """
    if parser is None:
        return no_calls
    check_parser(parser, section)
    from sglang.srt.entrypoints.openai.protocol import Tool  # seconds
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def found(text: str, tools: Sequence[Mapping[str, Any]], earlier: int) -> tuple[str, list[ToolCall]]:
        try:
            offered = [Tool(**tool) for tool in tools]
            rest, calls = FunctionCallParser(offered, parser, tokenizer).parse_non_stream(text)
            names = {tool.function.name for tool in offered}
            calls = [call for call in calls if call.name in names]  # as most parsers do it by themselves
        except Exception:  # of a model's text, or an agent's own description of its tools, as the parser can't read it: all is text
            log.warning("tool calls: the parser %s failed on a turn, which counts as text", parser, exc_info=True)
            calls = []
        if not calls:  # of half a call SGLang would give nothing at all
            return text, []
        named = enumerate(calls, earlier)
        return rest, [ToolCall(id_of_call(parser, call.name or "", number), call.name or "", call.parameters) for number, call in named]

    return found


def id_of_call(parser: str | None, name: str, number: int) -> str:
    """As it comes back with the call's result. Templates of Mistral's refuse a tool's turn unless it has nine letters or digits; those of
    Kimi's models show it to the model, which has learnt these forms. To others it is all one."""
    shown = {"kimi_k2": f"functions.{name}:{number}", "kimi_k3": f"{name}:{number}"}
    return shown.get(parser or "", f"{number:09d}")
