"""The faults of chaos.py: finds the processes of a run by their names, kills or stops them or delays their calls, and measures the cost."""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.late_calls import LateCalls
from benchmarks.watched_run import processes_of
from evenkeel.actors.processes.children import command_of

KILLED, STOPPED, LATE = "killed", "stopped", "called late"
# Role -> how often it is drawn, and the faults that may be drawn. Only actors can be called late.
_DEEDS = {
    "rollout worker": (4, (KILLED, KILLED, KILLED, STOPPED, LATE)),
    "scheduler": (4, (KILLED, KILLED, STOPPED)),
    "scoring process": (2, (KILLED, KILLED, STOPPED)),
    "correction service": (2, (KILLED, KILLED, STOPPED, LATE)),
    "learner rank": (2, (KILLED, KILLED, KILLED, STOPPED, LATE)),
    "driver": (1, (KILLED, KILLED, KILLED, STOPPED)),
}
_IN_UPDATES = ("rollout worker", "scheduler", "learner rank", "driver")
# Share of kills of these roles that are made inside a weight update.
_UPDATE_SHARE = 0.3
_STOPPED_S, _LATE_S = (1.0, 30.0), (0.3, 8.0)
_HELD_S = (0.2, 1.5)
_EXPORT = "ray::LearnerRankActor.export"
_LOOK_S, _LOOKING_S = 0.003, 0.15
# Longest wait for a fault whose process is just being started, or whose weight update hasn't come yet.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Blow:
    """The next fault."""

    role: str
    deed: str
    which: float
    """Chooses among the processes of the role; in [0, 1)."""
    lasts_s: float
    held_s: float
    """Seconds for which the weight update is held up first; 0: the fault doesn't wait for an update."""

    @classmethod
    def of(cls, chance: random.Random) -> Blow:
        """Draw a fault. Each takes the same number of random draws, so that a seed gives the same faults however they turn out."""
        names = list(_DEEDS)
        role = chance.choices(names, [often for often, _ in _DEEDS.values()])[0]
        deed = chance.choice(_DEEDS[role][1])
        which, long, in_update, held = (chance.random() for _ in range(4))
        is_held = deed == KILLED and role in _IN_UPDATES and in_update < _UPDATE_SHARE
        lasts_s = _between(_LATE_S if deed == LATE else _STOPPED_S, long)
        return cls(role, deed, which, lasts_s, _between(_HELD_S, held) if is_held else 0.0)


@dataclass
class Strike:
    """A fault that was done to the run."""

    at_s: float
    role: str
    what: str
    """Without how long it lasted."""
    text: str
    step: int
    """The last that was written by then."""
    recovered_s: float | None = None
    """Seconds until the run was further than before; None: it never was."""
    is_alone: bool = True
    """Whether there was no other fault until then."""


class Strikes:
    """Draws faults from a seed, and does them."""

    def __init__(self, chance: random.Random, *, every_s: float) -> None:
        self._chance, self._every_s = chance, every_s
        self._next_s: float | None = None
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._late: list[LateCalls] = []
        # For its process, or for a weight update, and until when.
        self._waits: tuple[Blow, float] | None = None
        # In the next one: the learner's ranks, and the engines.
        self._taking_part: tuple[list[psutil.Process], list[psutil.Process]] = [], []
        self._held: tuple[Blow, float, psutil.Process] | None = None
        self._furthest = 0
        self.told: list[Strike] = []
        self.missed: list[tuple[str, str]] = []
        """Roles of faults that could not be done, with the reasons."""

    def watch(self, now: Callable[[], float], reached: Callable[[], int]) -> None:
        """Called all the time while the run trains.

        Args:
            now: seconds.
            reached: the last step that is written.
        """
        for late in self._late:
            late.look()
        for due_s, undo in list(self._undo):
            if now() >= due_s:
                undo()
                self._undo.remove((due_s, undo))
        self._note(now(), reached())
        if self._next_s is None:
            self._next_s = now() + self._chance.uniform(0.5, 1.5) * self._every_s
        if self._held is not None and now() >= self._held[1]:
            self._strike_in_update(now, reached)
        elif self._waits is None and self._held is None and now() >= self._next_s:
            self._next_s = None
            self._waits = Blow.of(self._chance), now() + _PATIENCE_S
        if self._waits is not None:
            self._try(now, reached)

    def wrong(self) -> list[str]:
        """Kinds of faults that should have been done and never were."""
        done = {fault.role for fault in self.told}
        never = sorted({f"{role}: it was to be struck, and never was ({reason})" for role, reason in self.missed if role not in done})
        return never if self.told else [*never, "nothing befell it"]

    def end(self) -> None:
        """Let all stopped processes go on."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        if self._held is not None:
            _go_on(self._held[2])

    def _note(self, now: float, step: int) -> None:
        self._furthest = max(self._furthest, step)
        for fault in self.told:
            if fault.recovered_s is None and self._furthest > fault.step:
                fault.recovered_s = now - fault.at_s
                print(f"{now:7.1f} s  step {self._furthest}, {fault.recovered_s:.1f} s after {fault.text}", flush=True)

    def _try(self, now: Callable[[], float], reached: Callable[[], int]) -> None:
        assert self._waits is not None
        blow, until_s = self._waits
        if blow.held_s:
            self._look_for_update(blow, now)
        elif found := processes_of(blow.role):
            self._waits = None
            self._strike(blow, found[int(blow.which * len(found))], now, reached)
        if self._waits is not None and now() > until_s:
            self._miss(blow, "no weight update came" if blow.held_s else "no such process came up")

    def _miss(self, blow: Blow, reason: str) -> None:
        self._waits = None
        self.missed.append((blow.role, reason))
        print(f"{blow.role} could not be {blow.deed}: {reason}", flush=True)

    # -- inside a weight update --------------------------------------------------------------------------------------

    def _look_for_update(self, blow: Blow, now: Callable[[], float]) -> None:
        """Called when the learner hands out new weights: stop an engine before it has them, so that its update can't end."""
        if not all(process.is_running() for some in self._taking_part for process in some) or not all(self._taking_part):
            self._taking_part = processes_of("learner rank"), processes_of("scheduler")
        ranks, engines = self._taking_part
        ends = time.monotonic() + _LOOKING_S
        while ranks and engines and time.monotonic() < ends:
            if command_of(ranks[0]).startswith(_EXPORT):
                engine = engines[int(blow.which * len(engines))]
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.send_signal(signal.SIGSTOP)
                    self._waits, self._held = None, (blow, now() + blow.held_s, engine)
                return
            time.sleep(_LOOK_S)

    def _strike_in_update(self, now: Callable[[], float], reached: Callable[[], int]) -> None:
        assert self._held is not None
        blow, _, engine = self._held
        self._held = None
        found = [engine] if blow.role == "scheduler" else processes_of(blow.role)
        if found:
            self._strike(blow, found[int(blow.which * len(found))], now, reached)
        else:
            self._miss(blow, "no such process was there in the update")
        _go_on(engine)

    # -- what is done ------------------------------------------------------------------------------------------------

    def _strike(self, blow: Blow, process: psutil.Process, now: Callable[[], float], reached: Callable[[], int]) -> None:
        try:
            self._do(blow, process, now)
        except (psutil.Error, OSError) as error:
            self._miss(blow, f"{type(error).__name__}: {error}")
            return
        where = " inside a weight update" if blow.held_s else ""
        lasts = "" if blow.deed == KILLED else f" for {blow.lasts_s:.1f} s"
        self._note(now(), reached())  # what it had done by then
        for fault in self.told:
            fault.is_alone &= fault.recovered_s is not None
        is_alone = all(fault.recovered_s is not None for fault in self.told)
        what = f"{blow.role} {blow.deed}{where}"
        self.told.append(Strike(now(), blow.role, what, what + lasts, self._furthest, is_alone=is_alone))
        print(f"{now():7.1f} s  {what}{lasts}, at step {self._furthest}", flush=True)

    def _do(self, blow: Blow, process: psutil.Process, now: Callable[[], float]) -> None:
        if blow.deed == KILLED:
            process.kill()
        elif blow.deed == STOPPED:
            process.send_signal(signal.SIGSTOP)
            self._undo.append((now() + blow.lasts_s, lambda: _go_on(process)))
        else:
            late = LateCalls(process.pid)
            self._late.append(late)
            self._undo.append((now() + blow.lasts_s, lambda: self._on_time(late)))

    def _on_time(self, late: LateCalls) -> None:
        late.end()
        self._late.remove(late)


def table(told: Sequence[Strike]) -> str:
    """In Markdown: by what was done, how often, and the seconds until the run was further than before."""
    rows = ["| fault | times | alone | s until further, median of those | most of all | never |", "|---|---|---|---|---|---|"]
    for what in sorted({fault.what for fault in told}):
        those = [fault for fault in told if fault.what == what]
        took = [fault.recovered_s for fault in those if fault.recovered_s is not None]
        alone = [fault.recovered_s for fault in those if fault.recovered_s is not None and fault.is_alone]
        median, most = (f"{number(some):.1f}" if some else "-" for number, some in ((statistics.median, alone), (max, took)))
        rows.append(f"| {what} | {len(those)} | {len(alone)} | {median} | {most} | {len(those) - len(took)} |")
    return "\n".join(rows)


def _between(limits: tuple[float, float], share: float) -> float:
    """As often in each part of the same ratio."""
    least, most = limits
    return least * (most / least) ** share


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
