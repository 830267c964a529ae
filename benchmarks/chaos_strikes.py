"""What befalls the run of chaos.py: processes found by what they call themselves, killed or stopped, and what each fault cost."""

from __future__ import annotations

import contextlib
import random
import signal
from dataclasses import dataclass

import psutil

from actors.descendants import descendants

ROLES = {
    "rollout worker": ("ray::RolloutWorker", 4),
    "scheduler": ("sglang::scheduler", 4),
    "scoring process": ("rollout.reward_process", 2),
    "trajectory queue": ("ray::TrajectoryQueueActor", 1),
    "correction service": ("ray::CorrectionService", 1),
    "learner rank": ("ray::LearnerRankActor", 2),
    "driver": ("actors.commands.attempt", 1),
}
"""By role: what its command line says, and how often it is drawn."""
_STOPPED_SHARE = 0.25
_STOPPED_S = (1.0, 30.0)


@dataclass
class Strike:
    """Something that was done to the run."""

    at_s: float
    role: str
    how: str
    step: int
    """The last that was written by then."""
    recovered_s: float | None = None
    """Until the run was further than it had been; None: it never was."""


class Strikes:
    """Draws them by a seed. One at a time: the next comes when the run has recovered from the last."""

    def __init__(self, chance: random.Random, *, every_s: float) -> None:
        self._chance, self._every_s = chance, every_s
        self._next_s: float | None = None
        self._stopped: list[tuple[float, psutil.Process]] = []
        self._furthest = 0
        self.told: list[Strike] = []

    def watch(self, now: float, step: int) -> None:
        """Called all the time while the run trains.

        Args:
            now: seconds.
            step: the last that is written.
        """
        for until_s, process in list(self._stopped):
            if now >= until_s:
                self._go_on(process)
                self._stopped.remove((until_s, process))
        self._furthest = max(self._furthest, step)
        for fault in self.told:
            if fault.recovered_s is None and self._furthest > fault.step:
                fault.recovered_s = now - fault.at_s
                print(f"{now:7.1f} s  step {self._furthest}, {fault.recovered_s:.1f} s after {fault.role} {fault.how}", flush=True)
        if self._next_s is None:
            self._next_s = now + self._chance.uniform(0.5, 1.5) * self._every_s
        if now >= self._next_s:
            self._next_s = None
            self._strike(now)

    def end(self) -> None:
        """Whatever is stopped goes on."""
        for _, process in self._stopped:
            self._go_on(process)
        self._stopped.clear()

    def _strike(self, now: float) -> None:
        names = list(ROLES)
        role = self._chance.choices(names, [often for _, often in ROLES.values()])[0]
        stops, which = self._chance.random() < _STOPPED_SHARE, self._chance.random()
        least_s, most_s = _STOPPED_S
        lasts_s = least_s * (most_s / least_s) ** self._chance.random()
        found = sorted((p for p in descendants() if ROLES[role][0] in _command(p)), key=lambda p: p.pid)
        if not found:
            return  # it is being started again
        process = found[int(which * len(found))]
        with contextlib.suppress(psutil.NoSuchProcess):
            if stops:
                process.send_signal(signal.SIGSTOP)
                self._stopped.append((now + lasts_s, process))
            else:
                process.kill()
            how = f"stopped for {lasts_s:.0f} s" if stops else "killed"
            self.told.append(Strike(now, role, how, self._furthest))
            print(f"{now:7.1f} s  {role} {how}, at step {self._furthest}", flush=True)

    @staticmethod
    def _go_on(process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    @staticmethod
    def table(told: list[Strike]) -> str:
        """In Markdown: by what was done, how often, and the seconds until the run was further than before."""
        rows = ["| fault | times | s until further, median | most | never |", "|---|---|---|---|---|"]
        for kind in sorted({(fault.role, fault.how.split()[0]) for fault in told}):
            those = [fault for fault in told if (fault.role, fault.how.split()[0]) == kind]
            took = sorted(fault.recovered_s for fault in those if fault.recovered_s is not None)
            numbers = f"{took[len(took) // 2]:.1f} | {took[-1]:.1f}" if took else "- | -"
            rows.append(f"| {' '.join(kind)} | {len(those)} | {numbers} | {len(those) - len(took)} |")
        return "\n".join(rows)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
