"""What runs in a process with limits: `python -m MODULE FD LEASH_FD PARENT_PID`, started and ended by parent.py.

Messages go over a socket of its own, so that the user's code may print what it likes; each begins with its length. Requests are pickles;
answers are JSON, so that the parent never unpickles what that code sends. The first message is the specification, its answer {"ready":
true} or {"error": why}.

What it prints goes where the parent's output goes, by way of the guardian, which leaves out what is too much.

Such a process must never outlive its parent, nor what it has started: the process that is started becomes its guardian (guardian.py) and
works in a child, which the kernel kills when the guardian dies, even in the middle of a C function. What it leaves in its folder of
temporary files ends with it, too.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from evenkeel.rollout.limited_processes.guardian import guard, limit_process
from evenkeel.rollout.limited_processes.output import handed_on, write_to
from evenkeel.rollout.parent_death import adopt_orphans, signal_at_parents_death

LENGTH = struct.Struct("!Q")
"""Size of a message in bytes, which comes before it."""
REMOVE = ("/bin/sh", "-c", 'chmod -R u+rwX -- "$@" 2>/dev/null; rm -rf -- "$@"', "sh")
"""Command line that removes the folders named after it, if they are there, those too that were made unreadable."""
# Characters that are kept of an exception's text.
_LONGEST_ERROR = 500


class LoadError(Exception):
    """What the specification names can't be set up; the message is for the user."""


Serve = Callable[[socket.socket, dict[str, Any]], None]
"""Answers requests until the parent closes the socket. It is given the socket and the specification."""


def run(serve: Serve) -> NoReturn:
    """Be such a process, with the arguments of this one's command line. Never returns: the process ends as its child did."""
    code = _main(serve, *map(int, sys.argv[1:]))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _main(serve: Serve, fd: int, leash: int, parent_pid: int) -> int:
    """Guard a child that answers requests until the parent closes the socket. Returns: the exit code of either."""
    connection = socket.socket(fileno=fd)
    spec = receive(connection)
    if spec is None:
        return 0
    memory_bytes = None if spec["memory_gib"] is None else int(spec["memory_gib"] * 2**30)
    adopt_orphans()
    guardian = os.getpid()
    scratch = tempfile.mkdtemp(prefix="evenkeel-")
    pipes = {output: os.pipe() for output in (1, 2)}
    child = os.fork()
    if child:
        connection.close()
        try:
            with handed_on(pipes):
                return guard(child, leash, parent_pid, memory_bytes, spec["most_processes"])
        finally:
            subprocess.run([*REMOVE, scratch], check=False)
    write_to(pipes)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    os.close(leash)
    _die_with_parent(guardian)
    _restore_environment(spec["python_path"])
    limit_process(memory_bytes)
    serve(connection, spec)
    return 0


def _restore_environment(python_path: str | None) -> None:
    """What a scorer starts looks for modules as it would without evenkeel. Args: python_path: PYTHONPATH there; None: not set."""
    os.environ.pop("PYTHONSAFEPATH", None)
    if python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = python_path


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL at the death of the thread that started this process (Linux; elsewhere the closed socket ends it)."""
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


# --- the user's code -------------------------------------------------------------------------------------------------


def import_named(setting: str, path: str, given: Path | None, kind: str) -> Callable[..., Any]:
    """What a setting names as MODULE:NAME.

    Args:
        setting: its key, for messages.
        given: where the module may lie; None: where the run was started. That comes last: a file there takes the place of no module that
            something else needs.
        kind: "a function" or "a class", for messages.
    Raises: LoadError with the remedy.
    """
    folder = (given or Path.cwd()).absolute()
    module_name, _, attributes = path.partition(":")
    sys.path.append(str(folder))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if taken := _taken_name(module_name, folder):
            raise LoadError(f"{setting} = {path}: {taken}") from error
        raise LoadError(
            f"{setting} = {path}: importing {module_name} raised {error_text(error)}; {_remedy(module_name, error, folder)}"
        ) from error
    if taken := _taken_name(module_name, folder):
        raise LoadError(f"{setting} = {path}: {taken}")
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = difflib.get_close_matches(attribute, dir(found), n=1)
            raise LoadError(f"{setting} = {path}: {module_name} has no {attribute}" + (f"; did you mean {near[0]}?" if near else ""))
        found = getattr(found, attribute)
    if not callable(found):
        raise LoadError(f"{setting} = {path} is {type(found).__name__}, not {kind}")
    return found  # type: ignore[no-any-return]


def _taken_name(module_name: str, folder: Path) -> str:
    """What to do if the module lies in the folder, but another one was imported by its name; empty: it isn't so."""
    top, base = module_name.partition(".")[0], folder.joinpath(*module_name.split("."))
    own = next((path for path in (folder / f"{top}.py", folder / top) if path.exists()), None)
    if own is None or not (base.is_dir() or base.with_name(f"{base.name}.py").is_file()) or (found := sys.modules.get(top)) is None:
        return ""
    places = [*getattr(found, "__path__", ()), *filter(None, [getattr(found, "__file__", None)])]
    if any(Path(place).resolve() == own.resolve() for place in places):
        return ""
    return f"by the name {top} Python imports {places[-1] if places else 'a module of its own'}, and never {own}; rename the latter"


def _remedy(module: str, error: Exception, folder: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        is_the_module = f"{module}.".startswith(f"{error.name}.")
        where = f"it isn't in {folder}: start the run where the module lies, or install it"
        return where if is_the_module else f"install {error.name}, which it imports"
    return "mend the module"


def error_text(error: BaseException) -> str:
    """Type of an exception and what it says, not at any length; a class of somebody's own may refuse to say it."""
    try:
        return shortened(f"{type(error).__name__}: {error}".removesuffix(": "), _LONGEST_ERROR)
    except Exception as another:
        return f"{type(error).__name__}, whose text raised {type(another).__name__}"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters, and how many were cut off."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more characters are cut off)"


# --- messages -------------------------------------------------------------------------------------------------------


def pack_message(value: Any) -> bytes:
    """A message to the child as it goes over the socket."""
    payload = pickle.dumps(value)
    return LENGTH.pack(len(payload)) + payload


def pack_answer(value: dict[str, Any]) -> bytes:
    """A message to the parent as it goes over the socket."""
    payload = json.dumps(value).encode()
    return LENGTH.pack(len(payload)) + payload


def send(connection: socket.socket, value: dict[str, Any]) -> None:
    """Answer the parent."""
    connection.sendall(pack_answer(value))


def receive(connection: socket.socket) -> Any:
    """The next message, or None when the parent has closed the socket."""
    header = _exactly(connection, LENGTH.size)
    payload = header and _exactly(connection, LENGTH.unpack(header)[0])
    return pickle.loads(payload) if payload else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
