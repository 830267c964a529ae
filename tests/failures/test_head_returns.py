"""The head of a joined cluster keeps what it knows in a Redis (Ray's GCS fault tolerance), dies, and comes back before Ray gives it up.

Redis is Debian's (deploy/fetch_redis.sh). Ray's control service alone is ended, by SIGKILL, and started again with its own command; its
node lives on, as those of a cluster do whose head is a machine of its own. Behaviours locked here: the run goes on with what it has while
the head is gone; a worker that dies after the head's return is replaced, which takes the head; no step is done again.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.ports import free_port
from tests.e2e.cluster import RunningCluster, ray_cluster
from tests.e2e.launch import RECIPE, ROOT, Run
from tests.failures.books import check_books
from tests.failures.measured import REAL, Measured

REDIS = ROOT / ".tools" / "redis" / "usr"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (REDIS / "bin" / "redis-server").exists(), reason="no Redis: run deploy/fetch_redis.sh (Debian's package)"),
]

GROUPS = 4
GONE_S = 10.0
"""The run ends when the head has been gone for 30 s: half of what Ray's own processes wait."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables by which a head finds it."""
    port = free_port()
    password = secrets.token_hex(16)
    settings = tmp_path / "redis.conf"
    settings.write_text(f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\ndir {tmp_path}\n')
    libraries = ":".join(sorted({str(path.parent) for path in (REDIS / "lib").rglob("*.so*")}))
    with subprocess.Popen([str(REDIS / "bin" / "redis-server"), str(settings)], env=os.environ | {"LD_LIBRARY_PATH": libraries}) as server:
        yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}", "RAY_REDIS_PASSWORD": password}
        server.terminate()


@contextmanager
def killed_and_back(cluster: RunningCluster, after_s: float) -> Iterator[None]:
    """Begins when Ray's control service is there again."""
    (server,) = cluster.head.processes("gcs_server")
    command, variables = server.cmdline(), server.environ()
    cluster.head.main.send_signal(signal.SIGSTOP)  # `ray start` would end the head's other processes
    try:
        server.kill()
        time.sleep(after_s)
        with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/tmp") as returned:
            try:
                yield
            finally:
                returned.kill()
    finally:
        cluster.head.main.send_signal(signal.SIGCONT)


def test_a_head_that_comes_back_costs_nothing(small_model: Path, tmp_path: Path, redis: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", "steps=100000", f"groups_per_step={GROUPS}", "checkpoint.every_steps=50", "evaluation.problems=4"]
    with ray_cluster(f"--redis-password={redis['RAY_REDIS_PASSWORD']}", **redis) as cluster:
        run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, address=cluster.address, **cluster.variables)
        try:
            run.wait_until(lambda: len(run.metrics()) >= 3, "three steps")
            reached = len(run.metrics())
            with killed_and_back(cluster, GONE_S):
                steps = len(run.metrics()) - reached
                assert steps > 1, "none waits for the head"
                fault = f"head of a joined cluster, its memory in a Redis, killed and back after {GONE_S:g} s"
                follows = f"the run goes on with what it has ({steps} steps meanwhile), and what is to start waits for the head"
                Measured(fault, follows, None, "nothing", REAL).write()
                (worker,) = cluster.head.processes("ray::RolloutWorker")
                worker.kill()
                run.wait_until(lambda: "rollout 1 is up" in run.output(), "another worker in its place")
                steps = len(run.metrics())
                run.wait_until(lambda: len(run.metrics()) >= steps + 2, "steps with it")
                run.process.send_signal(signal.SIGTERM)
                assert run.wait() == 128 + signal.SIGTERM, run.output()[-4000:]
        finally:
            run.close()
    check_books(run, groups_per_step=GROUPS)
    assert "The run goes back to" not in run.events() and "the head of the Ray cluster" not in run.output()
    assert run.orphans(30.0) == []
