"""A run that grows and shrinks: Ray's autoscaler takes real engines from 1 rollout node to 3 and back to 1, and loses one on the way.

    python benchmarks/elastic.py [--nodes 3] [--keep FOLDER]

Each node is a raylet on this machine, brought and taken by Ray's own autoscaler. A policy that knows nothing samples long answers, so a
learner of full speed waits: the pool grows. Then a node is killed, with all that runs on it. Then the learner's process is stopped for
19/20 of the time, so workers wait, and the pool shrinks. It prints the timeline with the reasons of each decision, the time from a decision
to the first group that a new worker has sampled (so to its first token at most that), from the killed node to its groups being sampled
elsewhere, and whether the books balance. Processes of one machine die with a closed connection, which is noticed sooner than a machine
without power.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import EVENKEEL, NANO_RECIPE, ROOT, evenkeel, options, scratch, steps_of
from lab.autoscaled_cluster import AutoscaledCluster

MODEL = [
    *("init.architecture.layers=1", "init.architecture.hidden_size=64", "init.architecture.heads=2", "init.architecture.head_dim=32"),
    *("init.architecture.key_value_heads=1", "init.architecture.intermediate_size=128"),
    *("init.warmup.steps=4", "init.warmup.sequences_per_step=8"),
]
RUN = [
    *("steps=100000", "groups_per_step=4", "rollout.sampling.samples_per_group=4", "rollout.sampling.max_tokens=64"),
    *("rollout.engine.max_running_requests=4", "rollout.engine.context_length=128", "rollout.engine.threads=1", "learner.threads=1"),
    *("evaluation.problems=8", "evaluation.every_steps=0", "checkpoint.every_steps=0"),
]
_POLL_S = 0.05
# Less than the time after which a worker without a heartbeat is lost.
_STOPPED_S = 2.0
_LIST_NODES = """
import json, sys, time
import ray

ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False, namespace="watcher")
while True:
    there = {n["NodeID"]: n["RayletSocketName"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("rollout")}
    print(json.dumps(there), flush=True)
    time.sleep(0.2)
"""
# What of events.log belongs on the timeline.
_TOLD = {
    "decision": r"the pool goes to (\d+) rollout workers?",
    "engine up": r"rollout (\d+) is up",
    "first group": r"rollout worker (\d+) sampled its first group",
    "leaves": r"rollout worker (\d+) leaves",
    "left": r"rollout worker (\d+) has left",
    "lost": r"rollout worker (\d+) is gone",
    "sampled again": r"all groups of rollout worker (\d+) are under way again",
}


@dataclass(frozen=True)
class Moment:
    """Something that happened."""

    at_s: float
    kind: str
    text: str
    subject: str = ""
    """Worker, node or size."""


@dataclass
class Timeline:
    """What happened since the beginning, in order."""

    shows: bool = True
    moments: list[Moment] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def add(self, kind: str, text: str, subject: str = "") -> None:
        self.moments.append(Moment(time.monotonic() - self._began, kind, text, subject))
        if self.shows:
            print(f"{self.moments[-1].at_s:7.1f} s  {kind:14} {text}", flush=True)

    def all_of(self, kind: str, after_s: float = 0.0) -> list[Moment]:
        return [moment for moment in list(self.moments) if moment.kind == kind and moment.at_s >= after_s]

    @property
    def now(self) -> float:
        return time.monotonic() - self._began


class ElasticRun:
    """`evenkeel train` on a cluster that grows and shrinks, with its timeline."""

    def __init__(self, cluster: AutoscaledCluster, run_dir: Path, words: list[str], timeline: Timeline, **variables: str) -> None:
        self.cluster, self.run_dir, self.timeline = cluster, run_dir, timeline
        command = [*EVENKEEL, "train", *words, f"run_dir={run_dir}", f"ray.address={cluster.address}"]
        self._log = run_dir.with_suffix(".log").open("wb")
        environment = os.environ | cluster.variables | variables
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        self.nodes: dict[str, str] = {}
        """Rollout nodes that are there: the socket of each one's daemon, by id."""
        self._node_lister = subprocess.Popen([sys.executable, "-c", _LIST_NODES, cluster.address], env=environment, stdout=PIPE, text=True)
        self._is_over = threading.Event()
        self._watchers = [threading.Thread(target=watch, daemon=True) for watch in (self._watch_events, self._watch_nodes)]
        for watcher in self._watchers:
            watcher.start()

    def events(self) -> str:
        path = self.run_dir / "events.log"
        return path.read_text() if path.exists() else ""

    def _watch_events(self) -> None:
        seen = 0
        while not self._is_over.wait(_POLL_S):
            lines = self.events().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            for line in whole[seen:]:
                text = line.split(maxsplit=2)[2].strip()
                for kind, pattern in _TOLD.items():
                    if found := re.search(pattern, text):
                        self.timeline.add(kind, text, found[1])
            seen = len(whole)

    def _watch_nodes(self) -> None:
        """Through a process of its own: a process decides on Ray's token once, and this one may have used another Ray before."""
        assert self._node_lister.stdout is not None
        for line in self._node_lister.stdout:
            if not line.startswith("{"):  # something else that Ray had to say
                continue
            before, self.nodes = set(self.nodes), json.loads(line)
            for node in self.nodes.keys() - before:
                self.timeline.add("node up", f"node {node[:8]}; {len(self.nodes)} rollout nodes", node)
            for node in before - self.nodes.keys():
                self.timeline.add("node gone", f"node {node[:8]}; {len(self.nodes)} rollout nodes", node)

    def until(self, what: str, ready: Any, limit_s: float) -> None:
        """Raises: TimeoutError, with the run's last events."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not in {limit_s:.0f} s, or the run ended ({self.process.poll()}):\n{self.events()[-3000:]}")
            time.sleep(_POLL_S)

    def workers(self) -> int:
        """Workers that have sampled, and have neither left nor been lost."""
        gone = {moment.subject for kind in ("leaves", "lost") for moment in self.timeline.all_of(kind)}
        return len({moment.subject for moment in self.timeline.all_of("first group")} - gone)

    def part(self, name: str) -> psutil.Process:
        """The process of a part of the run, as its events name it."""
        found = re.search(rf"{name} is up \(process (\d+)", self.events())
        assert found is not None
        return psutil.Process(int(found[1]))

    @contextlib.contextmanager
    def slow_learner(self, share: float) -> Iterator[None]:
        """Within the block the learner's process runs for only this share of the time."""
        learner, is_over = self.part("learner 0"), threading.Event()

        def hold() -> None:
            while not is_over.is_set():
                learner.suspend()
                is_over.wait(1.0 - share)
                learner.resume()
                is_over.wait(share)

        holding = threading.Thread(target=hold, daemon=True)
        holding.start()
        try:
            yield
        finally:
            is_over.set()
            holding.join()
            learner.resume()

    def kill_a_busy_node(self) -> float:
        """A node whose engine is up, not the first worker's. Returns: when, seconds of the timeline.

        Its worker is stopped for a moment before, in which the pool gives it groups: the model's answers are so short that it might
        have none under way.
        """
        newest = self.timeline.all_of("first group")[-1].subject
        worker, node = self.part(f"rollout {newest}"), self.node_of(newest)
        worker.suspend()
        time.sleep(_STOPPED_S)
        began = self.timeline.now
        self.timeline.add("node killed", f"the node of rollout worker {newest}", newest)
        self.cluster.kill_node(self.nodes[node])
        return began

    def node_of(self, name: str) -> str:
        """Id of the node on which a worker runs."""
        parents = [" ".join(parent.cmdline()) for parent in self.part(f"rollout {name}").parents()]
        (found,) = (node for node, socket in self.nodes.items() if any(socket in command for command in parents))
        return found

    def stop(self, limit_s: float = 240.0) -> int:
        """After the step under way, by Ctrl-C. Returns: the exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(limit_s)
        finally:
            self.close()

    def close(self) -> None:
        self._is_over.set()
        self._node_lister.kill()
        self._node_lister.wait(10)
        for watcher in self._watchers:
            watcher.join(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self._log.close()

    def balance(self) -> dict[str, float]:
        """The counts of the last step."""
        last = steps_of(self.run_dir)[-1]
        names = ("groups/admitted_total", "groups/trained_total", "groups/discarded_total", "groups/outstanding")
        return {name: last[name] for name in names} | {"handed back": last.get("pool/handed_back_total", 0.0)}


def is_balanced(counts: dict[str, float]) -> bool:
    admitted, trained, discarded, outstanding, _ = counts.values()
    return admitted == trained + discarded + outstanding


def prompts_of(run_dir: Path) -> list[str]:
    """Of the ledger: each that was trained on or discarded, as often as it stands there."""
    return [json.loads(line)["prompt_id"] for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def started(nodes: int, folder: Path, words: list[str], timeline: Timeline, **variables: str) -> Iterator[ElasticRun]:
    """A cluster of one rollout node that may have `nodes`, with a run on it whose pool has the same bounds."""
    with AutoscaledCluster(nodes) as cluster:
        timeline.add("cluster", f"a head, and up to {nodes} rollout nodes")
        bounds = ["rollout.min_workers=1", f"rollout.max_workers={nodes}"]
        run = ElasticRun(cluster, folder / "run", [*words, *bounds], timeline, **variables)
        try:
            yield run
        finally:
            run.close()


# After the pool has grown, until it has decided whether it is to stay so.
_SETTLED_S = 5.0


def grown(run: ElasticRun, nodes: int) -> list[str]:
    """Until that many workers sample. Returns: what to tell."""
    run.until("the first worker", lambda: run.workers() >= 1, 240)
    run.until(f"{nodes} workers", lambda: run.workers() >= nodes, 420)
    decided = run.timeline.all_of("decision")[0].at_s
    took = [moment.at_s - decided for moment in run.timeline.all_of("first group", after_s=decided)]
    return [f"decision to a new worker's first group: {', '.join(f'{t:.1f} s' for t in took)}"]


def lost(run: ElasticRun, nodes: int) -> list[str]:
    time.sleep(_SETTLED_S)
    killed = run.kill_a_busy_node()
    run.until("its groups elsewhere", lambda: run.timeline.all_of("sampled again", after_s=killed), 60)
    noticed, again = (run.timeline.all_of(kind, after_s=killed)[0].at_s - killed for kind in ("lost", "sampled again"))
    run.until("a worker in its place", lambda: run.workers() >= nodes, 420)
    replaced = run.timeline.all_of("first group", after_s=killed)[-1].at_s - killed
    return [
        f"killed node: noticed after {noticed:.2f} s, all its groups sampled elsewhere after {again:.2f} s; its replacement's first group "
        f"after {replaced:.0f} s"
    ]


def shrunk(run: ElasticRun) -> list[str]:
    began = run.timeline.now
    with run.slow_learner(0.05):
        run.until("one worker", lambda: run.workers() == 1 and len(run.nodes) == 1, 420)
    leaves, left, gone = (run.timeline.all_of(kind, after_s=began) for kind in ("leaves", "left", "node gone"))
    drained = max(moment.at_s for moment in left) - leaves[0].at_s
    return [f"shrinking: {drained:.1f} s from the decision until drained, {gone[-1].at_s - leaves[0].at_s:.1f} s until the nodes are gone"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--nodes", type=int, default=3, help="rollout nodes at most")
    parser.add_argument("--keep", type=Path, help="keep the run there")
    arguments = parser.parse_args()
    with scratch(arguments.keep) as folder:
        model = f"model={folder / 'model'}"
        evenkeel("init-model", NANO_RECIPE, model, *MODEL, "--if-missing")
        with started(arguments.nodes, folder, [str(NANO_RECIPE), model, *MODEL, *RUN], Timeline()) as run:
            found = grown(run, arguments.nodes) + lost(run, arguments.nodes) + shrunk(run)
            code = run.stop()
        counts, prompts = run.balance(), prompts_of(folder / "run")
        books = "balanced" if is_balanced(counts) else "NOT balanced"
        print("\n".join(["", *found]))
        print(f"books: {books} {counts}; {len(prompts)} prompts settled, {len(set(prompts))} of them different; exit code {code}")


if __name__ == "__main__":
    main()
