"""benchmarks/correction_pass.py fails where the pass takes more copies of its inputs than it may."""

from __future__ import annotations

import pytest
import torch

from benchmarks import correction_pass


@pytest.mark.parametrize(("ragged", "is_over"), [(25.0, False), (25.1, True)])
def test_a_pass_over_the_limit_is_a_failure(monkeypatch: pytest.MonkeyPatch, ragged: float, is_over: bool) -> None:
    """After all that there is to print. What was measured is made up: how long a pass takes is no matter of a test."""
    printed = list[object]()
    monkeypatch.setattr("sys.argv", ["correction_pass.py"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(correction_pass, "measure", lambda kind, _: ragged if kind == "ragged" else 1.0)
    monkeypatch.setattr(correction_pass, "profile", printed.append)
    if is_over:
        with pytest.raises(SystemExit, match=r"over 25 copies of its inputs \(ragged: 25.1\)"):
            correction_pass.main()
    else:
        correction_pass.main()
    assert printed
