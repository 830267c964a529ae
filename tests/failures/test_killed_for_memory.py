"""Ray's memory monitor kills a rollout worker of a real run, on a node whose memory has run out.

Ray's daemon goes by /proc/meminfo, and kills above 95 % in use. The node has a file in its place, in a mount namespace of its own, so that
memory is short there when the test says so, and nowhere else: another machine's worth of it would have to be used up for the real thing.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.cluster import ray_cluster
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run, command_of, living
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, TOTAL_KB = 4, 8 << 20
_LINE = "MemAvailable:   {:8d} kB\n"


class Meminfo:
    """What a node takes for its memory: 8 GiB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rest = "".join(f"{name}: 0 kB\n" for name in ("Buffers", "Cached", "Active", "Inactive", "SwapTotal", "SwapFree", "Shmem", "Slab"))
        path.write_text(f"MemTotal:       {TOTAL_KB:8d} kB\n" + _LINE.format(TOTAL_KB) + f"MemFree:        {TOTAL_KB:8d} kB\n" + rest)

    @property
    def inside(self) -> list[str]:
        """Of a command that sees it."""
        return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', str(self._path)]

    def leave(self, kilobytes: int) -> None:
        """So much is free, 1 at least: of 0 Ray thinks that the kernel doesn't tell. In one write, as a reader may come at any time."""
        lines = self._path.read_text().splitlines(keepends=True)
        file = os.open(self._path, os.O_WRONLY)
        try:
            os.pwrite(file, _LINE.format(kilobytes).encode(), len(lines[0]))
        finally:
            os.close(file)


@pytest.fixture
def meminfo(tmp_path: Path) -> Meminfo:
    made = Meminfo(tmp_path / "meminfo")
    if subprocess.run([*made.inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    return made


def test_a_worker_that_is_killed_for_memory_is_replaced(small_model: Path, tmp_path: Path, meminfo: Meminfo) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", "rollout.workers=2", f"groups_per_step={GROUPS}", "checkpoint.every_steps=5", "evaluation.problems=4"]
    with ray_cluster() as cluster:
        run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, address=cluster.address, **cluster.variables)
        try:
            run.wait_until(lambda: "learner 0 is up" in run.events(), "the learner, on the head")
            other = cluster.add_node(inside=meminfo.inside)
            run.wait_until(lambda: all(f"rollout {i} is up" in run.events() for i in (0, 1)), "a worker on each node")
            before = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) >= before + 2, "two steps of both")
            (worker,) = other.processes("ray::RolloutWorker")
            of_worker = [worker, *worker.children(recursive=True)]
            assert any("sglang::scheduler" in command_of(process) for process in of_worker), "or its end says nothing"
            recovery = Recovery(run, "rollout worker killed by Ray's memory monitor", "its groups go to others; a new one comes")
            meminfo.leave(1)
            assert living([worker], timeout_s=60.0) == [], "Ray's monitor lets it live"
            meminfo.leave(TOTAL_KB)
            run.wait_until(lambda: "rollout worker 1 is gone: " in run.events(), "the loss to be noticed")
            recovery.wait(steps=2)
            assert [command_of(process) for process in living(of_worker, timeout_s=30.0)] == [], "its engine and scorers end with it"
            run.wait_until(lambda: "rollout 2 is up" in run.events(), "a worker in its place")
            run.interrupt()
            assert run.wait() == 0, run.output()[-4000:]
        finally:
            run.close()
    check_end(run, groups_per_step=GROUPS, but=RAY_AGENTS)
    (gone,) = [event.text for event in RunFolder.view(run_dir).read_events() if " is gone: " in event.text]
    assert "memory" in gone.lower(), "the reason is told"
