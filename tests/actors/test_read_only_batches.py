"""Nobody writes to a batch, or to logprobs, that another process has handed over: in Ray's object store that would end the process."""

from __future__ import annotations

import signal
import subprocess
import sys

from correction.methods import PRESETS
from tests.e2e.launch import ROOT, environment


def played(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a write ends."""
    command = [sys.executable, "-m", "tests.actors.read_only_paths", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment(), cwd=ROOT, check=False)


def test_a_write_would_be_seen() -> None:
    assert played("--write").returncode == -signal.SIGSEGV


def test_service_and_learner_only_read_what_they_are_given() -> None:
    """With every preset, with and without a forward of its own: from the queue to the diagnosis, and through a real learner's steps."""
    done = played()
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert done.stdout.splitlines() == ["asked", *(f"{preset} {steps}" for steps in (1, 2) for preset in PRESETS)]
