"""A whole run in an environment: rollouts of several turns are sampled, corrected and trained, and the two engines agree on all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, evenkeel
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROUNDS = """
import asyncio

class Rounds:
    async def reset(self, task):
        return task["prompt"]

    async def step(self, turn):
        await asyncio.sleep(0.02)
        return "again", float(len(turn.token_ids)), turn.number == 2
"""


def test_a_run_in_an_environment(tmp_path: Path) -> None:
    """Half of the tokens that are no characters end a turn, so that a model of random weights has short ones. Mismatch at equal weights is
    rounding in every step, over all turns; rewards are the lengths of what was said."""
    (tmp_path / "rounds.py").write_text(ROUNDS)
    model = save_tiny_model(save_tiny_tokenizer(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    broken = [token for token in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": broken[::2]}))
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["rollout"] |= {"reward": {"kind": "environment"}, "environment": {"path": "rounds:Rounds", "folder": str(tmp_path)}}
    recipe["rollout"]["engine"] |= {"context_length": 512}
    recipe["rollout"]["sampling"] |= {"max_tokens": 200}
    (tmp_path / "rounds.yaml").write_text(yaml.safe_dump(recipe))
    done = evenkeel("train", str(tmp_path / "rounds.yaml"), f"model={model}", f"run_dir={tmp_path / 'run'}", "steps=3", timeout_s=900.0)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert 2 < step["turns/mean"] <= step["turns/max"] == 3 and step["turns/tool_s"] > 0
        assert step["reward/mean"] == pytest.approx(step["length/trained_tokens"], rel=1e-6), "all that was said, and nothing that was read"
    known = [step["mismatch/k3"] for step in steps if "mismatch/k3" in step]  # where a step has tokens of its own version
    assert known and max(known) < 1e-11
    spans = RunFolder.view(tmp_path / "run").read_timeline()
    tools, samples = ([span for span in spans if span.what == what] for what in ("tool", "sample"))
    by_group = {span.group: span for span in samples}
    assert {span.group for span in tools} >= {span.group for span in samples if span.why is None}, (
        "of each group it is told when its tools work"
    )
    assert all(by_group[span.group].begin <= span.begin and span.end <= by_group[span.group].end for span in tools)
