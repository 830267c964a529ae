"""Nobody writes to a batch, or to logprobs, that another process has handed over: in Ray's object store that would end the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from correction.methods import PRESETS
from tests.e2e.launch import ROOT, environment
from tests.learner.learner_cases import save_model
from tests.learner.moe_cases import save_moe


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a write ends."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "dense")
    save_moe(folder / "moe")
    command = [sys.executable, "-m", "tests.actors.read_only_paths", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment(), cwd=ROOT, check=False)


def test_a_write_would_be_seen(played: subprocess.CompletedProcess[str]) -> None:
    assert played.stdout.splitlines()[0] == "a write: SIGSEGV"


def test_service_and_learner_only_read_what_they_are_given(played: subprocess.CompletedProcess[str]) -> None:
    """With every preset, with and without a forward of its own: from the queue to the diagnosis, and through a real learner's steps."""
    assert played.returncode == 0, played.stdout[-1000:] + played.stderr[-4000:]
    assert played.stdout.splitlines()[1:] == ["asked", *(f"{preset} {steps}" for steps in (1, 2) for preset in PRESETS)]
