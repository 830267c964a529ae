"""A Ray cluster that takes anybody's commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.launch import RECIPE, evenkeel


def test_a_cluster_that_lets_everybody_in_is_refused(
    cluster: Cluster, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token of the user's own too: such a cluster takes any."""
    monkeypatch.delenv("RAY_AUTH_MODE")  # by which this process knows the cluster; a user doesn't
    settings = (f"model={tiny_model}", f"run_dir={tmp_path / 'run'}", f"ray.address={cluster.address}")
    answer = evenkeel("train", str(RECIPE), *settings, timeout_s=240.0)
    said = answer.stdout + answer.stderr
    assert answer.returncode != 0, said
    sentence = said.strip().splitlines()[-1]
    assert "doesn't ask for a token" in sentence and "ray.allow_unauthenticated=true" in sentence
