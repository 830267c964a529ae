"""The books balance at every step, discarded prompts reason by reason: what is lost, doubled or used before is named; a resume cuts the
file where the checkpoint was."""

from __future__ import annotations

import errno
import json
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.carriers import DiscardedGroup, DiscardReason, discarded_as
from actors.queue.outstanding import Outstanding
from actors.queue.trajectory_queue import TrajectoryQueue
from actors.state import ledger as ledger_module
from actors.state.ledger import Ledger, LedgerMark, outstanding_ids
from actors.state.queue_snapshot import QueueSnapshot
from correction.errors import LedgerError
from tests.actors.cases import at_hand, group, prompts, snapshot_of


def lines_of(path: Path) -> list[tuple[int, str, str]]:
    return [(e["step"], e["prompt_id"], e["outcome"]) for e in map(json.loads, path.read_text().splitlines())] if path.exists() else []


def names(*positions: int) -> list[str]:
    return [f"train/0/{position}" for position in positions]


ALIKE, FAILED = DiscardReason.UNIFORM, DiscardReason.FAILED


def given_up(*positions: int, reason: DiscardReason = FAILED) -> list[DiscardedGroup]:
    return [DiscardedGroup(name, reason) for name in names(*positions)]


def books(admitted: int, trained: int, discarded: int, outstanding: int, *, failed: int = 0) -> dict[str, int]:
    """As a queue counts; of what is outstanding one is in each state, the rest is being sampled. Args: failed: of the discarded."""
    return {
        "admitted": admitted, "trained": trained, "discarded": discarded,
        "in_flight": max(0, outstanding - 2), "finished": min(outstanding, 1), "drawn": min(max(outstanding - 1, 0), 1),
        discarded_as(ALIKE): discarded - failed, discarded_as(FAILED): failed,
    }


def lines_counted(ledger: Ledger) -> int:
    """Lines that the ledger has written, those of a file set aside included, by its own count."""
    return ledger._mark.lines + ledger._mark.aside


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    """After two steps: 0, 1 and 2 were trained, 3 was discarded; 4 to 6 are under way."""
    ledger = Ledger(path)
    ledger.settle(1, trained=names(0, 1), outstanding=names(2, 3, 4), counts=books(5, 2, 0, 3))
    ledger.settle(2, trained=names(2), discarded=given_up(3, reason=ALIKE), outstanding=names(4, 5, 6), counts=books(7, 3, 1, 3))
    return ledger


def test_what_is_written(ledger: Ledger, path: Path) -> None:
    trained = [(1, "train/0/0", "trained"), (1, "train/0/1", "trained"), (2, "train/0/2", "trained")]
    assert lines_of(path) == [*trained, (2, "train/0/3", "rewards all alike")]
    assert lines_counted(ledger) == 4


@pytest.mark.parametrize(
    ("trained", "discarded", "outstanding", "counts", "said"),
    [
        ([4], [], [6], books(7, 4, 1, 1), "train/0/5 lost: neither trained nor discarded, and no longer under way"),
        ([4], [4], [5, 6], books(7, 4, 2, 2), "train/0/4 twice in the queue's books"),
        ([4, 4], [], [5, 6], books(7, 5, 1, 2), "train/0/4 twice in the queue's books"),
        ([4], [], [4, 5, 6], books(7, 4, 1, 3), "train/0/4 twice in the queue's books"),
        ([4, 2], [], [5, 6], books(8, 5, 1, 2), r"train/0/2 used before \(train/0/6 came later\)"),
        ([4], [], [0, 5, 6], books(8, 4, 1, 3), r"train/0/0 used before \(train/0/6 came later\)"),
        (
            [4], [], [5, 6, 7], books(9, 4, 1, 3),
            "9 groups admitted in the queue, 8 in the ledger; of this step: train/0/4; discarded: none; under way",
        ),
        ([4], [], [5, 6], books(7, 5, 1, 2), "5 groups trained in the queue, 4 in the ledger; of this step: train/0/4"),
        (
            [4], [5], [6], books(7, 4, 1, 1),
            r"1 groups discarded in the queue, 2 in the ledger; of this step: train/0/4; discarded: train/0/5 \(no usable answer\); under",
        ),
        (
            [4], [5], [6], books(7, 4, 2, 1),
            r"2 groups discarded \(rewards all alike\) in the queue, 1 in the ledger; of this step: train/0/4; "
            r"discarded: train/0/5 \(no usable answer\); under way: train/0/6",
        ),
        ([4], [], [5, 6], books(7, 4, 1, 2, failed=1), r"0 groups discarded \(rewards all alike\) in the queue, 1 in the ledger"),
        (
            [4], [], [5, 6], books(7, 4, 1, 2) | {discarded_as("unheard of"): 1},
            r"1 groups discarded \(unheard of\) in the queue, 0 in the ledger; of this step: train/0/4; discarded: none",
        ),
        ([4], [], [5, 6], books(7, 4, 1, 1), "1 groups outstanding in the queue, 2 in the ledger"),
    ],
)
def test_an_imbalance_names_the_prompts_and_writes_nothing(
    ledger: Ledger, path: Path, trained: list[int], discarded: list[int], outstanding: list[int], counts: dict[str, int], said: str
) -> None:
    before = path.read_text()
    with pytest.raises(LedgerError, match=rf"step 3: out of balance: {said}"):
        ledger.settle(3, trained=names(*trained), discarded=given_up(*discarded), outstanding=names(*outstanding), counts=counts)
    assert path.read_text() == before and lines_counted(ledger) == 4
    ledger.settle(3, trained=names(4), outstanding=names(5, 6), counts=books(7, 4, 1, 2))  # the right books are still taken


def test_an_earlier_prompt_of_a_later_epoch_is_a_new_one(ledger: Ledger) -> None:
    """train/1/0 comes after train/0/6; train/0/5 of the first epoch would not."""
    ledger.settle(3, trained=names(4, 5, 6), outstanding=["train/1/0"], counts=books(8, 6, 1, 1))
    with pytest.raises(LedgerError, match=r"train/0/9 used before \(train/1/0 came later\)"):
        ledger.settle(4, trained=["train/1/0"], outstanding=names(9))


def test_what_a_full_disk_does_not_take_comes_with_the_next_step(ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a line that it took is taken back; a checkpoint, which needs the lines, says so."""
    plain = Path.open

    class Full:
        """Takes five bytes."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def tell(self) -> int:
            return int(self.file.tell())

        def write(self, data: bytes) -> int:
            self.file.write(data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *a, **k: Full(plain(self, *a, **k)) if a[:1] == ("ab",) else plain(self, *a, **k))
        ledger.settle(3, trained=names(4), outstanding=names(5, 6))
        assert path.read_bytes() == before
        with pytest.raises(OSError, match="No space left"):
            ledger.flush()
    ledger.settle(4, trained=names(5), outstanding=names(6))
    assert [entry[:2] for entry in lines_of(path)][4:] == [(3, "train/0/4"), (4, "train/0/5")]
    assert ledger.flush().bytes == path.stat().st_size and ledger.flush().lines == 6


def test_lines_of_somebody_else_are_found(ledger: Ledger, path: Path) -> None:
    ledger.flush()
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(LedgerError, match=r"bytes long, but this run has written \d+; who else writes to it"):
        ledger.flush()


def test_reasons_are_counted_over_steps(ledger: Ledger) -> None:
    """A step with the right totals and the right reasons is taken, one whose reasons were swapped with those of an earlier step is not."""
    ledger.settle(3, trained=names(4), discarded=given_up(5), outstanding=names(6), counts=books(7, 4, 2, 1, failed=1))
    with pytest.raises(LedgerError, match=r"3 groups discarded \(rewards all alike\) in the queue, 2 in the ledger; .* train/0/6 \("):
        ledger.settle(4, trained=(), discarded=given_up(6, reason=ALIKE), counts=books(7, 4, 3, 0))
    ledger.settle(4, trained=(), discarded=given_up(6, reason=ALIKE), counts=books(7, 4, 3, 0, failed=1))


def queue_of(ledger: Ledger) -> QueueSnapshot:
    """At the fixture's second step."""
    queue = TrajectoryQueue(groups_per_step=4, max_staleness=3)
    queue.admit(prompts(0, 7))
    for i in range(3):
        queue._release(queue._entries[i])
    queue.trained = 3
    queue.discard([3], ALIKE)
    queue.take_discarded()
    snapshot = snapshot_of(queue)
    assert outstanding_ids(snapshot) == names(4, 5, 6)
    return snapshot


def test_a_snapshot_without_a_prompt_is_no_checkpoint(ledger: Ledger) -> None:
    queue = queue_of(ledger)
    assert ledger.flush(queue) == ledger.flush()
    with pytest.raises(LedgerError, match="train/0/6 lost"):
        ledger.flush(replace(queue, in_flight=queue.in_flight[:2], admitted=6))
    with pytest.raises(LedgerError, match=r"4 lines, but 5 prompts were trained or discarded"):
        ledger.flush(replace(queue, trained=4, admitted=8))
    with pytest.raises(LedgerError, match=r"1 groups discarded, but by reason \{'a': 2\}"):
        ledger.flush(replace(queue, discarded_by_reason={"a": 2}))


def test_a_snapshot_with_other_reasons_is_no_checkpoint(ledger: Ledger) -> None:
    """Those of which the ledger hasn't heard yet are named."""
    queue = queue_of(ledger)
    new = replace(queue, discarded=2, in_flight=queue.in_flight[1:], unreported=tuple(given_up(4)))
    ledger.flush(replace(new, discarded_by_reason={ALIKE: 1, FAILED: 1}))
    with pytest.raises(LedgerError, match=r"by reason are \{'odd': 1\} groups in the queue, \{'rewards all alike': 1\} in the ledger, .*4"):
        ledger.flush(replace(new, discarded_by_reason={"odd": 1, FAILED: 1}))
    with pytest.raises(LedgerError, match=r"discarded, \{'no usable answer': 1\} fewer than those without a line .*: train/0/4 \(no"):
        ledger.flush(replace(new, discarded_by_reason={ALIKE: 2}))
    with pytest.raises(LedgerError, match=r"2 groups discarded, but by reason .*: train/0/4 \(no usable answer\)"):
        ledger.flush(replace(new, discarded_by_reason={ALIKE: 2, FAILED: 1}))


def test_a_resume_goes_on_with_the_reasons_of_the_checkpoint(ledger: Ledger, path: Path) -> None:
    """What the ledger hadn't heard of is not among them yet. The state is as before: it has them in the queue's part."""
    queue = queue_of(ledger)
    new = replace(queue, discarded=2, in_flight=queue.in_flight[1:], unreported=tuple(given_up(4)))
    again, _ = Ledger.resumed(path, replace(new, discarded_by_reason={ALIKE: 1, FAILED: 1}), ledger.flush())
    step = {"trained": names(5), "discarded": given_up(4), "outstanding": names(6)}
    with pytest.raises(LedgerError, match=r"2 groups discarded \(rewards all alike\) in the queue, 1 in the ledger"):
        again.settle(3, **step, counts=books(7, 4, 2, 1))
    again.settle(3, **step, counts=books(7, 4, 2, 1, failed=1))


def test_a_resume_takes_back_later_steps(ledger: Ledger, path: Path) -> None:
    """Whole lines and a torn one, as a kill leaves them."""
    queue, mark = queue_of(ledger), ledger.flush()
    kept = path.read_bytes()
    ledger.settle(3, trained=names(4, 5), outstanding=names(6))
    with path.open("a") as file:
        file.write('{"step": 4, "prom')
    again, warning = Ledger.resumed(path, queue, mark)
    assert warning is None and path.read_bytes() == kept and lines_counted(again) == 4
    again.settle(3, trained=names(4), outstanding=names(5, 6), counts=books(7, 4, 1, 2))
    assert len(lines_of(path)) == 5 == again.flush().lines


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_file_is_set_aside_and_the_books_go_on(ledger: Ledger, path: Path, damage: str) -> None:
    queue, mark = queue_of(ledger), ledger.flush()
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    if damage != "gone":  # of those that were set aside earlier none is written over
        path.with_name("ledger.damaged.jsonl").write_text("earlier")
    again, warning = Ledger.resumed(path, queue, mark)
    assert warning is not None and "set aside as ledger.damaged" in warning and not path.exists()
    assert damage == "gone" or path.with_name("ledger.damaged-2.jsonl").read_bytes() != content != b"earlier"
    again.settle(3, trained=names(4), outstanding=names(5, 6), counts=books(7, 4, 1, 2))
    assert again.flush() == replace(again.flush(), lines=1, aside=4) and lines_counted(again) == 5
    with pytest.raises(LedgerError, match=r"train/0/0 used before"):
        again.settle(4, trained=names(5), outstanding=names(0, 6))


def test_a_run_that_begins_has_no_lines(ledger: Ledger, path: Path) -> None:
    """A run without a checkpoint that is resumed starts from step 0."""
    assert lines_counted(Ledger(path)) == 0 and lines_of(path) == []


@pytest.mark.parametrize("per_step", [1_000, pytest.param(500_000, marks=pytest.mark.slow)])
def test_memory_and_a_resume_cost_what_is_under_way(path: Path, monkeypatch: pytest.MonkeyPatch, per_step: int) -> None:
    """After 20 steps (20,000 prompts, or ten million) the ledger holds the 10 that are open, and a resume parses no line of those that are
    gone, and reads the file in pieces."""
    ledger, count = Ledger(path), 20 * per_step
    for step in range(20):
        first, next_first = step * per_step, (step + 1) * per_step
        ledger.settle(step + 1, trained=names(*range(first, next_first)), outstanding=names(*range(next_first, next_first + 10)))
    mark = ledger.flush()
    assert ledger._open == set(names(*range(count, count + 10))) and mark.lines == count
    monkeypatch.setattr(ledger_module.json, "loads", lambda *_: pytest.fail("a line was parsed"))
    queue = TrajectoryQueue(groups_per_step=10, max_staleness=0)
    queue.admitted = queue.trained = count
    queue.admit(prompts(count, count + 10))
    tracemalloc.start()
    again, warning = Ledger.resumed(path, snapshot_of(queue), mark)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert warning is None and lines_counted(again) == count and again._open == ledger._open
    assert most < 10 << 20, "two pieces of the file at a time, of 4 MiB"


class Books(RuleBasedStateMachine):
    """Any order of admissions, answers, draws, refusals, steps, checkpoints, kills and resumes of the real queue."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.queue, self.ledger = TrajectoryQueue(groups_per_step=2, max_staleness=2), Ledger(self.path)
        self.step = 0
        self.saved: tuple[int, QueueSnapshot, LedgerMark] | None = None

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(count=st.integers(0, 6))
    def admit(self, count: int) -> None:
        self.queue.admit(prompts(self.queue.admitted, self.queue.admitted + count))

    @rule(pick=st.integers(0, 9))
    def finish(self, pick: int) -> None:
        waiting = [e.ticket for e in self.queue._entries.values() if e.group is None]
        if waiting:
            self.queue.put(at_hand(group(waiting[pick % len(waiting)])))

    @rule(pick=st.integers(0, 9), reason=st.sampled_from(DiscardReason))
    def discard(self, pick: int, reason: DiscardReason) -> None:
        if ids := sorted(self.queue._entries):
            self.queue.discard([ids[pick % len(ids)]], reason)

    @rule()
    def train(self) -> None:
        self.queue.draw(self.queue.version, 2)
        drawn = [e.group for e in self.queue._entries.values() if e.state == "drawn" and e.group]
        self.queue.publish(self.queue.version + 1)
        self.queue.settle([g.group_id for g in drawn])
        self.step += 1
        self.ledger.settle(
            self.step,
            trained=[g.prompt_id for g in drawn],
            discarded=self.queue.take_discarded(),
            outstanding=self.queue.outstanding(),
            counts=self.queue.counts(),
        )
        assert self.ledger._open == set(self.queue.outstanding())

    @rule()
    def checkpoint(self) -> None:
        snapshot = snapshot_of(self.queue)
        self.saved = self.step, snapshot, self.ledger.flush(snapshot)

    @precondition(lambda self: self.saved is not None)
    @rule(torn=st.binary(max_size=20))
    def kill_and_resume(self, torn: bytes) -> None:
        assert self.saved is not None
        self.step, snapshot, mark = self.saved
        with self.path.open("ab") as file:
            file.write(torn)
        self.queue = TrajectoryQueue(groups_per_step=2, max_staleness=2)
        self.queue.fill(Outstanding(snapshot).contents())
        self.ledger, warning = Ledger.resumed(self.path, snapshot, mark)
        assert warning is None

    @invariant()
    def every_prompt_once(self) -> None:
        """In the file, among the discarded that it doesn't know yet, or under way: together the first `admitted` positions."""
        if not hasattr(self, "queue"):
            return
        gone = [prompt_id for _, prompt_id, _ in lines_of(self.path)]
        known = [*gone, *(one.prompt_id for one in self.queue._unreported), *self.queue.outstanding()]
        assert sorted(known) == sorted(names(*range(self.queue.admitted)))
        assert len(gone) == lines_counted(self.ledger) == self.queue.trained + self.queue.discarded - len(self.queue._unreported)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
