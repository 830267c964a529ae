"""Fixtures that every package's tests share: a tiny Qwen3 folder, and one SGLang engine for the whole session."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch, for this process and all that it starts: a test of two threads would have the one that is done with its part spin until
# the other is, and with two such processes on two cores that one waits for the core. Sleeping, it needs a tenth of the seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from evenkeel import actors  # noqa: F401  # before Ray: a test that forgets to start one gets an error, not a Ray of somebody else's
from evenkeel.engines.machine import gc_paused
from lab.background_loop import BackgroundLoop
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / ".tools" / "prometheus"

# Files whose tests own engines, or call SGLang: of several processes only one imports SGLang, and starts the shared engine.
_ENGINES = (
    "tests/evenkeel/plan/test_engine_memory.py",
    "tests/actors/settings/test_nccl.py",
    "tests/e2e/test_diff_engines.py",
    "tests/e2e/test_true_on_policy.py",
    "tests/e2e/test_truncated_sampling.py",
    "tests/e2e/test_weight_updates.py",
    "tests/rollout/test_branches.py",
    "tests/rollout/test_broadcast_arrival.py",
    "tests/rollout/test_continuation.py",
    "tests/rollout/test_door.py",
    "tests/rollout/test_engine.py",
    "tests/rollout/test_engine_arguments.py",
    "tests/rollout/test_engine_buckets.py",
    "tests/rollout/test_engine_failures.py",
    "tests/rollout/test_engine_metrics.py",
    "tests/rollout/test_engine_process.py",
    "tests/rollout/test_engine_updates.py",
    "tests/rollout/test_gpu_share.py",
    "tests/rollout/test_overlap_hooks.py",
    "tests/rollout/test_played_groups.py",
    "tests/rollout/test_sampler.py",
    "tests/rollout/test_session.py",
    "tests/rollout/test_seeded_sampler.py",
    "tests/rollout/test_weight_group.py",
)

# Files whose tests share processes for the learner's ranks.
_RANKS = (
    "tests/evenkeel/plan/test_plan_ranks.py",
    "tests/evenkeel/plan/test_plan_step_ranks.py",
    "tests/actors/groups/test_wide_fields.py",
    "tests/actors/service/test_read_only_batches.py",
    "tests/correction/test_shard_ranks.py",
    "tests/learner/test_broadcast_overlap.py",
    "tests/learner/test_learner_batch_invariant.py",
    "tests/learner/test_learner_kept_sets.py",
    "tests/learner/test_learner_kept_weights.py",
    "tests/learner/test_learner_layers.py",
    "tests/learner/test_learner_ranks.py",
    "tests/learner/test_learner_ranks_export.py",
)

# Folder whose tests share a Ray cluster.
_NODES = "tests/actors/on_two_nodes"

# Files that read the same syntax trees.
_TREES = ("tests/test_imports.py", "tests/test_layers.py")

# Whole runs, which wait as much as they compute, the longest first: one of the processes begins with them, and is the last to end.
_RUNS = (
    "tests/e2e/test_several_workers.py",
    "tests/e2e/test_asynchronous_run.py",
    "tests/e2e",
    "nodes",
)

# What else takes seconds, what computes most last. What is short lies between, and they end together.
_COMPUTING = (
    "tests/failures",
    "tests/evenkeel/plan",
    "tests/simulation",
    "tests/actors/service",
    "tests/actors/checkpoints",
    "tests/actors/record",
    "tests/evenkeel/doctor",
    "tests/rollout",
    "tests/learner",
    "ranks",
    "engines",
)

# What waits most of its time, and needs hardly a core: the others begin with it, beside the whole runs, which start a dozen processes at a
# time and can use the rest.
_WAITING = (
    "tests/actors/checkpoints/test_checkpoint_disk.py",
    "tests/actors/cluster/test_head_watch.py",
    "tests/actors/cluster/test_hub.py",
    "tests/actors/cluster/test_hub_data.py",
    "tests/evenkeel/test_resume_disk.py",
    "tests/evenkeel/test_retries.py",
    "tests/actors/driver/test_lost_parts.py",
    "tests/actors/driver/test_rollback.py",
    "tests/actors/metrics/test_exporter.py",
    "tests/actors/pool/test_pool.py",
    "tests/actors/pool/test_pool_starts.py",
    "tests/actors/processes",
    "tests/actors/record/test_recorder.py",
    "tests/actors/record/test_recorder_disturbed.py",
    "tests/actors/record/test_stack_collector.py",
    "tests/evenkeel/doctor/test_long_run_doctor.py",
    "tests/actors/service/test_correction_service.py",
    "tests/actors/service/test_service_diagnostics.py",
    "tests/actors/weights",
    "tests/benchmarks/test_chaos.py",
    "tests/deploy/test_slurm.py",
    "tests/rollout/test_reward_guardian.py",
    "tests/rollout/test_reward_limits.py",
    "tests/rollout/test_rewards.py",
    "tests/rollout/test_stacks.py",
    "tests/rollout/test_weight_transfer.py",
)


def group_of(node_id: str) -> str:
    """A file stays in one process, and so does all that owns engines: engines, ranks and whole runs are then made once."""
    file = node_id.split("::")[0]
    if file.startswith(_NODES):
        return "nodes"
    shared = {"engines": _ENGINES, "ranks": _RANKS, "trees": _TREES}
    return next((name for name, files in shared.items() if file in files), file)


def _rank(group: str) -> int:
    """Place in the row of which the first process takes from the front, and the others from the back; 0: in the middle."""
    for rank, start in enumerate(_RUNS):
        if group.startswith(start):
            return rank - len(_RUNS)
    if group.startswith(_WAITING):
        return len(_COMPUTING) + 1
    return next((rank for rank, start in enumerate(_COMPUTING, 1) if group.startswith(start)), 0)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the groups of the most tests


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups for `pytest -n 3`. (Those of `--dist loadgroup` go by marks, which pytest 9.2 leaves without effect.)"""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if self.nodes.index(node):  # one whole run at a time, as long as there is something else
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return InGroups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises: pytest.UsageError where a test outside `_ENGINES` would start the shared engine a second time."""
    for item in items:
        if "shared_engine" in getattr(item, "fixturenames", ()) and group_of(item.nodeid) != "engines":
            raise pytest.UsageError(f"{item.nodeid} uses the shared engine: add its file to _ENGINES in tests/conftest.py")
    groups = [group_of(item.nodeid) for item in items]
    places = {name: place for place, name in enumerate(dict.fromkeys(groups))}
    items.sort(key=lambda item: (_rank(name := group_of(item.nodeid)), places[name]))  # stable: tests of a group keep their order


# torch is imported in here, not by this file: the process that only hands out tests needs none, and all others wait for it.
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """torch, Ray and the tests stay to the end: no collection of garbage need look through them, now or later."""
    with gc_paused():
        return (yield)


def pytest_sessionfinish() -> None:
    """End the learner's ranks, if a test has started any."""
    if (cases := sys.modules.get("tests.learner.learner_cases")) is not None:
        cases.end_ranks()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """At the end, where it is read: what was left out for want of a program, and the command that fetches it."""
    yield
    if not all((PROMETHEUS / name).exists() for name in ("prometheus", "promtool")):
        terminalreporter.write_line("without a real Prometheus its tests were skipped: deploy/fetch_prometheus.sh fetches it", yellow=True)


@pytest.fixture(autouse=True)
def root_logger_warns() -> None:
    """In each test, whatever ran before it in this process: SGLang puts the root logger to errors, and `caplog` would see no warning."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3 of 2 layers, hidden 64, 512 tokens, tied embeddings, random weights, with its tokenizer."""
    return save_tiny_model(save_tiny_tokenizer(tmp_path_factory.mktemp("tiny_qwen3")))


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path, engine_loop: BackgroundLoop) -> Iterator[Any]:
    """One RolloutEngine on `tiny_model`; tests that change its weights use `engine`, which restores them."""
    from evenkeel.rollout.engine.engine import RolloutEngine
    from evenkeel.rollout.engine_settings.engine_config import EngineConfig

    config = EngineConfig(device="cpu", max_total_tokens=65_536, max_running_requests=64)
    engine = engine_loop.run(RolloutEngine.start(tiny_model, config, name="test engine"))
    yield engine
    engine_loop.run(engine.shutdown())


@pytest.fixture
def engine(shared_engine: Any, engine_loop: BackgroundLoop, tiny_model: Path) -> Iterator[Any]:
    """The shared engine; when a test has changed its weights, those of `tiny_model` come back under a new version."""
    from tests.rollout.engine_scene import is_healthy

    version = shared_engine.version
    yield shared_engine
    if shared_engine.version != version or not is_healthy(shared_engine):
        from safetensors.torch import load_file

        from evenkeel.engines.weights import WeightBucket

        weights = WeightBucket.of(load_file(tiny_model / "model.safetensors"))
        engine_loop.run(shared_engine.update_weights(shared_engine.version + 1, [weights]))
