"""Truly on-policy runs: what has to hold at each of their steps, and whether two of them did the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from evenkeel.actors.record.config_that_ran import config_that_ran
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.engines.weights import tensor_checksum
from tests.e2e.launch import Run

EXACT = [
    "true_on_policy=true",
    "dynamic_sampling=true",  # which groups fill a batch must not depend on which are finished first
    "rollout.reward.path=e2e_reward:even_vowels",
    "evaluation.temperature=1.0",
    "metrics.trajectories_per_step=4",
]


def run_to_its_end(run_dir: Path, *words: str, timeout_s: float = 400.0) -> Run:
    run = Run(run_dir, *words)
    try:
        run.wait(timeout_s)
    finally:
        run.close()
    assert run.process.returncode == 0, run.output()[-4000:]
    return run


def assert_all_equal(run: Run, steps: int) -> None:
    config = config_that_ran(RunFolder.view(run.run_dir))
    assert config.learner.batch_invariant and config.rollout.engine.batch_invariant
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert (line["true_on_policy/equal_share"], line["true_on_policy/max_abs_difference"]) == (1.0, 0.0)
        assert line["true_on_policy/tokens"] == line["staleness/tokens/0"] > 100
        assert line["mismatch/k3"] == line["mismatch/max_abs_log_ratio"] == 0.0
        assert line.get("sync/probe_max_abs_difference", 0.0) == 0.0
        assert line["learner/grad_norm"] > 0, "equal bits at later versions would be a matter of course"
    assert any("sync/probe_max_abs_difference" in line for line in lines)  # a line has what was received by then


def what_happened(run: Run) -> dict[str, Any]:
    """All of a run that the clock has no part in: weights, questions, answers, rewards, updates."""
    folder = RunFolder.view(run.run_dir)
    weights = load_file(folder.checkpoints()[-1].hf / "model.safetensors")
    numbers = ("learner/loss", "learner/grad_norm", "reward/mean", "staleness/tokens/0", "groups/discarded_total")
    return {
        "weights": {name: tensor_checksum(tensor) for name, tensor in weights.items()},
        "steps": [[line[name] for name in numbers] for line in run.metrics()],
        "prompts": sorted((entry["step"], entry["prompt_id"], entry["outcome"]) for entry in run.ledger()),
        "answers": {path.name: path.read_text() for kind in ("step", "held_out") for path in folder.trajectory_files(kind)},
    }


def assert_same(run: Run, reference: Run, *, evaluations: int) -> None:
    """As many steps, and the same ones; and the same held-out answers wherever the reference has some, `evaluations` times at least."""
    found, expected = what_happened(run), what_happened(reference)
    assert len(expected["answers"]) >= len(expected["steps"]) + evaluations
    found["answers"] = {name: text for name, text in found["answers"].items() if name in expected["answers"]}
    for name in ("prompts", "answers", "steps", "weights"):  # in the order in which one thing leads to the other
        assert found[name] == expected[name], name
