"""Lines that a crash has torn are left out by readers, and cut before the next line would join them."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.actors import json_lines
from evenkeel.actors.json_lines import JsonLines, last_step, step_of, step_of_line


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
    assert lines.read(step_of) == [1, 2, 3] and last_step(lines.path) == 3
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


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(0, 9)).map(sorted),
    junk=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([b"", b"torn", b'{"step": 2', b"\xff\0", b"[1]"])), max_size=3),
    torn=st.sampled_from([b"", b"{", b'{"step": 1}', b'{"step": 99}']),
    block=st.sampled_from([1, 7, 64, 1 << 17]),
    step=st.integers(-1, 10),
)
def test_rewind_goes_back_to_the_last_line_that_stays(
    steps: list[int], junk: list[tuple[int, bytes]], torn: bytes, block: int, step: int
) -> None:
    """Wherever the pieces begin in which the file is read: nothing of a later step is left, nothing of an earlier one gone, and all that
    leaves the file is in the other, in order. A second time there is nothing to do."""
    lines = [json.dumps({"step": one, "words": "x" * one}).encode() for one in steps]
    for place, line in junk:
        lines.insert(min(place, len(lines)), line)
    content = b"".join(line + b"\n" for line in lines) + torn
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_TAIL_BYTES", block)
        file, moved = JsonLines(Path(base) / "lines"), Path(base) / "moved"
        file.path.write_bytes(content)
        assert file.steps() == {*steps, *([json.loads(torn)["step"]] if torn.endswith(b"}") else [])}
        taken = file.rewind(step, to=moved)
        kept, gone = file.path.read_bytes(), moved.read_bytes() if moved.exists() else b""
        assert kept + gone == content + (b"\n" if torn else b"") and taken == gone.count(b"\n")
        assert file.read(step_of) == [one for one in steps if one <= step]
        assert not kept or step_of_line(kept.splitlines()[-1]) <= step
        assert file.last(2, step_of) == file.read(step_of)[-2:]
        assert (file.rewind(step, to=moved), file.path.read_bytes()) == (0, kept)


@contextmanager
def at_most(monkeypatch: pytest.MonkeyPatch, *, parsed: int, held: int) -> Iterator[None]:
    """That so many lines are parsed, and so many bytes are in memory at a time."""
    calls = []

    def counted(plain: Any) -> Any:
        return lambda line: (calls.append(len(line)), plain(line))[1]

    with monkeypatch.context() as patch:
        patch.setattr(json_lines.json, "loads", counted(json.loads))
        patch.setattr(json_lines, "_DECODER", type("Decoder", (), {"decode": staticmethod(counted(json_lines._DECODER.decode))}))
        tracemalloc.start()
        try:
            yield
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert len(calls) <= parsed and most < held


def test_a_long_file_costs_what_is_taken_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ten million prompts has 156,000 lines of 8 kB. Here are 2,000."""
    lines, count = JsonLines(tmp_path / "lines.jsonl"), 2000
    lines.append(*({"step": step, "words": "x" * 8000} for step in range(1, count + 1)))
    with lines.path.open("a") as file:
        file.write('{"step": 2001, "words": "x')
    with at_most(monkeypatch, parsed=0, held=3 << 20):
        lines.repair()
    with at_most(monkeypatch, parsed=4, held=3 << 20):
        assert lines.rewind(count - 3, to=tmp_path / "moved.jsonl") == 3
    with at_most(monkeypatch, parsed=3, held=3 << 20):  # what follows the last line end is one, too
        assert lines.last(2, step_of) == [count - 4, count - 3]
    with at_most(monkeypatch, parsed=count, held=3 << 20):
        assert lines.steps() == set(range(1, count - 2))


@pytest.mark.parametrize(
    "line",
    [
        *(f'{{"step": {step}}}' for step in ("null", '"5"', "[1]", "true", "-1", "5.0", "1e999", "NaN", str(1 << 53), "9" * 30, "5")),
        *(f'{{"step": 5, "x": {value}}}' for value in ("NaN", "1e999", "01", "1.", "[}", "tru", '"\\ud800"', '"\x01"', '{"step": 6}')),
        *('{"step": 5, "a{"step": 6}', '{"step": 5, "step": 6}', '{"step": 5} x', '{"step": 5,}', " {}", "", "[1]", "5", "[" * 100_000),
    ],
    ids=lambda line: line[:30],
)
def test_the_step_of_a_line_is_that_of_its_object(line: str) -> None:
    """What isn't JSON, or no such object, is refused by both."""

    def of_object() -> int | None:
        try:
            return step_of(json.loads(line))
        except json_lines._NOT_OURS:
            return None

    try:
        found = step_of_line(line.encode())
    except json_lines._NOT_OURS:
        found = None
    assert found == of_object()


def test_a_number_that_json_has_no_word_for_is_refused_before_anything_is_written(lines: JsonLines) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        lines.append({"step": 4}, {"step": 5, "value": float("nan")})
    assert lines.read(step_of) == [1, 2, 3]
