"""The server of the page: on this machine alone, for whoever has the token, over the files of the named runs.

The address that it prints has a token, which the browser gets a cookie for; without either nothing is served. Host names other than this
machine's are refused, or a page elsewhere could reach it by a name of its own (DNS rebinding). The page runs no script and loads nothing
but its own files, so that what a model wrote stays text even if a view made markup of it.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel.correction.errors import ConfigError
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.views import VIEWS

LOOPBACK = "127.0.0.1"
PAGE = Path(str(files("evenkeel.dashboard") / "page"))
"""The page's own files."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_TOKEN = "Open the address that `evenkeel dashboard` has printed: it has the token that this page asks for.\n"


class _Door:
    """Lets in whoever has the cookie, gives it to whoever has the token, and puts the headers on each answer."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._pass = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._app
        if not _is(request.cookies.get(self._cookie), self._pass):
            answer = PlainTextResponse(_NO_TOKEN, status_code=403)
        if request.url.path == "/" and _is(request.query_params.get("token"), self._token):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._cookie, self._pass, httponly=True, samesite="lax")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        await answer(scope, receive, with_headers)


def _is(given: str | None, secret: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode(), secret.encode())


def application(runs: Sequence[OpenRun], token: str, *, cookie: str = "evenkeel") -> Starlette:
    """The page and its data. Args: cookie: its name; cookies know no ports, so that of another server on this machine must be another."""
    by_name = {view.name: view for view in VIEWS}

    def run_of(query: Mapping[str, str]) -> OpenRun:
        number = query.get("run", "0")
        if not number.isdecimal() or int(number) >= len(runs):
            raise HTTPException(404, f"There is no run {number!r}.")
        return runs[int(number)]

    def data(name: str, query: Mapping[str, str]) -> Any:
        run = run_of(query)
        with run.lock:
            return by_name[name].data(run, query)

    async def view(request: Request) -> Response:
        if (name := request.path_params["view"]) not in by_name:
            raise HTTPException(404, "There is no such view.")
        try:
            return as_json(await run_in_threadpool(data, name, request.query_params))
        except (ValueError, OSError, ConfigError) as error:  # a query of other words, or a file that is damaged or gone
            return as_json({"error": " ".join(str(error).split())}, status_code=422)

    async def pulse(request: Request) -> Response:
        return as_json(await run_in_threadpool(lambda: [run.pulse() for run in runs]))

    async def start(request: Request) -> Response:
        try:
            return as_json(await run_in_threadpool(beginning, runs))
        except (ValueError, OSError, ConfigError) as error:  # config.yaml is damaged or gone
            return as_json({"error": " ".join(str(error).split())}, status_code=422)

    async def index(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    routes = [
        Route("/", index),
        Route("/data/start", start),
        Route("/data/pulse", pulse),
        Route("/data/{view}", view),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"], www_redirect=False),
        Middleware(partial(_Door, token=token, cookie=cookie)),
        Middleware(GZipMiddleware, compresslevel=2),  # it has to come through a tunnel at most
    ]
    return Starlette(routes=routes, middleware=middleware)


def beginning(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """What the page knows before it asks for a view."""
    return {
        "runs": [{"name": run.name, "path": str(run.folder.path), "title": str(run.config.get("name", run.name))} for run in runs],
        "views": [{"name": view.name, "title": view.title, "shows_all_runs": view.shows_all_runs} for view in VIEWS],
    }


def as_json(found: Any, status_code: int = 200) -> Response:
    """Numbers that aren't finite become null."""
    content = json_bytes(found)
    return Response(content, status_code=status_code, media_type="application/json")


def json_bytes(found: Any) -> bytes:
    return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def serve(paths: Sequence[Path], *, port: int, say: Callable[[str], object]) -> None:
    """Serve the page until Ctrl-C.

    Args: port: 0: any free one.
    Raises: ConfigError for a folder that isn't a run, and for a port that is taken.
    """
    runs = [OpenRun(path) for path in paths]
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listening:
        try:
            listening.bind((LOOPBACK, port))
            listening.listen()  # the address is printed before the server is up: who comes early waits
        except OSError as error:
            raise ConfigError(f"--port {port}: can't be listened on: {error.strerror}. Choose another, or leave --port out.") from error
        number = listening.getsockname()[1]
        token = secrets.token_urlsafe(24)
        for run in runs:  # long ones take seconds to read, which the browser need not wait for
            threading.Thread(target=lambda run=run: run.steps, daemon=True).start()
        server = uvicorn.Server(uvicorn.Config(application(runs, token, cookie=f"evenkeel-{number}"), log_level="error", lifespan="off"))
        say(f"{', '.join(run.name for run in runs)}: http://{LOOPBACK}:{number}/?token={token}")
        say(f"On this machine alone; from another: ssh -L {number}:{LOOPBACK}:{number} HOST, then the same address. Ctrl-C ends it.")
        server.run(sockets=[listening])
