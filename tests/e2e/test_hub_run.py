"""A whole run whose model is a name of the hub, and its resume when the hub is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.launch import RECIPE, Run
from tests.hub_stand_in import Repository, stand_in_hub

pytestmark = pytest.mark.slow


def test_a_run_takes_its_model_from_the_hub_once_and_is_resumed_without_it(small_model: Path, tmp_path: Path) -> None:
    run_dir, cache = tmp_path / "run", {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    files = {path.name: path.read_bytes() for path in small_model.iterdir() if path.is_file()}
    with stand_in_hub() as hub:
        commit = hub.repositories.setdefault("models/acme/small", Repository()).commit(files)
        words = ["model=hf://acme/small", f"run_dir={run_dir}", "steps=1", "learner.report_kl_every=1"]
        run = Run(run_dir, str(RECIPE), *words, HF_ENDPOINT=hub.address, **cache)
        try:
            assert run.wait() == 0, run.output()[-4000:]
        finally:
            run.close()
        assert hub.sent("model.safetensors") == 1, "on the rank's node; rank and reference found it in the cache"
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["model"] == f"hf:acme/small@{commit}"
    assert f"hf:acme/small is hf:acme/small@{commit}" in run.events()
    again = Run(run_dir, "--resume", str(run_dir), "steps=2", HF_HUB_OFFLINE="1", **cache)
    try:
        assert again.wait() == 0, again.output()[-4000:]
    finally:
        again.close()
    assert again.steps() == [1, 2]
