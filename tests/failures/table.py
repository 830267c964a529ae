"""python -m tests.failures.table: run the tests that measure what a fault costs, and make a table of it.

python -m tests.failures.table --write docs/reliability.md      runs them first, some 35 minutes on two cores; a test that is skipped
                                                                measures nothing, and the page stays as it is
python -m tests.failures.table --measured FILE                  from what a run of tests with EVENKEEL_FAILURES=FILE has left
python -m tests.failures.table --measured FILE --write docs/reliability.md --keep
                                                                ... of some of the tests: the page's other rows stay
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.sides import put_between
from tests.failures.measured import FILE, Measured

TESTS = (
    "tests/failures/test_parts_killed.py",
    "tests/failures/test_driver_killed.py",
    "tests/failures/test_own_ray_killed.py",
    "tests/failures/test_joined_cluster.py",
    "tests/failures/test_head_stopped.py",
    "tests/failures/test_head_killed.py",
    "tests/failures/test_head_returns.py",
    "tests/failures/test_frozen_engine.py",
    "tests/failures/test_slow_engine.py",
    "tests/failures/test_worker_stopped.py",
    "tests/failures/test_rank_stopped.py",
    "tests/failures/test_node_cut_off.py",
    "tests/failures/test_node_removed.py",
    "tests/failures/test_engine_rank_killed.py",
    "tests/failures/test_nan_in_engine.py",
    "tests/failures/test_broadcast_stopped.py",
    "tests/failures/test_late_calls.py",
    "tests/failures/test_killed_for_memory.py",
    "tests/failures/test_step_aborted.py",
    "tests/failures/test_disk_full.py",
    "tests/failures/test_full_object_store.py",
    "tests/rollout/test_engine_failures.py",
    "tests/rollout/test_rewards.py::test_calls_on_other_processes_do_not_wait_for_a_hanging_one",
    "tests/rollout/test_reward_limits.py::test_the_whole_tree_has_the_limits",
    "tests/actors/on_two_nodes/test_two_callers.py",
    "tests/e2e/test_asynchronous_run.py",
    "tests/actors/groups/test_payloads_in_ray.py::test_a_finished_group_outlives_its_worker_and_goes_with_its_node",
    "tests/actors/checkpoints/test_checkpoint_disk.py::test_a_real_full_disk",
    "tests/actors/checkpoints/test_checkpoint_disk.py::test_after_a_disk_that_hung_the_next_checkpoint_is_whole",
    "tests/actors/record/test_run_folder.py::test_a_killed_owner_leaves_the_folder_free",
    "tests/evenkeel/test_resume_point.py::test_a_damaged_checkpoint_is_named_and_the_older_one_taken",
    "tests/actors/pool/test_faults.py",
    "tests/actors/pool/test_heartbeats_and_losses.py::test_workers_that_die_one_after_the_other_end_the_run_after_longer_and_longer_pauses",
)
"""Those that measure."""


# Of the page's table.
_MARK = "failures"
_HEAD = ["| fault | what follows | s until work goes on | done again | how it is caused |", "|---|---|---|---|---|"]


def by_fault(rows: Iterable[Measured]) -> dict[str, Measured]:
    """Of a fault that came more than once the slowest."""
    slowest: dict[str, Measured] = {}
    for row in rows:
        if row.fault not in slowest or (row.seconds or 0.0) > (slowest[row.fault].seconds or 0.0):
            slowest[row.fault] = row
    return slowest


def table(rows: Iterable[Measured]) -> str:
    """In Markdown, in the order of the tests; of a fault that came more than once the slowest."""
    lines = list(_HEAD)
    for row in by_fault(rows).values():
        seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
        lines.append(f"| {row.fault} | {row.follows} | {seconds} | {row.again} | {row.how} |")
    return "\n".join(lines)


def read(path: Path) -> list[Measured]:
    return [Measured(**json.loads(line)) for line in path.read_text().splitlines()]


def rows_of(page: Path) -> list[Measured]:
    """Those that it has already."""
    _, _, text = page.read_text().partition(f"<!-- {_MARK} -->")
    text, _, _ = text.partition(f"<!-- /{_MARK} -->")
    cells = [line.strip("|").strip().split(" | ") for line in text.splitlines() if line.startswith("| ") and line not in _HEAD]
    return [Measured(fault, follows, None if s == "-" else float(s), again, how) for fault, follows, s, again, how in cells]


def skipped(report: Path) -> list[str]:
    """Tests that a run has skipped, and why. Args: report: the XML file that pytest has written (--junitxml)."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        for skip in case.iter("skipped"):
            found.append(f"{case.get('classname')}::{case.get('name')}: {skip.get('message')}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failures.table", description="The table of faults and what they cost.")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what tests have measured already; without it they are run")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page, between its marks")
    parser.add_argument("--keep", action="store_true", help="rows of PAGE that FILE doesn't have stay")
    options = parser.parse_args()
    if options.keep and (options.measured is None or options.write is None):
        parser.error("--keep needs --measured and --write")
    code, left_out = 0, list[str]()
    with tempfile.TemporaryDirectory() as made:
        path, report = options.measured or Path(made) / "measured.jsonl", Path(made) / "tests.xml"
        if options.measured is None:
            command = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "", f"--junitxml={report}", *TESTS]
            code = subprocess.run(command, env={**os.environ, FILE: str(path)}, check=False).returncode
            left_out = skipped(report) if code == 0 else []
        rows = read(path)
    before = rows_of(options.write) if options.write is not None and options.measured is not None else []
    absent = [] if options.keep else [row.fault for row in before if row.fault not in by_fault(rows)]
    found = table((by_fault(before) | by_fault(rows)).values() if options.keep else rows)
    print(found)
    if options.write is None or code:
        return code
    if left_out:
        print(f"{options.write} stays as it is, or rows would vanish: these tests were skipped:", *left_out, sep="\n", file=sys.stderr)
        return 1
    if absent:
        why = f"{options.write} stays as it is, or rows would vanish: {options.measured} has none of these (--keep keeps them):"
        print(why, *absent, sep="\n", file=sys.stderr)
        return 1
    put_between(options.write, _MARK, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
