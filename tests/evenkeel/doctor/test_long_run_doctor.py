"""The doctor's look at a long run with a large checkpoint, which takes a while: it says what it reads, has an end, and holds little."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from evenkeel.actors.checkpoints import reader as checkpoint_reader
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.processes import disk
from evenkeel.actors.processes.disk import DiskLate
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.cli import app
from evenkeel.doctor import run_doctor
from evenkeel.doctor.run_doctor import RECENT_STEPS, LinesRead, check_ledger, diagnose_run
from evenkeel.learner.weights import file_sums
from evenkeel.recipe import load_config
from tests.evenkeel.disk_clock import notice_first
from tests.evenkeel.doctor.test_run_doctor import RECIPE, run_folder
from tests.evenkeel.finished_run import hasty
from tests.evenkeel.test_resume_disk import hanging


@pytest.mark.parametrize(
    ("name", "what", "how_far"),
    [
        ("config.yaml", "the run's config.yaml", ""),
        ("metrics.jsonl", "the numbers of the last steps", ""),
        ("events.log", "the run's events", ""),
        ("checkpoints/step_000002/manifest.json", "files of the newest checkpoint", r" \(step_000002\)"),
        ("ledger.jsonl", "the run's ledger", r" \(0 lines of the ledger are read\)"),
        ("evaluations.jsonl", "the run's evaluations and stacks", ""),
    ],
)
def test_a_disk_that_hangs_is_told_and_ends_the_look_at_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, what: str, how_far: str
) -> None:
    folder = run_folder(tmp_path / "run", steps=2, saved=2)
    folder.append_evaluation(StepMetrics(0))
    folder.write_config(hasty(load_config(RunConfig, RECIPE, ["steps=2"])))
    monkeypatch.setattr(disk, "DeadlinesConfig", lambda: SimpleNamespace(disk_s=0.3))  # before the run's own are known
    notice_first(monkeypatch, what)
    named = rf"{what} -> the run folder's disk"
    with hanging(folder.path / name), pytest.raises(DiskLate, match=rf"^{named}: not done in \d s{how_far}\. When that disk answers again"):
        diagnose_run(RunFolder.view(folder.path))
    assert re.search(rf"^evenkeel: waiting 0 s for {named}{how_far}$", capsys.readouterr().err, re.MULTILINE)


def test_a_large_checkpoint_is_read_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the time of its bytes, and the page comes when it is read."""
    folder, is_told, plain = run_folder(tmp_path / "run", saved=2), threading.Event(), file_sums.sum_of
    folder.close()

    def sum_of(path: Path, note: Callable[[int], object]) -> Any:
        note(1)
        assert is_told.wait(60.0)
        return plain(path)

    monkeypatch.setattr(file_sums, "sum_of", sum_of)
    monkeypatch.setattr(disk, "_NOTICE_S", 0.1)

    def put(text: str, _: object) -> None:
        if "files of the newest checkpoint" in text and ": 1e-09 of" in text:  # other reading may be told, and more of this
            said.append(text)
            is_told.set()

    monkeypatch.setattr(disk, "put", put)
    said: list[str] = []
    done = CliRunner().invoke(app, ["doctor", str(folder.path)])
    assert said[0].endswith("-> the run folder's disk (step_000002: 1e-09 of 2e-09 GB are read)\n")
    assert done.exit_code == 0 and "(newest checkpoint: step 2)" in done.stdout


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that is looked at goes on, and keeps the newest ones only."""
    folder, plain = run_folder(tmp_path / "run", saved=1), checkpoint_reader.verify

    def verify(path: Path, *arguments: Any) -> list[str]:
        if path.name == "step_000001":
            with folder.checkpoint(2) as checkpoint:
                (checkpoint.state / "part.json").write_text("{}")
            shutil.rmtree(path)
        return plain(path, *arguments)

    monkeypatch.setattr(checkpoint_reader, "verify", verify)
    found = diagnose_run(RunFolder.view(folder.path))
    assert (found.saved_step, found.damaged) == (2, ())


def test_of_a_long_run_the_last_steps_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain, steps = run_folder(tmp_path / "run", done=RECENT_STEPS + 80), StepMetrics.of_record, []
    folder.close()
    monkeypatch.setattr(StepMetrics, "of_record", lambda record: (steps.append(record["step"]), plain(record))[1])
    found = diagnose_run(RunFolder.view(folder.path))
    assert found.step == RECENT_STEPS + 80 and found.books.is_balanced and sorted(steps) == list(range(81, RECENT_STEPS + 81))


def test_the_ledger_s_check_holds_a_bit_a_prompt(tmp_path: Path) -> None:
    """In whatever order they left the queue, and through two epochs; one that comes twice is found wherever it is."""
    folder, count = run_folder(tmp_path / "run", done=0), 20_000
    ids = [f"train/{epoch}/{position}" for epoch in range(2) for position in range(count // 2)]
    random.Random(0).shuffle(ids)
    lines = [json.dumps({"step": 1, "prompt_id": one, "outcome": "trained"}) + "\n" for one in ids]
    (folder.path / "ledger.jsonl").write_text("".join(lines))
    tracemalloc.start()
    found = check_ledger(folder, None, LinesRead())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.is_balanced and found.sentence == f"balanced: {count} trained, each prompt once"
    assert most < 10 * count, "a set of their ids takes a hundred bytes a prompt"
    with (folder.path / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(lines[7:9])
    found = check_ledger(folder, None, LinesRead())
    named = ", ".join(sorted(ids[7:9]))
    assert found.sentence.startswith(f"NOT balanced: 2 prompts stand in the ledger twice, {named} among them")


def test_ids_of_any_form_are_told_apart() -> None:
    ids = ["train/0/1", "train/0/01", "train/0/\u0661", "train/1/1", "held_out/0/1", f"train/0/{1 << 16}", f"train/0/{10**40}", "train/0/0"]
    ids += [f"train/0/{'9' * 5000}", "", "x", "a/b/c", "a/0/1/2", "train/0/8", "train/00/1", "train/0/-1", "5", "/5", "05"]
    seen = run_doctor._Seen()
    assert [seen.add(one) for one in ids] == [False] * len(ids) and [seen.add(one) for one in ids] == [True] * len(ids)


def test_a_ledger_that_is_read_on_and_on_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline counts from the newest lines."""
    monkeypatch.setattr(run_doctor, "_LOOK", 3)
    monkeypatch.setattr(run_doctor, "time", SimpleNamespace(monotonic=iter([0.0, 7.0, 9.0]).__next__))
    read, found = LinesRead(), []
    for _ in range(7):
        read.add()
        found.append(read.newest)
    assert found == [0.0, 0.0, 7.0, 7.0, 7.0, 9.0, 9.0] and str(read) == "7 lines of the ledger are read"
