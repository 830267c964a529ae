"""GPUs that are asked for and aren't there are said before anything waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.devices import check_devices, check_engine_device, check_rollout_resource, check_types, shortage
from correction.errors import ConfigError

RECIPE = Path(__file__).parents[1] / "e2e" / "small.yaml"


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, overrides)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("there", "overrides", "said"),
    [
        (0, "rollout.engine.device=cuda", "rollout.engine.device = cuda with 1 worker: 1 GPU is needed.* torch sees none here"),
        (0, "learner.device=cuda learner.data_parallel=2", "learner.device = cuda with 2 ranks: 2 GPUs are needed"),
        (1, "rollout.engine.device=cuda learner.device=cuda", "and learner.device = cuda with 1 rank: 2 GPUs are needed.*sees 1"),
        (1, "", "rollout.engine.device = auto with 1 worker and learner.device = auto with 1 rank: 2 GPUs"),
        (3, "rollout.min_workers=1 rollout.max_workers=3", "rollout.engine.device = auto with 3 workers and .*: 4 GPUs"),
        (3, "rollout.workers=3", "rollout.engine.device = auto with 3 workers and .*: 4 GPUs"),
    ],
)
def test_too_few_gpus_on_this_machine(monkeypatch: pytest.MonkeyPatch, there: int, overrides: str, said: str) -> None:
    gpus(monkeypatch, there)
    with pytest.raises(ConfigError, match=said):
        check_devices(config(*overrides.split()))


@pytest.mark.parametrize(
    ("there", "overrides"),
    [
        (0, ""),
        (0, "rollout.engine.device=cpu learner.device=cpu"),
        (1, "learner.device=cpu"),
        (2, ""),
        (0, "learner.device=cuda ray.address=auto"),
    ],
)
def test_enough_gpus_or_another_machines(monkeypatch: pytest.MonkeyPatch, there: int, overrides: str) -> None:
    """auto without a GPU is the CPU; what a joined cluster has is known after joining."""
    gpus(monkeypatch, there)
    check_devices(config(*overrides.split()))


def test_a_joined_cluster_with_too_few_is_told_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may grow by itself, so this is no error."""
    gpus(monkeypatch, 0)
    wanting = config("ray.address=10.0.0.1:6379", "learner.device=cuda", "learner.tensor_parallel=2", "deadlines.start_s=90")
    said = shortage(wanting, 1.0)
    assert said is not None and "2 GPUs are needed" in said and "cluster at 10.0.0.1:6379 offer 1 by now" in said and "= 90 s" in said
    assert shortage(wanting, 2.0) is None


def test_an_engine_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    check_engine_device(config())
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device = cuda, but torch sees no GPU here"):
        check_engine_device(config("rollout.engine.device=cuda"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("learner.dtype=float16", r"rollout.engine.dtype = auto \(float32 on a CPU\) with learner.dtype = float16.*engine.dtype: float16"),
        ("learner.dtype=float16 rollout.engine.dtype=bfloat16", "rollout.engine.dtype = bfloat16 with learner.dtype = float16"),
        ("rollout.engine.dtype=bfloat16 ray.address=auto", "rollout.engine.dtype = bfloat16 with learner.dtype = float32"),
    ],
)
def test_an_engine_of_another_type_than_the_learners_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: str, said: str) -> None:
    """It would refuse the first weights, after the start of everything."""
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=said):
        check_types(config(*overrides.split()))


@pytest.mark.parametrize("overrides", ["", "learner.dtype=float16 rollout.engine.dtype=float16", "learner.dtype=bfloat16 ray.address=auto"])
def test_equal_types_and_those_that_a_cluster_decides_are_not(monkeypatch: pytest.MonkeyPatch, overrides: str) -> None:
    gpus(monkeypatch, 0)
    check_types(config(*overrides.split()))


JOINED = ("ray.address=10.0.0.1:6379", "rollout.min_workers=1", "rollout.max_workers=4")


def test_a_resource_that_no_node_can_offer_is_refused() -> None:
    said = r"rollout.max_workers = 4 with ray.rollout_resource = .rollout.: no node .* Give a node type"
    with pytest.raises(ConfigError, match=said) as caught:
        check_rollout_resource(config(*JOINED), 0, 0)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"rollout\.workers = 1 with"):
        check_rollout_resource(config("ray.address=10.0.0.1:6379"), 0, 0)


def test_fewer_nodes_than_the_pool_may_want_are_told_of() -> None:
    note = check_rollout_resource(config(*JOINED), 1, 3)
    assert note is not None and "rollout.max_workers = 4" in note and "3 times at most" in note
    assert check_rollout_resource(config(*JOINED), 1, 4) is None
    assert check_rollout_resource(config(*JOINED), 4, 0) is None, "nodes that somebody started by hand"
    assert check_rollout_resource(config(*JOINED), 0, None) is None, "nodes may come that nobody knows of yet"
