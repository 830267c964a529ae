"""deploy/slurm.sh, with a stand-in for Slurm: what is started where and with what, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_ray_cluster import script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sh"

# Every program writes down what it was called with, and the token that it finds; srun then runs the command here.
SAY = 'echo "$(basename "$0") $*" >>"$CALLS"\n'
PROGRAMS = {
    "scontrol": SAY + "printf 'node1\\nnode2\\nnode3\\n'",
    "hostname": "echo 127.0.0.1 10.0.0.1",
    "srun": SAY + 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "ray": SAY + 'if [[ $1 == status ]]; then (($(grep -c . "$TOKENS") < 2)) || printf "%s" "$NODES"; exit 0; fi\n'
    'stat -c %a "$RAY_AUTH_TOKEN_PATH" >>"$MODES"\ntrap \'echo "ray ended" >>"$CALLS"; exit 0\' TERM\n'
    'printf "%s\\n" "$(cat "$RAY_AUTH_TOKEN_PATH")" >>"$TOKENS"\nwhile :; do sleep 0.05; done',
    "evenkeel": SAY + 'trap \'sleep 0.3; echo "checkpoint written" >>"$CALLS"; exit 143\' TERM\n'
    'if [[ -n ${ENDS:-} ]]; then exit "$ENDS"; fi\nwhile :; do sleep 0.05; done',
}
THREE = "Active:\n 1 node_a\n 1 node_b\n 1 node_c\nPending:\n"


class Job:
    def __init__(self, folder: Path, start: Sequence[str] = (str(SCRIPT), "recipes/x.yaml", "steps=5"), **variables: str) -> None:
        programs = folder / "bin"
        programs.mkdir()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (programs / name).chmod(0o755)
        self.calls, self.tokens, self.modes = folder / "calls", folder / "tokens", folder / "modes"
        self.home = folder / "home"
        self.home.mkdir()
        self.tokens.touch()
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(self.home), "EVENKEEL_BIN": str(programs), "EVENKEEL_POLL_S": "0.05",
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_GPUS_PER_NODE": "h100:8",
            "NODES": THREE, "CALLS": str(self.calls), "TOKENS": str(self.tokens), "MODES": str(self.modes),
        }  # fmt: skip
        both: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(start, env=environment | variables, cwd=ROOT, text=True, **both)

    def lines(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 60.0
        while not ready():
            assert time.monotonic() < end and self.process.poll() is None, self.lines()
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=60)[0]
        return self.process.returncode, output


def test_bash_reads_it_and_sbatch_its_options() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0 and os.access(SCRIPT, os.X_OK)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))
    assert options == {"job-name": "evenkeel", "ntasks-per-node": "1", "exclusive": "", "signal": "B:TERM@300"}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "deploy").glob("*.sh")))
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    done = subprocess.run(["shellcheck", str(ROOT / "deploy" / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_head_workers_and_run_find_each_other(tmp_path: Path) -> None:
    job = Job(tmp_path, ENDS="0")
    code, output = job.end()
    assert code == 0, output
    starts = [line for line in job.lines() if line.startswith("srun") and "/ray start" in line]
    (head,) = [line for line in starts if "--head" in line]
    (others,) = [line for line in starts if "--head" not in line]
    assert "--nodes=1 --ntasks=1 --nodelist=node1" in head and "--node-ip-address=127.0.0.1 --port=6379" in head
    assert "--nodes=2 --ntasks=2 --exclude=node1" in others and "--address=127.0.0.1:6379" in others
    assert all('--resources={"rollout": 8}' in line for line in starts), "as many workers as GPUs, on every node"
    (run,) = [line for line in job.lines() if line.startswith("evenkeel")]
    assert run == "evenkeel train recipes/x.yaml steps=5 ray.address=127.0.0.1:6379"
    assert job.lines()[-2:] == ["ray ended"] * 2, "nothing is left on the nodes"


def test_the_token_is_the_jobs_own_for_its_owner_alone_and_goes_with_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.until(lambda: any(line.startswith("evenkeel") for line in job.lines()))
    job.process.send_signal(signal.SIGTERM)
    _, output = job.end()
    tokens = job.tokens.read_text().split()
    assert len(tokens) == 2 and len(set(tokens)) == 1 and re.fullmatch(r"[0-9a-f]{64}", tokens[0]), "head and workers have the same one"
    assert job.modes.read_text().split() == ["600", "600"] and list(job.home.iterdir()) == []
    assert not any(tokens[0] in line for line in job.lines()) and tokens[0] not in output


def test_slurms_warning_ends_the_run_with_its_checkpoint_and_its_exit_code(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.until(lambda: any(line.startswith("evenkeel") for line in job.lines()))
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143
    assert job.lines().index("checkpoint written") < job.lines().index("ray ended"), "Ray stays until the run has saved"


@pytest.mark.parametrize("code", ["1", "3"])
def test_the_runs_exit_code_is_the_jobs(tmp_path: Path, code: str) -> None:
    assert Job(tmp_path, ENDS=code).end()[0] == int(code)


def test_a_node_that_doesn_t_join_is_said(tmp_path: Path) -> None:
    job = Job(tmp_path, NODES="Active:\n 1 node_a\nPending:\n", EVENKEEL_POLL_S="0.001")
    code, output = job.end()
    assert code == 1 and "only 1 of 3 nodes are in the Ray cluster at 127.0.0.1:6379" in output
    assert not any(line.startswith("evenkeel") for line in job.lines())


def test_what_evenkeel_deploy_prints_hands_over_to_it(tmp_path: Path) -> None:
    """With units, object store and words of the recipe; the job's signal reaches the script, as both are one process."""
    text = script("qwen3_8b_8gpu", "rollout.workers=12")
    (printed := tmp_path / "job.sh").write_text(text)
    job = Job(tmp_path, start=["bash", str(printed)], ENDS="0")
    code, output = job.end()
    assert code == 0, output
    starts = [line for line in job.lines() if line.startswith("srun") and "/ray start" in line]
    assert len(starts) == 2 and all('--resources={"rollout": 8} --object-store-memory=' in line for line in starts)
    (run,) = [line for line in job.lines() if line.startswith("evenkeel")]
    words = "rollout.workers=12 --retries 3 metrics.bind=node metrics.discovery_port=9400 ray.address=127.0.0.1:6379"
    assert run == f"evenkeel train recipes/qwen3_8b_8gpu.yaml {words}"
