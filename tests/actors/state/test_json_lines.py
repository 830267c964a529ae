"""Lines that a crash has torn are left out by readers, and cut before the next line would join them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.metrics.step_number import step_of
from actors.state.json_lines import JsonLines, last_step


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append({"step": 1}, {"step": 2})
    lines.append({"step": 3})
    return lines


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "none.jsonl")
    lines.repair()
    assert (lines.read(step_of), lines.rewind(0), list(tmp_path.iterdir())) == ([], 0, [])


@pytest.mark.parametrize("foreign", ["not json", "[1]", "7", '{"other": 1}', '{"step": "x"', "", pytest.param("[" * 100_000, id="nested")])
def test_what_is_no_such_line_is_left_out(lines: JsonLines, foreign: str) -> None:
    with lines.path.open("a") as file:
        file.write(foreign + "\n")
    lines.append({"step": 4})
    assert lines.read(step_of) == [1, 2, 3, 4]


@pytest.mark.parametrize("step", ["null", '"x"', "[1]", "true", "-1", "2.5", "1e300", "1e999", "NaN", str(1 << 53)])
def test_a_line_whose_step_is_no_whole_number_belongs_to_none(lines: JsonLines, step: str, tmp_path: Path) -> None:
    with lines.path.open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    assert lines.read(step_of) == [1, 2, 3] and last_step(lines.path) == 0
    assert lines.rewind(3, to=tmp_path / "moved.jsonl") == 1 and last_step(lines.path) == 3


@pytest.mark.parametrize("error", [AttributeError, OverflowError], ids=lambda error: error.__name__)
def test_a_value_of_another_type_or_size_is_that_of_a_foreign_line(lines: JsonLines, error: type[Exception]) -> None:
    """As dict.items of a list, and int of an infinite number."""

    def parse(record: dict[str, int]) -> int:
        if record["step"] == 2:
            raise error
        return record["step"]

    assert lines.read(parse) == [1, 3]


@pytest.mark.parametrize("cut", [1, 5])
def test_a_torn_line_is_cut_before_the_next_would_join_it(lines: JsonLines, cut: int) -> None:
    """Also when only the line's end is missing."""
    lines.path.write_bytes(lines.path.read_bytes()[:-cut])
    lines.repair()
    lines.append({"step": 4})
    assert lines.read(step_of) == [1, 2, 4]


def test_rewind_moves_later_lines_and_those_that_nobody_can_read(lines: JsonLines, tmp_path: Path) -> None:
    with lines.path.open("a") as file:
        file.write("torn\n")
    moved = tmp_path / "moved.jsonl"
    assert lines.rewind(1, to=moved) == 3
    assert moved.read_text().splitlines() == [json.dumps({"step": 2}), json.dumps({"step": 3}), "torn"]
    assert lines.path.read_text() == json.dumps({"step": 1}) + "\n" and lines.rewind(1, to=moved) == 0


def test_a_number_that_json_has_no_word_for_is_refused_before_anything_is_written(lines: JsonLines) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        lines.append({"step": 4}, {"step": 5, "value": float("nan")})
    assert lines.read(step_of) == [1, 2, 3]
