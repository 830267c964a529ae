"""Tests queue and dispatch on a large cluster in simulated time (actors/simulation): both are the real ones.

    python benchmarks/control_plane.py [--workers 500] [--groups 1024] [--steps 300]

Prints (1) simulated over expected throughput where the answer is known in closed form: equal lengths, and the slower side decides; (2) a
run of many workers with a long tail of lengths: how busy both sides are, what they wait for, how old the tokens are, and how many seconds
of the cluster one second of this processor simulates; (3) what the queue takes for a group when it holds twice as many: 1 if nothing in
it walks through all of them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.queue.trajectory_queue import TrajectoryQueue
from actors.simulation.costs import AnswerLengths, DecodeSpeed, RunCosts, RunShape
from actors.simulation.outcome import Outcome
from actors.simulation.run import simulate
from benchmarks.sides import TimeRatio, in_turns, options
from rollout.trajectory import Group, Prompt

SPEED = DecodeSpeed(((1, 50.0), (64, 1600.0), (128, 2600.0)))
"""Of an engine, made up after what one GPU does with a model of 8B parameters: 20 ms a step for one request, 49 ms for 128."""
PROMPT_TOKENS = 500
SAMPLES = 8


def closed_form(train_share: float) -> float:
    """Simulated over expected tokens/s: 16 full engines, and a learner that takes `train_share` of their time for a batch."""
    shape = RunShape(16, 256, 4, SAMPLES, 32, 128)
    length = 1000
    rollout_s = 256 * SAMPLES * length / (16 * 2600.0)
    tokens = 256 * SAMPLES * (length + PROMPT_TOKENS)
    costs = RunCosts(SPEED, learner_token_s=train_share * rollout_s / tokens)
    lengths = AnswerLengths.like([length], "one length")
    found = simulate(shape, costs, lengths, prompt_tokens=PROMPT_TOKENS, steps=30)
    return found.tokens_per_s * max(train_share, 1.0) * rollout_s / (256 * SAMPLES * length)


def cluster(workers: int, groups: int, steps: int) -> tuple[Outcome, float]:
    """(what a run of many workers comes to, CPU seconds that its simulation took)."""
    shape = RunShape(workers, groups, 2, SAMPLES, 32, 128)
    costs = RunCosts(
        SPEED,
        learner_token_s=140.0 / (groups * SAMPLES * 8000),
        prompt_token_s=1 / 20_000,
        handover_s=0.5,
        publish_s=1.0,
        sync_s=5.0,
        pause_s=2.0,
    )
    began = time.process_time()
    found = simulate(shape, costs, AnswerLengths.lognormal(6000, 32000, max_tokens=32768), prompt_tokens=PROMPT_TOKENS, steps=steps)
    return found, time.process_time() - began


def queue_s(groups: int) -> float:
    """CPU seconds a group: admitted, put, drawn one by one, settled; the queue holds twice `groups` of them."""
    queue = TrajectoryQueue(groups_per_step=groups, max_staleness=1)
    count, began = 0, time.process_time()
    for version in range(max(2, 20_000 // groups)):
        tickets = queue.admit([Prompt(f"p/{version}/{i}", "", (), "") for i in range(queue.free_places)])
        drawn = []
        for ticket in tickets:
            queue.put(Group(ticket.group_id, ticket.prompt, (), version))
            drawn += queue.draw(version, groups - len(drawn))
        queue.publish(version + 1)
        queue.settle([group.group_id for group in drawn])
        count += len(tickets)
    return (time.process_time() - began) / count


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--groups", type=int, default=1024, help="groups (of 8) in a training batch")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    for share in (0.5, 0.9, 1.1, 2.0):
        print(f"equal lengths, learner takes {share} of the engines' time: {closed_form(share):.3f} of the closed form")
    found, cpu_s = cluster(arguments.workers, arguments.groups, arguments.steps)
    print(
        f"{arguments.workers} workers, {arguments.groups} groups of {SAMPLES} a step, max_staleness 2, {arguments.steps} steps: "
        f"learner trains {found.learner_share:.0%} of its time, engines sample {found.engine_share:.0%} of theirs with "
        f"{found.mean_requests:.0f} requests each; mean staleness {found.mean_staleness:.2f}"
    )
    for side, waits in (("learner", found.learner_wait_shares()), ("engines", found.engine_wait_shares())):
        print(f"  {side} waits for: " + ", ".join(f"{cause} {share:.1%}" for cause, share in waits.items()))
    ages = sorted(found.tokens_by_staleness.items())
    print("  tokens by staleness: " + ", ".join(f"{age}: {tokens / found.tokens:.0%}" for age, tokens in ages))
    print(f"  one CPU second simulates {found.seconds / cpu_s:,.0f} s of the cluster ({cpu_s:.0f} CPU seconds in all)")
    sides = {name: lambda _, size=size: queue_s(size) for name, size in (("many", 8192), ("half", 4096))}
    times = in_turns(sides, 5, warm_up=1)
    print(f"queue, a group's CPU time with 16,384 groups held against 8,192: {TimeRatio.of(times['many'], times['half'])}")


if __name__ == "__main__":
    main()
