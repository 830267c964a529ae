"""What ranks and engines say to NCCL, of whose communicator both are part: with SGLang's own function, in a process that has SGLang."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from evenkeel.actors.settings.environment import learner_environment, worker_environment
from evenkeel.rollout.engine.engine import RolloutEngine
from tests.actors.settings.test_devices import config, gpus

pytestmark = pytest.mark.engine


def said_by_sglang() -> dict[str, str]:
    """Where nobody has said anything. It would also take SIGQUIT, if it were called by the main thread."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import ServerArgs

    with mock.patch.dict(os.environ), ThreadPoolExecutor(1) as thread:
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            del os.environ[name]
        thread.submit(_set_envs_and_config, ServerArgs(model_path="none")).result()
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def test_nccl_is_told_on_both_sides_what_sglang_tells_it(shared_engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and engines are in one communicator. Args: shared_engine: its owner has imported SGLang."""
    gpus(monkeypatch, 8)
    theirs = said_by_sglang()
    assert theirs == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    for environment in (learner_environment, worker_environment):
        found = environment(config("weight_sync.transport=broadcast"))
        assert {name: value for name, value in found.items() if name.startswith("NCCL_")} == theirs
