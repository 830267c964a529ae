"""Runs with two real rollout workers (slow: four), two learner ranks and weights by broadcast, ended by Ctrl-C.

Synchronous ones are truly on-policy.

Behaviours locked here: all workers have a fair part of the groups, tokens and groups by worker sum to the totals, each worker's version is
the one that its step was sampled with, and metrics, terminal, report and Prometheus agree; nothing is stale in a synchronous run, and each
trained logprob has the bits that were sampled; slow: one worker with thirteen requests at a time comes to the same answers and weights;
Ctrl-C ends with exit code 0, a checkpoint, a report and no process left.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.board import ALERTS
from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.metrics.catalogue import COUNTERS
from evenkeel.actors.metrics.step_metrics import by_worker, lookup
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan
from tests.actors.metrics.real_prometheus import TOOLS, needs_prometheus, real_prometheus, until
from tests.deploy.board_queries import PLAIN, QUERIES, wanted
from tests.e2e.exact_runs import EXACT, assert_all_equal, assert_same, run_to_its_end
from tests.e2e.launch import RECIPE, Run
from tests.evenkeel.dashboard.made_runs import read_report

pytestmark = pytest.mark.engine

GROUPS, STEPS = 8, 6
"""Of a step; and how many steps are looked at, from the first that had all workers."""
SETTINGS = [
    f"groups_per_step={GROUPS}", "checkpoint.every_steps=0", "learner.data_parallel=2",
    "rollout.sampling.max_tokens=96",  # sampling has to take longer than what lies between the two receipts
]  # fmt: skip
OF_ALERTS = {
    rule["alert"]: rule["expr"].partition(" > ")[0] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}
"""Their rules, without the comparison."""
OF_OTHERS = re.compile("ray_node_|ray_object_|sglang_|_engine_")
"""In queries of numbers of Ray's nodes and of the engines."""
APART_S = 0.5
"""Most by which the clocks of two processes differ in the timeline."""
SYNCHRONOUS = [*EXACT, "max_staleness=0", "evaluation.problems=8"]


@dataclass
class Story:
    """What the tests look at afterwards."""

    run: Run
    workers: int
    max_staleness: int
    lines: list[dict[str, Any]]
    """Of all steps."""
    together: list[dict[str, Any]]
    """Of those in which all workers were there from the beginning."""
    scraped: dict[str, set[str]]
    """Prometheus: workers by name of the metric, while the run went on."""
    beside_the_driver: list[str]
    """Commands of the processes in its group, likewise."""
    asked: dict[str, list[tuple[dict[str, str], float]]]
    """What a real Prometheus answers to each query of the board, and to each alert's, at one moment of the run; empty without one."""

    @property
    def names(self) -> list[str]:
        return [str(i) for i in range(self.workers)]


def scrape(run: Run, workers: int) -> dict[str, set[str]]:
    """The worker label of each metric of the controller's endpoint, found as Prometheus finds it."""
    found = re.search(r"service discovery at (\S+)", run.events())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=10) as answer:
        targets = json.load(answer)
    assert {t["labels"]["run"] for t in targets} == {run.run_dir.name}
    assert sorted(t["labels"]["name"] for t in targets if t["labels"]["role"] == "rollout") == [str(i) for i in range(workers)]
    (controller,) = (t["targets"][0] for t in targets if t["labels"]["role"] == "controller")
    with urllib.request.urlopen(f"http://{controller}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {family.name: {s.labels["worker"] for s in family.samples if "worker" in s.labels} for family in families}


def ask_a_prometheus(run: Run, folder: Path) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Each query, at the moment of one of its scrapes of the driver."""
    (discovery,) = re.findall(r"service discovery at (\S+)", run.events())
    queries = {place: query.replace("$run", run.run_dir.name) for place, query in (QUERIES | OF_ALERTS).items()}
    asked: dict[str, list[tuple[dict[str, str], float]]] = {}
    with real_prometheus(discovery, folder) as ask:

        def is_complete() -> bool:
            for _, at in ask("timestamp(evenkeel_step)"):
                asked.update({place: ask(query, at) for place, query in queries.items()})
            return all(asked.get(place) for place, query in queries.items() if OF_OTHERS.search(query))

        assert until(is_complete, 120.0), [place for place, found in asked.items() if not found]
    return asked


@pytest.fixture(
    scope="module",
    params=[(2, 0), *(pytest.param(case, marks=pytest.mark.slow) for case in ((2, 1), (4, 0), (4, 1)))],
    ids=lambda case: f"{case[0]}-{'asynchronous' if case[1] else 'synchronous'}",
)
def story(request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir = tmp_path_factory.mktemp("two") / "run"
    workers, max_staleness = request.param
    overrides = [*SETTINGS, *(SYNCHRONOUS if max_staleness == 0 else ["max_staleness=1"])]
    several = [f"rollout.workers={workers}", "weight_sync.transport=broadcast"]
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", *overrides, *several)
    try:
        run.wait_until(lambda: len(_together(run.metrics(), workers)) >= STEPS, f"{STEPS} steps with {workers} workers")
        scraped, beside = scrape(run, workers), run.beside_the_driver()
        asked = ask_a_prometheus(run, run_dir.parent) if TOOLS.exists() else {}
        run.interrupt()
        run.wait(120.0)
        lines = run.metrics()
        yield Story(run, workers, max_staleness, lines, _together(lines, workers), scraped, beside, asked)
    finally:
        run.close()


def _together(lines: list[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    first = next((i for i, line in enumerate(lines) if len(by_worker(line, "weight_version")) == workers), len(lines))
    return lines[first + 1 :]  # in the first such step the last one may have come at its end


def test_all_workers_work(story: Story) -> None:
    """Each has about its part of the groups: exactly that if all hold the new weights before the first group is finished."""
    groups = [sum(by_worker(line, "groups").get(name, 0) for line in story.together) for name in story.names]
    tokens = [sum(by_worker(line, "tokens").get(name, 0) for line in story.together) for name in story.names]
    assert min(groups) >= 0.6 / story.workers * sum(groups), groups
    assert min(tokens) >= 0.5 / story.workers * sum(tokens), tokens


@needs_prometheus
def test_the_board_shows_what_metrics_jsonl_has(story: Story) -> None:
    """At one moment of the run: each number of the driver's as its newest line then had it. Of a run with a Ray of its own, the numbers of
    the node and of each engine are there, too, although nothing but the driver says where they are."""
    ((_, step),) = story.asked["Steps: " + lookup("step").label]
    (line,) = (line for line in story.lines if line["step"] == step)
    assert len([place for place in PLAIN if wanted(place, line)]) >= 40
    told = [dict.fromkeys(COUNTERS, 0.0) | dict(line), *RunFolder(story.run.run_dir).read_evaluations()]
    shown = {place: sorted(value for _, value in story.asked[place]) for place in PLAIN}
    other = {place: values for place, values in shown.items() if values not in [wanted(place, one) for one in told]}
    assert other == {}
    for place in (place for place, query in QUERIES.items() if 'role="rollout"' in query):
        assert sorted(labels["name"] for labels, _ in story.asked[place]) == story.names, place
    for place in ("Memory of the nodes: {{instance}}", "EvenkeelMemoryFull"):
        ((_, share),) = story.asked[place]
        assert 0.0 < share < 1.0, place


def test_who_did_what_adds_up(story: Story) -> None:
    for quantity, total in (("tokens", "rollout/generated_tokens_total"), ("groups", "rollout/finished_groups_total")):
        added = 0.0
        for line in story.lines:
            added += sum(by_worker(line, quantity).values())
            assert added == line[total], f"step {line['step']}: {quantity}"
    assert story.lines[-1]["rollout/generated_tokens_total"] > 0


def test_workers_hold_the_versions_that_were_trained_on(story: Story) -> None:
    """A step of version v publishes v + 1; until then v is the newest, which the workers that sampled for it hold."""
    for line in story.together:
        versions, newest = by_worker(line, "weight_version"), line["weight_version"] - 1
        assert line["pool/workers"] == story.workers
        assert line["pool/current_workers"] == sum(version == newest for version in versions.values())
        assert all(version <= newest for version in versions.values())
        if story.max_staleness == 0:
            assert line["pool/current_workers"] >= 1 and line["staleness/max"] == 0
    assert any(line["pool/current_workers"] == story.workers for line in story.together)


def test_each_worker_says_how_long_it_waited(story: Story) -> None:
    """The share of all is between those of each, which is what a mean weighted by time is."""
    told = [(line, shares) for line in story.together if (shares := by_worker(line, "wait_share"))]
    assert any(set(shares) == set(story.names) for _, shares in told)  # who doesn't answer within seconds is left out
    for line, shares in told:
        assert min(shares.values()) - 1e-9 <= line["wait/rollout_share"] <= max(shares.values()) + 1e-9


def test_the_timeline_says_what_each_process_did_all_of_the_time(story: Story) -> None:
    """At least 95 % of each lane, from its first span to its last, in one order of causes across six processes: a rank's step lies within
    the driver's of that version, and a group waits for a worker, is sampled, waits for its batch, and is trained. Clocks agree to half a
    second: to the way of the quickest of a lane's reports, which is long where all cores are busy, as is an answer with spans that comes
    too late to be taken."""
    lanes: dict[str, list[LaneSpan]] = {}
    for span in RunFolder.view(story.run.run_dir).read_timeline():
        lanes.setdefault(span.lane, []).append(span)
    ranks, workers = ["rank-0", "rank-1"], [f"worker-{name}" for name in story.names]
    assert sorted(lanes) == sorted(["book", "driver", "service", *ranks, *workers])
    for lane in ("driver", *ranks, *workers):
        assert _covered(lanes[lane]) >= 0.95, (lane, _covered(lanes[lane]))
    steps = {span.version: span for span in lanes["driver"] if span.what == "step"}
    assert sorted(steps) == list(range(len(story.lines)))
    for rank in ranks:
        assert [span.version for span in lanes[rank] if span.what == "step"] == sorted(steps)
        assert all(_within(span, steps[span.version]) for span in lanes[rank] if span.what == "step")
    sampled = {span.group: span for worker in workers for span in lanes[worker] if span.what == "sample" and span.why is None}
    queued, awaited = ({span.group: span for span in lanes["book"] if span.what == what} for what in ("queue", "slot"))
    assert len(queued) >= len(steps) * GROUPS and queued.keys() == awaited.keys() <= sampled.keys()
    for group, span in queued.items():
        assert awaited[group].end <= sampled[group].begin + APART_S
        assert sampled[group].end <= span.begin + APART_S
        assert span.version not in steps or span.end <= steps[span.version].begin + APART_S


def _covered(spans: list[LaneSpan]) -> float:
    """Share of the time from the first begin to the last end in which there is a span."""
    covered, until = 0.0, min(span.begin for span in spans)
    began = until
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return covered / (until - began)


def _within(inner: LaneSpan, outer: LaneSpan) -> bool:
    return outer.begin - APART_S <= inner.begin and inner.end <= outer.end + APART_S


def test_terminal_report_and_prometheus_tell_the_workers_apart(story: Story) -> None:
    last = next(line for line in reversed(story.together) if len(by_worker(line, "wait_share")) == story.workers)
    assert f"    workers  {_expected(last, story.names)}" in story.run.output().splitlines()
    rows = read_report(story.run.run_dir / "report.html")["overview"]["workers"]
    assert {name: int(count.replace(",", "")) for name, _, count, *_ in rows} == {
        name: sum(by_worker(line, "groups").get(name, 0) for line in story.lines) for name in story.names
    }
    for name in ("tokens", "groups", "wait_ratio", "weight_version"):
        assert story.scraped[f"evenkeel_worker_{name}"] == set(story.names)


def _expected(line: dict[str, Any], names: list[str]) -> str:
    tokens, waits, versions = (by_worker(line, quantity) for quantity in ("tokens", "wait_share", "weight_version"))
    return "  ".join(f"{name}: {tokens[name]:,.0f} tokens, waits {waits[name]:.0%}, v{versions[name]:.0f}" for name in names)


def test_every_prompt_is_accounted_for_once(story: Story) -> None:
    """Several workers put into one queue: settled in the ledger, or outstanding in the last checkpoint."""
    settled = [entry["prompt_id"] for entry in story.run.ledger()]
    assert len(set(settled)) == len(settled)
    state = TrainingState.load(RunFolder.view(story.run.run_dir).checkpoints()[-1].state)
    outstanding = [t.prompt.prompt_id for t in state.book.in_flight] + [g.prompt.prompt_id for g in state.book.finished]
    outstanding += [group.prompt_id for group in state.book.unreported]  # discarded since the last step: the next one's to settle
    positions = sorted(int(prompt_id.rpartition("/")[2]) for prompt_id in settled + outstanding)
    assert positions == list(range(state.book.admitted))


def test_ctrl_c_ends_with_a_checkpoint_and_a_report(story: Story) -> None:
    run = story.run
    assert run.process.returncode == 0, run.output()[-4000:]
    assert "Traceback" not in run.output()
    folder = RunFolder.view(run.run_dir)
    checkpoint = folder.checkpoints()[-1]
    assert [checkpoint.step] == [c.step for c in folder.checkpoints()] and checkpoint.step == run.steps()[-1]
    state = TrainingState.load(checkpoint.state)
    assert state.weight_version == checkpoint.step
    assert (folder.path / "report.html").stat().st_size > 10_000
    assert f"evenkeel train --resume {run.run_dir}" in run.output()


def test_no_process_is_left_after_ctrl_c(story: Story) -> None:
    for name in ("raylet", "gcs_server", "LearnerRankActor", "sglang", "reward_process"):
        assert name in story.run.seen_commands, f"the count must have seen what it counts: {story.run.seen_commands}"
    assert story.run.orphans() == []


def test_signals_to_the_drivers_group_are_for_the_driver(story: Story) -> None:
    """Ray's daemons, ranks, engines and scorers are in others, and live as long as the run needs them to end in order."""
    assert story.beside_the_driver == []


def test_engines_agree_on_every_batch(story: Story) -> None:
    """Float32 forwards of two implementations at the same weights, k3 by expm1 in float64. An asynchronous batch may have none fresh."""
    fresh = [line for line in story.lines if "mismatch/k3" in line]
    assert fresh and (story.max_staleness > 0 or fresh == story.lines)
    for line in fresh:
        assert line["mismatch/k3"] < 1e-11
        assert line["mismatch/max_abs_log_ratio"] < 2e-5
    probes = [line["sync/probe_max_abs_difference"] for line in story.lines if "sync/probe_max_abs_difference" in line]
    assert probes and max(probes) < 2e-5  # a line has what was answered by then


def test_staleness_is_bounded_and_the_policy_moves(story: Story) -> None:
    """In a synchronous run nothing is stale."""
    assert [line["step"] for line in story.lines] == list(range(1, len(story.lines) + 1))
    for line in story.lines:
        assert line["staleness/max"] <= story.max_staleness
        assert line["staleness/mixed_version_share"] == 0 or story.max_staleness > 0
        outstanding = line["groups/admitted_total"] - line["groups/trained_total"] - line["groups/discarded_total"]
        assert outstanding <= (story.max_staleness + 1) * GROUPS
        assert line["learner/grad_norm"] > 0, "a batch without gradient would make agreement at later versions a matter of course"


def test_a_healthy_run_has_no_warning(story: Story) -> None:
    assert all(line["monitor/level"] == 0 for line in story.lines)
    assert RunFolder.view(story.run.run_dir).read_monitor_events() == []


def test_weights_went_by_broadcast(story: Story) -> None:
    assert "goes through the object store" not in story.run.output()


def test_sampled_and_trained_logprobs_are_the_same_bits(story: Story) -> None:
    """At every step."""
    if story.max_staleness > 0:
        pytest.skip("engines sample with older weights than the learner trains")
    assert_all_equal(story.run, len(story.lines))


@pytest.mark.slow
def test_one_worker_trains_the_same_run(story: Story, small_model: Path, tmp_path: Path) -> None:
    """To the last bit of its weights, with thirteen requests at a time and weights through the object store.

    The fast suite has its parts, by the same engine and learner: an answer depends on weights, prompt and seed alone
    (test_true_on_policy.py), a batch is in the order of admission however its groups arrive
    (tests/actors/service/test_correction_service.py), and no packing of it changes a bit (tests/learner/test_learner_batch_invariant.py).
    """
    if story.max_staleness > 0:
        pytest.skip("an asynchronous run is another one each time")
    one = ["rollout.workers=1", "rollout.engine.max_running_requests=13", f"steps={len(story.lines)}"]
    words = [str(RECIPE), f"model={small_model}", f"run_dir={tmp_path / 'one'}", *SETTINGS, *SYNCHRONOUS, *one]
    run = run_to_its_end(tmp_path / "one", *words)
    assert any(entry["outcome"] != "trained" for entry in run.ledger()), "groups were to be replaced"
    assert_same(run, story.run, evaluations=1)
