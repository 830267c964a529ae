"""The HTTP server of a rollout worker: a base URL and a key for each rollout.

    POST /sessions/ID/v1/chat/completions    OpenAI's form, streamed or not
    GET  /sessions/ID/v1/models
    POST /sessions/ID/inference/v1/generate  token ids in, token ids with logprobs out; also without /sessions/ID, by the key alone

It listens on loopback or, if it is told so, on another address of its node; there is no TLS. It answers nobody without the session's key.
Keys are in no URL and in no log: nothing of a request is logged.
A stream begins at once and says that it lives; its turn comes in one piece, when the model has ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.door.conversation import Conversation, RefusedRequest, Turn
from evenkeel.rollout.door.requests import chat_request, token_request
from evenkeel.rollout.tasks.chat import ChatEncoder

log = logging.getLogger("evenkeel.door")
LARGEST_BODY_BYTES = 32 << 20
"""Of a request. A conversation of 256,000 tokens has about a megabyte."""
LOOPBACK = "127.0.0.1"
# aiohttp's own would write down the line of a request that is no HTTP, its key included.
_QUIET = logging.Logger("the door's server", logging.CRITICAL + 1)
_SIGN_OF_LIFE_S = 10.0
# Of a connection without a request. Clients open another one, as for one that an agent has kept through a long call of a tool.
_IDLE_S = 60.0
# Connections beyond the limit that are told so at a time, and the seconds that one of them may take; others are cut off.
_MOST_REFUSED, _REFUSED_S = 64, 2.0
# Ended sessions that are told from those that never were.
_REMEMBERED = 10_000
_LOST = "this session has ended: its agent is over, or the run has given it up"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Address:
    """Where an agent finds its session."""

    base_url: str
    """As OpenAI's clients take it."""
    key: str
    """For the header Authorization: Bearer KEY."""
    session: str


@dataclass(frozen=True, slots=True)
class _Open:
    conversation: Conversation
    key: str
    how: AnswerSampling


class Door:
    """Sessions by their ids. All belong to the event loop on which it was opened."""

    def __init__(self, model: str, encoder: ChatEncoder, host: str, connections: int) -> None:
        """Use Door.opened.

        Args:
            model: the name that agents ask for.
            host: the address that it listens on.
            connections: at a time, about; one more is told so.
        """
        self.model, self.host, self._encoder, self._connections = model, host, encoder, connections
        self._open: dict[str, _Open] = {}
        # id -> key of sessions that have ended, the oldest first.
        self._ended: OrderedDict[str, str] = OrderedDict()
        app = web.Application(middlewares=[self._guarded], client_max_size=LARGEST_BODY_BYTES)
        app.add_routes(
            [
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
                web.get("/sessions/{id}/v1/models", self._models),
                web.post("/sessions/{id}/inference/v1/generate", self._generate),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        seconds: dict[str, Any] = {"shutdown_timeout": 1.0, "keepalive_timeout": _IDLE_S}
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, logger=_QUIET, **seconds)
        self._listening: asyncio.Server
        self._refused = set[_TooMany]()
        # As URLs and Host headers write it.
        self._place = ""

    @classmethod
    async def opened(cls, model: str, encoder: ChatEncoder, host: str = LOOPBACK, connections: int = 256) -> Door:
        """A door on a free port. Args: as Door. Raises: OSError."""
        door = cls(model, encoder, host, connections)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        door._place = f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        await door._runner.setup()
        door._listening = await asyncio.get_running_loop().create_server(door._protocol, sock=listener)
        return door

    def _protocol(self) -> asyncio.Protocol:
        """Of a new connection."""
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < self._connections else _TooMany(self._refused, self._connections)

    async def close(self) -> None:
        """End all sessions and the server."""
        for session in list(self._open):
            self._end(session)
        self._listening.close()
        await self._runner.cleanup()

    def admit(self, conversation: Conversation, how: AnswerSampling) -> Address:
        """Open a session. Args: how: it is sampled."""
        session, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._open[session] = _Open(conversation, key, how)
        return Address(f"http://{self._place}/sessions/{session}/v1", key, session)

    def end(self, address: Address) -> None:
        """End a session, and the turn under way."""
        self._end(address.session)

    def _end(self, session: str) -> None:
        if (found := self._open.pop(session, None)) is not None:
            found.conversation.end()
            self._ended[session] = found.key
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    # -- requests ----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever happens, an answer of one sentence in OpenAI's form."""
        try:
            return await handler(request)
        except RefusedRequest as error:
            return _error(str(error), error.status, error.code)
        except web.HTTPRequestEntityTooLarge:
            return _error(f"the body has more than the {LARGEST_BODY_BYTES} bytes that the door takes", 413)
        except web.HTTPException as error:
            return _error(
                f"{request.method} here: {error.reason}; the door has /sessions/ID/v1/chat/completions and .../v1/models", error.status
            )
        except ConnectionError:  # the client has gone; aiohttp knows what to do
            raise
        except Exception as error:
            return _error(_failure(error), 500)

    def _session(self, request: web.Request) -> _Open:
        """Raises: RefusedRequest."""
        if request.headers.get("Host", "").replace("localhost:", f"{LOOPBACK}:") != self._place:
            raise RefusedRequest("the Host header names another place: a page of somebody else's asks, or a proxy rewrites it", status=403)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            by_key = (name for name, one in self._open.items() if _same(one.key, key))
            session = request.match_info.get("id") or next(by_key, "")
            found = self._open.get(session)
            if found is not None and _same(found.key, key):
                return found
            if session in self._ended and _same(self._ended[session], key):
                raise RefusedRequest(_LOST, status=410)
        raise RefusedRequest("no session has this id and key; the key goes into the header Authorization: Bearer KEY", status=401)

    async def _asked(self, request: web.Request) -> tuple[_Open, Any]:
        """The session of a request, and its body. Raises: RefusedRequest."""
        session = self._session(request)
        with _refusals_of(session.conversation):
            body = await _body(request)
        return self._session(request), body  # it may have ended meanwhile, and would begin a turn that nobody ends

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "evenkeel"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._asked(request)
        with _refusals_of(session.conversation):
            asked = chat_request(body, self.model, session.how)
            turn = session.conversation.chat(asked.messages, asked.tools, has_calls=asked.has_calls, max_tokens=asked.max_tokens)
            if not asked.is_streamed:
                return web.json_response(self._completion(await _ended(turn), has_logprobs=asked.has_logprobs))
        return await self._streamed(request, session.conversation, turn, has_logprobs=asked.has_logprobs, has_usage=asked.has_usage)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._asked(request)
        with _refusals_of(session.conversation):
            asked = token_request(body, self.model, session.how, self._encoder.ends.ids)
            turn = await _ended(session.conversation.generate(asked.ids, max_tokens=asked.max_tokens))
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(turn.ids, turn.logprobs, strict=True)]
        choice = {"index": 0, "token_ids": list(turn.ids), "finish_reason": _finish(turn), "logprobs": {"content": content}}
        return web.json_response({"request_id": secrets.token_hex(8), "choices": [choice], "usage": _usage(turn)})

    async def _streamed(
        self, request: web.Request, conversation: Conversation, turn: asyncio.Task[Turn], *, has_logprobs: bool, has_usage: bool
    ) -> web.StreamResponse:
        """An answer that has begun: what goes wrong from here on is its last event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not (await asyncio.wait({turn}, timeout=_SIGN_OF_LIFE_S))[0]:
            await response.write(b": sampling\n\n")
        try:
            with _refusals_of(conversation):
                whole = self._completion(await _ended(turn), has_logprobs=has_logprobs)
        except Exception as error:
            told = (str(error), error.code) if isinstance(error, RefusedRequest) else (_failure(error), None)
            await _send(response, _error_body(*told))
            return response
        usage = whole.pop("usage")
        (choice,) = whole.pop("choices")
        chunk = {**whole, "object": "chat.completion.chunk"}
        delta = choice["message"]
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        said = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        for part in (said, {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}):
            await _send(response, chunk | {"choices": [part]})
        if has_usage:
            await _send(response, chunk | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _completion(self, turn: Turn, *, has_logprobs: bool) -> dict[str, Any]:
        """OpenAI's chat.completion."""
        logprobs: dict[str, Any] | None = None
        if has_logprobs:
            named = zip(map(self._encoder.name_of, turn.ids), turn.logprobs, strict=True)
            logprobs = {"content": [{"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []} for name, logprob in named]}
        finish = "tool_calls" if turn.message.get("tool_calls") else _finish(turn)
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [{"index": 0, "message": dict(turn.message), "finish_reason": finish, "logprobs": logprobs}],
            "usage": _usage(turn),
        }


class _TooMany(asyncio.Protocol):
    """A connection beyond the limit: its request gets one sentence, after which clients ask again, and it ends."""

    def __init__(self, there: set[_TooMany], most: int) -> None:
        """Args: there: all that there are. most: the limit."""
        self._there, self._most, self._is_answered = there, most, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._there) >= _MOST_REFUSED:
            transport.abort()
            return
        self._there.add(self)
        self._end = asyncio.get_running_loop().call_later(_REFUSED_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:  # the rest of its request
            return
        self._is_answered = True
        said = f"the door has {self._most} connections, and takes no more at a time; close those that aren't needed, or ask again later"
        body = json.dumps(_error_body(said, None)).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._there:
            self._there.discard(self)
            self._end.cancel()


@contextlib.contextmanager
def _refusals_of(conversation: Conversation) -> Iterator[None]:
    """A block whose refusals the conversation remembers, for the people who read why its agent gave up."""
    try:
        yield
    except RefusedRequest as error:
        conversation.refusal = str(error)
        raise


async def _body(request: web.Request) -> Any:
    """Raises: RefusedRequest."""
    try:
        text = (await request.read()).decode()
        found = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is no text, and no tokenizer takes it
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is no JSON ({error})") from error


async def _ended(turn: asyncio.Task[Turn]) -> Turn:
    """The turn; it goes on if the request for it is given up. Raises: RefusedRequest."""
    await asyncio.wait({turn})
    if turn.cancelled():
        raise RefusedRequest(_LOST, status=410)
    return turn.result()


def _same(key: str, given: str) -> bool:
    return hmac.compare_digest(key.encode(), given.encode(errors="surrogateescape"))


def _finish(turn: Turn) -> str:
    return "length" if turn.is_cut else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    return {"prompt_tokens": turn.read_tokens, "completion_tokens": len(turn.ids), "total_tokens": turn.read_tokens + len(turn.ids)}


def _failure(error: Exception) -> str:
    """What a client is told of an error that is the door's own, and the log in full."""
    log.error("a request of a session", exc_info=error)
    return f"the door failed: {type(error).__name__}"


def _error_body(message: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _error(message: str, status: int, code: str | None = None) -> web.Response:
    return web.json_response(_error_body(message, code), status=status)


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
