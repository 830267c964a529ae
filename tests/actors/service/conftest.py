from __future__ import annotations

import pytest
import ray


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray a reference is the object."""
    monkeypatch.setattr(ray, "put", lambda content: content)
