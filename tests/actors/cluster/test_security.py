"""Who may reach a private Ray."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from actors.cluster import security
from tests.e2e.launch import environment


def test_the_token_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "auth_token"
    token.write_text("x")
    token.chmod(0o644)
    monkeypatch.setattr(security, "_TOKEN", token)
    security.protect_token()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_ray_listens_on_loopback_only_while_a_private_one_starts() -> None:
    name = security.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(name)
    with security.loopback_only():
        assert os.environ[name] == "0" and not security.ray_constants.ENABLE_RAY_CLUSTER
    assert os.environ.get(name) == before and security.ray_constants.ENABLE_RAY_CLUSTER
    assert name not in environment()
