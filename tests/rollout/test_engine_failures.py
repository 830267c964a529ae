"""What happens when parts of an engine die.

Behaviours locked here: no process outlives a killed owner (in the fast suite that is a rollout worker's engine,
tests/e2e/test_asynchronous_run.py); a stopped scheduler is a DeadlineExceeded with phase and engine, and the engine
works again when it goes on; one that waits for a broadcast is free after the group's time-out, however short its heartbeat, and one that
waits for a member of the group as soon as that is given up; a killed
scheduler is an EngineError for everybody who waits and for every later call, at once; shutdown leaves no process and kills nobody else's;
slow: a folder that SGLang can't serve is an EngineError, and leaves no process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from evenkeel.correction.errors import DataError, DeadlineExceeded, EngineDirty, EngineError, RequestError, SyncError
from evenkeel.engines.rendezvous import Rendezvous
from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig, EngineDeadlines
from evenkeel.rollout.trajectory import Trajectory
from lab.ports import free_port
from tests.conftest import BackgroundLoop
from tests.failures.measured import Measured
from tests.rollout.engine_scene import is_healthy
from tests.rollout.hf_reference import tiny_weights

pytestmark = pytest.mark.engine

HEARTBEAT_S = 4.0
GROUP_S = 5.0
"""For a collective of weights: longer than the heartbeat, which has to bear with it."""

OWNER = """
import asyncio, json, sys
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig, EngineDeadlines

async def main():
    engine = await RolloutEngine.start(sys.argv[1], EngineConfig(device="cpu", max_total_tokens=4096))
    print(json.dumps(engine.process_ids), flush=True)
    await engine.generate([5, 6, 7], max_tokens=900, ignore_stop=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def living_descendants(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(pids: list[int], deadline_s: float) -> list[int]:
    """Those of the processes that still live at the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        living = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not living:
            return []
        time.sleep(0.1)
    return living


@pytest.mark.slow
def test_no_process_outlives_an_owner_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    owner = subprocess.Popen([sys.executable, script, tiny_model], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert owner.stdout is not None
        process_ids: dict[str, int] = json.loads(owner.stdout.readline())
        assert set(process_ids) == {"scheduler"}
        everybody = [p.pid for p in living_descendants(owner.pid)]
        assert set(process_ids.values()) <= set(everybody)
    finally:
        owner.kill()
        owner.wait(10)
    assert wait_until_gone(everybody, 30.0) == []


@pytest.fixture(scope="module")
def doomed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, engine_loop: BackgroundLoop) -> Iterator[RolloutEngine]:
    """An engine started as a run's are, from a folder without weights, that prefills long prompts in parts. The last test kills it."""
    waits = EngineDeadlines(heartbeat_s=HEARTBEAT_S)
    options = {"chunked_prefill_size": 64}
    config = EngineConfig(device="cpu", max_total_tokens=8192, engine_args=options, deadlines=waits, weight_group_timeout_s=GROUP_S)
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("doomed") / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    engine = engine_loop.run(RolloutEngine.start(folder, config, name="doomed engine", has_weights=False))
    yield engine
    engine_loop.run(engine.shutdown())


def test_samples_that_are_prefilled_in_parts_after_an_update(doomed: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop) -> None:
    """Each part has to find the one before in the prefix cache, though samples that found their prompt there add nothing to it.

    Otherwise the parts' memory is lost, or a part is computed for ever; and SGLang's scheduler ends when it is idle and misses memory.
    The engine answers nobody before its first update, and is then of those weights.
    """
    engine = doomed

    async def sample_across_an_update() -> list[Trajectory]:
        group = asyncio.ensure_future(engine.generate(list(range(5, 45)), max_tokens=250, samples=4, ignore_stop=True))
        await engine.generate([5], max_tokens=120, ignore_stop=True)
        await engine.update_weights(1, [WeightBucket.of(tiny_weights(tiny_model))], mode="retract")
        return await group

    for call in (engine.generate([5, 6, 7], max_tokens=4), engine.score([5, 6])):
        with pytest.raises(EngineDirty, match="it has had no weights yet"):
            engine_loop.run(call)
    engine_loop.run(engine.update_weights(0, [WeightBucket.of(tiny_weights(tiny_model))]))
    expected = {name: tensor_checksum(tensor) for name, tensor in tiny_weights(tiny_model).items()}
    assert engine_loop.run(engine.weight_checksums()) == expected
    completions = engine_loop.run(sample_across_an_update())
    spans = [[(span.version, span.end) for span in completion.version_spans] for completion in completions]
    assert all(new == (1, 250) for _, new in spans)
    assert all(old_end > 64 for (_, old_end), _ in spans), "the prefill after the update came in one part"
    time.sleep(1.0)  # a scheduler looks after its memory as soon as it is idle
    assert len(engine_loop.run(engine.generate([5, 6, 7], max_tokens=4, ignore_stop=True))[0].response_ids) == 4


def test_an_engine_that_is_paused_for_long_has_its_heartbeat(doomed: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop) -> None:
    """While it waits for the last part of new weights it samples nothing and computes nothing, for longer than the limit; it lives."""
    engine, version = doomed, doomed.version + 1
    weights = tiny_weights(tiny_model)

    async def parts() -> AsyncIterator[WeightBucket]:
        for start in range(4):
            if start == 3:  # two are read ahead, so the first is loaded
                assert engine._dirty == f"an update to v{version} has begun"
                await asyncio.sleep(1.5 * HEARTBEAT_S)
            yield WeightBucket.of({name: weights[name] for name in list(weights)[start::4]})

    engine_loop.run(engine.update_weights(version, parts()))
    assert engine.version == version and is_healthy(engine)


def test_broadcast_that_never_comes_ends_and_the_engine_recovers(
    doomed: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop
) -> None:
    """The group's time-out frees the scheduler, which gives no sign until then; the next update comes as tensors."""
    engine, version, weights = doomed, doomed.version, tiny_weights(tiny_model)
    specs = [[WeightSpec.of(name, tensor) for name, tensor in weights.items()]]

    async def run() -> None:
        port = free_port()
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 2, "weights-2"))
        learner = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, 2, "weights-2", 20.0, torch.device("cpu"))
        await joining
        with pytest.raises(SyncError, match="dirty"):
            await engine.receive_weights(version + 1, specs, group="weights-2")
        learner.close()
        await engine.leave_weight_group("weights-2")

    engine_loop.run(run())
    assert not is_healthy(engine)
    engine_loop.run(engine.update_weights(version + 1, [WeightBucket.of(weights)]))
    assert is_healthy(engine)


def test_an_engine_waits_for_no_member_of_a_group_that_is_given_up(doomed: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """Of three one never comes, as if it had died. The other engine samples again when the learner says so, not at the group's time-out."""
    engine, port, given_up = doomed, free_port(), threading.Event()

    def came() -> int:
        return Rendezvous("127.0.0.1", port, "weights-3", timeout=timedelta(seconds=20)).came()

    async def run() -> list[Trajectory]:
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 3, "weights-3"))
        told = ("127.0.0.1", port, 3, "weights-3", 300.0, torch.device("cpu"))
        leading = asyncio.ensure_future(asyncio.to_thread(WeightBroadcaster, *told, given_up=given_up))
        while not await asyncio.to_thread(came):
            await asyncio.sleep(0.05)
        given_up.set()
        with pytest.raises(SyncError, match="weights-3 as rank 1 of 3: the group was given up before all members had come"):
            await joining
        with pytest.raises(SyncError, match="the learner has left it meanwhile"):
            await leading
        return await engine.generate([5, 6, 7], max_tokens=4, ignore_stop=True)

    assert len(engine_loop.run(run())[0].response_ids) == 4 and is_healthy(engine)


def test_an_engine_whose_weights_are_no_numbers_fails_the_request_and_lives(
    doomed: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop
) -> None:
    """A bit that flipped in one weight is enough. What it samples is refused, whoever it was for; with whole weights it works again."""
    engine, whole = doomed, tiny_weights(tiny_model)
    broken = {name: tensor.clone() for name, tensor in whole.items()}
    broken["model.norm.weight"][0] = float("nan")
    engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(broken)]))
    for _ in range(2):
        with pytest.raises(RequestError, match="not finite"):
            engine_loop.run(engine.generate([5, 6, 7], max_tokens=4, ignore_stop=True))
    assert is_healthy(engine)
    engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(whole)]))
    assert len(engine_loop.run(engine.generate([5, 6, 7], max_tokens=4, ignore_stop=True))[0].response_ids) == 4
    follows = "its group is sampled by another worker; the fourth such request in a row has all weights sent again, then it is replaced"
    Measured("NaN among an engine's weights", follows, None, "the groups that it got wrong", "a real engine").write()


def test_stopped_and_killed_scheduler(doomed: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    engine, version = doomed, doomed.version + 1
    assert set(engine.process_ids) == {"scheduler"}, "SGLang's detokenizer has nothing to do"
    engine_loop.run(engine.update_weights(version, [WeightBucket.of(tiny_weights(tiny_model))]))
    scheduler = engine.process_ids["scheduler"]
    try:
        os.kill(scheduler, signal.SIGSTOP)
        said = rf"doomed engine: no answer in 1 s \(phase: generate: 3 tokens, sent at weights v{version}"
        with pytest.raises(DeadlineExceeded, match=said):
            engine_loop.run(engine.generate([5, 6, 7], max_tokens=4, deadline_s=1.0))
        os.kill(scheduler, signal.SIGCONT)
        assert len(engine_loop.run(engine.generate([5, 6, 7], max_tokens=4, ignore_stop=True))[0].response_ids) == 4
        engine_loop.run(kill_while_everybody_waits(engine, tiny_model))
        assert not is_healthy(engine)
    finally:
        engine_loop.run(engine.shutdown())
        still_runs = bystander.poll() is None
        bystander.kill()
        bystander.wait(10)
    assert wait_until_gone(list(engine.process_ids.values()), 30.0) == []
    manager = engine._process.engine.tokenizer_manager
    lingers = [one.linger for one in (manager.send_to_scheduler, manager.recv_from_detokenizer, engine._process.engine.send_to_rpc)]
    assert lingers == [0, 0, 0], "whoever collects this engine would wait for good until its scheduler has read the last messages"
    assert still_runs, "shutting the engine down killed a process that is not its own"


async def kill_while_everybody_waits(engine: RolloutEngine, folder: Path) -> None:
    """A request is sampled, an update waits for a stopped scheduler, and then the scheduler is killed."""
    scheduler = engine.process_ids["scheduler"]
    request = asyncio.ensure_future(engine.generate([5, 6, 7], max_tokens=900, ignore_stop=True))
    await asyncio.sleep(0.2)
    os.kill(scheduler, signal.SIGSTOP)
    update = asyncio.ensure_future(engine.update_weights(engine.version + 1, [WeightBucket.of(tiny_weights(folder))]))
    await asyncio.sleep(0.2)
    os.kill(scheduler, signal.SIGKILL)
    async with asyncio.timeout(60.0):  # far less than an update's or an answer's deadline
        for waiting in (request, update):
            with pytest.raises(EngineError, match=r"scheduler process .* ended"):
                await waiting
        for call in (engine.generate([5], max_tokens=1), engine.score([5, 6]), engine.weight_checksums(), engine.update_weights(1, [])):
            with pytest.raises(EngineError):
                await call


@pytest.mark.slow
def test_folder_that_sglang_cannot_serve(tiny_model: Path, tmp_path: Path, engine_loop: BackgroundLoop) -> None:
    """Weights that end in the middle: SGLang's scheduler fails while it loads, and its owner says of what. The fast suite has the parts:
    what a dying scheduler leaves to be read (test_last_error.py), and the end of a failed start's processes (test_engine_children.py)."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = {p.pid for p in living_descendants(os.getpid())}
    with pytest.raises(EngineError, match=r"broken engine: SGLang did not start: .*SafetensorError"):
        engine_loop.run(RolloutEngine.start(folder, EngineConfig(device="cpu", max_total_tokens=4096), name="broken engine"))
    left = [p.pid for p in living_descendants(os.getpid()) if p.pid not in before and "resource_tracker" not in " ".join(p.cmdline())]
    assert wait_until_gone(left, 30.0) == []


def test_folder_without_a_model(tmp_path: Path, engine_loop: BackgroundLoop) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        engine_loop.run(RolloutEngine.start(tmp_path, EngineConfig(device="cpu")))
