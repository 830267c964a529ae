"""The stand-in of the hub, with one model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evenkeel.actors.cluster import hub
from tests.actors.cluster.hub_scene import FILES
from tests.hub_stand_in import Repository, StandInHub, stand_in_hub


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub with one model, and an empty cache. huggingface_hub has read its environment when it was imported."""
    from huggingface_hub import constants

    with stand_in_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.address + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its protocol has no stand-in
        monkeypatch.setattr(hub, "_HUB_S", 2.0)
        running.repositories["models/acme/tiny"] = Repository()
        running.repositories["models/acme/tiny"].commit(FILES)
        yield running
