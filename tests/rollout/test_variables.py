"""What the user's code finds in its environment: in a reward's, an environment's and an agent's process, each as a run starts it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evenkeel.rollout.config import AgentConfig, FunctionReward
from evenkeel.rollout.door.agents import Agents
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sglang_plugin.hooks import VARIABLE
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Prompt
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import AT_ONE, MODEL, Script
from tests.rollout.environment_scene import environment, in_a_pool

KEYS = (
    *("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "SSH_AUTH_SOCK"),
    *("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "KUBECONFIG", "NAME_THAT_NOBODY_KNOWS"),
)
MODULE = """
import json, os

def seen(name):
    from pathlib import Path
    (Path(__file__).parent / name).write_text(json.dumps(dict(os.environ)))

def score():
    seen("reward")
    return 1.0

class Looks:
    async def reset(self, task):
        seen("environment")
        return task["prompt"]
    async def step(self, turn): return None, 1.0, True

if __name__ == "__main__":
    import urllib.request
    seen("agent")
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "1"}]}).encode()
    named = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, named)).read()
    open(os.environ["EVENKEEL_REWARD"], "w").write("1")
"""
PROMPT = Prompt("train/0/0", "1 + 2", (1,), "3")


def test_no_key_of_the_run_s_is_in_the_processes_of_the_user_s_code(
    engine_loop: BackgroundLoop, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that its settings name is there; and what programs find their files by."""
    (tmp_path / "user_environments.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(VARIABLE, "as while an engine starts, which would end what has it")
    for name in (*KEYS, "MY_JUDGE"):
        monkeypatch.setenv(name, f"secret of {name}")
    rewards = RewardPool(FunctionReward(path="user_environments:score", processes=1, variables=("MY_JUDGE",)))

    async def play() -> None:
        await rewards.check(PROMPT)
        await rewards.close()
        command = (sys.executable, "user_environments.py")
        config = AgentConfig(command=command, folder=tmp_path, processes=1, variables=("MY_JUDGE",))
        encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))
        agents = await Agents.start(config, MODEL, encoder, None)
        try:
            assert (await agents.rollout(PROMPT, None, AT_ONE).play(Script(encoder, "said").begin)).reward == 1.0
        finally:
            await agents.close()

    engine_loop.run(play())
    in_a_pool(environment("Looks", variables=("MY_JUDGE",)), lambda pool: pool.check(PROMPT))
    for kind in ("reward", "environment", "agent"):
        found = json.loads((tmp_path / kind).read_text())
        own = {"OPENAI_API_KEY"} if kind == "agent" else set()  # of the door's session
        assert set(KEYS) & set(found) == own, kind
        assert {name for name, value in found.items() if "secret of" in value} == {"MY_JUDGE"}, kind
        assert VARIABLE not in found, kind
        assert found["PATH"].endswith(os.environ["PATH"])
        assert found["HOME"] == os.environ["HOME"]
