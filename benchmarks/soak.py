"""Does anything grow? Memory, open files and threads of every process of a long run.

    python benchmarks/soak.py [--minutes 30] [--every 0.5] [--workers 2] [--bound 60] [--keep FOLDER] [--write PAGE]

The nano recipe with two workers trains for so long, undisturbed, and ends by SIGTERM. Every half second each of its processes is looked
at: its own memory (Pss_Anon of /proc/PID/smaps_rollup), its open files, its threads; and at the memory that they share, such as the object
store's (Pss_Shmem, all together). A line is laid through the second half by least squares, when caches are full and everything has been
compiled; what comes and goes within it, as processes of Ray's pool do, is left out. A process' own memory counts by the least or the
median of each three minutes, whichever of the two is precise enough and rises less: engines and ranks give free pages of their heap back
every half minute, and take them again within a second or two, so less frequent looks would miss most of these moments.

Exit code 1: a process' memory, or what they share, grows by more than --bound MiB an hour, beyond what its own scatter can make of a flat
line (two standard errors), or its open files or threads by more than 6 an hour; a kind of process was not looked at; or the run ends by
itself. Linux only.
"""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import NANO_RECIPE, evenkeel, options, put_between, scratch
from benchmarks.watched_run import ROLES, WatchedRun
from evenkeel.actors.processes.children import adopted_orphans, command_of, descendants, end_new

_MIB = 1 << 20
# Name of an idle process of Ray's pool.
_IDLE = "IDLE"
# Roles of processes that have to be there all the time.
_LAST = ("rollout worker", "scheduler", "correction service", "learner rank", "driver")
# Seconds of a window. The heap is given back some six times in it; often, not always, a look sees one of them before the heap has grown
# again.
_WINDOW_S = 180.0
# Share of the looks at which a process has to be there.
_MOST = 0.8
# Open files or threads an hour.
_COUNT_BOUND = 6.0
_ERRORS = 2.0
# MiB an hour: a line with a standard error up to this one can be judged.
_PRECISE = 20.0
_START_S, _END_S = 600.0, 120.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a process."""

    at_s: float
    memory: float
    """MiB."""
    shared: float
    """MiB of memory that is shared with others, this process' part."""
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a line by least squares."""

    an_hour: float
    error: float
    """Standard error, an hour."""

    @classmethod
    def of(cls, seconds: Sequence[float], values: Sequence[float]) -> Slope:
        """Args: at least three points."""
        n, mean_s, mean = len(seconds), math.fsum(seconds) / len(seconds), math.fsum(values) / len(values)
        spread = math.fsum((s - mean_s) ** 2 for s in seconds)
        slope = math.fsum((s - mean_s) * (v - mean) for s, v in zip(seconds, values, strict=True)) / spread
        rest = math.fsum((v - mean - slope * (s - mean_s)) ** 2 for s, v in zip(seconds, values, strict=True))
        return cls(3600 * slope, 3600 * math.sqrt(rest / (n - 2) / spread))

    def is_above(self, bound: float) -> bool:
        """Whether it grows by more than chance explains."""
        return self.an_hour - _ERRORS * self.error > bound

    def __str__(self) -> str:
        return f"{self.an_hour:+.1f} ± {self.error:.1f}"


@dataclass(frozen=True, slots=True)
class Grown:
    """Growth of a process in the second half."""

    name: str
    first: Look
    last: Look
    memory: Slope
    """Of the least of each window, or of its median: of those that are precise enough, the one that rises less, as what stays for good
    lifts both."""
    files: Slope
    threads: Slope

    @classmethod
    def of(cls, name: str, looks: Sequence[Look]) -> Grown:
        """Args: looks of at least three windows. first and last are those with the least memory of the first and of the last one."""
        of_windows = [sorted(window, key=lambda look: look.memory) for window in windows(looks)]
        least, middle = [window[0] for window in of_windows], [window[len(window) // 2] for window in of_windows]
        slopes = [Slope.of([look.at_s for look in some], [look.memory for look in some]) for some in (least, middle)]
        precise = max(_PRECISE, 2.0 * min(slope.error for slope in slopes))  # a line that chance has drawn would hide growth
        memory = min((slope for slope in slopes if slope.error <= precise), key=lambda slope: slope.an_hour)
        files, threads = (Slope.of([look.at_s for look in looks], [getattr(look, what) for look in looks]) for what in ("files", "threads"))
        return cls(name, least[0], least[-1], memory, files, threads)

    def wrong(self, bound: float) -> list[str]:
        told = [f"its memory grows by {self.memory} MiB an hour, more than {bound:g}"] if self.memory.is_above(bound) else []
        counts = ("open files", self.files), ("threads", self.threads)
        return told + [f"its {what} grow by {slope} an hour" for what, slope in counts if slope.is_above(_COUNT_BOUND)]

    @property
    def row(self) -> str:
        first, last = self.first, self.last
        cells = [self.name, f"{first.memory:.0f} -> {last.memory:.0f}", str(self.memory)]
        cells += [f"{first.files} -> {last.files}", str(self.files), f"{first.threads} -> {last.threads}", str(self.threads)]
        return f"| {' | '.join(cells)} |"


def windows(looks: Sequence[Look]) -> list[list[Look]]:
    """The looks of each three minutes since the first one. A window that is not whole, the last one, is left out.

    The least of a window is what stays when the heap has been given back, if a look falls into the second before it has grown again. Its
    median rises where a heap takes ever more before it gives memory back.
    """
    whole = int((looks[-1].at_s - looks[0].at_s + 1.0) // _WINDOW_S) if looks else 0  # a look comes a little early or late

    def window(look: Look) -> int:
        return int((look.at_s - looks[0].at_s) // _WINDOW_S)

    return [list(of_one) for number, of_one in groupby(looks, key=window) if number < whole]


class ProcessWatch:
    """Looks at the processes of a run."""

    def __init__(self) -> None:
        self.looks: dict[psutil.Process, list[Look]] = defaultdict(list)
        # Of all looks, seconds; on a busy machine they are fewer than were meant.
        self._moments: list[float] = []
        self._names: dict[psutil.Process, str] = {}

    def look(self, at_s: float) -> None:
        self._moments.append(at_s)
        for process in descendants():
            try:
                own, shared = (size / _MIB for size in memory_of(process.pid))
                one = Look(at_s, own, shared, process.num_fds(), process.num_threads())
                if (name := name_of(command_of(process))) != _IDLE:
                    self._names[process] = name
            except (psutil.Error, OSError):
                continue  # it has just ended
            self.looks[process].append(one)

    def grown(self, since_s: float) -> list[Grown]:
        """Args: since_s: from then on. A process that was not there at most of the looks since then is left out, and one that was seen in
        fewer than three windows."""
        later = {process: [look for look in all_of_it if look.at_s >= since_s] for process, all_of_it in self.looks.items()}
        looks = _MOST * sum(moment >= since_s for moment in self._moments)

        def is_seen(some: list[Look]) -> bool:
            return len(some) >= looks and len(windows(some)) >= 3

        found = [Grown.of(self._names.get(process, _IDLE), some) for process, some in later.items() if is_seen(some)]
        return sorted(found, key=lambda one: (one.name, -one.last.memory))

    def save(self, path: Path) -> None:
        """Each look at each process, as comma-separated values."""
        with path.open("w") as page:
            page.write("name,at_s,memory_mib,shared_mib,files,threads\n")
            for process, some in self.looks.items():
                name = f"{self._names.get(process, _IDLE)} {process.pid}"
                page.writelines(f"{name},{one.at_s:.1f},{one.memory:.1f},{one.shared:.1f},{one.files},{one.threads}\n" for one in some)

    def shared(self, since_s: float) -> tuple[list[float], list[float]]:
        """Seconds, and MiB of shared memory of all processes together: each page counts once."""
        sums: dict[float, float] = defaultdict(float)
        for look in (look for some in self.looks.values() for look in some if look.at_s >= since_s):
            sums[look.at_s] += look.shared
        return list(sums), list(sums.values())


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of its own, and its part of what is shared. Raises: OSError if the process is gone or another user's."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own, shared = (re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE) for name in ("Pss_Anon", "Pss_Shmem"))
    if own is None or shared is None:
        raise OSError(f"process {pid}: the kernel doesn't tell the parts of its memory")
    return 1024 * int(own[1]), 1024 * int(shared[1])


def conclusions(grown: Sequence[Grown], shared: Slope | None, bound: float) -> list[str]:
    """What is wrong. Empty: nothing grows, and all that should have been looked at was."""
    shown = {one.name for one in grown}
    wrong = [f"{role}: it was not looked at often enough" for role in _LAST if name_of(ROLES[role]) not in shown]
    wrong += [f"{one.name}: {said}" for one in grown for said in one.wrong(bound)]
    if shared is None:
        wrong.append("shared memory was not looked at")
    elif shared.is_above(bound):
        wrong.append(f"shared memory of all processes grows by {shared} MiB an hour, more than {bound:g}")
    return wrong


def name_of(command: str) -> str:
    """Short name of a process: an actor's class, a module, or a program."""
    for pattern in (r"^ray::(\w+)", r"^(sglang::\w+)", r"/(raylet)\b", r" -m ([\w.]+)", r"/(\w+\.py)\b", r"^\S*?([\w.-]+)(?:\s|$)"):
        if found := re.search(pattern, command):
            return found[1]
    return command[:30] or "?"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of training (30; at least 18)")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks (0.5)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bound", type=float, default=60.0, help="MiB an hour that a process' memory may grow by (60)")
    parser.add_argument("--keep", type=Path, help="keep the run there, and each look, in looks.csv")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page, between its marks")
    arguments = parser.parse_args()
    with scratch(arguments.keep) as folder:
        model = f"model={folder / 'model'}"
        evenkeel("init-model", NANO_RECIPE, model, "--if-missing")
        words = [model, "steps=1000000", f"rollout.workers={arguments.workers}", "rollout.engine.threads=1", "learner.threads=1"]
        watch, trained_s, steps, wrong = watched(folder / "run", words, arguments.minutes * 60, arguments.every)
        watch.save(folder / "looks.csv")
    half_s = trained_s / 2
    grown = watch.grown(half_s)
    seconds, sizes = watch.shared(half_s)
    shared = Slope.of(seconds, sizes) if len(seconds) >= 3 else None
    wrong += conclusions(grown, shared, arguments.bound)
    head = ["process", "own memory, MiB", "an hour", "open files", "an hour", "threads", "an hour"]
    table = "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(one.row for one in grown)])
    told = f"{steps} steps in {trained_s / 60:.0f} minutes; the last {half_s / 60:.0f} of them, standard errors behind ±:\n\n{table}"
    if shared is not None:
        told += f"\n\nShared memory of all of them, the object store included: {sizes[0]:.0f} -> {sizes[-1]:.0f} MiB, {shared} an hour."
    print(told)
    if arguments.write is not None:
        put_between(arguments.write, "soak", told)
    print("nothing grows" if not wrong else "\n".join(f"WRONG: {line}" for line in wrong))
    sys.exit(1 if wrong else 0)


def watched(run_dir: Path, words: list[str], length_s: float, every_s: float) -> tuple[ProcessWatch, float, int, list[str]]:
    """Train for so long. Returns: what was seen, by seconds of training; these; steps; what was wrong."""
    watch, wrong = ProcessWatch(), []
    with adopted_orphans():
        run = WatchedRun(run_dir, words)
        asked = time.monotonic()
        while not run.is_training() and run.process.poll() is None and time.monotonic() - asked < _START_S:
            time.sleep(1.0)
        if not run.is_training():
            wrong.append(f"it did not begin to train in {_START_S:g} s")
            length_s = 0.0
        began, trained_s = time.monotonic(), 0.0
        while run.process.poll() is None and trained_s < length_s:
            time.sleep(min(every_s, length_s - trained_s))
            trained_s = time.monotonic() - began
            watch.look(trained_s)
        steps = run.reached()
        if (code := run.process.poll()) is not None:
            wrong.append(f"the run has ended by itself, exit code {code}")
        run.process.send_signal(signal.SIGTERM)
        try:
            run.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            wrong.append(f"it did not end in {_END_S:g} s after SIGTERM")
            end_new()
        wrong += [f"left behind: {command}" for command in run.close()]
    return watch, trained_s, steps, wrong


if __name__ == "__main__":
    main()
