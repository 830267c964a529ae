"""A mixture of experts end to end: engine and two learner ranks that share the experts, with the engine's routing replayed.

Behaviours locked here: the asynchronous run trains; what the engines sent tokens to reaches training; at equal weights and precision
(float32 on both sides) the learner's routers choose the same, and logprobs agree as they do for dense models.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, Run, evenkeel

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 4


def test_a_mixture_of_experts_trains_with_the_engines_routing(tmp_path: Path) -> None:
    experts = ["init.architecture.experts=8", "init.architecture.tie_word_embeddings=false", "init.architecture.layers=2"]
    made = evenkeel("init-model", str(RECIPE), f"model={tmp_path / 'model'}", *experts, timeout_s=240.0)
    assert made.returncode == 0, made.stdout + made.stderr
    settings = ["learner.routing_replay=rollout", "learner.data_parallel=2", "learner.expert_parallel=2", f"steps={STEPS}"]
    run = Run(tmp_path / "run", str(RECIPE), f"model={tmp_path / 'model'}", f"run_dir={tmp_path / 'run'}", *experts, *settings)
    try:
        assert run.wait(400.0) == 0, run.output()[-4000:]
        steps = run.metrics()
    finally:
        run.close()
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["learner/grad_norm"] > 0 for line in steps)
    first, *later = (line["learner/routing_agreement_share"] for line in steps)
    assert first == 1.0, "the first batch is of the learner's own weights"
    assert all(0.5 < share <= 1.0 for share in later)
    assert steps[0]["mismatch/max_abs_log_ratio"] < 2e-5
    assert all(line["sync/probe_max_abs_difference"] < 2e-5 for line in steps if "sync/probe_max_abs_difference" in line)
