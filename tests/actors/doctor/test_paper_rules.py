"""Further rules of the first layer: what ranks and engines would refuse late, memory beside the cache, one node and several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.doctor.paper_rules import enough, on_paper
from actors.plan.gpus import Gpus
from tests.actors.doctor.test_doctor import EXPERTS, eight, paper

OLMOE = {"shape": replace(EXPERTS, model_type="olmoe")}
RECOMPUTED = "learner.routing_replay=recompute learner.optimizer_steps_per_batch=2 correction.proximal=recompute"
FRACTION, REQUESTS = "rollout.engine.memory_fraction", "rollout.engine.max_running_requests"


@pytest.mark.parametrize(
    ("overrides", "facts", "severity", "said", "setting"),
    [
        (f"{FRACTION}=0.99", {}, "fail", "an engine leaves 0.796 GiB beside weights and KV cache", "memory_fraction"),
        (f"{FRACTION}=0.98", {}, "warn", "an engine leaves 1.59 GiB beside weights and KV cache", "memory_fraction"),
        (f"{FRACTION}=0.9 {REQUESTS}=4096", {}, "fail", "4096 requests at the same time take up to", "max_running_requests"),
        ("learner.routing_replay=rollout", {}, "fail", "routing_replay = rollout: qwen3 has no experts", "none"),
        (RECOMPUTED, {}, "fail", "routing_replay = recompute: qwen3 has no experts", "none"),
        ("learner.moe_aux_loss_coefficient=0.001", {}, "fail", "moe_aux_loss_coefficient = 0.001: qwen3 has no experts", "Set it to 0"),
        ("learner.routing_replay=rollout", OLMOE, "fail", "SGLang's olmoe doesn't report which experts it took", "recompute"),
    ],
)
def test_a_rule(overrides: str, facts: dict[str, Any], severity: str, said: str, setting: str) -> None:
    complaints = on_paper(paper(**facts), eight(*overrides.split()))
    assert any(c.severity == severity and said in c.sentence and setting in c.setting for c in complaints), complaints


def test_nothing_is_said_of_experts_that_are_there() -> None:
    words = ["learner.sequence_parallel=true", "learner.moe_aux_loss_coefficient=0.001"]
    for kind, replay in (("qwen3_moe", "learner.routing_replay=rollout"), ("olmoe", RECOMPUTED)):
        found = on_paper(paper(shape=replace(EXPERTS, model_type=kind)), eight(*words, *replay.split()))
        assert not any("experts" in one.sentence for one in found), found


def test_without_an_address_a_run_has_one_node() -> None:
    """Ray started by the run itself knows no other machine."""
    four = Gpus.parse("H100x8x4")
    (found,) = enough(four, eight("rollout.workers=16"))
    assert found.severity == "fail" and "it asks for 20 GPUs, and 8 x H100 (80 GiB) are 8" in found.sentence and "auto" in found.setting
    assert enough(four, eight("rollout.workers=16", "ray.address=auto")) == []
    assert enough(replace(four, nodes=1), eight()) == enough(four, eight()) == []
