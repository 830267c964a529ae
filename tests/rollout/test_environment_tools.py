"""Functions that the model calls: they run in the environment's process, all calls of a turn at once, and whatever goes wrong with one is
text that the model reads. The model is a script, whose words SGLang's parser reads."""

from __future__ import annotations

import asyncio
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import EnvironmentConfig
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.environments.tools import LONGEST_RESULT, MOST_CALLS, MOST_THREADS
from evenkeel.rollout.trajectory import FinishReason, Trajectory
from tests.rollout.environment_scene import PROMPT, TEMPLATE_WITH_TOOLS, ScriptedModel, environment, in_a_pool

MODULE = '''
    import asyncio, json, sys, threading, time
    from typing import Literal


    met = asyncio.Event()

    def add(a: int, b: int = 1) -> int:
        """The sum.

        Args:
            a: The one.
            b: The other.
        """
        return a + b

    def bad(how: Literal["raise", "sleep", "spin", "exit", "stop", "long", "odd", "nothing", "object"]) -> object:
        """It fails in a thread.

        Args:
            how: It fails.
        """
        if how == "raise": raise KeyError("x" * 10_000)
        if how == "sleep": time.sleep(60)
        if how == "exit": sys.exit(3)
        if how == "stop": raise StopIteration
        if how == "long": return "y" * (1 << 23)
        if how == "odd": return json.loads('"\\\\ud83d"')
        if how == "nothing": return None
        if how == "object": return {"text": "\\u00e9", "what": object}
        while True: pass

    async def meet(first: bool) -> str:
        """Two calls that end only together.

        Args:
            first: Which.
        """
        met.set() if first else None
        await met.wait()
        return "met"

    async def hang(how: str) -> str:
        """It awaits for ever, or cancels itself, or ends the process.

        Args:
            how: It hangs.
        """
        if how == "exit": sys.exit(3)
        if how == "cancel":
            inner = asyncio.create_task(asyncio.sleep(60))
            inner.cancel()
            await inner
        await asyncio.sleep(60)

    running, most, lock = 0, 0, threading.Lock()

    def crowd(seconds: float) -> int:
        """How many of it have run at a time.

        Args:
            seconds: It takes.
        """
        global running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(seconds)
        with lock:
            running -= 1
        return most

    async def use_up(what: Literal["memory", "threads"]) -> None:
        """Nothing is left.

        Args:
            what: Of it.
        """
        if what == "memory": raise MemoryError
        threading.stack_size(1 << 47)  # more than there are addresses: the machine refuses the next thread

    class Sums:
        tools = [add, bad, meet, hang, crowd, use_up]
        async def reset(self, task):
            self.seen = []
            assert "torch" not in sys.modules, "hundreds of MB for each process"
            return task["prompt"]
        async def count(self, word: str) -> int:
            """How often this rollout has asked for a word.

            Args:
                word: Asked for.
            """
            self.seen.append(word)
            return self.seen.count(word)
        tools += [count]
        async def step(self, turn):
            if turn.results: return turn.results, 0.25, False
            return None, float(turn.text == "end"), True
        async def cut(self): return 0.0

    class Plain:
        async def reset(self, task): return "x"
        async def step(self, turn): return "x", 0.0, True

    class Undescribed(Plain):
        def silent(a: int): pass
        tools = [silent]

    class Twice(Plain):
        tools = [add, add]
'''


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_environments.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ScriptedModel:
    found = ScriptedModel(tiny_model, max_tokens=40_000)
    found.encoder.tokenizer.chat_template = TEMPLATE_WITH_TOOLS
    return found


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def with_tools(name: str = "Sums", **settings: Any) -> EnvironmentConfig:
    return environment(name, **{"tool_parser": "qwen25", "start_deadline_s": 300, **settings})


def played(model: ScriptedModel, *scripts: list[str], **settings: Any) -> list[Trajectory]:
    return in_a_pool(with_tools(**settings), lambda pool: asyncio.gather(*(model.rollout(script, pool) for script in scripts)))  # type: ignore[no-any-return]


def results(model: ScriptedModel, one: Trajectory) -> list[str]:
    """What the model has read of its calls."""
    return [part.partition("\n")[2].partition("<|im_end|>")[0] for part in model.read(one).split("<|im_start|>tool ")[1:]]


def test_calls_of_a_turn_run_at_once_and_the_model_reads_what_they_give(model: ScriptedModel) -> None:
    """To the token what transformers makes of the whole, tools shown; two calls that wait for one another; a method sees its own rollout
    alone, in each of which it counts from 1."""
    first = "both: " + call("meet", first=False) + "\n" + call("meet", first=True)
    second = call("add", a=1, b="2") + call("count", word="w") + call("count", word="w") + call("add", a=4)
    (one, other) = played(model, [first, second, "end"], [second, "no"])
    read = [[("meet", "met"), ("meet", "met")], [("add", "3"), ("count", "1"), ("count", "2"), ("add", "5")]]
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT.text}]
    for earlier, said, given in zip((0, 2), (first, second), read, strict=True):
        messages.append({"role": "assistant", "content": said})
        messages += [
            {"role": "tool", "content": text, "name": name, "tool_call_id": f"{place:09d}"}
            for place, (name, text) in enumerate(given, earlier)
        ]
    messages.append({"role": "assistant", "content": "end"})
    tools = in_a_pool(with_tools(), lambda pool: pool.check(PROMPT))
    assert [tool["function"]["name"] for tool in tools] == ["add", "bad", "meet", "hang", "crowd", "use_up", "count"]
    assert tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer", "description": "The one."}, "b": {"type": "integer", "description": "The other."}},
        "required": ["a"],
    }
    whole = model.encoder.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert model.read(one) + "\n" == whole and '"description": "How often this rollout has asked for a word."' in whole
    assert (one.turns, one.reward, one.turn_rewards, one.tool_calls, one.tool_errors) == (3, 1.5, (0.25, 0.25, 1.0), 6, 0)
    assert results(model, other) == ["3", "1", "2", "5"] and (other.reward, other.tool_calls) == (0.25, 4)
    assert (one.facts.tool_calls, other.facts.tool_errors) == (6, 0)


GOES_WRONG = {
    call("add"): "error: a: Missing required argument",
    call("add", a="1.5", c=2): "error: a: Input should be a valid integer, ",
    '<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>': "error: TypeError: the arguments are no JSON object",
    call("bad", how="dance"): "error: how: Input should be 'raise', 'sleep', ",
    call("bad", how="raise"): "error: KeyError: 'xxxxx",
    call("bad", how="exit"): "error: SystemExit: 3",
    call("bad", how="stop"): "error: RuntimeError: coroutine raised StopIteration",
    call("bad", how="sleep"): "error: it took more than 4 s",
    call("bad", how="spin"): "error: it took more than 4 s",
    call("hang", how="wait"): "error: it took more than 4 s",
    call("hang", how="exit"): "error: SystemExit: 3",
    call("hang", how="cancel"): "error: ",
    call("bad", how="long"): "yyyyy",
    call("bad", how="odd"): "?",
    call("bad", how="nothing"): "null",
    call("bad", how="object"): '{"text": "é", "what": "<class \'object\'>"}',
}
"""Calls, and how what is read of them begins: the last four go well."""


def test_whatever_goes_wrong_with_a_call_is_what_the_model_reads(model: ScriptedModel) -> None:
    """All in one turn, beside another rollout of the process, which notices nothing; no result is longer than it may be. The threads that
    are left behind keep nobody waiting."""
    mine, other = played(model, ["".join(GOES_WRONG), call("add", a=1), "end"], [call("add", a=1), call("add", a=2), "end"], deadline_s=8.0)
    assert (mine.error, mine.turns, mine.reward, mine.tool_calls, mine.tool_errors) == (None, 3, 1.5, 17, 12)
    *found, after = results(model, mine)
    assert len(found) == len(GOES_WRONG) and after == "2"
    for text, begins in zip(found, GOES_WRONG.values(), strict=True):
        assert text.startswith(begins) and len(text) <= LONGEST_RESULT + 60, text[:200]
    assert found[-4].endswith(f"... ({(1 << 23) - LONGEST_RESULT} more characters are cut off)")
    assert results(model, other) == ["2", "3"] and (other.tool_errors, other.reward) == (0, 1.5)


def test_calls_beyond_the_limit_of_a_turn_are_not_run(model: ScriptedModel) -> None:
    (one,) = played(model, [call("count", word="w") * (MOST_CALLS + 2), call("count", word="w"), "end"])
    assert results(model, one) == [
        *(str(number + 1) for number in range(MOST_CALLS)),
        *[f"error: it was not run: a turn has {MOST_CALLS} calls at most"] * 2,
        str(MOST_CALLS + 1),
    ]
    assert one.tool_errors == 2


def test_a_process_has_so_many_threads_for_calls(model: ScriptedModel) -> None:
    """The calls of five rollouts are more: the others wait, and none fails."""
    rollouts = MOST_THREADS // MOST_CALLS + 1
    found = played(model, *[[call("crowd", seconds=1) * MOST_CALLS, call("crowd", seconds=0), "end"]] * rollouts, deadline_s=120.0)
    assert [(one.error, one.tool_errors) for one in found] == [(None, 0)] * rollouts
    assert {results(model, one)[-1] for one in found} == {str(MOST_THREADS)}


@pytest.mark.parametrize(("what", "why"), [("memory", "ran out of memory"), ("threads", "NoThread: can't start new thread")])
def test_a_process_without_memory_or_threads_is_not_the_model_s_doing(model: ScriptedModel, what: str, why: str) -> None:
    (one,) = played(model, [call("use_up", what=what), call("add", a=1), "end"])
    assert one.reward is None and why in (one.error or ""), one.error


def test_what_is_no_call_is_an_answer(model: ScriptedModel) -> None:
    """Half a call, a tool that isn't there, and a call in a turn that a limit cuts."""
    scripts = ['<tool_call>\n{"name": "add", '], [call("subtract", a=1)], [call("add", a=1) + "9" * 50]
    for one in played(model, *scripts, max_turn_tokens=90):
        assert (one.turns, one.tool_calls, one.reward) == (1, 0, 0.0)
    (cut,) = played(model, [call("add", a=1), call("add", a=1)], max_turns=2)
    assert (cut.finish_reason, cut.turns, cut.tool_calls) == (FinishReason.LENGTH, 2, 2)


@pytest.mark.parametrize(
    ("name", "parser", "message"),
    [
        ("Sums", None, "it has tools, and no parser for the model's calls; set rollout.environment.tool_parser, e.g. qwen25"),
        ("Plain", "qwen25", "rollout.environment.tool_parser = qwen25, and user_environments:Plain has no `tools` to call"),
        ("Sums", "qwen26", "rollout.environment.tool_parser = qwen26: SGLang has no such parser"),
        ("Undescribed", "qwen25", "can't be described to the model: DocstringParsingException"),
        ("Twice", "qwen25", "two of its tools have the name add; rename one"),
    ],
)
def test_a_mistake_shows_at_the_start(name: str, parser: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        in_a_pool(with_tools(name, tool_parser=parser), lambda pool: pool.check(PROMPT))
    assert message in str(caught.value)


def test_a_rollout_with_tools_goes_on_elsewhere(model: ScriptedModel) -> None:
    """Its calls are made again, and counted once."""
    script = [call("count", word="w"), call("count", word="w"), "end"]

    async def play() -> tuple[Trajectory, Trajectory]:
        pools = [EnvironmentPool(with_tools()) for _ in range(2)]
        try:
            _, playing = model.playing(script, pools[0], stopped_in=1)
            begun = await playing
            return begun, await model.rollout(script, pools[1], begun)
        finally:
            for pool in pools:
                await pool.close()

    begun, whole = asyncio.run(play())
    assert begun.reward is None and whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert results(model, whole) == ["1", "2"] and (whole.tool_calls, whole.reward) == (2, 1.5)
