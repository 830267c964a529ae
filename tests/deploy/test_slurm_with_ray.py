"""deploy/slurm.sh with a real Ray and a real run: two nodes of a job, both on this machine, where srun runs what it is given.

Behaviours locked here: head and second node find each other by the job's token, the run gets workers on both; when the job's time is up it
ends with a checkpoint, and its exit code is the job's; afterwards neither a process nor the token is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.metrics.step_metrics import by_worker
from evenkeel.actors.record.run_folder import RunFolder
from tests.deploy.own_hosts import free_ports
from tests.deploy.test_slurm import SCRIPT
from tests.e2e.conftest import small_model as small_model
from tests.e2e.launch import RECIPE, ROOT, environment, json_lines

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]
PROGRAMS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "hostname": "echo 127.0.0.1",
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for Ray's sockets."""
    made = Path(tempfile.mkdtemp(prefix="eksl", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def running_below(folder: Path) -> list[str]:
    """Processes that know the folder, by their environment or words."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline())[:80])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def workers_of(run_dir: Path) -> set[str]:
    """Those whose groups were trained."""
    lines = json_lines(run_dir / "metrics.jsonl")
    return {name for line in lines for name, groups in by_worker(line, "groups").items() if groups}


def test_a_job_of_two_nodes_trains_and_leaves_nothing(small_model: Path, folder: Path) -> None:
    programs, home, run_dir = folder / "bin", folder / "home", folder / "run"
    programs.mkdir()
    home.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    (port,) = free_ports(1)
    variables = environment() | {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "RAY_TMPDIR": str(folder), "RAY_PORT": str(port),
        "EVENKEEL_BIN": str(Path(sys.executable).parent), "EVENKEEL_WORKERS_PER_NODE": "1",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
    }  # fmt: skip
    settings = [f"model={small_model}", f"run_dir={run_dir}", "steps=100000", "rollout.workers=2", "checkpoint.every_steps=0"]
    output = folder / "output"
    with output.open("wb") as log:
        job = subprocess.Popen([str(SCRIPT), str(RECIPE), *settings], cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
    try:
        ends = time.monotonic() + 600.0
        while workers_of(run_dir) != {"0", "1"}:  # a node offers one worker's unit, so that these are on both
            assert job.poll() is None and time.monotonic() < ends, output.read_text()[-4000:]
            time.sleep(0.5)
        job.terminate()  # as Slurm does when the job's time is nearly up
        assert job.wait(120.0) == 128 + signal.SIGTERM, output.read_text()[-4000:]
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(120.0)
    steps = [line["step"] for line in json_lines(run_dir / "metrics.jsonl")]
    saved = TrainingState.load(RunFolder.view(run_dir).checkpoints()[-1].state)
    assert steps == list(range(1, saved.step + 1)), "every step that was made is in the checkpoint"
    assert list(home.glob(".evenkeel-token-*")) == []
    ends = time.monotonic() + 60.0  # a fork server ends when it notices that nobody holds its pipe any more
    while running_below(folder) and time.monotonic() < ends:
        time.sleep(0.5)
    assert running_below(folder) == []
