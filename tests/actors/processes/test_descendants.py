"""Real processes whose parent dies."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from evenkeel.actors.processes.descendants import adopted_orphans, descendants, end_new


@pytest.mark.skipif(sys.platform != "linux", reason="adoption is Linux's")
def test_an_orphan_of_a_killed_child_is_found_and_ended() -> None:
    """Ray's daemon was killed while it started its agents: they became children of init, and lived on for a minute."""
    before = descendants()
    with adopted_orphans():
        child = subprocess.Popen(["sh", "-c", "sleep 300 & echo started; wait"], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"started\n"
        (orphan,) = psutil.Process(child.pid).children()
        child.kill()
        child.wait()
        until = time.monotonic() + 10.0
        while orphan not in descendants() and time.monotonic() < until:
            time.sleep(0.01)
        assert orphan in descendants(), "adopted"
        end_new(before)
    assert not orphan.is_running()
    assert [process for process in descendants() if process not in before] == []
    child.stdout.close()
