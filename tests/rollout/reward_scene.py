"""Answers, questions and rewards in real scoring processes."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from evenkeel.rollout.config import ReasoningGymTask, RewardConfig
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.trajectory import FinishReason, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of

CHAIN_SUM = ReasoningGymTask(dataset="chain_sum")
USER_REWARDS = """
    import json, mmap, os, pickle, resource, signal, socket, struct, subprocess, sys, time

    class Touch:
        def __init__(self, path): self.path = path
        def __reduce__(self): return os.mkdir, (self.path,)
    def forged(completion, metadata):
        payload = {"pickle": pickle.dumps(Touch(metadata["path"])), "list": b"[1]", "nan": b'{"components": {"reward": NaN}}'}
        payload |= {"nested": b"[" * 100_000, "ready": b'{"ready": true}', "name": b'{"components": {"a/b": 1.0}}'}
        payload |= {"surrogate": b'{"error": "\\\\ud83d"}'}
        payload |= {"large": b'{"components": {"a": 1e39}}', "large sum": b'{"components": {"a": 1e18, "b": 1e18}}'}
        payload |= {"many": json.dumps({"components": {str(i): 0.0 for i in range(129)}}).encode()}
        payload |= {"text": b'{"components": {"reward": "1"}}', "none": b'{"components": {}}'}
        if completion == "long": os.write(int(sys.argv[1]), struct.pack("!Q", 1 << 40))
        elif completion != "ok": os.write(int(sys.argv[1]), struct.pack("!Q", len(payload[completion])) + payload[completion])
        return 1.0

    def length(completion): return len(completion)
    def parts(*, completion, answer, metadata): return {"right": float(completion == answer), "bonus": metadata["bonus"]}
    async def slowly(prompt, completion, **rest):
        import asyncio
        await asyncio.sleep(0.01)
        return len(prompt) + len(completion)
    def loud(completion):
        print("noise on stdout")
        return 1.0
    def wasteful(metadata):
        return len(metadata.pop("tests"))

    class Mute(Exception):
        def __str__(self): raise OSError
    def moody(completion):
        if completion == "raise": raise KeyError("no such thing")
        if completion == "surrogate": raise ValueError(json.loads('"half \\\\ud83d"'))
        if completion == "nested": return json.loads("[" * 100_000)
        if completion == "name": return {"\\ud83d": 1.0}
        if completion == "slash": return {"a/b": 1.0}
        if completion == "nan": return float("nan")
        if completion == "large": return -1.1e18
        if completion == "large sum": return {"a": 1e18, "b": 1e18}
        if completion == "many": return {f"part {i}": 0.0 for i in range(100_000)}
        if completion == "long name": return {"a" * 257: 1.0}
        if completion == "essay": raise ValueError("x" * 10_000_000)
        if completion == "mute": raise Mute
        if completion == "text": return "1.0"
        if completion == "none": return None
        if completion == "hang": time.sleep(60)
        if completion == "spin": sum(1 for _ in iter(int, 1))
        if completion == "power": 5 ** 5 ** 5 ** 5
        if completion == "die": os.kill(os.getpid(), signal.SIGSEGV)
        if completion == "real-time": os.kill(os.getpid(), 40)
        if completion == "exit": sys.exit(3)
        if completion == "memory": bytearray(2 << 30)
        if completion == "offspring":
            subprocess.Popen(["sleep", "61.25"])
            time.sleep(60)
        if completion == "daemon":
            subprocess.Popen(["sleep", "62.5"], start_new_session=True)
            time.sleep(60)
        if completion == "left behind":
            subprocess.Popen(["sh", "-c", "setsid sleep 63.5 & exit 0"]).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "forks":
            try: children = [subprocess.Popen(["sleep", "64.5"]) for _ in range(400)]
            except BlockingIOError: raise MemoryError("no more processes")
            time.sleep(60)
        if completion == "spreads":
            command = [sys.executable, "-c", "import time; kept = b'x' * (300 << 20); time.sleep(65.5)"]
            children = [subprocess.Popen(command) for _ in range(4)]
            time.sleep(60)
        if completion == "locks": os.makedirs(os.environ["TMPDIR"] + "/a/b"), os.chmod(os.environ["TMPDIR"] + "/a", 0)
        if completion == "in a file":
            os.posix_fallocate(os.memfd_create("a"), 0, 400 << 20)
            time.sleep(60)
        if completion in ("maps", "shares"):
            shared = mmap.mmap(-1, (400 if completion == "maps" else 100) << 20)
            def touch():
                for at in range(0, len(shared), 4096): shared[at] = 1
                time.sleep(0.5)
            touch()
            children = []
            while completion == "shares" and len(children) < 3:
                children.append(os.fork())
                if children[-1] == 0:
                    touch()
                    os._exit(0)
            for child in children: os.waitpid(child, 0)
        if completion == "file":
            with open("large", "wb") as file: file.truncate(5 << 30)
        return os.getpid()

    def modules(completion): return float("torch" in sys.modules or "sglang" in sys.modules or "ray" in sys.modules)
    def wants_more(completion, tokenizer): return 0.0
    not_a_function = 3
"""


def write_user_module(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "user_rewards.py").write_text(textwrap.dedent(USER_REWARDS))
    patch.syspath_prepend(str(folder))


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_module(tmp_path, monkeypatch)


def reward(**settings: Any) -> RewardConfig:
    adapter: TypeAdapter[RewardConfig] = TypeAdapter(RewardConfig)
    return adapter.validate_python({"processes": 1, **settings})


def user_reward(name: str, **settings: Any) -> RewardConfig:
    return reward(kind="function", path=f"user_rewards:{name}", **settings)


def answered(text: str, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "prompt_id": "train/0/0", "prompt_ids": ids_of((1,)), "response_ids": ids_of((2, 3)),
        "behavior_logprobs": logprobs_of((-1.0, -1.0)),
        "version_spans": (VersionSpan(0, 0, 2),), "finish_reason": FinishReason.STOP, "text": text,
    }  # fmt: skip
    return Trajectory(**(values | changes))


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def sleepers(seconds: str) -> list[int]:
    """Processes of the machine that run `sleep` for so long: each test file has seconds of its own, as others run beside it."""
    return [process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", seconds]]


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 40.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def pids_of(pool: RewardPool) -> tuple[int, ...]:
    """Of the guardians of its scoring processes that are up."""
    return tuple(process._child.pid for process in pool._scorers.processes if process._child is not None)


def asked(answer: str | tuple[str, ...] = "3", **metadata: Any) -> Prompt:
    return Prompt("train/0/0", "1 + 2 =", (1,), answer, metadata)


def scored_each(config: RewardConfig, *groups: tuple[tuple[str, ...], Prompt]) -> list[list[Trajectory]]:
    """Texts and their question, group after group by the same processes."""

    async def run() -> list[list[Trajectory]]:
        pool = RewardPool(config, CHAIN_SUM)
        try:
            return [list(await pool.score(tuple(answered(text) for text in texts), prompt)) for texts, prompt in groups]
        finally:
            await pool.close()

    return asyncio.run(run())


def scored(config: RewardConfig, *texts: str, prompt: Prompt | None = None) -> list[Trajectory]:
    (found,) = scored_each(config, (texts, prompt or asked()))
    return found
