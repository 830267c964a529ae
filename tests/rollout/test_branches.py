"""Rollouts of several sequences by the agents' door: histories made short, sub-agents, other ways from an earlier turn. Each token is
sampled in one sequence, and read, as it was sampled, in those that go on from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evenkeel.rollout.config import ExactMatchReward, SamplingConfig
from evenkeel.rollout.continuation import kept, unsampled
from evenkeel.rollout.door.conversation import NO_ROOM, Conversation, RefusedRequest, canonical
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FinishReason, Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import Script, scripted, user
from tests.rollout.engine_scene import TOLERANCE
from tests.rollout.hf_reference import hf_model, largest_difference
from tests.rollout.test_session import expected

TOOL = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> ChatEncoder:
    return ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def in_characters(encoder: ChatEncoder, text: str) -> list[int]:
    """Ids of a text that its tokenizer would write with others."""
    ids = [token for character in text for token in encoder.tokenizer.encode(character, add_special_tokens=False)]
    assert ids != encoder.tokenizer.encode(text, add_special_tokens=False)
    return ids


def told(one: Trajectory, encoder: ChatEncoder) -> list[str]:
    """What each turn says."""
    return [encoder.text_of(segment.ids) for segment in one.segments if segment.sampled is not None]


def test_a_history_made_short_and_a_sub_agent_are_sequences_of_the_rollout(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """The first begins otherwise, with words of the model in it that it reads alone; so does the second, with other tools. Each goes on;
    the one in which the model spoke last is the rollout's own."""
    script = Script(encoder, "aa", "bb", "cc", "dd", "ee")
    first = [user("1"), said("aa"), user("2")]
    short = [user("so far: 1"), said("bb"), user("3")]
    other = [{"role": "system", "content": "look"}, user("4")]
    again = [*short, said("cc"), user("5")]

    async def run() -> Trajectory | None:
        conversation = scripted(script, encoder, max_sequences=3)
        for messages, tools in ((first[:1], []), (first, []), (short, []), (other, TOOL), (again, [])):
            await conversation.chat(messages, tools)
        assert conversation.trajectory.response_tokens == conversation.played.response_tokens  # type: ignore[union-attr]
        return conversation.played

    played = engine_loop.run(run())
    assert played is not None and (played.sequence_count, played.turns) == (3, 5)
    assert [told(one, encoder) for one in played.sequences] == [["aa", "bb"], ["dd"], ["cc", "ee"]]
    whole = [encoder.encode(first), encoder.encode(short), encoder.encode(other, TOOL), encoder.encode(again)]
    assert script.read[1:] == list(map(list, whole))


def test_another_way_from_an_earlier_turn_reads_it_as_it_was_sampled(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """To the token, though its tokenizer would write the turn with others; also where it leaves another branch, at a turn of that one."""
    turns = [in_characters(encoder, text) for text in ("12 + 34", "41 + 23")]
    script = Script(encoder, turns[0], "bb", turns[1], "dd", "ff")
    start = [user("1"), said("12 + 34")]
    branch = [*start, user("TWO"), said("41 + 23")]

    async def run() -> Trajectory | None:
        conversation = scripted(script, encoder, max_sequences=3)
        for messages in (start[:1], [*start, user("2")], [*start, user("TWO")], [*branch, user("3")], [*branch, user("THREE")]):
            await conversation.chat(messages)
        return conversation.played

    found = engine_loop.run(run())
    assert found is not None
    first, second, third = found.sequences
    ways = [["12 + 34", "bb"], ["41 + 23", "dd"], ["ff"]]
    assert [told(one, encoder) for one in found.sequences] == ways and script.read[-1] == third.prompt_ids.tolist()
    after_one = [*first.prompt_ids, *turns[0], encoder.ends.of_turn]
    assert second.prompt_ids[: len(after_one)].tolist() == after_one and len(second.prompt_ids) > len(after_one)
    after_two = [*second.prompt_ids, *turns[1], encoder.ends.of_turn]
    assert third.prompt_ids[: len(after_two)].tolist() == after_two


def test_an_earlier_request_is_sampled_anew_and_the_last_one_is_not(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    script = Script(encoder, "aa", "bb", "AA")

    async def run() -> tuple[list[str], Trajectory | None]:
        conversation = scripted(script, encoder, max_sequences=2)
        asked = [[user("1")], [user("1")], [user("1"), said("aa"), user("2")], [user("1")]]
        return [(await conversation.chat(one)).message["content"] for one in asked], conversation.played

    texts, played = engine_loop.run(run())
    assert texts == ["aa", "aa", "bb", "AA"]
    assert played is not None and [told(one, encoder) for one in played.sequences] == [["aa", "bb"], ["AA"]]


class Together(Script):
    """After its first turn it answers once so many more are asked for."""

    def __init__(self, encoder: ChatEncoder, *texts: str, count: int) -> None:
        super().__init__(encoder, *texts)
        self._missing, self._all = count, asyncio.Event()

    async def _go_on(self, begun: Trajectory, most: int) -> Trajectory:
        if self.read:
            self._missing -= 1
            if not self._missing:
                self._all.set()
            await asyncio.wait_for(self._all.wait(), 60)
        return await super()._go_on(begun, most)


def test_sub_agents_are_sampled_side_by_side(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """One from nothing; two from one turn, of which the first goes on in the line itself."""

    async def run() -> tuple[list[str], Trajectory | None]:
        conversation = scripted(Together(encoder, "aa", "x", "y", "z", count=3), encoder, max_sequences=9)
        await conversation.chat([user("1")])
        asked = [[user("1"), said("aa"), user("a")], [user("1"), said("aa"), user("b")], [user("c")]]
        turns = await asyncio.gather(*(conversation.chat(messages) for messages in asked))
        return [turn.message["content"] for turn in turns], conversation.played

    texts, played = engine_loop.run(run())
    assert sorted(texts) == ["x", "y", "z"] and played is not None
    assert sorted(len(told(one, encoder)) for one in played.sequences) == [1, 1, 2] and played.response_tokens == 3 + 2 * 3


def test_turns_under_way_count_against_the_limit(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Three of four that are asked for at once are sampled; which ones goes by who comes first."""

    async def run() -> list[Any]:
        conversation = scripted(Together(encoder, "aa", "x", "y", "z", count=3), encoder, max_turns=4, max_sequences=9)
        await conversation.chat([user("1")])
        asked = [conversation.chat([user(str(number))]) for number in range(2, 6)]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = engine_loop.run(run())
    refused = [one for one in found if isinstance(one, RefusedRequest)]
    assert len(refused) == 1 and str(refused[0]) == "the session has had its 4 turns (rollout.agent.max_turns)"
    assert sorted(one.message["content"] for one in found if one is not refused[0]) == ["x", "y", "z"]


def test_what_alters_the_model_s_words_or_is_one_line_too_many_is_refused(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """The session goes on afterwards, and such requests leave nothing behind."""
    edited = [user("1"), said("aA"), user("2")]
    refused = {
        "message 1: its content was 'aa', and comes back as 'aA'; token 1 of that turn, ": edited,
        "message 2 is an assistant's, and the model didn't say it": [user("1"), said("aa"), said("cc"), user("2")],
        "nothing is new in this request": [user("1"), said("aa")],
        "the last message is an assistant's": [user("0"), said("aa")],
    }

    async def run() -> Trajectory | None:
        conversation = scripted(Script(encoder, "aa", "bb", "cc"), encoder, max_sequences=2)
        await conversation.chat([user("1")])
        for sentence, messages in refused.items():
            with pytest.raises(RefusedRequest) as error:
                conversation.chat(messages)
            assert str(error.value).startswith(sentence)
        await conversation.chat([user("0")])
        for messages in ([user("3")], [user("1")]):
            with pytest.raises(RefusedRequest, match=r"and the session has had its 2 \(rollout.agent.max_sequences\)"):
                conversation.chat(messages) if messages == [user("3")] else conversation.chat(messages, TOOL)
        await conversation.chat([user("1"), said("aa"), user("2")])
        return conversation.played

    played = engine_loop.run(run())
    assert played is not None and [told(one, encoder) for one in played.sequences] == [["bb"], ["aa", "cc"]]


def test_a_line_without_room_is_not_the_end_where_another_one_goes_on(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """An agent that hears of too long a conversation makes its history short; one whose request is the last is cut."""

    async def run() -> tuple[Trajectory | None, Trajectory | None]:
        script = Script(encoder, "aa", "bb")
        conversation = Conversation(unsampled((), "p"), partial(script.begin, max_tokens=30), encoder, max_turns=9, max_sequences=2)
        await conversation.chat([user("1")])
        with pytest.raises(RefusedRequest) as error:
            await conversation.chat([user("1"), said("aa"), user("2" * 40)])
        assert error.value.code == NO_ROOM
        cut = conversation.played
        await conversation.chat([user("short")])
        return cut, conversation.played

    cut, whole = engine_loop.run(run())
    assert cut is not None and (cut.finish_reason, cut.sequence_count) == (FinishReason.LENGTH, 1)
    assert whole is not None and (whole.finish_reason, whole.sequence_count) == (FinishReason.STOP, 2)


def test_token_ids_branch_where_the_model_read_and_are_refused_where_it_spoke(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """From another token of what was given, and from before a turn; a turn with other ids is named."""

    async def run() -> Trajectory | None:
        conversation = scripted(Script(encoder, "aa", "bb", "cc", "dd"), encoder, max_sequences=3)
        first = [5, 6, 7]
        turn = list((await conversation.generate(first)).ids)
        await conversation.generate([*first, *turn, 8])
        for other in ([*first, turn[0] + 1, *turn[1:], 8], [*first, *turn[:1]], [*first, turn[0], turn[1] + 1]):
            with pytest.raises(RefusedRequest, match=rf"token [34] of the session is {turn[0]}|{turn[1]}, and"):
                conversation.generate(other)
        await conversation.generate([*first, *turn, 9])
        await conversation.generate([*first])
        with pytest.raises(RefusedRequest, match=r"token 1 of the session is 6, and 1 is given there.*has had its 3 "):
            conversation.generate([5, 1])
        return conversation.played

    played = engine_loop.run(run())
    assert played is not None and [told(one, encoder) for one in played.sequences] == [["aa", "bb"], ["cc"], ["dd"]]
    assert [one.prompt_ids.tolist()[-1] for one in played.sequences] == [7, 9, 7]


def test_several_lines_go_on_elsewhere_with_a_new_agent(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """The last one was being sampled when the worker left. An agent that asks the same has all turns as they were; one that leaves a line
    out, or asks it otherwise, has the others."""
    asked = [[user("1")], [user("short")], [user("1"), said("aa"), user("2")], [user("1"), said("aa"), user("TWO")]]

    async def run() -> None:
        conversation = scripted(Script(encoder, "aa", "bb", "cc", "dddd"), encoder, max_sequences=3)
        for messages in asked:
            await conversation.chat(messages)
        *others, last = conversation.trajectory.sequences
        left = replace(kept(replace(last, finish_reason=FinishReason.ABORT, branches=()), 10_000), branches=tuple(others))
        again = Script(encoder, "!")
        same = Conversation(left, again.begin, encoder, max_turns=9, max_sequences=3)
        assert same.trajectory == left
        texts = [(await same.chat(messages)).message["content"] for messages in asked]
        assert texts == ["aa", "bb", "cc", "dddd!"] and again.read == [left.token_ids.tolist()]
        assert same.played is not None and same.played.branches == left.branches and same.played.response_tokens == left.response_tokens + 2
        again = Script(encoder, "xx")
        other = Conversation(left, again.begin, encoder, max_turns=9, max_sequences=3)
        for messages in ([user("LONG")], asked[0], asked[2]):
            await other.chat(messages)
        assert other.played is not None
        assert sorted(told(one, encoder) for one in other.played.sequences) == [["aa", "cc"], ["xx"]]
        assert other.trajectory.response_tokens == left.response_tokens + 3, "what nobody has come to again is still there"

    engine_loop.run(run())


OPERATIONS = st.lists(st.tuples(st.sampled_from(["go on", "back", "anew", "short"]), st.integers(0, 99), st.integers(0, 99)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_tokens_of_every_session_balance(engine_loop: BackgroundLoop, encoder: ChatEncoder, operations: list[tuple[str, int, int]]) -> None:
    """Whatever an agent does: what the engine sampled is, each token once, in the sequences; and each sequence is, to the token, what
    the template makes of the messages of its line."""
    texts = [f"{chr(97 + i)}{i} {chr(98 + i)}" for i in range(len(operations) + 1)]
    script = Script(encoder, *texts)
    lines: list[list[dict[str, str]]] = []

    async def run() -> Conversation:
        conversation = scripted(script, encoder, max_sequences=99)
        for number, (what, which, where) in enumerate([("anew", 0, 0), *operations]):
            new = user(f"message {number}")
            line = lines[which % len(lines)] if lines else []
            if what == "anew":
                asked = [new]
            elif what == "go on":
                asked = [*line, new]
            elif what == "back":
                asked = [*line[: 2 * (where % (len(line) // 2 + 1))], new]
            else:
                asked = [user("so far"), *line[1:], new]
            turn = await conversation.chat(asked)
            whole = [*asked, turn.message]
            if what == "go on" or asked[:-1] in lines:
                lines[lines.index(asked[:-1])] = whole
            else:
                lines.append(whole)
        return conversation

    conversation = engine_loop.run(run())
    played = conversation.played
    assert played is not None and played.response_tokens == conversation.trajectory.response_tokens
    end = encoder.ends.of_turn
    sampled = [token for text in texts for token in [*encoder.tokenizer.encode(text, add_special_tokens=False), end]]
    assert sorted(token for one in played.sequences for token in one.response_ids) == sorted(sampled)
    found = [one.token_ids.tolist() for one in played.sequences]
    wanted = [[*encoder.encode(line[:-1]), *encoder.tokenizer.encode(line[-1]["content"], add_special_tokens=False), end] for line in lines]
    assert sorted(found) == sorted(wanted)


@pytest.mark.engine
def test_branches_on_the_real_engine(
    shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, encoder: ChatEncoder
) -> None:
    """20 sessions of four sequences: two turns, one sampled anew from the same request, another way, and a history made short. The
    logprobs of all are those of one forward of transformers over each sequence; the turn that is sampled anew is another one."""
    rewards = RewardPool(ExactMatchReward(processes=1))
    sampler = Sampler(shared_engine, {"": Player(encoder, rewards, SamplingConfig(samples_per_group=2, max_tokens=400))}, seed=3)

    async def talk(number: int) -> Trajectory:
        async def begin(begun: Trajectory, line: int) -> Session:
            return sampler.session(Prompt(begun.prompt_id, "", tuple(begun.prompt_ids), ""), 0, begun=begun, line=line)

        conversation = Conversation(unsampled((), f"train/0/{number}"), begin, encoder, max_turns=9, max_sequences=4)
        first = [user(f"{number} + 4 =")]
        turn = await conversation.chat(first, max_tokens=8)
        after = [*first, canonical(turn.message, 1)]
        await conversation.chat([*after, user("and?")], max_tokens=8)
        await asyncio.gather(
            conversation.chat([*after, user("or?")], max_tokens=8),
            conversation.chat(first, max_tokens=8),
            conversation.chat([user("so far"), after[1], user("?")], max_tokens=8),
        )
        assert conversation.played is not None
        return conversation.played

    async def run() -> list[Trajectory]:
        return list(await asyncio.gather(*map(talk, range(20))))

    model = {shared_engine.version: hf_model(tiny_model)}
    others = 0
    for one in engine_loop.run(run()):
        assert (one.sequence_count, one.turns) == (4, 5)
        for sequence in one.sequences:
            assert largest_difference(sequence.behavior_logprobs, expected(model, sequence)[0]) < TOLERANCE
        same = [sequence for sequence in one.sequences if sequence.prompt_ids == one.sequences[0].prompt_ids]
        others += len({tuple(told(sequence, encoder)[:1]) for sequence in same}) == len(same) == 2
    assert others > 15, "each sequence has a seed of its own"
