"""What benchmarks share: the order of turns, ratios by hand, and a worker in a process of its own, with this Python as its environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.sides import ROOT, Peer, TimeRatio, in_turns, options


def test_each_turn_begins_with_another_side_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def side(name: str, turn: int) -> int:
        order.append(name)
        return turn

    found = in_turns({name: lambda turn, name=name: side(name, turn) for name in "abc"}, 3, warm_up=1)
    assert "".join(order) == "abcbcacababc"
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}
    order.clear()
    in_turns({name: lambda turn, name=name: side(name, turn) for name in "ab"}, 2, rotate=False)
    assert "".join(order) == "abab"


def test_a_ratio_is_of_the_same_turn() -> None:
    """1, 2 and 3 times, though the sums' ratio is 14 / 6: quartiles of three values are the values."""
    assert str(TimeRatio.of([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])) == "2.00 (1.00 to 3.00)"


def peer(folder: Path, answer: str) -> Peer:
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "worker.py").write_text(f"from sides import serve\n\ndef answer(question):\n    {answer}\n\nserve(answer)\n")
    return Peer("other", str(folder / "worker.py"), ())


def test_a_worker_answers_whatever_else_it_prints(tmp_path: Path) -> None:
    other = peer(tmp_path, "print('a line of a log'); return {'sum': sum(question)}")
    with other.start(tmp_path, PYTHONPATH=str(ROOT / "benchmarks")) as ask:
        assert ask([1, 2]) == {"sum": 3}
        assert ask([4]) == {"sum": 4}


def test_a_worker_that_fails_is_quoted(tmp_path: Path) -> None:
    other = peer(tmp_path, "raise ValueError('no such batch')")
    with (
        pytest.raises(SystemExit, match=r"other failed.*\n(.*\n)*ValueError: no such batch"),
        other.start(tmp_path, PYTHONPATH=str(ROOT / "benchmarks")) as ask,
    ):
        ask(None)


def test_a_peer_brings_its_two_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--verl", str(tmp_path)])
    assert Peer("verl", "verl_worker.py", ()).parse(options("text")).verl == tmp_path
