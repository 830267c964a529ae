"""What the control plane's own actors cost: the real correction service, pool and weight sync over Ray; engines and learner replay.

    python benchmarks/control_plane_actors.py [--workers 10,50,100] [--groups 64] [--tokens 1000] [--rate 300000] [--steps 6] [--hosts 1]
        [--churn 2] [--topk 20] [--expert-layers 24] [--lengths RUN_DIR] [--every 2]

The driver is a run's: controller, ledger, recorder, metrics line, TensorBoard and Prometheus endpoint. Engines sleep and hand over groups
of real size, cut from made-up buffers; a learner of one rank answers with logprobs near the sampled ones. Many workers share a process.
Answers have lognormal lengths. With --lengths they have those of a recorded run, drawn at random, and prompts
are as long as its were in the mean; with --tokens besides, answers are scaled to that mean.

Printed for each number of workers and of groups, with the goals: processor seconds for each million tokens trained, process by process,
what of them a process takes in that time without any work, and by how much its anonymous memory has grown; how long a place that has become
free waits for its group (p50, p99); what the learner waits between two steps, and how much of that for the batch's last group to be
sampled; from publishing a version to the last worker's receipt; how late the driver's event loop was; how many calls of Ray's the processes
made for a group; and the tokens a second at which the first of the single processes would have no time left; before that, what Ray takes
for a call that does nothing. And what a start takes: each worker
is handed as many checksums as Qwen3-30B-A3B has tensors, and compares its own; weights have no bytes.

With --every 2 every second step's weights are published, with one more version of staleness; what the learner waits after the other steps
is printed apart: those have neither calls for weights nor new groups.
With --churn engines die while the run goes on: it is printed what became of their prompts, and the run ends with an error if one was lost.
Each that joins in their places compares checksums, too.
With --topk and --expert-layers answers have wide fields: it is printed what the object store takes for them, as a multiple of their size:
what it has grown by, less what `evenkeel plan` counts for the tokens' other fields (it holds a few MB of checksums, too). With --profile
it is printed in which threads, or functions of their event loops, processor seconds were spent, or what the driver's loop was doing while
it was late.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.call_floor import CallFloor
from benchmarks.process_use import Uses
from benchmarks.replayed_parts import SAMPLES, WideShape, tensor_names
from benchmarks.replayed_run import PROMPT_TOKENS, Figures, ReplayedRun, ReplayedShape, recorded_shape
from benchmarks.sides import ROOT, options
from evenkeel.correction.errors import ConfigError
from evenkeel.plan.hosts import ANSWER, CORRECTED
from lab.simulate.costs import AnswerLengths

# CPU seconds for a million tokens, and MB for a million tokens in flight.
_GOALS = {"driver": (0.03, 30), "service": (0.15, 120), "rank": (0.1, None)}


async def run(shape: ReplayedShape, *, profile: str) -> tuple[Figures, dict[str, tuple[float, int]]]:
    """Of a run: what was measured, and of each process CPU seconds and bytes."""
    replayed = ReplayedRun(shape, profile=profile)
    try:
        await replayed.join()
        uses = Uses(replayed.actors, profile=profile)
        replayed.figures.idle = await uses.idle_share()
        return replayed.figures, await replayed.train(uses)
    finally:
        await replayed.close()


def _of(values: Sequence[float], share: float) -> float:
    """A quantile of the values, s."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", default="10,50,100", help="numbers of workers, one run each")
    parser.add_argument("--groups", default="64", help="numbers of groups (of 8) in a training batch, one run each")
    parser.add_argument("--tokens", type=int, help="mean length of an answer; 1000, or what --lengths has recorded")
    parser.add_argument("--lengths", type=Path, metavar="RUN_DIR", help="folder of a run whose answers' lengths are drawn")
    parser.add_argument("--rate", type=float, default=3e5, help="tokens a second that engines and learner aim at")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=1, help="processes that the workers share")
    parser.add_argument("--churn", type=int, default=0, help="workers that die in the time of a step")
    parser.add_argument("--topk", type=int, default=0, help="likeliest tokens that come with each sampled one")
    parser.add_argument("--expert-layers", type=int, default=0, help="layers whose 8 routed experts come with each token")
    parser.add_argument("--every", type=int, default=1, help="steps from one published version to the next")
    profile = parser.add_argument("--profile", choices=("threads", "functions", "late"), default="")
    profile.help = "print what of the processes takes their time, or what makes the driver's loop late"
    arguments = parser.parse_args()
    lengths, tokens, prompt_tokens = _lengths(arguments.lengths, arguments.tokens)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # of the actors
    with tempfile.TemporaryDirectory(prefix="ek", dir="/tmp") as folder:
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # as a private Ray (actors/cluster/cluster.py)
        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, _temp_dir=folder)
        print(asyncio.run(CallFloor.measured()), flush=True)
        print(f"lengths: {lengths.description if lengths else 'lognormal'}; mean {tokens} tokens, prompts of {prompt_tokens}", flush=True)
        for workers, groups in itertools.product(map(int, arguments.workers.split(",")), map(int, arguments.groups.split(","))):
            more = arguments.churn, WideShape(arguments.topk, arguments.expert_layers), lengths, prompt_tokens, arguments.every
            shape = ReplayedShape(workers, groups, tokens, arguments.rate, arguments.steps, arguments.hosts, *more)
            found, used = asyncio.run(run(shape, profile=arguments.profile))
            _tell(shape, found, used)
        ray.shutdown()


def _lengths(run_dir: Path | None, mean: int | None) -> tuple[AnswerLengths | None, int, int]:
    """(recorded lengths, mean, tokens of a prompt); None: lognormal ones. A folder that has none ends the benchmark, and says why."""
    if run_dir is None:
        return None, mean or 1000, PROMPT_TOKENS
    from lab.simulate.measured import recorded_lengths

    try:
        lengths, prompt_tokens = recorded_lengths(run_dir)
        return *recorded_shape(lengths, mean), max(2, prompt_tokens)  # two at least: the probe has a logprob then
    except ConfigError as error:
        raise SystemExit(f"--lengths {error}") from None


def _tell(shape: ReplayedShape, found: Figures, used: dict[str, tuple[float, int]]) -> None:
    millions, rate, steps = found.tokens / 1e6, found.tokens / found.seconds / 1e3, shape.steps
    held = 2 * millions / steps  # of this batch and the next
    print(f"{shape.workers} workers, {shape.groups} groups and {millions / steps:.2f} million tokens a step, {rate:.0f} thousand a second")
    for name, (cpu_s, grown) in used.items():
        goal_s, goal_mb = _GOALS.get(name, (None, None))
        idle = found.idle[name] * found.seconds / millions
        cpu = f"{cpu_s / millions:7.3f} CPU s for a million tokens ({_goal(goal_s)}{idle:.3f} of them without any work)"
        memory = f"{grown / 2**20:.0f} MiB more with {held:.1f} million tokens in flight"
        memory += f" ({_goal(goal_mb)}{grown / 1e6 / held:.0f} MB for a million)"
        print(f"  {name:8} {cpu}, {memory}")
    groups, calls = shape.groups * steps, sum(found.calls.values())
    made = ", ".join(f"{name} {number / groups:.2f}" for name, number in found.calls.items() if number)
    print(f"  {calls / groups:.2f} calls of Ray's for a group of {shape.tokens * SAMPLES} tokens, made by: {made}")
    print(f"  a free place has its group after {_of(found.admission_s, 0.5):.3f} s (p50), {_of(found.admission_s, 0.99):.3f} s (p99)")
    gap_s, last_s, receipts_s = map(statistics.median, (found.gap_s, found.last_group_s, found.receipts_s))
    print(
        f"  the learner waits {gap_s:.3f} s between steps, {last_s:.3f} of them until the last answer is sampled; the last receipt comes "
        f"{receipts_s:.3f} s after publishing (goal 2); the driver's loop is late by {found.late_s * 1e3:.0f} ms (p99; goal 50)"
    )
    if found.gap_unpublished_s:
        print(f"  ... that is after a published step; after another one it waits {statistics.median(found.gap_unpublished_s):.3f} s")
    print(
        f"  the first version was verified by {len(tensor_names()):,} checksums in all workers {found.start_s:.2f} s after publishing: "
        f"{found.start_cpu_s:.2f} CPU s of the driver, whose loop stood still for {found.start_late_s * 1e3:.0f} ms at most"
    )
    print(f"  a version's probe was answered and compared {found.probes / steps:.1f} times, of {shape.workers} workers")
    if shape.wide.token_bytes:
        size = 2 * shape.groups * statistics.fmean(found.wide)  # of two batches
        carried = f"{shape.wide.token_bytes} bytes a token in wide fields, {size / 1e6:.1f} MB of those in flight"
        rest = held * 1e6 * (ANSWER + CORRECTED)
        print(f"  {carried}; the object store has grown by {found.stored / 1e6:.1f} MB", end="" if size else "\n")
        if size:
            times = max(0.0, found.stored - rest) / size
            print(f", {rest / 1e6:.1f} of them of other fields: {times:.2f} times their size on this node (goal at most 1)")
    if shape.churn:
        _tell_churn(found)
    name, (cpu_s, _) = max(((n, u) for n, u in used.items() if n in ("driver", "service")), key=lambda pair: pair[1][0])
    print(f"  full first: {name}, at {found.tokens / cpu_s / 1e6:.1f} million tokens a second of its one process", flush=True)


def _goal(value: float | None) -> str:
    return "" if value is None else f"goal {value:g}; "


def _tell_churn(found: Figures) -> None:
    counts = {name: int(found.counts[f"groups/{name}_total"]) for name in ("admitted", "trained", "discarded")}
    under_way = int(found.counts["groups/outstanding"])
    if counts["admitted"] != counts["trained"] + counts["discarded"] + under_way:
        raise SystemExit(f"prompts were lost: {counts}, and {under_way} under way")
    print(
        f"  {found.lost} workers died, and others joined, {found.verified} with {len(tensor_names()):,} checksums; "
        f"of {counts['admitted']} prompts {counts['trained']} were trained on, "
        f"{counts['discarded']} discarded, {under_way} under way; copies of a version: at most {max(found.exports.values())}"
    )


if __name__ == "__main__":
    main()
