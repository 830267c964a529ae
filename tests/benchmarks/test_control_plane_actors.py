"""The benchmark of the control plane's own actors runs: the parts that replay still fit those that they work with."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.sides import ROOT


def printed(*words: str) -> str:
    """Lognormal lengths of mean 100, workers in two processes: a step of 6 groups of 8 has about 6 x 8 x 100 tokens."""
    shape = ("--groups", "6", "--tokens", "100", "--rate", "20000", "--hosts", "2")
    command = [sys.executable, str(ROOT / "benchmarks" / "control_plane_actors.py"), *shape, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_real_actors_train_on_what_is_replayed() -> None:
    """Two shapes, one after the other."""
    told = printed("--workers", "2,5", "--steps", "3")
    found = re.findall(r"(\d+) workers, 6 groups and ([\d.]+) million tokens a step", told)
    assert [workers for workers, _ in found] == ["2", "5"]
    assert all(0.3 < float(millions) * 1e6 / (6 * 8 * (100 + 200)) < 3 for _, millions in found), "prompts of 200 tokens each, and answers"
    for process in ("driver", "queue", "service", "rank", "host 0", "host 1"):
        assert len(re.findall(rf"^  {process} +[\d.]+ CPU s for a million tokens", told, re.MULTILINE)) == 2
    made = r"^  [\d.]+ calls of Ray's for a group of 800 tokens, made by: driver ([\d.]+), service [\d.]+$"
    calls = re.findall(made, told, re.MULTILINE)
    assert len(calls) == 2, "neither workers nor queue call anybody for a group"
    assert all(float(driver) > 1 for driver in calls)
    compared = re.findall(r"^  a version's probe was answered and compared ([\d.]+) times, of (\d) workers", told, re.MULTILINE)
    assert [workers for _, workers in compared] == ["2", "5"]
    for times, workers in compared:
        assert float(times) == pytest.approx(int(workers), rel=0.4), "each version by each worker; of three, one may fall out at the edges"
    assert not re.search("is gone|dirty|alarm", told), "no worker was lost on the way, and the early warning finds nothing"


@pytest.mark.slow
def test_workers_that_die_lose_no_prompt_and_wide_fields_arrive() -> None:
    """Of four workers one dies in the time of each step. A token has 20 likeliest ones with it, 8 bytes each, and 8 experts in 2 layers:
    of a group that is more than Ray returns by value."""
    told = printed("--workers", "4", "--steps", "8", "--churn", "1", "--topk", "20", "--expert-layers", "2")
    numbers = r"  (\d+) workers died, .* of (\d+) prompts (\d+) were trained on, (\d+) discarded, (\d+) under way; copies .* at most (\d+)$"
    ((died, *books, copies),) = re.findall(numbers, told, re.MULTILINE)
    admitted, trained, discarded, under_way = map(int, books)
    assert int(died) >= 5 and told.count("is gone: ") >= 5
    assert (trained, discarded, int(copies)) == (10 * 6, 0, 1) and admitted == trained + under_way
    assert "  176 bytes a token in wide fields" in told
