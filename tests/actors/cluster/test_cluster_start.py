"""Ray's start, with a stand-in for ray.init: what fails once is cleaned away and tried again, what fails for good is one sentence."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from evenkeel.actors.cluster import address, cluster
from evenkeel.actors.cluster.address import NoClusterError, check_ray
from evenkeel.actors.cluster.cluster import Cluster, gpus_there
from evenkeel.actors.config import RunConfig
from evenkeel.actors.processes import signals
from evenkeel.correction.errors import ConfigError, EngineError
from evenkeel.recipe import load_config
from lab.ports import free_port

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No pauses, no turns with other runs of this machine, and the environment as it was."""
    monkeypatch.setattr(cluster, "_PAUSE_S", 0.0)
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, overrides)


def starts(monkeypatch: pytest.MonkeyPatch, *outcomes: Callable[[], None]) -> list[dict[str, Any]]:
    """In the place of ray.init: one outcome after the other, the last again and again. Returns: the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def init(**arguments: Any) -> None:
        calls.append(arguments)
        outcomes[min(len(calls), len(outcomes)) - 1]()

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


def times_out() -> None:
    raise Exception("The current node timed out during startup. This could happen because ...\nmore")


def succeeds() -> None:
    pass


def test_a_start_that_timed_out_is_tried_again_without_its_remains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The half-started Ray is killed before the second try; other processes of ours are not."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    remains: list[subprocess.Popen[bytes]] = []

    def half_starts() -> None:
        remains.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "/tmp/x/session_2026-01-01_1/sockets"]))
        times_out()

    def second() -> None:
        assert not psutil.pid_exists(remains[0].pid), "the remains must be gone before the next try"

    calls = starts(monkeypatch, half_starts, second)
    try:
        with caplog.at_level(logging.WARNING, "evenkeel"), Cluster(config()):
            assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert len(calls) == 2 and calls[0] == calls[1]
    assert calls[0]["address"] == "local", "a private Ray is never somebody else's"
    assert "trying again, 2 of 3" in caplog.text and "timed out during startup" in caplog.text


def test_a_start_that_fails_for_good_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_starts() -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--dir=/tmp/x/session_2026-01-01_1/sockets"])
        times_out()

    calls = starts(monkeypatch, half_starts)
    with pytest.raises(EngineError) as caught, Cluster(config()):
        pass
    said = str(caught.value)
    assert len(calls) == 3
    assert said.startswith("starting a private Ray failed after 0 s: Exception: The current node timed out during startup.")
    assert f" on {os.cpu_count()} cores); tried 3 times. Start the run again when the machine has less to do" in said
    assert said.count("/tmp/x/session_2026-01-01_1/logs") == 1 and "\n" not in said and "more" not in said


def test_no_try_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = starts(monkeypatch, times_out)
    with pytest.raises(EngineError, match=r"tried 1 time\."), Cluster(config("deadlines.start_s=1e-9")):
        pass
    assert len(calls) == 1


def test_joining_has_short_attempts_and_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own twenty attempts of 40 s at a cluster that accepts connections and says nothing are left at one a try."""
    seen: list[str | None] = []
    name = "RAY_gcs_server_port_wait_time_s"

    def silent() -> None:
        seen.append(os.environ.get(name))
        raise RuntimeError("Failed to connect to GCS.")

    starts(monkeypatch, silent)
    monkeypatch.setattr(cluster, "check_ray", lambda _: None)
    with pytest.raises(EngineError, match=r"joining ray\.address = auto failed .*leave ray\.address empty"):
        Cluster(config("ray.address=auto")).__enter__()
    assert seen == ["1", "1", "1"] and name not in os.environ


def test_who_asks_for_one_attempt_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `doctor` does: each takes Ray 40 s at a head that accepts connections and says nothing."""
    calls = starts(monkeypatch, times_out)
    monkeypatch.setattr(cluster, "check_ray", lambda _: None)
    with pytest.raises(NoClusterError, match=r"tried 1 time\."):
        gpus_there(config("ray.address=auto"), tries=1)
    assert len(calls) == 1


def test_no_cluster_is_looked_for_at_an_address_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all addresses that `auto` may mean; the answer says which it was, and where that is from. Ray would look for two minutes."""
    calls = starts(monkeypatch, times_out)
    closed = f"{services.get_node_ip_address()}:{free_port()}"
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: closed)
    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(lambda: frozenset()))
    with pytest.raises(NoClusterError, match=rf"'auto': .* answers at {closed} \(as `ray start` noted on this machine\): .*Set it"):
        Cluster(config("ray.address=auto")).__enter__()
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    with pytest.raises(NoClusterError, match=r"'auto': Ray finds no cluster that this machine is part of\. Set it to HOST:PORT"):
        Cluster(config("ray.address=auto")).__enter__()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(NoClusterError, match=r"'auto': Ray finds no cluster that this machine is part of\."):
        Cluster(config("ray.address=auto")).__enter__()
    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(lambda: frozenset({closed})))
    with pytest.raises(NoClusterError, match=rf"'auto': no Ray cluster answers at {closed}: .*Set it"):
        Cluster(config("ray.address=auto")).__enter__()
    monkeypatch.setenv("RAY_ADDRESS", closed)
    with pytest.raises(NoClusterError, match=rf"'auto': no Ray cluster answers at {closed} \(from RAY_ADDRESS\): .*refused\. Set it"):
        Cluster(config("ray.address=auto")).__enter__()
    assert not calls


def test_a_private_ray_of_another_run_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on 127.0.0.1 alone, which to Ray is the machine's own address: nothing would answer it there."""
    calls = starts(monkeypatch, times_out)
    with socket.create_server(("127.0.0.1", 0)) as private:
        port = private.getsockname()[1]
        monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
        monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(lambda: frozenset({f"127.0.0.1:{port}"})))
        monkeypatch.setattr(services, "get_node_ip_address", lambda: "127.0.0.2")
        for place in ("auto", f"127.0.0.1:{port}"):
            with pytest.raises(NoClusterError, match=f"{place}': no Ray cluster answers at 127.0.0.2:{port}: "):
                Cluster(config(f"ray.address={place}")).__enter__()
    assert not calls


def test_a_cluster_connects_to_the_head_once_before_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray does. A head behind a slow network would be waited for each time."""
    connected, connect = [], socket.create_connection
    monkeypatch.setattr(address.socket, "create_connection", lambda place, timeout: connected.append(place) or connect(place, timeout))
    calls = starts(monkeypatch, times_out)
    with socket.create_server((services.get_node_ip_address(), 0)) as head:
        place = f"{head.getsockname()[0]}:{head.getsockname()[1]}"
        with pytest.raises(NoClusterError, match=r"tried 1 time\."):
            Cluster(config(f"ray.address={place}"), tries=1).__enter__()
    assert [f"{host}:{port}" for host, port in connected] == [place] and len(calls) == 1


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_what_listens_at_an_address_of_ipv6_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives such an address with brackets, which a socket doesn't take."""
    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda _: f"[::1]:{port}")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        port = head.getsockname()[1]
        check_ray(config("ray.address=auto").ray)
    with pytest.raises(NoClusterError, match=rf"no Ray cluster answers at \[::1\]:{port}"):
        check_ray(config("ray.address=auto").ray)


def test_a_setting_that_ray_refuses_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise ValueError("no such thing")

    calls = starts(monkeypatch, refuses)
    with pytest.raises(ConfigError, match="starting a private Ray: ValueError: no such thing"), Cluster(config()):
        pass
    assert len(calls) == 1


def test_a_signal_during_the_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler isn't put in the place of ours, and a swallowed signal is found when ray.init comes back."""
    remains: list[subprocess.Popen[bytes]] = []

    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def is_hit() -> None:
        ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(15))  # as ray.init does
        remains.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        Swallows()

    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    calls = starts(monkeypatch, is_hit)
    with pytest.raises(signals.Interrupted) as caught, signals.guarded(), Cluster(config()):
        pass
    assert caught.value.code == 143 and len(calls) == 1
    assert not psutil.pid_exists(remains[0].pid)


def test_signals_to_our_group_are_not_for_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for what they start: the checkpoint that a run saves when it is asked to end needs Ray. Ctrl-C they have blocked, as ever."""
    started: list[subprocess.Popen[bytes]] = []
    services: Any = ray._private.services

    def starts_a_daemon() -> None:
        forks = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
        started.append(services.start_ray_process(forks, "raylet", fate_share=True).process)

    starts(monkeypatch, starts_a_daemon)
    plain = services.ConsolePopen
    try:
        with Cluster(config()):
            daemon = psutil.Process(started[0].pid)
            while not daemon.children():
                assert daemon.is_running()
                time.sleep(0.02)  # without a pause this would take the core that the daemon needs
            for process in (daemon, *daemon.children()):
                assert os.getsid(process.pid) == os.getpgid(process.pid) == daemon.pid
                masks = dict(re.findall(r"^Sig(Ign|Blk):\t(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE))
                assert int(masks["Ign"], 16) >> (signal.SIGHUP - 1) & 1 and int(masks["Blk"], 16) >> (signal.SIGINT - 1) & 1
        assert services.ConsolePopen is plain
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_what_daemons_report_is_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ "(raylet) A worker died or was killed ..." comes past log_to_driver=False; here it is handed to what prints it."""
    from ray._private import worker

    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    message = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert "(raylet)" in capsys.readouterr().out, "the count must have seen what it counts"
    starts(monkeypatch, succeeds)
    with Cluster(config()):
        worker.print_to_stdstream({**message, "lines": ["Another worker died or was killed"]}, ignore_prefix=False)
    assert capsys.readouterr().out == ""


def test_a_raylet_that_is_stopped_does_not_keep_the_run_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's shutdown waits for its answer without a limit, and gives up when it is gone."""
    raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    raylet.send_signal(signal.SIGSTOP)
    starts(monkeypatch, succeeds)
    monkeypatch.setattr(cluster, "_SHUTDOWN_S", 0.2)
    monkeypatch.setattr(ray, "shutdown", lambda: raylet.wait(20.0))
    try:
        with Cluster(config()):
            processes = {"raylet": [SimpleNamespace(process=raylet)]}
            monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(all_processes=processes))
        assert not psutil.pid_exists(raylet.pid)
    finally:
        raylet.kill()
