"""The head of a joined cluster is gone while the main thread stands in a call that doesn't come back."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from actors.cluster.head_watch import _KEEPALIVE_MS, _LIMIT, _answers, ends_with_the_head
from actors.config import RayConfig
from actors.processes.interrupts import NO_CLUSTER

ROOT = Path(__file__).parents[3]
LIMIT_S = 2
STANDS = f"""
import socket, time, types
from pathlib import Path
import ray
from actors.config import RayConfig
from actors.processes import interrupts
from actors.cluster.head_watch import ends_with_the_head
interrupts.is_attempt = IS_ATTEMPT
def tell(text):
    print(text, flush=True)
    time.sleep(1000)  # a folder on a disk that hangs
head = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % head.getsockname()[1]
ray.get_runtime_context = lambda: types.SimpleNamespace(gcs_address=address)
with ends_with_the_head(RayConfig(address=address), Path("runs/one"), tell, lambda *_: None):
    time.sleep({2 * LIMIT_S})
    print(address, flush=True)
    head.close()
    time.sleep(120)
"""


HANGS = """
import socket, time
from pathlib import Path
from actors.config import RayConfig
from actors.cluster.head_watch import ends_with_the_head
head = socket.create_server(("127.0.0.1", 0), backlog=100)
settings = RayConfig(address="127.0.0.1:%d" % head.getsockname()[1])
with ends_with_the_head(settings, Path("runs/one"), print, lambda *told: print(*told, flush=True)):
    time.sleep(120)
"""
OF_RAY = {_LIMIT: str(LIMIT_S)}
SCRIPTS = {
    "by itself": (STANDS.replace("IS_ATTEMPT", "False"), OF_RAY),
    "under --retries": (STANDS.replace("IS_ATTEMPT", "True"), OF_RAY),
    "hangs": (HANGS, OF_RAY | dict.fromkeys(_KEEPALIVE_MS, "1000")),
}
"""Python, and Ray's variables for it."""


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """By name of the script, all started at once: each waits for seconds until its head counts as gone."""
    started = {}
    for name, (script, of_ray) in SCRIPTS.items():
        words, variables = [sys.executable, "-c", script], os.environ | of_ray | {"PYTHONPATH": str(ROOT)}
        started[name] = subprocess.Popen(words, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("name", "code"), [("by itself", 1), ("under --retries", NO_CLUSTER)])
def test_a_head_that_is_gone_ends_the_process_with_a_sentence(processes: dict[str, subprocess.Popen[str]], name: str, code: int) -> None:
    """Whatever the main thread does, and the disk; as long as something listens there, nothing happens.

    To `--retries` it is a lost cluster: it may be lost again before the next step, and says nothing about the run.
    """
    output, error = processes[name].communicate(timeout=100)
    address, told = output.splitlines()
    assert processes[name].returncode == code and error == f"evenkeel: {told}\n", "in the run's events, and on the terminal"
    assert told.startswith(f"the head of the Ray cluster at {address} is gone") and "evenkeel train --resume runs/one" in told


def test_a_head_that_hangs_for_good_ends_the_process_before_ray_does(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Ray gives a silent connection up, and ends its processes without our sentence."""
    output, error = processes["hangs"].communicate(timeout=100)
    assert processes["hangs"].returncode == 1
    assert "hangs: it listens, " in output and "after 3 s this run ends" in output
    assert " hangs: it has answered nothing for " in error and "evenkeel train --resume runs/one" in error


def test_a_private_ray_has_no_head_to_look_after() -> None:
    before = threading.active_count()
    with ends_with_the_head(RayConfig(), Path("runs/one"), print, print):
        assert threading.active_count() == before


def test_a_head_that_hangs_is_told_once_and_so_is_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes connections for it all the time."""
    monkeypatch.setenv(_LIMIT, "1.2")
    told, changed = list[tuple[str, str]](), threading.Event()

    def tell(level: str, text: str) -> None:
        told.append((level, text))
        changed.set()

    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with ends_with_the_head(RayConfig(address=address), Path("runs/one"), lambda text: pytest.fail(text), tell):
            assert changed.wait(60.0)
            changed.clear()
            answering = threading.Thread(target=answer_all, args=(head,), daemon=True)
            answering.start()
            assert changed.wait(60.0)
    assert [level for level, _ in told] == ["warning", "warning"]
    assert told[0][1].startswith(f"the head of the Ray cluster at {address} hangs: it listens, and has answered nothing for ")
    assert told[1][1].startswith(f"the head of the Ray cluster at {address} answers again, after ")


def test_a_head_that_dies_while_it_hangs_has_not_answered() -> None:
    """Its kernel resets what it held."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"

        def die() -> None:
            connection, _ = head.accept()
            head.shutdown(socket.SHUT_RDWR)
            head.close()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        dying = threading.Thread(target=die, daemon=True)
        dying.start()
        with pytest.raises((ConnectionRefusedError, ConnectionResetError)):  # as its socket is gone, or just going
            _answers(address, 30.0)
        dying.join()


def answer_all(head: socket.socket) -> None:
    """As a server of gRPC does, after its client's first words."""
    with suppress(OSError):  # closed
        while True:
            with head.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
