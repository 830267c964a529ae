"""A real run whose pool follows the load, on a cluster that Ray's own autoscaler grows and shrinks: 1, 2 and 1 rollout nodes.

Behaviours locked here: while the learner waits the pool asks for a second worker, whose node comes by that demand; a worker's process that
gets a SIGTERM leaves in order and is replaced; when the learner becomes slow the pool shrinks, and the node goes; the books balance, and no
prompt is trained twice.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from benchmarks.elastic import MODEL, RUN, ElasticRun, Timeline, grown, is_balanced, prompts_of, shrunk, started
from benchmarks.sides import NANO_RECIPE, evenkeel, steps_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticRun]:
    folder = tmp_path_factory.mktemp("elastic")
    model = f"model={folder / 'model'}"
    evenkeel("init-model", NANO_RECIPE, model, *MODEL)
    with started(2, folder, [str(NANO_RECIPE), model, *MODEL, *RUN], Timeline(shows=False)) as run:
        grown(run, 2)
        found = re.search(r"rollout 1 is up \(process (\d+)", run.events())
        assert found is not None
        os.kill(int(found[1]), signal.SIGTERM)
        run.until("worker 2 in its place", lambda: any(m.subject == "2" for m in run.timeline.all_of("first group")), 300)
        shrunk(run)
        assert run.stop() == 0, run.events()[-3000:]
    yield run


def test_the_pool_follows_the_load_and_nodes_follow_the_pool(ended: ElasticRun) -> None:
    decisions = ended.timeline.all_of("decision")
    assert [moment.subject for moment in decisions] == ["2", "1"]
    assert "(learner_waits)" in decisions[0].text and "(workers_wait)" in decisions[1].text
    up, gone = ended.timeline.all_of("node up"), ended.timeline.all_of("node gone")
    assert [len(up), len(gone)] == [2, 1] and decisions[0].at_s < up[1].at_s and decisions[1].at_s < gone[0].at_s
    targets = [line["pool/target_workers"] for line in steps_of(ended.run_dir)]
    assert sorted(set(targets)) == [1, 2] and targets[0] == targets[-1] == 1
    last = steps_of(ended.run_dir)[-1]
    assert last["pool/scaled_total/learner_waits"] == last["pool/scaled_total/workers_wait"] == 1


def test_a_process_that_is_told_to_end_leaves_in_order(ended: ElasticRun) -> None:
    leaves = [moment for moment in ended.timeline.all_of("leaves") if moment.subject == "1"]
    assert len(leaves) == 1 and "told to end (SIGTERM)" in leaves[0].text
    assert any(moment.subject == "1" for moment in ended.timeline.all_of("left"))
    assert ended.timeline.all_of("lost") == [] and "did not leave in order" not in ended.events()


def test_the_books_balance(ended: ElasticRun) -> None:
    counts, prompts = ended.balance(), prompts_of(ended.run_dir)
    assert is_balanced(counts) and counts["groups/discarded_total"] == 0
    assert len(prompts) == len(set(prompts)) == counts["groups/trained_total"]
