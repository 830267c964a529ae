"""A real run whose pool follows the load, on a cluster that Ray's own autoscaler grows and shrinks: 1, 2 and 1 rollout nodes.

Behaviours locked here: while the learner waits the pool asks for a second worker, whose node comes by that demand; a worker whose process
gets a SIGTERM, or whose node Ray drains, in the midst of its groups hands them back, leaves in order and is replaced, on a new node if its
own goes, while others go on with them; when the learner becomes slow the pool shrinks, and the node goes; the books balance, and no prompt
is trained twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.elastic import MODEL, RUN, ElasticRun, Moment, Timeline, grown, is_balanced, prompts_of, shrunk, started
from benchmarks.sides import NANO_RECIPE, evenkeel, steps_of
from evenkeel.rollout.prompt_place import PromptPlace

pytestmark = [pytest.mark.engine, pytest.mark.slow]
DRAIN_S = 1.0
TOLD_S = 2.0
"""In which a worker is told to hand its groups back, after drain_s; less than the time after which one without a heartbeat is lost."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticRun]:
    folder = tmp_path_factory.mktemp("elastic")
    model = f"model={folder / 'model'}"
    evenkeel("init-model", NANO_RECIPE, model, *MODEL)
    with started(2, folder, [str(NANO_RECIPE), model, *MODEL, *RUN, f"deadlines.drain_s={DRAIN_S}"], Timeline(shows=False)) as run:
        grown(run, 2)
        with held_engine(run, "1") as worker:
            worker.send_signal(signal.SIGTERM)
        drain_a_busy_node(run, "0", left_s=60)
        run.until("workers 2 and 3 in their places", lambda: run.workers() == 2, 300)
        shrunk(run)
        assert run.stop() == 0, run.events()[-3000:]
    yield run


def drain_a_busy_node(run: ElasticRun, name: str, *, left_s: int) -> None:
    """Have Ray drain the node of a worker in the midst of its groups, as when a spot machine is reclaimed.

    Args: left_s: seconds that the notice leaves.
    """
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", f"--address={run.cluster.address}"]
    command += [f"--node-id={run.node_of(name)}", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=reclaimed"]
    with held_engine(run, name):
        subprocess.run(
            [*command, f"--deadline-remaining-seconds={left_s}"], env=os.environ | run.cluster.variables, check=True, capture_output=True
        )


@contextlib.contextmanager
def held_engine(run: ElasticRun, name: str) -> Iterator[psutil.Process]:
    """Within the block a worker, whose process this gives, gets a notice that it has to leave.

    Its engine is stopped in the midst of answers until it was told to hand its groups back: the model's answers are so short that it
    would end them in any time that it is given for them.
    """
    worker = run.part(f"rollout {name}")
    engine = [one for one in worker.children(recursive=True) if one.cmdline()[:1] and one.cmdline()[0].startswith("sglang::scheduler")]
    assert engine
    run.until(f"rollout worker {name} in the midst of answers", lambda: is_stopped_busy(run, name, engine), 60)
    try:
        yield worker
        run.until("its leave", lambda: any(moment.subject == name for moment in run.timeline.all_of("leaves")), 60)
        time.sleep(DRAIN_S + TOLD_S)
    finally:
        for process in engine:
            with contextlib.suppress(psutil.NoSuchProcess):  # a pool that did not wait for it has ended the worker
                process.resume()


def is_stopped_busy(run: ElasticRun, name: str, engine: list[psutil.Process]) -> bool:
    """Stop an engine. It goes on if it has no request: it would get none, for it could not take newer weights either."""
    for process in engine:
        process.suspend()
    time.sleep(0.05)
    is_busy = requests_in_flight(run, name) > 0
    if not is_busy:
        for process in engine:
            process.resume()
    return is_busy


def requests_in_flight(run: ElasticRun, name: str) -> float:
    """Of one worker, by its own metrics."""
    found = re.search(r"service discovery at (\S+)", run.events())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=10) as answer:
        targets = json.load(answer)
    (worker,) = (one["targets"][0] for one in targets if (one["labels"]["role"], one["labels"]["name"]) == ("rollout", name))
    with urllib.request.urlopen(f"http://{worker}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(s.value for family in families if family.name == "evenkeel_rollout_requests_in_flight" for s in family.samples)


def test_the_pool_follows_the_load_and_nodes_follow_the_pool(ended: ElasticRun) -> None:
    decisions = ended.timeline.all_of("decision")
    assert [moment.subject for moment in decisions] == ["2", "1"]
    assert "(learner_waits)" in decisions[0].text and "(workers_wait)" in decisions[1].text
    up, gone = ended.timeline.all_of("node up"), ended.timeline.all_of("node gone")
    assert [len(up), len(gone)] == [3, 2] and decisions[0].at_s < up[1].at_s and decisions[1].at_s < gone[1].at_s
    targets = [line["pool/target_workers"] for line in steps_of(ended.run_dir)]
    assert sorted(set(targets)) == [1, 2] and targets[0] == targets[-1] == 1
    last = steps_of(ended.run_dir)[-1]
    assert last["pool/scaled_total/learner_waits"] == last["pool/scaled_total/workers_wait"] == 1


def left(ended: ElasticRun, name: str) -> Moment:
    (found,) = [moment for moment in ended.timeline.all_of("left") if moment.subject == name]
    return found


def handed_back(moment: Moment) -> int:
    """Groups that a worker had under way when it had to leave."""
    found = re.search(r"(\d+) groups? go on elsewhere from \d+ tokens", moment.text)
    assert found is not None, moment.text
    return int(found[1])


@pytest.mark.parametrize(("name", "why"), [("1", "its process was told to end (SIGTERM)"), ("0", "Ray drains its node")])
def test_who_is_told_to_end_leaves_in_order(ended: ElasticRun, name: str, why: str) -> None:
    leaves = [moment for moment in ended.timeline.all_of("leaves") if moment.subject == name]
    assert len(leaves) == 1 and leaves[0].text.endswith(why) and handed_back(left(ended, name)) > 0
    assert ended.timeline.all_of("lost") == [] and "did not leave in order" not in ended.events()


def test_a_drained_node_ends_after_its_worker_and_another_comes_in_its_place(ended: ElasticRun) -> None:
    first, gone = ended.timeline.all_of("node up")[0], ended.timeline.all_of("node gone")[0]
    assert gone.subject == first.subject and left(ended, "0").at_s < gone.at_s < ended.timeline.all_of("node up")[2].at_s


def test_what_they_had_under_way_goes_on_elsewhere(ended: ElasticRun) -> None:
    """All groups that had been admitted when they left were trained later, those that they handed back among them."""
    together = sum(handed_back(left(ended, name)) for name in ("1", "0"))
    counted = next(line for line in steps_of(ended.run_dir) if line.get("pool/handed_back_total", 0) == together)
    places = {PromptPlace.parse(prompt_id) for prompt_id in prompts_of(ended.run_dir)}
    assert {PromptPlace("train", 0, number) for number in range(int(counted["groups/admitted_total"]))} <= places


def test_the_books_balance(ended: ElasticRun) -> None:
    counts, prompts = ended.balance(), prompts_of(ended.run_dir)
    assert is_balanced(counts) and counts["groups/discarded_total"] == 0
    assert len(prompts) == len(set(prompts)) == counts["groups/trained_total"]
