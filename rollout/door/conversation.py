"""One rollout as an agent sees it: messages or token ids outside, the session's exact tokens inside.

A request has all that was said so far, and something new. What was said is compared with what the door knows, message by message or token
by token, and only the new part is rendered and read; nothing that comes back from a client is tokenised again. The same request once more,
as after a cut connection, gets the same turn.

Requests that go on from the end of one another are a line: a sequence of the rollout. One that doesn't begins another line, with all turns
of a known one that it begins with, to the token, and then what it says; or with itself alone, where it begins otherwise, as a history does
that was made short. A request that alters what the model said is refused, and the session stays as it was.

A rollout that goes on elsewhere, because its worker leaves, is played again by a new agent: as long as that one gives the model the same to
read, it gets the turns that were sampled; from the first other token on, the model goes on from what it was given now.

    a line:  waiting -> (request) sampling -> (turn) waiting -> ... -> ended

An agent moves it; its connection doesn't: a turn is sampled to its end whether or not somebody still waits for it. Turns of several lines
are sampled side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from evenkeel.correction.errors import DataError, EvenkeelError, NoRoomError, RequestError
from evenkeel.rollout.continuation import is_begun, of_first_turns, unsampled
from evenkeel.rollout.engine.engine import in_answer_thread
from evenkeel.rollout.limited_processes.child import shortened
from evenkeel.rollout.session import OpenSession, Session
from evenkeel.rollout.tasks.chat import ChatEncoder, common
from evenkeel.rollout.tool_calls import Calls, no_calls
from evenkeel.rollout.trajectory import FinishReason, Segment, Trajectory, ids_of

Message = dict[str, Any]
NO_ROOM = "context_length_exceeded"
"""OpenAI's code for a conversation without room for more, which clients know."""
# Characters: it may quote what a request has, which is up to 32 MiB, and becomes part of its rollout's error.
_LONGEST_REFUSAL = 1000


class RefusedRequest(Exception):
    """A request that gets no turn; the message is for the agent's author."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        """Args: status: of HTTP; clients repeat requests that got 408, 409, 429 or 500 and above. code: OpenAI's word, if it has one."""
        super().__init__(shortened(message, _LONGEST_REFUSAL))
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said to one request."""

    ids: Sequence[int]
    """The token that ended it included, if one did."""
    logprobs: Sequence[float]
    """Of each token."""
    message: Message
    """As a client gets it, and has to give it back."""
    is_cut: bool
    """Whether a limit ended it, and not the model."""
    read_tokens: int
    """Tokens before it."""


@dataclass(slots=True, eq=False)
class _Line:
    """A sequence of the rollout, as its agent knows it."""

    number: int
    """From 0, in the order in which they began."""
    start: Sequence[int] = ()
    """Tokens of another line that it goes on from."""
    heard: list[Message] = field(default_factory=list)
    """The conversation so far as it should come back; empty where it is of token ids."""
    told: list[Message] = field(default_factory=list)
    """The same as the template is given it: with all that the model said, calls included."""
    said: dict[int, Sequence[int]] = field(default_factory=dict)
    """Ids of what the model said, by the number of the message."""
    tools: Sequence[Mapping[str, Any]] = ()
    turns: int = 0
    """Of its own, that its agent has had."""
    session: Session | None = None
    request: Any = None
    """The last one that was taken."""
    turn: asyncio.Task[Turn] | None = None
    """That of this request."""

    @property
    def is_busy(self) -> bool:
        return self.turn is not None and not self.turn.done()

    @property
    def played(self) -> Trajectory:
        """The turns that its agent has had, at least one."""
        assert self.session is not None
        found = self.session.trajectory
        return of_first_turns(found, self.turns) if self.turns < found.turns else found

    def first_turns(self, turns: int) -> list[Segment]:
        """All up to the end of a turn."""
        return [] if self.session is None else [one for one in self.session.trajectory.segments if one.turn < turns]

    def common(self, messages: Sequence[Message]) -> int:
        """How many messages begin as they were heard."""
        return common(self.heard, messages)

    def branch(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], number: int) -> _Line:
        """A line that goes on from all turns of this one that the messages begin with."""
        known = self.common(messages) if tools == self.tools else 0
        kept = max((place + 1 for place in self.said if place < known), default=0)
        if any(one["role"] == "assistant" for one in messages[kept:]):  # turns without what stood before them
            kept = 0
        said = {place: ids for place, ids in self.said.items() if place < kept}
        own = len(said) - (len(self.said) - self.turns)
        start = [token for segment in self.first_turns(own) for token in segment.ids]
        return _Line(number, start, self.heard[:kept], self.told[:kept], said)


class Conversation:
    """A rollout under way."""

    def __init__(
        self,
        begun: Trajectory,
        begin: OpenSession,
        encoder: ChatEncoder,
        *,
        max_turns: int,
        max_sequences: int = 1,
        calls: Calls = no_calls,
    ) -> None:
        """
        Args:
            begun: what there is of it; of one without a token the name alone counts.
            begin: opens the session of a line; called again if the engine refuses the prompt.
            max_turns: of the model, in all lines.
            max_sequences: lines.
        """
        self.failed: asyncio.Future[EvenkeelError] = asyncio.get_running_loop().create_future()
        """What ended it from the engine's side; a result only once there is one."""
        self.sampling_s = 0.0
        """Seconds in which a turn was sampled."""
        self.refusal = ""
        """The last thing that was refused, for people."""
        self._begun, self._begin, self._encoder, self._calls = begun, begin, encoder, calls
        self._max_turns, self._max_sequences = max_turns, max_sequences
        # Sequences that another worker has begun, and that this rollout's agent hasn't come to.
        self._records = [replace(one, branches=()) for one in begun.sequences if one.response_ids]
        self._lines: list[_Line] = []
        # The line of the last turn that the agent has had.
        self._spoke: _Line | None = None
        self._is_cut = False
        # Turns that are sampled now, and since when there is one.
        self._sampling, self._since = 0, 0.0

    @property
    def trajectory(self) -> Trajectory:
        """What there is of it, turns that its agent hasn't come to again included."""
        lines = [line.session.trajectory for line in self._lines if line.session is not None]
        if not lines:
            return self._begun
        *branches, last = [*lines, *self._records]
        return replace(last, branches=tuple(branches))

    @property
    def played(self) -> Trajectory | None:
        """The turns that its agent has had; None: none."""
        if self._spoke is None:
            return None
        branches = tuple(line.played for line in self._lines if line.turns and line is not self._spoke)
        found = replace(self._spoke.played, branches=branches)
        return replace(found, finish_reason=FinishReason.LENGTH) if self._is_cut else found

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it: the last request found no room, or was one turn too many."""
        return self._is_cut

    def end(self) -> None:
        """Take no more requests, and give up the turns under way."""
        for line in self._lines:
            if line.turn is not None:
                line.turn.cancel()

    async def turn_over(self) -> None:
        """Returns when no turn is under way. An engine that leaves ends it soon, and keeps what it has of it."""
        if turns := [line.turn for line in self._lines if line.turn is not None]:
            await asyncio.wait(turns)

    # -- requests ----------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        has_calls: bool = True,
        max_tokens: int | None = None,
    ) -> asyncio.Task[Turn]:
        """The turn that follows some messages.

        Args:
            messages: in the form of `canonical`: the whole conversation.
            has_calls: False: what looks like a call of a tool is text.
        Raises: RefusedRequest.
        """
        request = (messages, tools, has_calls)
        if (again := self._again(request)) is not None:
            return again
        if any(line.turns and not line.heard for line in self._lines):
            raise RefusedRequest("this session has been given token ids; a conversation in messages needs one of its own")
        line = self._line_of_messages(messages, tools)
        kept = len(line.heard)
        new = list(map(_for_template, messages[kept:]))

        def rendered() -> Sequence[int]:
            if not kept:
                return self._encoder.encode(new, tools)
            rest = self._encoder.following(line.told[:-1], line.said[kept - 1], new, tools)
            return rest if line.turns else [*line.start, *rest]

        async def turn() -> Turn:
            try:
                ids = await in_answer_thread(rendered)
            except DataError as error:
                raise RefusedRequest(str(error)) from error
            called = sum(len(one.get("tool_calls", ())) for one in messages)
            found = await self._sampled(line, ids, tools if has_calls else (), max_tokens, called)
            line.said[len(messages)] = found.ids
            line.heard = [*messages, canonical(found.message, len(messages))]
            line.told += [*new, {"role": "assistant", "content": self._encoder.text_of(found.ids)}]
            line.tools = tools
            return found

        return self._take(line, request, turn())

    def generate(self, ids: Sequence[int], *, max_tokens: int | None = None) -> asyncio.Task[Turn]:
        """The turn that follows some tokens. Args: ids: the whole conversation's. Raises: RefusedRequest."""
        if (again := self._again(ids)) is not None:
            return again
        if any(line.heard for line in self._lines):
            raise RefusedRequest("this session has been given messages; token ids need one of their own")
        line, known = self._line_of_tokens(ids)
        return self._take(line, ids, self._sampled(line, ids[known:], (), max_tokens))

    def _again(self, request: Any) -> asyncio.Task[Turn] | None:
        """The turn of a line's last request, if this is the same once more."""
        for line in self._lines:
            turn = line.turn
            is_lost = turn is None or (turn.done() and (turn.cancelled() or turn.exception() is not None))
            if not is_lost and line.request == request:
                return turn
        return None

    def _take(self, line: _Line, request: Any, turn: Coroutine[Any, Any, Turn]) -> asyncio.Task[Turn]:
        if line not in self._lines:
            self._lines.append(line)

        def ended(task: asyncio.Task[Turn]) -> None:
            if not task.cancelled():
                task.exception()  # nobody may wait for it any more
            if line.session is None:  # its prompt was refused: it has not begun
                self._lines.remove(line)

        line.request, line.turn = request, asyncio.ensure_future(turn)
        line.turn.add_done_callback(ended)
        return line.turn

    @property
    def _next_number(self) -> int:
        return max((line.number + 1 for line in self._lines), default=0)

    def _refuse_another(self, why: str) -> None:
        """Refuse what would be one sequence too many. Args: why: it doesn't go on from one that there is."""
        if self._lines and len(self._lines) >= self._max_sequences:
            limit = f", and the session has had its {self._max_sequences} (rollout.agent.max_sequences)" if self._max_sequences > 1 else ""
            raise RefusedRequest(f"{why}{limit}")

    # -- messages ----------------------------------------------------------------------------------------------------

    def _line_of_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Line:
        """The line that goes on with these messages. Raises: RefusedRequest."""
        nearest = max(self._lines, key=lambda line: line.common(messages), default=_Line(0))
        known = nearest.common(messages)
        words = [line.heard[place] for line in self._lines for place in line.said]
        other = [i for i in range(known, len(messages)) if messages[i]["role"] == "assistant" and messages[i] not in words]
        if nearest.said and known in other and known in nearest.said:
            raise RefusedRequest(self._difference(nearest, known, messages[known]))
        if nearest.said and known == len(nearest.heard):
            if known == len(messages):
                raise RefusedRequest("nothing is new in this request: the model needs something to read before each turn")
            if other:
                raise RefusedRequest(f"message {other[0]} is an assistant's, and the model didn't say it; leave it out")
        free = [line for line in self._lines if line.turns and not line.is_busy and line.tools == tools]
        going_on = [line for line in free if line.common(messages) == len(line.heard)]
        if going_on and not any(one["role"] == "assistant" for one in messages[known:]):
            return max(going_on, key=lambda line: len(line.heard))
        self._refuse_another(self._why_new(nearest, messages, tools, known))
        if messages[-1]["role"] == "assistant":
            raise RefusedRequest("the last message is an assistant's, and the model begins its turns itself; end with what it is to answer")
        branches = [line.branch(messages, tools, self._next_number) for line in self._lines]
        return max(branches, key=lambda line: len(line.heard), default=_Line(0))

    def _why_new(self, nearest: _Line, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], known: int) -> str:
        """Why messages don't go on from the end of a line. Args: known: how many of its own they begin with."""
        if known == len(nearest.heard):
            if nearest.is_busy:
                return "a turn of this session is being sampled; the next request comes after its answer"
            if tools != nearest.tools:
                return "the tools are others than those of the session's first request, which stand in its prompt; keep them"
            return "what the model said elsewhere comes after what it said here"
        if known < len(messages):
            return self._difference(nearest, known, messages[known])
        return (
            f"the conversation ends before message {known}, which the session has: it goes on from its end alone; go back in a session of "
            "its own"
        )

    def _difference(self, line: _Line, number: int, given: Message) -> str:
        known = line.heard[number]
        field = next(name for name in (*known, *given) if known.get(name) != given.get(name))
        was, became = known.get(field), given.get(field)
        where = f"message {number}: its {field} was {_short(was)}, and comes back as {_short(became)}"
        if field == "content" and number in line.said and isinstance(became, str):
            place = common(was or "", became)
            token = self._encoder.token_at(line.said[number], place) if not known.get("tool_calls") else None
            if token is not None:
                where += f"; token {token} of that turn, {self._encoder.name_of(line.said[number][token])!r}, is the first that differs"
        return f"{where}. A session goes on from what was said in it; send messages back as they are"

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _line_of_tokens(self, ids: Sequence[int]) -> tuple[_Line, int]:
        """The line that goes on with these tokens, and how many of them it has. Raises: RefusedRequest."""
        known = [(line, [token for one in line.first_turns(line.turns) for token in one.ids]) for line in self._lines if line.turns]
        free = [(line, len(tokens)) for line, tokens in known if not line.is_busy and common(tokens, ids) == len(tokens) < len(ids)]
        if free:
            return max(free, key=lambda one: one[1])
        why = "a turn of this session is being sampled; the next request comes after its answer"
        if known:
            line, tokens = max(known, key=lambda one: common(one[1], ids))
            place = common(tokens, ids)
            if place == len(tokens) == len(ids):
                raise RefusedRequest("nothing is new in this request: the model needs something to read before each turn")
            if place < len(tokens):
                given = f"{ids[place]} is given" if place < len(ids) else "the request ends"
                why = (
                    f"token {place} of the session is {tokens[place]}, and {given} there: a request goes on from the session's own tokens; "
                    "send back what was given and sampled, and then what is new"
                )
                turns = accumulate((len(one.ids) for one in line.first_turns(line.turns)), initial=0)
                begins = {start for start, one in zip(turns, line.first_turns(line.turns), strict=False) if one.sampled is not None}
                is_sampled = [one.sampled is not None for one in line.first_turns(line.turns) for _ in one.ids]
                if is_sampled[place] and not (place in begins and place == len(ids)):
                    raise RefusedRequest(why)
        self._refuse_another(why)
        return _Line(self._next_number), 0

    # -- turns -------------------------------------------------------------------------------------------------------

    async def _sampled(
        self, line: _Line, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], max_tokens: int | None, called: int = 0
    ) -> Turn:
        """Args: tools: whose calls are looked for. called: so many stand before it, by which their ids count. Raises: RefusedRequest."""
        if sum(one.turns for one in self._lines) + self._sampling >= self._max_turns:
            self._is_cut = True
            raise RefusedRequest(f"the session has had its {self._max_turns} turns (rollout.agent.max_turns)", code=NO_ROOM)
        try:
            with self._sampling_counted():
                session, segment = await self._next(line, ids, max_tokens)
        except DataError as error:  # a prompt that is too long, or ids that the model doesn't have
            if not line.turns:
                line.session = None
            is_too_long = isinstance(error, NoRoomError)
            self._is_cut |= is_too_long
            raise RefusedRequest(str(error), code=NO_ROOM if is_too_long else None) from error
        except EvenkeelError as error:
            self._fail(error)
            raise RefusedRequest("the engine gave no turn; the rollout is over", status=503) from error
        trajectory = session.trajectory
        if is_begun(trajectory) and trajectory.turns == line.turns + 1:
            self._fail(RequestError(trajectory.error or "the engine gave the turn up"))
            raise RefusedRequest("the engine has given this turn up; the rollout is over", status=503)
        if segment is None or segment.sampled is None:
            self._is_cut = True
            raise RefusedRequest("the conversation has no room for more (rollout.sampling.max_tokens, the engine's context)", code=NO_ROOM)
        said = self._encoder.text_of(segment.ids)
        text, found = self._calls(said, tools, called) if tools else (said, [])
        message: Message = {"role": "assistant", "content": text}
        if found:
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in found
            ]
        line.turns += 1
        self._spoke, self._is_cut = line, False
        return Turn(
            ids=segment.ids,
            logprobs=trajectory.behavior_logprobs[segment.sampled],
            message=message,
            is_cut=len(self._encoder.ends.without(segment.ids)) == len(segment.ids),
            read_tokens=trajectory.tokens_before(segment.sampled.start),
        )

    async def _next(self, line: _Line, ids: Sequence[int], max_tokens: int | None) -> tuple[Session, Segment | None]:
        """The line's session, and its next turn: one that was sampled before, if it follows the same tokens; or else sampled now."""
        number = line.turns
        if line.session is None:
            record = next((one for one in self._records if one.prompt_ids == ids_of(ids)), None)
            self._records = [one for one in self._records if one is not record]
            try:
                line.session = await self._begin(record or unsampled(ids, self._begun.prompt_id), line.number)
            except BaseException:
                self._records += [] if record is None else [record]
                raise
        elif number < line.session.trajectory.turns and line.session.trajectory.later[number - 1].ids != ids_of(ids):
            line.session.trajectory = of_first_turns(line.session.trajectory, number)
        session, known = line.session, line.session.trajectory
        if number + 1 < known.turns or (number + 1 == known.turns and not is_begun(known)):
            return session, next(one for one in known.segments if one.turn == number and one.sampled is not None)
        return session, await session.sample(ids if number == known.turns else (), max_tokens=max_tokens)

    @contextlib.contextmanager
    def _sampling_counted(self) -> Iterator[None]:
        """A block in which a turn is sampled; the time in which several are counts once."""
        if not self._sampling:
            self._since = time.monotonic()
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1
            if not self._sampling:
                self.sampling_s += time.monotonic() - self._since

    def _fail(self, error: EvenkeelError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


# --- messages in one form ----------------------------------------------------------------------------------------------


_FIELDS = {"system": (), "developer": (), "user": ("name",), "assistant": ("tool_calls", "name"), "tool": ("tool_call_id", "name")}
"""Roles, and the fields of their messages beside role and content."""


def canonical(message: Any, number: int) -> Message:
    """A message of a request in the one form in which messages are compared: content a text, what is empty left out, arguments of calls as
    values.

    Args: number: of the message, for errors.
    Raises: RefusedRequest for what the door doesn't know.
    """
    where = f"message {number}"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _FIELDS:
        raise RefusedRequest(f"{where} has no role of {', '.join(_FIELDS)}")
    found: Message = {"role": role, "content": _text(message.get("content"), where)}
    for name, value in message.items():
        if name in found or value in (None, [], "", {}):
            continue
        if name not in _FIELDS[role]:
            raise RefusedRequest(f"{where} has the field {name!r}, which the template isn't given; leave it out")
        found[name] = [_call(call, where) for call in value] if name == "tool_calls" and isinstance(value, list) else value
    return found


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise RefusedRequest(f"{where} has content that is no text; the model reads text alone")


def _call(call: Any, where: str) -> Message:
    match call:
        case {"id": str() as name_of_call, "function": {"name": str() as name, "arguments": str() as arguments}}:
            return {"id": name_of_call, "type": "function", "function": {"name": name, "arguments": _value(arguments)}}
    raise RefusedRequest(f"{where} has a tool call without id, function.name or function.arguments (a text)")


def _value(arguments: str) -> Any:
    """Arguments of a call; a text that is no JSON stays as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _for_template(message: Message) -> Message:
    """Templates know no role `developer`: it is OpenAI's newer word for system."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
