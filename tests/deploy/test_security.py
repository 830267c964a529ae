"""Clusters that a run must not join."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from actors import security
from tests.e2e.cluster import ray_cluster
from tests.e2e.launch import environment, evenkeel


@pytest.mark.engine
def test_a_cluster_that_lets_everybody_in_is_refused(tmp_path: Path, model: Path) -> None:
    """With a token of the user's own too: such a cluster takes any."""
    with ray_cluster(asks_for_token=False) as cluster:
        settings = (f"model={model}", f"run_dir={tmp_path / 'run'}", f"ray.address={cluster.address}")
        answer = evenkeel("train", "recipes/nano_spell_backward.yaml", *settings)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    sentence = (answer.stdout + answer.stderr).strip().splitlines()[-1]
    assert "asks nobody for a token" in sentence and "ray.allow_unauthenticated=true" in sentence and not (tmp_path / "run").exists()


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
