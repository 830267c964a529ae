"""`doctor` and `train` make the same checks: of the same input they print the same sentence, before Ray and before a run has a folder."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evenkeel.cli import app
from tests.e2e.launch import RECIPE, refused

MANY = "".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(20))
LONG = json.dumps({"prompt": "word " * 500, "answer": "1"}) + "\n"
SCORERS = {
    "unfinished": "def score(:\n    return 1.0\n",
    "other_arguments": "def score(text):\n    return 1.0\n",
    "imports_nothing": "import nothing_of_the_kind\n",
}


@pytest.fixture
def port() -> Iterator[int]:
    """One that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        # What the trial of a new user met.
        ("", [], "none of its 0 rows can be used"),
        (MANY.replace("answer", "solution"), [], 'no field "answer"'),
        (LONG * 3, [], " that fit (what rollout.sampling.max_tokens = 48 leaves of the engine's context of "),
        (MANY, ["rollout.engine.max_total_tokens=60"], "leaves of the KV cache of 60 tokens (rollout.engine.max_total_tokens), of which "),
        (MANY.splitlines()[0], [], "every row is held out"),
        (MANY, ["rollout.reward.path=unfinished:score"], "SyntaxError"),
        (MANY, ["rollout.reward.path=other_arguments:score"], "the function asks for text"),
        (MANY, ["metrics.views=[wandb]"], "metrics.views has wandb: its package is not installed"),
        (MANY, ["metrics.views=[imports_nothing:show]"], "importing imports_nothing raised ModuleNotFoundError"),
        (MANY, ["metrics.discovery_port=PORT"], "Address already in use"),
        # And what nobody had tried.
        (MANY, ["rollout.reward.path=imports_nothing:score"], "ModuleNotFoundError"),
        (MANY, ["rollout.task.held_out_path=none.jsonl"], "held_out_path = "),
        (MANY, ["metrics.bind=0.0.0.0"], "Prometheus needs an address"),
        (MANY, ["metrics.bind=192.0.2.1"], "Set it to an address of this machine"),
        ("[1, 2]\n" * 5, [], "holds list, not an object with fields"),
        (MANY, ["run_dir=rows.jsonl"], "can't be made: File exists"),
        (MANY, ["run_dir=."], "other files (imports_nothing.py, ...) already"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_doctor_says_what_train_says(
    rows: str, words: list[str], said: str, port: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    monkeypatch.setattr("evenkeel.training.Cluster", _started)
    for name, text in SCORERS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "rows.jsonl").write_text(rows)
    reward = ["rollout.reward={kind: exact_match}"] if not any("reward" in word for word in words) else []
    task = "rollout.task={kind: file, path: rows.jsonl, held_out_size: 2}"
    call = [str(RECIPE), f"model={tiny_model}", task, *reward, *(word.replace("PORT", str(port)) for word in words)]
    sentence = refused("train", *call).removeprefix("evenkeel: ")
    told = CliRunner().invoke(app, ["doctor", *call])
    assert said in sentence and f"fail  {sentence}" in told.stdout.splitlines(), told.stdout
    assert told.exit_code == 1 and not (tmp_path / "runs").exists()


def _started(*_: Any, **__: Any) -> None:
    raise AssertionError("it was started")
