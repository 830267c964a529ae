"""The Python interface: what a notebook calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evenkeel
from evenkeel.correction.errors import ConfigError, EvenkeelError

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "e2e" / "small.yaml"


def test_importing_evenkeel_or_its_correction_loads_no_engine() -> None:
    code = "import sys, evenkeel, evenkeel.correction; print(sorted({'ray', 'sglang', 'megatron', 'transformers'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there_and_no_module_hides_it() -> None:
    assert {name for name in evenkeel.__all__ if not callable(getattr(evenkeel, name))} == set()
    assert [name for name in evenkeel.__all__ if (ROOT / "evenkeel" / f"{name}.py").exists()] == []
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = evenkeel.trian


def test_load_recipe_takes_settings_as_keywords_and_by_dotted_key() -> None:
    config = evenkeel.load_recipe(SMALL, steps=7, correction={"preset": "icepop"}, **{"rollout.workers": 2})
    assert (config.steps, config.correction.preset, config.rollout.workers) == (7, "icepop", 2)


def test_load_recipe_says_what_the_command_line_says() -> None:
    with pytest.raises(ConfigError, match="stpes = 7: no such key; the nearest is steps"):
        evenkeel.load_recipe(SMALL, stpes=7)


def test_train_says_what_the_command_line_says_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nearest is steps"):
        evenkeel.train(SMALL, stpes=7)
    with pytest.raises(EvenkeelError, match="no such folder"):
        evenkeel.train(SMALL, model=tmp_path / "gone", run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_read_run_gives_a_row_a_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    lines = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75, "correction/k3": 1e-3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew')
    run = evenkeel.read_run(tmp_path)
    assert list(run.metrics.index) == [1, 2] and list(run.metrics["reward/mean"]) == [0.5, 0.75]
    assert run.metrics["correction/k3"].isna().tolist() == [True, False]
    assert run.evaluations.empty and run.config == {"steps": 3} and run.checkpoints == []
    with pytest.raises(evenkeel.RunFailed, match="no checkpoint"):
        _ = run.model
    with pytest.raises(ConfigError):
        evenkeel.read_run(tmp_path / "gone")
