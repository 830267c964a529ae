"""One GPU, which Ray counts and nobody has, for a rank of the learner and a rollout worker: each gets the share that the run sets.

The fast suite has what is asked of Ray (test_placement_request.py) and what each says (tests/actors/settings/test_devices.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from evenkeel.actors.cluster.placement import reserve
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.parts import worker_settings
from evenkeel.actors.pool import workers
from evenkeel.actors.processes.part_heartbeat import sequential_actor
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import ConfigError
from evenkeel.recipe import load_config
from tests.actors.cases import prompt
from tests.ray_sessions import leave_ray

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"
SHARES = ("learner.device=cuda", "rollout.engine.device=cuda", "learner.gpus_per_rank=0.65", "rollout.gpus_per_worker=0.35")
PLACED_S, STARTED_S = 120.0, 120.0


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # the test's actors have an environment, and need other processes
    environment = {"env_vars": {"PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}}
    offered = {"num_cpus": 4, "num_gpus": 1, "resources": {"rollout": 1}}
    ray.init("local", logging_level="ERROR", log_to_driver=False, include_dashboard=False, runtime_env=environment, **offered)
    yield
    leave_ray()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here, so that nothing is to be refused")
@pytest.mark.skipif(os.environ.get("CUDA_VISIBLE_DEVICES") == "", reason="Ray counts no GPUs while all are hidden")
def test_a_rank_and_a_worker_share_one_gpu_and_each_looks_whether_it_has_it(one_gpu: None) -> None:
    """Both are placed, with 0.65 and 0.35 and no more, on GPU 0; there torch sees none, and each says so before it starts anything."""
    config = with_devices(load_config(RunConfig, RECIPE, SHARES), has_gpu=True)
    places = asyncio.run(reserve(config))
    rank = sequential_actor(LearnerRankActor).options(**places.options(0)).remote(config.learner, 0, bind="127.0.0.1")
    worker = workers.create("7", worker_settings(config, Path("none"), [prompt(0)])).actor
    ray.get([rank.__ray_ready__.remote(), worker.__ray_ready__.remote()], timeout=PLACED_S)
    starts = {"learner rank 0": rank.start.remote(1, ("127.0.0.1", 1), Path("none"), 0), "rollout worker 7": worker.start.remote(0)}
    for role, start in starts.items():
        with pytest.raises(ConfigError, match=f"{role}: Ray gave it GPU 0, but torch sees 0 there"):
            ray.get(start, timeout=STARTED_S)
