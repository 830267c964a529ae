"""The benchmark of the control plane's own actors runs: the parts that replay still fit those that they work with."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from benchmarks import control_plane_actors
from benchmarks.process_use import StoreUse
from benchmarks.replayed_parts import (
    ReplayedBucket,
    ReplayedEngine,
    ReplayedRank,
    ReplayPool,
    WideShape,
    tensor_names,
)
from benchmarks.replayed_run import Figures, ReplayedShape, prompt_of, recorded_shape
from benchmarks.sides import ROOT
from evenkeel.actors.carriers import ExportPlan
from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.engine.weight_transfer import require_checksums
from lab.simulate.costs import AnswerLengths
from lab.simulate.measured import recorded_lengths
from tests.lab.test_simulate import LENGTHS, PROMPT, record

LONG = [50, 60, 1990]
"""Mean 700."""


def sampled(lengths: AnswerLengths, groups: int) -> list[int]:
    """Lengths of the answers that a replayed engine hands over."""

    async def sample() -> list[int]:
        engine = ReplayedEngine(lengths, 0.0, WideShape(), 0)
        found = [await engine.group(prompt_of(i, 7), group_id=i, admitted_version=0) for i in range(groups)]
        assert all(len(one.prompt_ids) == 7 for group in found for one in group.trajectories)
        return [len(one.response_ids) for group in found for one in group.trajectories]

    return asyncio.run(sample())


def test_answers_and_prompts_are_as_long_as_those_of_a_recorded_run(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    lengths, mean, prompt = control_plane_actors._lengths(tmp_path / "run", None)
    assert lengths is not None and lengths.description == f"120 answers of {tmp_path / 'run'}"
    assert (mean, prompt) == (round(statistics.fmean(LENGTHS)), PROMPT)
    shape = ReplayedShape(2, 4, mean, 1e5, 3, 1, recorded=lengths, prompt_tokens=prompt)
    assert shape.config.rollout.sampling.max_tokens == max(LENGTHS)
    found = sampled(shape.lengths.afresh(0), 50)
    assert set(found) == set(LENGTHS) and statistics.fmean(found) == pytest.approx(statistics.fmean(LENGTHS), rel=0.05)


def test_recorded_lengths_are_scaled_to_a_mean_and_keep_their_tail() -> None:
    lengths, mean = recorded_shape(AnswerLengths.like(LONG, "a run"), 7000)
    assert (mean, sorted(lengths.recorded)) == (7000, [500, 600, 19900])
    assert lengths.description == "a run, 10 times as long"
    assert set(sampled(lengths, 20)) == {500, 600, 19900}
    assert recorded_shape(AnswerLengths.like(LONG, "a run"), None)[0].recorded == LONG


def test_without_a_run_lengths_are_lognormal() -> None:
    """Median exp(-1/8) of the mean."""
    assert control_plane_actors._lengths(None, None) == (None, 1000, 200)
    found = sampled(ReplayedShape(2, 4, 400, 1e5, 3, 1).lengths, 500)
    assert statistics.fmean(found) == pytest.approx(400, rel=0.05) and statistics.median(found) == pytest.approx(353, rel=0.05)
    assert max(found) <= 3200


def test_a_folder_without_lengths_and_ones_above_the_recipe_s_limit_end_it_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"^--lengths {tmp_path}: not a run folder: it has no config.yaml"):
        control_plane_actors._lengths(tmp_path, None)
    record(tmp_path / "run", 1)
    recipe = tmp_path / "run" / "config.yaml"
    recipe.write_text(re.sub(r"max_tokens: \d+", "max_tokens: 9", recipe.read_text()))
    assert recorded_lengths(tmp_path / "run")[0].max_tokens == 9
    with pytest.raises(SystemExit, match=r"^--lengths 120 answers of .*/run: 10 tokens, above the max_tokens of the run's recipe, 9$"):
        control_plane_actors._lengths(tmp_path / "run", None)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="0 steps to measure from"):
        recorded_lengths(tmp_path / "run")


def test_a_version_has_a_large_model_s_checksums_and_who_holds_it_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)
    assert len(tensor_names()) == len(set(tensor_names())) == 18_867
    rank = ReplayedRank(0.0)
    sent = rank.export(1, 0, ExportPlan(1, checksums=True))
    assert sent.checksums is not None
    sums: dict[str, str] = sent.checksums.by_name
    assert sums.keys() == set(tensor_names())
    assert len(set(sums.values())) == len(sums) and {len(one) for one in sums.values()} == {64}
    assert rank.export(2, 0, ExportPlan(1)).checksums is None, "nobody asked for any"
    require_checksums(sent.buckets, sums)
    engine = ReplayedEngine(AnswerLengths.like([5], "five", max_tokens=5), 0.0, WideShape(), 0)
    assert asyncio.run(engine.weight_checksums(sent.buckets, sums)) == sums
    assert ReplayedBucket(1).checksums() != sums, "another version's are others"


def test_all_workers_have_to_show_their_checksums() -> None:
    """The first ones, too: with hundreds of them that is most of what a start costs."""
    pool: Any = SimpleNamespace(hosts=[None])
    made = [ReplayPool._create(pool, name, Any) for name in ("0", "1")]  # type: ignore[arg-type]
    assert [worker.sync.is_verified for worker in made] == [False, False]


TIMES = (
    "40.0 MB of those in flight; the object store has grown by 44.0 MB, 8.4 of them of other fields: 0.89 times their size on this node "
    "(goal at most 1)"
)


@pytest.mark.parametrize(("wide", "text"), [([6_000_000, 4_000_000], TIMES), ([0], "grown by 44.0 MB")], ids=["wide", "few"])
def test_the_object_store_s_growth_is_a_multiple_of_the_wide_fields(capsys: pytest.CaptureFixture[str], wide: list[int], text: str) -> None:
    """Two batches of 4 groups are in flight, of 0.2 million tokens: 8 bytes for each as answers, 34 as batches."""
    figures = Figures(tokens=300_000, seconds=3.0, idle={"driver": 0.0}, admission_s=[0.1], gap_s=[0.1], receipts_s=[0.1], wide=wide)
    figures.last_group_s, figures.stored, figures.exports = [0.0], 44_000_000, {0: 1}
    control_plane_actors._tell(ReplayedShape(2, 4, 1000, 1e5, 3, 1, wide=WideShape(topk=20)), figures, {"driver": (1.0, 0)})
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "wide fields" in one]
    assert line.startswith("  160 bytes a token in wide fields, ") and line.endswith(text)


def test_the_learner_s_wait_after_a_step_without_new_weights_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures(tokens=300_000, seconds=3.0, idle={"driver": 0.0}, admission_s=[0.1], gap_s=[1.2, 1.4], receipts_s=[0.1], wide=[0])
    figures.gap_unpublished_s, figures.last_group_s = [0.3, 0.5], [0.9, 1.0]
    shape = ReplayedShape(2, 4, 1000, 1e5, 3, 1, every=2)
    assert (shape.config.weight_sync.every_steps, shape.config.max_staleness) == (2, 2)
    control_plane_actors._tell(shape, figures, {"driver": (1.0, 0)})
    told = capsys.readouterr().out
    assert "the learner waits 1.300 s between steps, 0.950 of them until the last answer is sampled" in told
    assert "after a published step; after another one it waits 0.400 s" in told


def test_bytes_that_others_write_to_the_store_s_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for the raylet, which opens the files; a file has bytes where it was written to."""
    this = SimpleNamespace(name=lambda: "raylet", pid=os.getpid())
    monkeypatch.setattr(psutil.Process, "children", lambda _: [this])
    with (tmp_path / "plasmaX").open("w+b") as file, (tmp_path / "plasmaX").open("rb"):
        file.truncate(1 << 24)
        file.write(bytes(1 << 20))
        file.flush()
        store = StoreUse()
        subprocess.run(["dd", "if=/dev/urandom", f"of={file.name}", "bs=1M", "count=3", "seek=4", "conv=notrunc,fsync"], check=True)
        assert store.grown == pytest.approx(3 << 20, rel=0.01)


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
    for process in ("driver", "service", "rank", "host 0", "host 1"):
        assert len(re.findall(rf"^  {process} +[\d.]+ CPU s for a million tokens", told, re.MULTILINE)) == 2
    made = r"^  [\d.]+ calls of Ray's for a group of 800 tokens, made by: driver ([\d.]+), service [\d.]+$"
    calls = re.findall(made, told, re.MULTILINE)
    assert len(calls) == 2, "workers call nobody for a group"
    assert all(float(driver) > 1 for driver in calls)
    compared = re.findall(r"^  a version's probe was answered and compared ([\d.]+) times, of (\d) workers", told, re.MULTILINE)
    assert [workers for _, workers in compared] == ["2", "5"]
    for times, workers in compared:
        assert float(times) == pytest.approx(int(workers), rel=0.4), "each version by each worker; of three, one may fall out at the edges"
    assert not re.search("is gone|dirty|alarm", told), "no worker was lost on the way, and the early warning finds nothing"


@pytest.mark.slow
def test_workers_that_die_lose_no_prompt_and_wide_fields_arrive(tmp_path: Path) -> None:
    """Of four workers one dies in the time of each step. A token has 20 likeliest ones with it, 8 bytes each, and 8 experts in 2 layers:
    of a group that is more than Ray returns by value. Lengths are those of a run, scaled to a mean of 100."""
    record(tmp_path / "run", 1)
    more = ("--topk", "20", "--expert-layers", "2", "--lengths", str(tmp_path / "run"))
    slowly = ("--rate", "5000")  # who joins has its checksums compared, and has to live long enough to finish a group
    told = printed("--workers", "4", "--steps", "8", "--churn", "1", *slowly, *more)
    assert f"lengths: 120 answers of {tmp_path / 'run'}, 16.7 times as long; mean 100 tokens, prompts of 14\n" in told
    ((joined, checksums),) = re.findall(r"and others joined, (\d+) with ([\d,]+) checksums; ", told)
    assert int(joined) >= 4 and checksums == "18,867"
    numbers = r"  (\d+) workers died, .* of (\d+) prompts (\d+) were trained on, (\d+) discarded, (\d+) under way; copies .* at most (\d+)$"
    ((died, *books, copies),) = re.findall(numbers, told, re.MULTILINE)
    admitted, trained, discarded, under_way = map(int, books)
    assert int(died) >= 5 and told.count("is gone: ") >= 5
    assert (trained, discarded, int(copies)) == (10 * 6, 0, 1) and admitted == trained + under_way
    carried = r"^  176 bytes a token in wide fields, ([\d.]+) MB .* grown by ([\d.]+) MB, .* [\d.]+ times their size on this node \(goal"
    ((megabytes, grown),) = re.findall(carried, told, re.MULTILINE)
    assert float(megabytes) == pytest.approx(2 * 6 * 8 * 100 * 176 / 1e6, rel=0.4), "of two batches; experts of prompts, too"
    assert float(grown) > float(megabytes) / 2, "a batch at least was in it at once"
