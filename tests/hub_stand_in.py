"""The Hugging Face hub's HTTP interface on loopback, as far as huggingface_hub 1.x uses it for what evenkeel asks of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LARGE = ".safetensors"
"""Such files are kept by their SHA-256 (git LFS), all others in git."""


@dataclass
class Repository:
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    """(commit, files by path), the newest last."""
    is_gated: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        """Another commit with these files over the last one's. Returns: its hash."""
        whole = (dict(self.commits[-1][1]) if self.commits else {}) | files
        digest = hashlib.sha1(repr((len(self.commits), sorted(whole.items()))).encode()).hexdigest()
        self.commits.append((digest, whole))
        return digest

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((one for one in self.commits if one[0] == revision), None)


@dataclass
class StandInHub:
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By models/ORGANISATION/NAME or datasets/..."""
    requests: list[str] = field(default_factory=list)
    """METHOD path, in the order of arrival."""
    ranges: dict[str, list[str]] = field(default_factory=dict)
    """By file, of each download the part that was asked for, as its Range header has it; empty: the whole file."""
    break_after: int | None = None
    """The next download of a large file ends after so many bytes, without the rest."""

    def sent(self, path: str) -> int:
        """How often a file was downloaded."""
        return sum(one.startswith("GET /") and one.endswith("/" + path) and "/resolve/" in one for one in self.requests)


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _oid(path: str, content: bytes) -> str:
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _oid(path, content)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": _oid(path, content), "size": len(content), "pointerSize": 130}
    return entry


def _listed(files: dict[str, bytes], folder: str, *, is_recursive: bool) -> list[dict[str, Any]]:
    """Entries below a folder, "" of all; not recursive: of the folder alone, with its own folders."""
    start = f"{folder}/" if folder else ""
    below = [path for path in files if path.startswith(start)]
    if is_recursive:
        return [_entry(path, files[path]) for path in below]
    names = {path: path.removeprefix(start).partition("/") for path in below}
    folders = sorted({start + name for name, slash, _ in names.values() if slash})
    own = [_entry(path, files[path]) for path, (_, slash, _) in names.items() if not slash]
    return own + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json"}.items() | headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def _read(self) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {url.path}")
        parts = url.path.strip("/").split("/")
        if "resolve" in parts and parts[0] != "api":
            of = parts[: parts.index("resolve")]
            revision, path = parts[parts.index("resolve") + 1], "/".join(parts[parts.index("resolve") + 2 :])
            name = "/".join(of) if of[0] == "datasets" else "models/" + "/".join(of)
            self._file(name, revision, path)
            return
        if parts[:1] != ["api"] or parts[1] not in ("models", "datasets"):
            self._refuse(404, "NotFound")
            return
        name, rest = "/".join(parts[1:4]), parts[4:]
        found = self._repository(name, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return
        commit, files = found
        if rest[:1] == ["tree"]:
            is_recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true"
            chosen = _listed(files, "/".join(rest[2:]), is_recursive=is_recursive)
            self._answer(200, chosen)
            return
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        self._answer(200, {"id": "/".join(parts[2:4]), "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def _repository(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
            return None
        found = repository.at(revision)
        if found is None:
            self._refuse(404, "RevisionNotFound")
        return found

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        commit, files = found
        if self.hub.repositories[name].is_gated:
            self._refuse(403, "GatedRepo")
            return
        if path not in files:
            self._refuse(404, "EntryNotFound")
            return
        content, oid = files[path], _oid(path, files[path])
        if self.command == "GET":
            self.hub.ranges.setdefault(path, []).append(self.headers.get("Range", ""))
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid}"', "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        headers["Accept-Ranges"] = "bytes"
        if self.command == "GET" and path.endswith(LARGE) and self.hub.break_after is not None:
            cut, self.hub.break_after = self.hub.break_after, None
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._answer(206 if start else 200, content[start:], **headers)

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = path.strip("/").split("/")
        if "paths-info" in parts:
            self._paths("/".join(parts[1:4]), parts[-1], body)
        else:
            self._refuse(404, "NotFound")

    def _paths(self, name: str, revision: str, body: bytes) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        form = parse_qs(body.decode()) if body[:1] != b"{" else {"paths": json.loads(body)["paths"]}
        wanted, files = form.get("paths", []), found[1]
        answers = [_entry(path, files[path]) for path in wanted if path in files]
        folders = {path for path in wanted if any(one.startswith(path.rstrip("/") + "/") for one in files)}
        self._answer(200, answers + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders])
