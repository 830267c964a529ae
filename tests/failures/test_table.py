"""The table of faults: what a run's own sentences say of the work that is lost, and how rows become a table."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenkeel.actors.driver.parts import StartingPoint
from evenkeel.actors.driver.recovery import what_is_done_again
from tests.failures.measured import FILE, PLAYED, REAL, Measured, done_again
from tests.failures.table import TESTS, main, read, rows_of, table

ROOT = Path(__file__).parents[2]


def went_back(*, step: int, saved: int) -> str:
    point = StartingPoint(Path("model"), SimpleNamespace(), SimpleNamespace(step=saved, weight_version=saved))  # type: ignore[arg-type]
    return what_is_done_again(point, step=step, version=step, generation=1)


@pytest.mark.parametrize(
    ("events", "again"),
    [
        (went_back(step=9, saved=6), "3 steps and the groups under way"),
        (went_back(step=7, saved=6), "1 step and the groups under way"),
        (went_back(step=6, saved=6), "no step and the groups under way"),
        ("the run's process was killed by SIGKILL after step 38; it goes on from the checkpoint of step 35 in 1 s (retry 1 of 3)",
         "3 steps and the groups under way"),
        ("the run's process was killed by SIGKILL after step 2; it goes on from its beginning (it has no checkpoint) in 1 s",
         "2 steps and the groups under way"),
        ("rollout worker 0 is gone: its actor died; others take its 8 groups", "8 groups"),
        ("rollout worker 0 is gone: its actor died; others take its 1 group", "1 group"),
        ("group 7 is sampled again: not finite\ngroup 9 is sampled again: not finite\ngroup 7 is sampled again: late", "2 groups"),
        ("checkpoint in 0.8 s", "nothing"),
    ],
)  # fmt: skip
def test_what_is_lost_is_read_off_the_runs_own_sentences(events: str, again: str) -> None:
    assert done_again(events) == again


def test_of_a_fault_that_came_more_than_once_the_slowest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Measured("driver killed", "resumed", 20.0, "2 steps", REAL),
        Measured("nodes gone", "waits", None, "8 groups", PLAYED),
        Measured("driver killed", "resumed", 41.26, "3 steps", REAL),
    ]
    rows[0].write()  # nobody asks: nothing is written
    monkeypatch.setenv(FILE, str(tmp_path / "measured.jsonl"))
    for row in rows:
        row.write()
    assert len([json.loads(line) for line in (tmp_path / "measured.jsonl").read_text().splitlines()]) == 3
    assert table(read(tmp_path / "measured.jsonl")).splitlines()[2:] == [
        "| driver killed | resumed | 41.3 | 3 steps | real processes |",
        "| nodes gone | waits | - | 8 groups | played, virtual time |",
    ]


def test_no_row_vanishes_because_its_test_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For want of a mount, of ptrace, of Redis; pytest's exit code is 0 then."""
    page, tests, measured = tmp_path / "page.md", tmp_path / "test_two.py", tmp_path / "measured.jsonl"
    page.write_text(before := "<!-- failures -->\nthe rows\n<!-- /failures -->\n")
    measured.write_text(row := json.dumps(asdict(Measured("a fault", "resumed", 1.0, "-", REAL))) + "\n")
    tests.write_text(
        "import os, pathlib, pytest\n"
        f"def test_one(): pathlib.Path(os.environ[{FILE!r}]).write_text({row!r})\n"
        "@pytest.mark.skipif(True, reason='no Redis')\ndef test_other(): ...\n"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # those that aren't needed take longer than the rest
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.setattr("tests.failures.table.TESTS", (str(tests),))
    monkeypatch.setattr("sys.argv", ["table", "--write", str(page)])
    assert main() == 1 and page.read_text() == before
    said = capsys.readouterr()
    assert "| a fault |" in said.out and said.err.splitlines()[1].endswith("test_two::test_other: no Redis")
    monkeypatch.setattr("sys.argv", ["table", "--write", str(page), "--measured", str(measured)])
    assert main() == 0 and "| a fault | resumed | 1.0 | - |" in page.read_text()


def test_a_file_of_some_tests_makes_no_other_row_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, measured = tmp_path / "page.md", tmp_path / "measured.jsonl"
    old = [Measured("one", "goes on", 1.0, "-", REAL), Measured("two", "waits", None, "2 groups", PLAYED)]
    page.write_text(f"before\n<!-- failures -->\n{table(old)}\n<!-- /failures -->\n| no | row |\n")
    before = page.read_text()
    new = [Measured("one", "goes on at once", 3.0, "-", REAL), Measured("one", "goes on", 0.5, "-", REAL)]
    new.append(Measured("new", "-", 2.0, "-", REAL))
    measured.write_text("".join(json.dumps(asdict(row)) + "\n" for row in new))
    monkeypatch.setattr("sys.argv", ["table", "--measured", str(measured), "--write", str(page)])
    assert main() == 1 and page.read_text() == before
    assert capsys.readouterr().err.splitlines()[1:] == ["two"]
    monkeypatch.setattr("sys.argv", ["table", "--measured", str(measured), "--write", str(page), "--keep"])
    assert main() == 0 and page.read_text() == before.replace(table(old), table([new[0], old[1], new[2]]))
    monkeypatch.setattr("sys.argv", ["table", "--write", str(page), "--keep"])
    with pytest.raises(SystemExit):
        main()


def test_rows_of_the_page_are_read_as_they_were_written(tmp_path: Path) -> None:
    """No cell has what separates cells."""
    page = ROOT / "docs" / "reliability.md"
    rows = rows_of(page)
    assert len(rows) > 40 and table(rows) in page.read_text()


def test_steps_that_a_resume_by_hand_takes_back_are_counted() -> None:
    assert done_again("going on from step 4 (/runs/one/checkpoints/step_000004)", reached=6) == "2 steps and the groups under way"


def test_every_test_that_measures_is_in_the_table() -> None:
    """None is forgotten when a new one comes. Looked for in the texts: these tests take minutes, and import Ray and SGLang."""
    apart = {Path(__file__), ROOT / "tests/failures/measured.py", ROOT / "tests/failures/table.py"}
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py") if path not in apart}
    measuring = {str(path.relative_to(ROOT)) for path, text in texts.items() if re.search(r"\b(Recovery|Measured)\(", text)}
    assert measuring == {name.partition("::")[0] for name in TESTS}


def test_the_tests_that_measure_are_there() -> None:
    for name in TESTS:
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text()
        assert "Measured(" in text or "Recovery(" in text, f"{path} measures nothing"
        assert f"def {function}(" in text or not function
