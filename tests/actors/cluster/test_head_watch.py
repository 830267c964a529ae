"""The head of a joined cluster is gone, or a process of a private one, while the main thread stands in a call that doesn't come back."""

from __future__ import annotations

import inspect
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from evenkeel.actors.cluster.cluster import Cluster
from evenkeel.actors.cluster.head_watch import (
    _KEEPALIVE_MS,
    _LIMIT,
    _PROBE_MS,
    _PROBES,
    OwnDaemon,
    _answers,
    _wait_for_the_end,
    ends_with_own_ray,
    ends_with_the_head,
)
from evenkeel.actors.config import RayConfig

ROOT = Path(__file__).parents[3]


def answer_all(head: socket.socket) -> None:
    """As a server of gRPC does, after its client's first words."""
    with suppress(OSError):  # closed
        while True:
            with head.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))


LIMIT_S = 2
STANDS = f"""
import socket, time
from pathlib import Path
from evenkeel.actors.cluster.head_watch import ends_with_the_head
def tell(text):
    print(text, flush=True)
    time.sleep(1000)  # a folder on a disk that hangs
head = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % head.getsockname()[1]
with ends_with_the_head(address, Path("runs/one"), tell, lambda *_: None):
    time.sleep({2 * LIMIT_S})
    print(address, flush=True)
    head.close()
    time.sleep(120)
"""


HANGS = """
import socket, time
from pathlib import Path
from evenkeel.actors.cluster.head_watch import ends_with_the_head
head = socket.create_server(("127.0.0.1", 0), backlog=100)
with ends_with_the_head("127.0.0.1:%d" % head.getsockname()[1], Path("runs/one"), print, lambda *told: print(*told, flush=True)):
    time.sleep(120)
"""
OWN_HANGS = f"""
import socket, subprocess, threading, time
from contextlib import suppress
from pathlib import Path
from evenkeel.actors.cluster.head_watch import OwnDaemon, ends_with_own_ray
{inspect.getsource(answer_all)}
service, listens = (socket.create_server(("127.0.0.1", 0), backlog=100) for _ in range(2))
threading.Thread(target=answer_all, args=(service,), daemon=True).start()
places = {{"gcs_server": service, "raylet": listens}}
own = {{name: OwnDaemon(subprocess.Popen(["sleep", "100"]), "127.0.0.1:%d" % at.getsockname()[1]) for name, at in places.items()}}
print(*(one.process.pid for one in own.values()), flush=True)
with ends_with_own_ray(own, Path("runs/one"), print, lambda *told: print(*told, flush=True)):
    time.sleep(120)
"""
OF_RAY = {_LIMIT: str(LIMIT_S)}
SCRIPTS = {
    "gone": (STANDS, OF_RAY),
    "hangs": (HANGS, OF_RAY | dict.fromkeys(_KEEPALIVE_MS, "1000")),
    "own raylet hangs": (OWN_HANGS, OF_RAY | dict.fromkeys(_PROBE_MS, "1000") | {_PROBES[0]: "2"}),
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


def test_a_head_that_is_gone_ends_the_process_with_a_sentence(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Whatever the main thread does, and the disk; as long as something listens there, nothing happens."""
    output, error = processes["gone"].communicate(timeout=100)
    address, told = output.splitlines()
    assert processes["gone"].returncode == 1 and error == f"evenkeel: {told}\n", "in the run's events, and on the terminal"
    assert told.startswith(f"the head of the Ray cluster at {address} is gone") and "evenkeel train --resume runs/one" in told


def test_a_head_that_hangs_for_good_ends_the_process_before_ray_does(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Ray gives a silent connection up, and ends its processes without our sentence."""
    output, error = processes["hangs"].communicate(timeout=100)
    assert processes["hangs"].returncode == 1
    assert "hangs: it listens, " in output and "The run goes on with what it has" in output and "after 3 s this run ends" in output
    assert " hangs: it has answered nothing for " in error and "evenkeel train --resume runs/one" in error


def test_a_raylet_of_its_own_that_hangs_ends_the_process_once_ray_has_given_it_up(processes: dict[str, subprocess.Popen[str]]) -> None:
    """The control service answers all the time. What is stopped is killed, too."""
    output, error = processes["own raylet hangs"].communicate(timeout=100)
    assert processes["own raylet hangs"].returncode == 1
    pids, *told = output.splitlines()
    service, raylet = map(int, pids.split())
    named = f"the raylet of this run's own Ray (process {raylet}, at 127.0.0.1:"
    assert told[0].startswith(f"warning {named}") and "hangs: it listens, " in told[0] and "after 4 s this run ends" in told[0]
    assert "The run stands still where it needs the object store" in told[0]
    assert error.startswith(f"evenkeel: {named}") and " hangs: it has answered nothing for " in error
    assert "evenkeel train --resume runs/one" in error and "--retries N" in error
    assert outlived((service, raylet)) == []


OWN = """
import socket, subprocess, sys, time
from pathlib import Path
from evenkeel.actors.cluster.head_watch import OwnDaemon, ends_with_own_ray
service = socket.create_server(("127.0.0.1", 0))
at = "127.0.0.1:%d" % service.getsockname()[1]
agent = "import subprocess, time; print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid, flush=True); time.sleep(100)"
own = {"gcs_server": subprocess.Popen(["sleep", "100"]), "raylet": subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE)}
of_raylet = int(own["raylet"].stdout.readline())
daemons = {name: OwnDaemon(process, at) for name, process in own.items()}
with ends_with_own_ray(daemons, Path("runs/one"), lambda text: print(text, flush=True), print):
    print(own["WHO"].pid, own["gcs_server"].pid, own["raylet"].pid, of_raylet, flush=True)
    own["WHO"].kill()
    time.sleep(60)
"""


@pytest.mark.parametrize("who", ["gcs_server", "raylet"])
def test_the_death_of_a_process_of_its_own_ray_ends_the_run_with_one_sentence(who: str) -> None:
    """And all that Ray had started ends with it, what has a session of its own, too."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    script = OWN.replace("WHO", who)
    done = subprocess.run([sys.executable, "-c", script], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    pids, told = done.stdout.splitlines()
    pid, *everybody = map(int, pids.split())
    assert done.returncode == 1 and done.stderr == f"evenkeel: {told}\n", "told once"
    assert told.startswith(f"this run's own Ray is gone: its {who} (process {pid}) was killed by SIGKILL, ")
    assert "evenkeel train --resume runs/one" in told and "--retries N" in told
    assert outlived(everybody) == []


def test_a_real_time_signal_has_a_name_in_that_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr("evenkeel.actors.cluster.head_watch._end", lambda text, *_: said.append(text))
    with subprocess.Popen(["sleep", "100"]) as raylet:
        raylet.send_signal(40)
        _wait_for_the_end("raylet", raylet, [], "resume", said.append, threading.Event())
    assert said == [f"this run's own Ray is gone: its raylet (process {raylet.pid}) was killed by SIG40, resume"]


def outlived(pids: Iterable[int]) -> list[int]:
    """Those that still run after some seconds: on a busy machine a killed process takes a moment to be gone."""
    left, until = list(pids), time.monotonic() + 20.0
    while (left := [pid for pid in left if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_own_ray_may_end_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr("evenkeel.actors.processes.signals.end_all", lambda why, *_, **__: said.append(why))
    with socket.create_server(("127.0.0.1", 0)) as service, subprocess.Popen(["sleep", "100"]) as raylet:
        daemon = OwnDaemon(raylet, f"127.0.0.1:{service.getsockname()[1]}")
        with ends_with_own_ray({"gcs_server": daemon, "raylet": daemon}, Path("runs/one"), print, print):
            watches = [thread for thread in threading.enumerate() if thread.name == "Ray watch"]
        raylet.kill()
        for watch in watches:
            watch.join(60.0)
    assert len(watches) == 4 and not any(watch.is_alive() for watch in watches) and said == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [(None, None), ("ray://10.0.0.1:10001", None), ("10.0.0.1:6379", "10.0.0.1:6379"), ("auto", "10.0.0.2:6379")],
)
def test_the_head_of_a_joined_cluster_is_looked_after(monkeypatch: pytest.MonkeyPatch, address: str | None, expected: str | None) -> None:
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.2:6379"))
    config: Any = SimpleNamespace(ray=RayConfig(address=address))
    assert Cluster(config).head_address == expected


def test_a_private_ray_has_no_head_to_look_after_and_a_joined_one_no_processes_of_ours() -> None:
    before = threading.active_count()
    with ends_with_the_head(None, Path("runs/one"), print, print), ends_with_own_ray({}, Path("runs/one"), print, print):
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
        with ends_with_the_head(address, Path("runs/one"), lambda text: pytest.fail(text), tell):
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
