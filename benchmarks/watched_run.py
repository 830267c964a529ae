"""`evenkeel train` as a user starts it, watched from outside: how far it has come, which processes are its own, what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.sides import EVENKEEL, NANO_RECIPE, ROOT
from evenkeel.actors.json_lines import last_step
from evenkeel.actors.processes.children import command_of, descendants, end_new

ROLES = {
    "rollout worker": "ray::RolloutWorker",
    "scheduler": "sglang::scheduler",
    "scoring process": "evenkeel.rollout.rewards.reward_process",
    "correction service": "ray::CorrectionService",
    "learner rank": "ray::LearnerRankActor",
    "driver": "evenkeel.cli",
}
"""Role -> text in the command line of its processes."""
# Ray's agents take a minute to notice that their daemon is gone.
_LEFT_S = 90.0
_POLL_S = 0.2


def processes_of(role: str) -> list[psutil.Process]:
    """Descendants of this process that have it, by their numbers."""
    return sorted((process for process in descendants() if ROLES[role] in command_of(process)), key=lambda process: process.pid)


class WatchedRun:
    """The nano recipe with --retries, in a Ray of its own; end it inside `adopted_orphans`."""

    def __init__(self, run_dir: Path, words: list[str]) -> None:
        """Args: words: settings."""
        self.run_dir = run_dir
        self._temp = tempfile.TemporaryDirectory(prefix="ek-", dir="/tmp", ignore_cleanup_errors=True)  # Ray's socket paths are short
        command = [*EVENKEEL, "train", str(NANO_RECIPE), *words, f"run_dir={run_dir}", f"ray.temp_dir={self._temp.name}"]
        self._log = run_dir.with_suffix(".log").open("wb")
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        # Byte code is kept, as for a user: a process that comes back would make it anew.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}
        self.process = subprocess.Popen(
            [*command, "--retries", "1000"], cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def reached(self) -> int:
        """The last step that is written."""
        return last_step(self.run_dir / "metrics.jsonl")

    def is_training(self) -> bool:
        events = self.run_dir / "events.log"
        return events.exists() and " training\n" in events.read_text()

    def close(self) -> list[str]:
        """Returns: command lines of processes that have outlived the run."""
        until = time.monotonic() + _LEFT_S
        while (left := descendants()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        commands = [command_of(process)[:100] for process in left if process.is_running()]
        end_new()
        self._log.close()
        self._temp.cleanup()
        return commands
