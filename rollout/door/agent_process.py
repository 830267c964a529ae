"""What runs agents' programs, one after the other: a process with limits (limited_processes/child.py), started and ended by agents.py.

Of what a program writes to its outputs the last part is kept, for messages. What it has started ends with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from evenkeel.rollout.limited_processes.child import receive, run, send
from evenkeel.rollout.limited_processes.guardian import end_tree
from evenkeel.rollout.parent_death import adopt_orphans

# Of the outputs; bytes that are kept, and that are read at a time.
_KEPT, _PIECE = 2000, 1 << 16
# Seconds that an output may take to end after its writers were killed.
_CLOSED_S = 5.0


def serve(connection: socket.socket, spec: dict[str, Any]) -> None:
    """Run programs until the parent closes the socket."""
    command, folder = spec["command"], Path(spec["folder"])
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # `python` is the run's
    program = shutil.which(command[0]) or (command[0] if os.access(folder / command[0], os.X_OK) else None)
    if program is None or not folder.is_dir():
        where = f"in PATH or {folder}" if folder.is_dir() else f", as the folder {folder} isn't there"
        send(connection, {"error": f"rollout.agent.command = {command}: no program {command[0]} {where}; the run starts where it lies"})
        return
    # The door is reached without a proxy, whatever else the user's own list has. Programs read one spelling or the other.
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), spec["door"]]))
    os.environ |= {"NO_PROXY": direct, "no_proxy": direct}
    adopt_orphans()
    send(connection, {"ready": True})
    while (request := receive(connection)) is not None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            send(connection, _ran([program, *command[1:]], folder, request["variables"] | {"TMPDIR": scratch}))


def _ran(command: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """{"code": exit code, "said": end of its outputs}, or {"error": why it didn't start}."""
    try:
        program = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return {"error": f"rollout.agent.command = {command}: it doesn't start ({error})"}
    assert program.stdout is not None
    pieces: deque[bytes] = deque(maxlen=2)
    reader = threading.Thread(target=_drain, args=(program.stdout, pieces), daemon=True)
    reader.start()
    code = program.wait()
    end_tree()
    reader.join(_CLOSED_S)
    return {"code": code, "said": b"".join(pieces)[-_KEPT:].decode(errors="replace")}


def _drain(output: IO[bytes], pieces: deque[bytes]) -> None:
    while piece := output.read1(_PIECE):  # type: ignore[attr-defined]
        pieces.append(piece)


if __name__ == "__main__":
    run(serve)
