"""What the benchmark of resumes writes and reads: a run's folder by a run's own parts, of which a resume reads no line that is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.resume import Resumed, resume, write_run
from evenkeel.actors.json_lines import JsonLines
from tests.learner.learner_cases import learner_on
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of runs that have trained so many prompts, 8 a step."""
    base = tmp_path_factory.mktemp("runs")
    (base / "model").mkdir()
    model = save_tiny_model(save_tiny_tokenizer(base / "model"))
    with learner_on(model) as learner:

        def save(checkpoint: Any) -> None:
            learner.save(checkpoint.state / "learner")
            learner.save_hf(checkpoint.hf)

        return {prompts: write_run(base, model, save, prompts, 8) for prompts in (80, 1600)}


def test_a_resume_parses_no_line_of_prompts_that_are_gone(runs: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 times as many prompts no more of the folder is parsed, but for the digits of larger numbers; all lines are there afterwards."""
    parsed: list[str] = []
    loads = json.loads

    def counted(text: Any, **named: Any) -> Any:
        parsed.append(text)
        return loads(text, **named)

    calls, characters = dict[int, int](), dict[int, int]()
    found = dict[int, Resumed]()
    for prompts, run in runs.items():
        lines = (run / "ledger.jsonl").read_bytes()
        assert lines.count(b"\n") == prompts + 8 and lines.endswith(b'\n{"step": '), "a step after the checkpoint, and a torn line"
        monkeypatch.setattr(json, "loads", counted)
        parsed.clear()
        found[prompts] = resume(run)
        monkeypatch.undo()
        calls[prompts], characters[prompts] = len(parsed), sum(map(len, parsed))
        assert (found[prompts].prompts, found[prompts].under_way, found[prompts].warnings) == (prompts, 16, [])
        assert lines.startswith((run / "ledger.jsonl").read_bytes()) and (run / "ledger.jsonl").read_bytes().count(b"\n") == prompts
        assert JsonLines(run / "metrics.jsonl").steps() == set(range(1, prompts // 8 + 1))
    assert calls[80] == calls[1600] and characters[1600] < 1.05 * characters[80]
    assert list(found[80].seconds) == ["open", "checkpoint", "take back", "metrics", "ledger"]
