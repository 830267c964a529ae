"""Rows in other encodings, with torn bytes, half characters and JSON that Python does not read: a sentence each, or the row alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import DataError
from evenkeel.rollout.config import FileTask, HuggingFaceTask
from evenkeel.rollout.tasks.tasks import build_task
from tests.rollout.row_files import numbered, write_rows

FRENCH = [{"prompt": f"Épelez été {i}", "answer": f"é{i}", "level": i % 3} for i in range(20)]


def as_text(rows: list[dict[str, Any]], name: str) -> str:
    if name == "rows.json":
        return json.dumps(rows, ensure_ascii=False, indent=1)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_costs_no_row(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(as_text(FRENCH, name), encoding="utf-8-sig")
    task = build_task(FileTask(path=tmp_path / name, held_out_size=1))
    assert task.check().skipped == () and task.check().train_questions == 19


def test_a_byte_order_mark_in_the_middle_is_of_a_joined_file(tmp_path: Path) -> None:
    """cat a.jsonl b.jsonl, both as Windows writes them."""
    half = as_text(FRENCH[:10], "rows.jsonl").encode("utf-8-sig") + as_text(FRENCH[10:], "rows.jsonl").encode("utf-8-sig")
    (tmp_path / "rows.jsonl").write_bytes(half)
    task = build_task(FileTask(path=tmp_path / "rows.jsonl", held_out_size=1))
    assert task.check().skipped == () and task.check().train_questions == 19


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("latin-1", "not UTF-8: "),
        ("cp1252", "likely Windows-1252"),
        ("utf-16", "is UTF-16, not UTF-8"),
        ("utf-16-le", "iconv -f UTF-16LE -t UTF-8"),
        ("utf-32", "is UTF-32, not UTF-8"),
    ],
)
def test_a_file_of_another_encoding_is_refused_with_its_name(tmp_path: Path, name: str, encoding: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(as_text(FRENCH, name), encoding=encoding)
    with pytest.raises(DataError) as caught:
        build_task(FileTask(path=path))
    assert str(caught.value).startswith(f"rollout.task.path = {path}: ") and said in str(caught.value)


def test_the_held_out_file_is_named_by_its_own_key(tmp_path: Path) -> None:
    train, held_out = write_rows(tmp_path / "rows.jsonl", numbered(9)), tmp_path / "test.jsonl"
    held_out.write_text(as_text(FRENCH, "test.jsonl"), encoding="latin-1")
    with pytest.raises(DataError, match=r"rollout\.task\.held_out_path = .*test\.jsonl: not UTF-8: 20 lines.* line 1 \(0xc9 at byte 13\)"):
        build_task(FileTask(path=train, held_out_path=held_out))


def test_torn_bytes_in_a_file_that_is_utf_8_cost_their_rows_alone(tmp_path: Path) -> None:
    lines = as_text(FRENCH, "rows.jsonl").encode().splitlines()
    for torn in (4, 8):
        lines[torn] = lines[torn].replace("É".encode(), b"\xc9")
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    task = build_task(FileTask(path=path, held_out_size=1))
    assert [str(row) for row in task.check().skipped] == [f"{path}:{line}: not UTF-8 (byte 0xc9 at column 13)" for line in (5, 9)]
    texts = {task.train_prompt(i).text for i in range(17)} | {p.text for p in task.held_out_prompts()}
    assert texts == {row["prompt"] for i, row in enumerate(FRENCH) if i not in (4, 8)}, "nothing is put in place of a byte"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "spell \ud800", "answer": "x"}, "prompt"),
        ({"prompt": "spell it", "answer": "x\udfff"}, "answer"),
        ({"prompt": "spell it", "answer": "x", "hints": [{"by": "\ud800"}]}, "hints"),
        ({"prompt": "spell it", "answer": "x", "hi\ud800": 1}, "hi\\ud800"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_half_a_surrogate_pair_costs_its_row_in_whatever_field(tmp_path: Path, row: dict[str, Any], field: str, name: str) -> None:
    """The tokenizer, the scorer's socket or the run folder would raise on it, steps later."""
    rows, path = [*numbered(3), row], tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if name == "rows.jsonl" else json.dumps(rows))
    (skipped,) = build_task(FileTask(path=path, held_out_size=1)).check().skipped
    assert skipped.place in (f"{path}:4", f"{path}, row 4")
    assert skipped.reason.startswith(f"field '{field}' holds '\\ud") and skipped.reason.isascii()


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    """JSON writes what is beyond U+FFFF as two escapes."""
    rows = [{"prompt": f"😀 {i}", "answer": "😀"} for i in range(5)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert "\\ud83d" in path.read_text()
    task = build_task(FileTask(path=path, held_out_size=1))
    assert task.check().skipped == () and task.train_prompt(0).answer == "😀"


def test_parquet_and_data_sets_name_the_row_whose_text_is_not_utf_8(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    texts = [f"question {i}".encode() for i in range(20)]
    texts[6] = b"qu\xe9"
    column = pyarrow.Array.from_buffers(pyarrow.string(), 20, pyarrow.array(texts, pyarrow.binary()).buffers())
    table = pyarrow.table({"prompt": column, "answer": [str(i) for i in range(20)]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for config in (FileTask(path=tmp_path / "rows.parquet"), HuggingFaceTask(path=str(tmp_path / "saved"))):
        report = build_task(config).check()
        assert [row.place.rpartition(", ")[2] for row in report.skipped] == ["row 7"] and "byte 0xe9" in report.skipped[0].reason
        assert report.train_questions is not None and report.train_questions + report.held_out == 19


def test_bytes_are_no_answer(tmp_path: Path) -> None:
    """Written out they would be "b'4'", which no model says."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["2 + 2"], "answer": [b"4"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match='field "answer" is bytes, which no answer is compared with'):
        build_task(FileTask(path=tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "tab\there", "answer": 1}', "no valid JSON (Invalid control character at column 16)"),
        ('{"prompt": ' + "[" * 100_000, "no readable JSON"),
        ('{"prompt": "q", "answer": ' + "9" * 5000 + "}", "no readable JSON"),
        ('{"prompt": "q", "answer": "a", "hints": ' + "[" * 600 + "]" * 600 + "}", "field 'hints' is nested too deeply"),
    ],
)
def test_json_that_python_does_not_read_costs_its_row(tmp_path: Path, line: str, reason: str) -> None:
    (skipped,) = build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", [*numbered(3), line]), held_out_size=1)).check().skipped
    assert reason in skipped.reason
