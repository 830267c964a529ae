"""The benchmark of the control plane's own actors runs: the parts that replay still fit those that they stand beside."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.sides import ROOT


@pytest.mark.slow
def test_the_real_actors_train_on_what_is_replayed() -> None:
    """Two shapes, five workers in two processes: lognormal lengths of mean 100, so a step of 6 groups of 8 has about 6 x 8 x 100 tokens."""
    shape = ("--workers", "2,5", "--groups", "6", "--tokens", "100", "--rate", "20000", "--steps", "3", "--hosts", "2")
    command = [sys.executable, str(ROOT / "benchmarks" / "control_plane_actors.py"), *shape]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"(\d+) workers, 6 groups and ([\d.]+) million tokens a step", done.stdout)
    assert [workers for workers, _ in found] == ["2", "5"]
    assert all(0.3 < float(millions) * 1e6 / (6 * 8 * (100 + 200)) < 3 for _, millions in found), "prompts of 200 tokens each, and answers"
    for process in ("driver", "queue", "service", "rank", "host 0", "host 1"):
        assert len(re.findall(rf"^  {process} +[\d.]+ CPU s for a million tokens", done.stdout, re.MULTILINE)) == 2
    made = r"^  [\d.]+ calls of Ray's for a group of 800 tokens, made by: driver ([\d.]+), service [\d.]+$"
    calls = re.findall(made, done.stdout, re.MULTILINE)
    assert len(calls) == 2, "neither workers nor queue call anybody for a group"
    assert all(float(driver) > 1 for driver in calls)
    assert "is gone" not in done.stdout and "dirty" not in done.stdout, "no worker was lost on the way"
