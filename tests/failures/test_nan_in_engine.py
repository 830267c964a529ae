"""A bit that is stuck in the memory of one of two engines makes one of its weights a NaN, in a real run, until all its weights come anew.

The test writes into the memory of SGLang's scheduler (/proc/PID/mem), where the last norm's weights lie: nobody is told.
"""

from __future__ import annotations

import math
import os
import re
import signal
import struct
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from evenkeel.actors.metrics.step_metrics import by_worker
from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, CHUNK, WEIGHT = 16, 16 << 20, "model.norm.weight"
ANEW = "gets no work until a full weight sync has succeeded: its last requests failed for several different groups"


class Memory:
    """Of another process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._path = Path(f"/proc/{pid}/mem")

    def find(self, what: bytes) -> list[int]:
        """Addresses of its copies in memory that the process has for itself."""
        found = []
        for span, mode, *_ in (line.split() for line in Path(f"/proc/{self._pid}/maps").read_text().splitlines()):
            start, end = (int(address, 16) for address in span.split("-"))
            for chunk in range(start, end if mode == "rw-p" else start, CHUNK):
                content = self.read(chunk, min(CHUNK + len(what) - 1, end - chunk))
                found += [chunk + match.start() for match in re.finditer(re.escape(what), content)]
        return found

    def read(self, address: int, size: int) -> bytes:
        """Empty where nothing can be read."""
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(address)
                return file.read(size)
        except OSError:
            return b""

    def write(self, address: int, content: bytes) -> None:
        with self._path.open("r+b", buffering=0) as file:
            file.seek(address)
            file.write(content)


def weights(folder: RunFolder, newest: int) -> list[bytes]:
    """The last norm's, float32, of the newest checkpoints."""
    found = []
    for checkpoint in folder.checkpoints()[-newest:]:
        with safe_open(checkpoint.hf / "model.safetensors", "np") as file:
            found.append(file.get_tensor(WEIGHT).tobytes())
    return found


def place_of(scheduler: int, run: Run, folder: RunFolder) -> int:
    """Where the engine has these weights: what holds one version's, and later ones' afterwards."""
    memory, ends = Memory(scheduler), time.monotonic() + 120.0
    while time.monotonic() < ends:
        os.kill(scheduler, signal.SIGSTOP)
        try:
            time.sleep(1.0)  # until the checkpoint of the version that it has is written
            before = weights(folder, 2)
            seen = {place: set[bytes]() for content in before for place in memory.find(content)}
        finally:
            os.kill(scheduler, signal.SIGCONT)
        size, reached = len(before[0]), len(run.metrics())
        while seen and len(run.metrics()) < reached + 4 and time.monotonic() < ends:
            for place, contents in seen.items():
                contents.add(memory.read(place, size))
            time.sleep(0.02)
        later = set(weights(folder, 8)).difference(before)
        if there := [place for place, contents in sorted(seen.items()) if contents & later]:
            return there[0]
    raise AssertionError("the engine's weights are nowhere in its memory")


def test_a_weight_that_is_no_number_costs_the_groups_that_it_spoilt(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"run_dir={run_dir}", f"groups_per_step={GROUPS}", "rollout.workers=2", "evaluation.problems=4"]
    run = Run(run_dir, str(RECIPE), *words, "rollout.sampling.max_tokens=96", "rollout.engine.deadlines.heartbeat_s=60")
    try:
        run.wait_until(lambda: len(run.metrics()) >= 3 and "rollout 1 is up" in run.events(), "two workers and three steps")
        folder = RunFolder.view(run_dir)
        scheduler = run.pids("sglang::scheduler")[0]
        memory, place = Memory(scheduler), place_of(scheduler, run, folder)
        follows = "other workers sample its groups; after four such requests in a row all weights are sent to it again"
        recovery = Recovery(run, "NaN among an engine's weights, in a run of two", follows)
        ends = time.monotonic() + 60.0
        while ANEW not in run.events():
            memory.write(place, struct.pack("<f", math.nan))
            assert time.monotonic() < ends and run.process.poll() is None, run.events()[-2000:]
            time.sleep(0.05)
        recovery.wait(steps=3)
        (sick,) = set(re.findall(r"rollout worker (\d+)[^\n]*" + re.escape(ANEW), run.events()))
        before = len(run.metrics())
        run.wait_until(lambda: any(by_worker(line, "groups").get(sick) for line in run.metrics()[before:]), "its groups in a step")
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]
    finally:
        run.close()
    assert len(re.findall(r"group \d+ is sampled again: [^\n]*not finite", run.events())) >= 4
    check_end(run, groups_per_step=GROUPS, within_s=60.0)
    lines = run.metrics()
    assert not any(line["correction/broken_tokens"] or line["steps/skipped_total"] for line in lines), "no NaN has come to the learner"
    assert all(math.isfinite(line[name]) for line in lines for name in ("learner/loss", "learner/grad_norm"))
