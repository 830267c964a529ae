"""Starting `evenkeel` as a user does, watching it, and counting every process that it ever started."""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenkeel.cli import main

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("small.yaml")
EVENKEEL = [sys.executable, "-m", "evenkeel"]
_MARK = "EVENKEEL_TEST_MARK"
_GONE = "(gone)"
PRIVATE, JOINED = 2, 3
"""Columns of the table in docs/security.md."""
THIS_MACHINE, OWN_ADDRESS, ALL_INTERFACES = range(3)
RAY_AGENTS = ("DashboardAgent", "RuntimeEnvAgent")
"""Two processes of Ray's that, when raylet is gone, first try to tell the control service for a minute, and then end."""


def environment(mark: str = "") -> dict[str, str]:
    """One thread, the test's reward function importable, and a mark that child processes inherit."""
    path = os.pathsep.join([str(ROOT), str(RECIPE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, _MARK: mark}


def evenkeel(*words: str, timeout_s: float = 300.0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a short command to its end."""
    return subprocess.run([*EVENKEEL, *words], capture_output=True, text=True, timeout=timeout_s, env=environment(), cwd=cwd, check=False)


def _ended(*words: str) -> str | int | None:
    """Call the entry point of the command line in this process: importing torch and ray takes seconds each time. Returns: its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr("sys.argv", ["evenkeel", *words])
        main()
    return caught.value.code


def said_here(*words: str) -> str:
    """What a command that succeeds writes to standard output, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = _ended(*words)
    assert code in (None, 0), f"{code}: {said.getvalue()}"
    return said.getvalue()


def refused(*words: str) -> str:
    """What the command line says when it refuses, in this process."""
    said = str(_ended(*words))
    assert said.startswith("evenkeel: ") and "\n" not in said, "one sentence, one line"
    return said


class Run:
    """`evenkeel train` in a session of its own, with its own Ray session in a short path, or on the cluster at `address`."""

    def __init__(self, run_dir: Path, *words: str, address: str = "", cwd: Path = ROOT, **variables: str) -> None:
        self.run_dir = run_dir
        self._mark = uuid.uuid4().hex
        self._temp = tempfile.mkdtemp(prefix="ek-", dir="/tmp")  # socket paths must stay below 108 characters
        (Path(self._temp) / "ray_current_cluster").write_text("192.0.2.1:6379")  # as `ray start` leaves it: a private Ray joins nobody's
        self.log = run_dir.parent / f"{run_dir.name}-{self._mark[:6]}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*EVENKEEL, "train", *words, f"ray.address={address}" if address else f"ray.temp_dir={self._temp}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self._mark) | variables,
                cwd=cwd,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {self.process.pid: psutil.Process(self.process.pid)}
        self._commands: dict[int, str] = {}
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    # -- what it wrote -----------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        return json_lines(self.run_dir / "metrics.jsonl")

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics()]

    def ledger(self) -> list[dict[str, Any]]:
        return json_lines(self.run_dir / "ledger.jsonl")

    def events(self) -> str:
        path = self.run_dir / "events.log"
        return path.read_text() if path.exists() else ""

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    # -- its life ----------------------------------------------------------------------------------------------------

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float = 480.0) -> None:
        """Raises: AssertionError with the end of the output when the run ends before, or time is up."""
        until = time.monotonic() + timeout_s
        while not ready():
            ended = self.process.poll()
            assert ended is None, f"the run ended ({ended}) before: {what}\n{self.output()[-4000:]}"
            assert time.monotonic() < until, f"not in {timeout_s} s: {what}\n{self.output()[-4000:]}\n{self.events()[-2000:]}"
            time.sleep(0.2)

    def wait(self, timeout_s: float = 480.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.output()[-4000:]}\n{self.events()[-2000:]}") from None

    def interrupt(self) -> None:
        """As a terminal does at Ctrl-C."""
        self.signal_group(signal.SIGINT)

    def signal_group(self, number: int) -> None:
        """To every process of the driver's group: by a terminal SIGINT at Ctrl-C and SIGHUP when it is lost, SIGTERM by `timeout`."""
        os.killpg(self.process.pid, number)

    def beside_the_driver(self) -> list[str]:
        """Command lines of other live processes in the driver's group."""
        found = []
        for process in self.processes():
            with contextlib.suppress(OSError):
                if process.pid != self.process.pid and os.getpgid(process.pid) == self.process.pid:
                    found.append(command_of(process))
        return found

    def kill(self) -> None:
        """kill -9 of the driver alone."""
        self.process.kill()
        self.process.wait(30.0)

    def processes(self) -> list[psutil.Process]:
        """Those that the run started, directly or not, and that are alive."""
        return [process for process in list(self._seen.values()) if _is_alive(process)]

    def orphans(self, timeout_s: float = 30.0, *, but: tuple[str, ...] = ()) -> list[str]:
        """Processes that are still there after the driver's end, once the time to notice it has passed.

        Args:
            but: command lines with one of these words don't count.
        """
        until = time.monotonic() + timeout_s
        while True:
            commands = {process.pid: command_of(process) for process in self.processes()}
            left = [f"{pid} {command}" for pid, command in commands.items() if not any(word in command for word in but)]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.2)

    @property
    def seen_commands(self) -> str:
        """Command lines of all that were ever seen, one a line, as they were when seen last."""
        return "\n".join(self._commands.values())

    def pids(self, command: str) -> list[int]:
        """Live processes whose command line contains `command`."""
        return [process.pid for process in self.processes() if command in command_of(process)]

    def listening(self) -> set[tuple[str, str]]:
        """As `listening`, of the run's processes, in a few looks: one may meet a process as it changes its name."""
        found = set()
        for _ in range(3):
            found |= listening(self.processes())
            time.sleep(0.3)
        return found

    def close(self) -> None:
        """End what is left, by process id."""
        self._is_over.set()
        self._watcher.join(10.0)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _watch(self) -> None:
        """Collect descendants: by parentage, by their sessions, and by the mark in their environment (some processes overwrite theirs)."""
        others: set[psutil.Process] = set()  # looked at once: nobody else's process becomes ours
        while not self._is_over.wait(0.5):
            for process in psutil.process_iter():
                if self._seen.get(process.pid) == process or process in others:  # numbers of processes come again
                    continue
                if (is_ours := self._is_ours(process)) is None:
                    continue
                if is_ours:
                    self._seen[process.pid] = process
                else:
                    others.add(process)
            for pid, process in list(self._seen.items()):
                # One that is ending has no command line for a moment, and is no zombie yet.
                if (command := command_of(process)) not in ("", _GONE):
                    self._commands[pid] = command

    def _is_ours(self, process: psutil.Process) -> bool | None:
        """None: not to be told now, as it is ending or another user's."""
        try:
            parent = process.ppid()
            if parent in self._seen and self._seen[parent].is_running():
                return True
            leader = self._seen.get(session := os.getsid(process.pid))
            if leader is not None and (leader.is_running() or not psutil.pid_exists(session)):  # else that number has come again
                return True
            return process.environ().get(_MARK) == self._mark
        except (psutil.Error, OSError):
            return None


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    """Command and address of each TCP socket that one of these listens on now."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            addresses = {one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
            found |= {(command_of(process), address) for address in addresses}
    return found


def reach(address: str) -> int:
    """Who reaches a socket that listens there: THIS_MACHINE, OWN_ADDRESS or ALL_INTERFACES. 127.0.0.2 stands for a node's address."""
    ip = ipaddress.ip_address(address.removeprefix("::ffff:"))
    return ALL_INTERFACES if ip.is_unspecified else THIS_MACHINE if str(ip) in ("127.0.0.1", "::1") else OWN_ADDRESS


def reach_of_the_page(column: int) -> dict[str, int]:
    """By the name of a process, as the table in docs/security.md has it: the widest of its rows.

    Args: column: PRIVATE or JOINED.
    """
    found: dict[str, int] = {}
    for line in (ROOT / "docs/security.md").read_text().splitlines():
        if line.startswith("| "):
            row = line.split("|")
            widest = ALL_INTERFACES if "all interfaces" in row[column] else OWN_ADDRESS if "own address" in row[column] else THIS_MACHINE
            found |= {name: max(widest, found.get(name, 0)) for name in re.findall(r"`([^`]+)`", row[1])}
    return found


def reach_by_name(listeners: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, int]:
    """The widest reach by a process' name, the longest that its command has; by its command if it has none.

    Args:
        listeners: command and address of each, as `listening`.
        names: of the page.
    """
    found: dict[str, int] = {}
    for command, address in listeners:
        said = command.replace(str(ROOT), "")  # a clone's folder is called evenkeel, as one of the names
        name = max((name for name in names if name in said), key=len, default=command)
        found[name] = max(reach(address), found.get(name, 0))
    return found


def check_private(listeners: set[tuple[str, str]]) -> None:
    """On loopback alone, and by names of docs/security.md. Args: listeners: command and address of each, of a private run."""
    page = reach_of_the_page(PRIVATE)
    found = reach_by_name(listeners, page)
    assert set(page.values()) == {THIS_MACHINE} == set(found.values()), f"docs/security.md says otherwise: {listeners}"
    assert {"gcs_server", "raylet", "LearnerRank", "sglang::scheduler"} <= found.keys(), f"the look must have seen what it is for: {found}"
    assert not found.keys() - page.keys(), "docs/security.md doesn't name them"


def kill_worker_above(pid: int) -> None:
    """kill -9 of the rollout worker that this process belongs to."""
    _worker_above(pid).kill()


def kill_engine_above(pid: int) -> None:
    """kill -9 of that worker's engine."""
    for one in _worker_above(pid).children(recursive=True):
        if "sglang::scheduler" in command_of(one):
            one.kill()


def _worker_above(pid: int) -> psutil.Process:
    (worker,) = [one for one in psutil.Process(pid).parents() if "ray::RolloutWorker" in command_of(one)]
    return worker


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may still be growing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def living(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that haven't ended when time is up."""
    until = time.monotonic() + timeout_s
    while (left := [process for process in processes if _is_alive(process)]) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """Its command line; SGLang and Ray give theirs speaking names."""
    try:
        return " ".join(process.cmdline())[:160]
    except psutil.Error:
        return _GONE
