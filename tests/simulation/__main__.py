"""python -m tests.simulation: play seeds, play one again, look for planted bugs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.sides import put_between
from tests.simulation.report import failures, table_of_planted_bugs
from tests.simulation.schedule import FaultSchedule, schedule_of
from tests.simulation.world import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulated runs with faults, from seeds.")
    parser.add_argument("--seeds", default="0-299", help="FIRST-LAST (0-299)")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--schedule", help="play this one, as a failure prints it")
    parser.add_argument("--trace", action="store_true", help="with --seed or --schedule: print every event")
    parser.add_argument("--planted", action="store_true", help="print the table of planted bugs, each looked for in these seeds")
    parser.add_argument("--write", type=Path, help="with --planted: put the table into this page, between its marks")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--most", type=int, default=5, help="end after so many failures (5)")
    options = parser.parse_args()
    if options.schedule or options.seed is not None:
        return _one(FaultSchedule.of_text(options.schedule) if options.schedule else schedule_of(options.seed), trace=options.trace)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if options.planted:
        table, is_complete = table_of_planted_bugs(seeds, processes=options.processes)
        print(table)
        if options.write is not None and is_complete:
            put_between(options.write, "planted", table)
        return 0 if is_complete else 1
    return _many(seeds, options.processes, options.most)


def _one(schedule: FaultSchedule, *, trace: bool) -> int:
    outcome = play(schedule)
    if trace:
        print("\n".join(outcome.trace))
    for fault in schedule.faults:
        print(f"fault {fault}")
    print(f"{outcome.steps} of {schedule.steps} steps by {outcome.drivers} drivers in {outcome.virtual_s:.0f} virtual seconds")
    print(outcome.violation or "nothing was wrong", outcome.where, sep="\n")
    return 1 if outcome.violation else 0


def _many(seeds: range, processes: int, most: int) -> int:
    began, wrong = time.monotonic(), 0
    for done, found in failures(seeds, processes=processes):
        for failure in found:
            print(f"\r{failure}\n", flush=True)
        wrong += len(found)
        print(f"\r{done} of {len(seeds)} seeds, {wrong} failures, {time.monotonic() - began:.0f} s", end="", flush=True, file=sys.stderr)
        if wrong >= most:
            break
    print(f"\n{wrong} failures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
