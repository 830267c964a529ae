"""Who may reach a private Ray."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from evenkeel.actors.cluster import cluster as security
from tests.e2e.launch import environment


def test_the_token_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("x")
    token.chmod(0o644)
    monkeypatch.setenv("HOME", str(tmp_path))
    security.protect_token()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize("home", ["kept", "/proc", "/nowhere"])
def test_a_private_ray_needs_no_home_for_its_token(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written to (HOME=/ in a container, read-only homes of a cluster's nodes) it gets a token that no file holds."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path) if home == "kept" else home)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(("/proc", "/nowhere")) and str(path) != "/")  # root may
    security.have_token()
    assert (home == "kept") == ("RAY_AUTH_TOKEN" not in os.environ)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)


def test_ray_listens_on_loopback_only_while_a_private_one_starts() -> None:
    name = security.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(name)
    with security.loopback_only():
        assert os.environ[name] == "0" and not security.ray_constants.ENABLE_RAY_CLUSTER
    assert os.environ.get(name) == before and security.ray_constants.ENABLE_RAY_CLUSTER
    assert name not in environment()
