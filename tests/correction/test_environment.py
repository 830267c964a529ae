"""Environment variables that are set for a while."""

from __future__ import annotations

import os

import pytest

from evenkeel.engines.machine import environment

SET, UNSET = "EVENKEEL_TEST_SET", "EVENKEEL_TEST_UNSET"


def test_variables_are_afterwards_what_they_were_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SET, "before")
    monkeypatch.delenv(UNSET, raising=False)
    with pytest.raises(RuntimeError), environment({SET: "within", UNSET: "within"}):
        assert os.environ[SET] == os.environ[UNSET] == "within"
        os.environ.pop(UNSET)  # as one that is taken over by whoever was started
        raise RuntimeError
    assert os.environ[SET] == "before" and UNSET not in os.environ
