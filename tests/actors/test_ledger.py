"""Every prompt once: a second settlement is an error, a rewind takes back whole steps, a torn line doesn't stop a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.ledger import Ledger
from correction.errors import LedgerError


def lines_of(path: Path) -> list[tuple[int, str, str]]:
    return [(e["step"], e["prompt_id"], e["outcome"]) for e in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.settle(1, trained=["a", "b"])
    ledger.settle(2, trained=["c"], discarded=[("d", "rewards all alike")])
    return path


def test_what_is_written(path: Path) -> None:
    assert lines_of(path) == [(1, "a", "trained"), (1, "b", "trained"), (2, "c", "trained"), (2, "d", "rewards all alike")]


@pytest.mark.parametrize("settle", [{"trained": ["d"]}, {"trained": [], "discarded": [("a", "x")]}, {"trained": ["e", "e"]}])
def test_a_prompt_is_settled_once(path: Path, settle: dict[str, list[str]]) -> None:
    before = path.read_text()
    with pytest.raises(LedgerError, match=r"step 3: prompt \w .* was settled in step \d already"):
        Ledger(path).settle(3, **settle)
    assert path.read_text() == before


def test_rewind_takes_back_whole_steps_and_lets_them_be_done_again(path: Path) -> None:
    ledger = Ledger(path)
    ledger.rewind(1)
    assert len(ledger) == 2 and [entry[0] for entry in lines_of(path)] == [1, 1]
    ledger.settle(2, trained=["c", "d"])
    assert len(Ledger(path)) == 4


@pytest.mark.parametrize("cut", [1, 10])
def test_a_torn_last_line_is_cut(path: Path, cut: int) -> None:
    """kill -9 in the middle of a write; also when only the line's end is missing, so that the next line doesn't join it."""
    path.write_bytes(path.read_bytes()[:-cut])
    ledger = Ledger(path)
    assert len(ledger) == 3
    ledger.settle(3, trained=["e"])
    assert [entry[1] for entry in lines_of(path)] == ["a", "b", "c", "e"]
