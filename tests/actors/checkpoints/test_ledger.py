"""The book is checked at every step and checkpoint against what was handed out and written, discarded prompts reason by reason: what is
lost, doubled, revived or used before is named; a resume cuts the file where the checkpoint was."""

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

from evenkeel.actors.carriers import DiscardedGroup, DiscardReason, GroupTokens, Ticket
from evenkeel.actors.groups import ledger as ledger_module
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.ledger import Ledger, LedgerMark, imbalance_of
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.correction.errors import LedgerError
from tests.actors.cases import at_hand, group, prompt, prompts, snapshot_of


def lines_of(path: Path) -> list[tuple[int, str, str]]:
    return [(e["step"], e["prompt_id"], e["outcome"]) for e in map(json.loads, path.read_text().splitlines())] if path.exists() else []


def names(*positions: int) -> list[str]:
    return [f"train/0/{position}" for position in positions]


ALIKE, FAILED = DiscardReason.UNIFORM, DiscardReason.FAILED


def given_up(*positions: int, reason: DiscardReason = FAILED) -> list[DiscardedGroup]:
    return [DiscardedGroup(name, reason) for name in names(*positions)]


def books(
    admitted: int, trained: int, held: list[int], *, alike: int = 0, failed: int = 0, unreported: list[DiscardedGroup] | None = None
) -> BookContents:
    """As a book has it. Args: held: positions of prompts under way. alike, failed: discarded."""
    reasons = {reason: groups for reason, groups in ((ALIKE, alike), (FAILED, failed)) if groups}
    tickets = tuple(Ticket(position, prompt(position), 0) for position in held)
    return BookContents(3, admitted, trained, tickets, (), reasons, tuple(unreported or ()))


def lines_counted(ledger: Ledger) -> int:
    """Lines that the ledger has written, those of a file set aside included, by its own count."""
    mark = ledger.flush()
    return mark.lines + mark.aside


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    """After two steps: 0, 1 and 2 were trained, 3 was discarded; 4 to 6 are under way."""
    ledger = Ledger(path)
    ledger.hand_out(names(0, 1, 2, 3, 4))
    ledger.settle(1, trained=names(0, 1), discarded=[], contents=books(5, 2, [2, 3, 4]))
    ledger.hand_out(names(5, 6))
    ledger.settle(2, trained=names(2), discarded=given_up(3, reason=ALIKE), contents=books(7, 3, [4, 5, 6], alike=1))
    return ledger


def test_what_is_written(ledger: Ledger, path: Path) -> None:
    trained = [(1, "train/0/0", "trained"), (1, "train/0/1", "trained"), (2, "train/0/2", "trained")]
    assert lines_of(path) == [*trained, (2, "train/0/3", "rewards all alike")]
    assert lines_counted(ledger) == 4


OURS = ", and the prompts handed out and lines written are"


@pytest.mark.parametrize(
    ("trained", "discarded", "contents", "said"),
    [
        ([4], [], books(7, 4, [6], alike=1), "train/0/5 lost: neither trained nor discarded, and no longer under way"),
        ([4], [4], books(7, 4, [5, 6], alike=1, failed=1), "train/0/4 left twice, or never handed out"),
        ([4, 4], [], books(7, 5, [5, 6], alike=1), "train/0/4 left twice, or never handed out"),
        ([4, 2], [], books(7, 5, [5, 6], alike=1), "train/0/2 left twice, or never handed out"),
        ([4], [], books(7, 4, [5, 5, 6], alike=1), "train/0/5 twice in the book"),
        ([4], [], books(7, 4, [4, 5, 6], alike=1), "train/0/4 under way, but they have left, or were never handed out"),
        ([4], [], books(7, 4, [0, 5, 6], alike=1), "train/0/0 under way, but they have left, or were never handed out"),
        ([4], [], books(8, 4, [5, 6, 7], alike=1), "train/0/7 under way, but they have left, or were never handed out"),
        ([4], [], books(9, 4, [5, 6], alike=1), f"the book counts .'admitted': 9, .*{OURS} .'admitted': 7, "),
        ([4], [], books(7, 5, [5, 6], alike=1), f"the book counts .*'trained': 5, .*{OURS} .*'trained': 4, "),
        ([4], [5], books(7, 4, [6], alike=1), f"the book counts .*'rewards all alike': 1.{OURS} .*'no usable answer': 1"),
        ([4], [5], books(7, 4, [6], alike=2), f"the book counts .*'rewards all alike': 2.{OURS} .*'no usable answer': 1"),
        ([4], [], books(7, 4, [5, 6], failed=1), f"the book counts .*'no usable answer': 1.{OURS} .*'rewards all alike': 1"),
        (
            [4],
            [],
            books(7, 4, [5, 6], alike=2, unreported=given_up(5, reason=ALIKE)),
            "train/0/5 twice in the book",
        ),
    ],
)
def test_an_imbalance_names_the_prompts_and_writes_nothing(
    ledger: Ledger, path: Path, trained: list[int], discarded: list[int], contents: BookContents, said: str
) -> None:
    before = path.read_text()
    with pytest.raises(LedgerError, match=rf"step 3: out of balance: {said}"):
        ledger.settle(3, trained=names(*trained), discarded=given_up(*discarded), contents=contents)
    assert path.read_text() == before and lines_counted(ledger) == 4
    ledger.settle(3, trained=names(4), discarded=[], contents=books(7, 4, [5, 6], alike=1))  # the right book is still taken


def test_tokens_balance_line_by_line(ledger: Ledger, path: Path) -> None:
    """What is sampled is trained, discarded or lost; what isn't is named, and nothing is written. What is 0 is in no line."""
    now, gone = books(7, 4, [6], alike=1, failed=1), replace(given_up(5)[0], tokens=GroupTokens(sampled=3, lost=3))
    before = path.read_text()
    with pytest.raises(LedgerError, match=r"step 3: out of balance: the tokens of train/0/4: .*sampled=9, trained=5, discarded=3, lost=0"):
        ledger.settle(3, trained=names(4), discarded=[gone], contents=now, tokens={"train/0/4": GroupTokens(9, 5, 3)})
    assert path.read_text() == before
    ledger.settle(3, trained=names(4), discarded=[gone], contents=now, tokens={"train/0/4": GroupTokens(9, 5, 3, 1, 40)})
    trained, discarded = map(json.loads, path.read_text().splitlines()[-2:])
    place = {"step": 3, "prompt_id": "train/0/4", "outcome": "trained"}
    assert trained == place | {"sampled": 9, "trained": 5, "discarded": 3, "lost": 1, "read": 40}
    assert discarded == {"step": 3, "prompt_id": "train/0/5", "outcome": "no usable answer", "sampled": 3, "lost": 3}


def test_a_prompt_is_handed_out_once(ledger: Ledger) -> None:
    """train/1/0 comes after train/0/6; train/0/5 of the first epoch, which is under way, and train/0/0, which has left, would not."""
    ledger.hand_out(["train/1/0"])
    for again in ("train/0/5", "train/0/0", "train/0/9", "train/1/0"):
        with pytest.raises(LedgerError, match=rf"{again} used before \(train/1/0 came later\)"):
            ledger.hand_out([again])


def test_each_task_has_an_order_of_its_own(ledger: Ledger) -> None:
    """Of two tasks the second may be behind; neither goes back."""
    ledger.hand_out(["words/train/0/0", "sums/train/0/0", "words/train/0/1", "sums/train/0/1"])
    with pytest.raises(LedgerError, match=r"sums/train/0/0 used before \(sums/train/0/1 came later\)"):
        ledger.hand_out(["sums/train/0/0"])


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
        ledger.settle(3, trained=names(4), discarded=[], contents=books(7, 4, [5, 6], alike=1))
        assert path.read_bytes() == before
        with pytest.raises(OSError, match="No space left"):
            ledger.flush()
    ledger.settle(4, trained=names(5), discarded=[], contents=books(7, 5, [6], alike=1))
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
    ledger.settle(3, trained=names(4), discarded=given_up(5), contents=books(7, 4, [6], alike=1, failed=1))
    with pytest.raises(LedgerError, match="'rewards all alike': 3"):
        ledger.settle(4, trained=[], discarded=given_up(6, reason=ALIKE), contents=books(7, 4, [], alike=3))
    ledger.settle(4, trained=[], discarded=given_up(6, reason=ALIKE), contents=books(7, 4, [], alike=2, failed=1))


SAVED = books(7, 3, [4, 5, 6], alike=1)
"""At the fixture's second step."""


def as_saved(contents: BookContents) -> BookSnapshot:
    return BookSnapshot.of(contents, ())


def saved(ledger: Ledger) -> tuple[BookSnapshot, LedgerMark]:
    """A checkpoint at the fixture's second step."""
    ledger.compare(SAVED)
    return as_saved(SAVED), ledger.flush()


def test_contents_without_a_prompt_are_no_checkpoint(ledger: Ledger) -> None:
    ledger.compare(SAVED)
    with pytest.raises(LedgerError, match="checkpoint of version 3: out of balance: train/0/6 lost"):
        ledger.compare(replace(SAVED, tickets=SAVED.tickets[:2], admitted=6))
    with pytest.raises(LedgerError, match="'trained': 4"):
        ledger.compare(replace(SAVED, trained=4))


def test_contents_with_other_reasons_are_no_checkpoint(ledger: Ledger) -> None:
    """Those that have no line yet are not among the ledger's."""
    new = replace(SAVED, tickets=SAVED.tickets[1:], unreported=tuple(given_up(4)))
    ledger.compare(replace(new, discarded_by_reason={ALIKE: 1, FAILED: 1}))
    with pytest.raises(LedgerError, match=f"'lost with several engines': 1.{OURS} .*'rewards all alike': 1"):
        ledger.compare(replace(new, discarded_by_reason={DiscardReason.LOST: 1, FAILED: 1}))
    with pytest.raises(LedgerError, match=f"'rewards all alike': 2.{OURS}"):
        ledger.compare(replace(new, discarded_by_reason={ALIKE: 2, FAILED: 1}))


def test_a_checkpoint_that_does_not_add_up_is_none(ledger: Ledger) -> None:
    """As a resume reads it: by itself, and with the ledger's mark."""
    whole, mark = saved(ledger)
    assert imbalance_of(whole, mark) is None
    for wrong, said in (
        ({"trained": 4, "admitted": 8}, "4 lines, but 5 prompts were trained or discarded"),
        ({"discarded_by_reason": {"a": 2}}, "1 groups discarded, but by reason {'a': 2}"),
        ({"in_flight": whole.in_flight[:2]}, "7 groups admitted, but 3 trained, 1 discarded and 2 under way"),
    ):
        found = imbalance_of(replace(whole, **wrong), mark)  # type: ignore[arg-type]
        assert said in str(found)


def test_what_is_handed_out_after_a_checkpoint_comes_again(ledger: Ledger, path: Path) -> None:
    """While its tokens are read, prompts are admitted that it doesn't have."""
    ledger.compare(SAVED)
    ledger.hand_out(names(7, 8))
    again, _ = Ledger.resumed(path, as_saved(SAVED), ledger.flush())
    again.hand_out(names(7))
    again.settle(3, trained=names(4), discarded=[], contents=books(8, 4, [5, 6, 7], alike=1))


def test_a_resume_goes_on_with_the_reasons_of_the_checkpoint(ledger: Ledger, path: Path) -> None:
    """What has no line yet is not among them. The state has it among the book's."""
    new = replace(SAVED, tickets=SAVED.tickets[1:], unreported=tuple(given_up(4)), discarded_by_reason={ALIKE: 1, FAILED: 1})
    again, _ = Ledger.resumed(path, as_saved(new), ledger.flush())
    with pytest.raises(LedgerError, match="'rewards all alike': 2"):
        again.settle(3, trained=names(5), discarded=given_up(4), contents=books(7, 4, [6], alike=2))
    again.settle(3, trained=names(5), discarded=given_up(4), contents=books(7, 4, [6], alike=1, failed=1))


def test_a_resume_takes_back_later_steps(ledger: Ledger, path: Path) -> None:
    """Whole lines and a torn one, as a kill leaves them."""
    book, mark = saved(ledger)
    kept = path.read_bytes()
    ledger.settle(3, trained=names(4, 5), discarded=[], contents=books(7, 5, [6], alike=1))
    with path.open("a") as file:
        file.write('{"step": 4, "prom')
    again, warning = Ledger.resumed(path, book, mark)
    assert warning is None and path.read_bytes() == kept and lines_counted(again) == 4
    again.settle(3, trained=names(4), discarded=[], contents=books(7, 4, [5, 6], alike=1))
    assert len(lines_of(path)) == 5 == again.flush().lines


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_file_is_set_aside_and_the_books_go_on(ledger: Ledger, path: Path, damage: str) -> None:
    book, mark = saved(ledger)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    if damage != "gone":  # of those that were set aside earlier none is written over
        path.with_name("ledger.damaged.jsonl").write_text("earlier")
    again, warning = Ledger.resumed(path, book, mark)
    assert warning is not None and "set aside as ledger.damaged" in warning and not path.exists()
    assert damage == "gone" or path.with_name("ledger.damaged-2.jsonl").read_bytes() != content != b"earlier"
    again.settle(3, trained=names(4), discarded=[], contents=books(7, 4, [5, 6], alike=1))
    assert again.flush() == replace(again.flush(), lines=1, aside=4) and lines_counted(again) == 5
    with pytest.raises(LedgerError, match=r"train/0/0 used before"):
        again.hand_out(names(0))


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
        ledger.hand_out(names(*range(first + 10 if first else 0, next_first + 10)))
        held = list(range(next_first, next_first + 10))
        ledger.settle(step + 1, trained=names(*range(first, next_first)), discarded=[], contents=books(next_first + 10, next_first, held))
    mark = ledger.flush()
    assert mark.lines == count
    monkeypatch.setattr(ledger_module.json, "loads", lambda *_: pytest.fail("a line was parsed"))
    book = GroupBook(groups_per_step=10, max_staleness=0)
    book.admitted = book.trained = count
    book.admit(prompts(count, count + 10), now=0.0)
    tracemalloc.start()
    again, warning = Ledger.resumed(path, snapshot_of(book), mark)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert warning is None and lines_counted(again) == count
    again.compare(book.contents())
    assert most < 10 << 20, "two pieces of the file at a time, of 4 MiB"


class Books(RuleBasedStateMachine):
    """Any order of admissions, answers, draws, refusals, steps, checkpoints, kills and resumes of the real book."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.book, self.ledger = self.opened(None), Ledger(self.path)
        self.step = 0
        self.saved: tuple[int, BookSnapshot, LedgerMark] | None = None

    def opened(self, snapshot: BookSnapshot | None) -> GroupBook:
        return GroupBook(groups_per_step=2, max_staleness=2, dynamic_sampling=True, snapshot=snapshot)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(count=st.integers(0, 6))
    def admit(self, count: int) -> None:
        new = prompts(self.book.admitted, self.book.admitted + count)[: max(0, self.book.free_places)]
        self.ledger.hand_out([one.prompt_id for one in new])
        self.book.admit(new, now=0.0)

    @rule(pick=st.integers(0, 9), is_uniform=st.booleans())
    def finish(self, pick: int, is_uniform: bool) -> None:
        if waiting := self.book.in_flight:
            rewards = (1.0, 1.0) if is_uniform else (0.0, 1.0)
            self.book.finish(at_hand(group(waiting[pick % len(waiting)], rewards=rewards)), now=0.0)

    @rule(pick=st.integers(0, 9), reason=st.sampled_from(DiscardReason))
    def give_up(self, pick: int, reason: DiscardReason) -> None:
        if waiting := self.book.in_flight:
            self.book.give_up(waiting[pick % len(waiting)].group_id, reason)

    @rule()
    def train(self) -> None:
        version = self.book.version
        drawn = self.book.draw(version, 2)
        discarded = self.book.settle(version + 1, version + 1, [g.group_id for g in drawn], now=0.0)
        self.step += 1
        self.ledger.settle(self.step, trained=[g.prompt_id for g in drawn], discarded=discarded, contents=self.book.contents())
        self.ledger.compare(self.book.contents())

    @rule()
    def checkpoint(self) -> None:
        self.ledger.compare(self.book.contents())
        self.saved = self.step, snapshot_of(self.book), self.ledger.flush()
        assert imbalance_of(self.saved[1], self.saved[2]) is None

    @precondition(lambda self: self.saved is not None)
    @rule(torn=st.binary(max_size=20))
    def kill_and_resume(self, torn: bytes) -> None:
        assert self.saved is not None
        self.step, snapshot, mark = self.saved
        with self.path.open("ab") as file:
            file.write(torn)
        self.book = self.opened(snapshot)
        self.ledger, warning = Ledger.resumed(self.path, snapshot, mark)
        assert warning is None
        self.ledger.compare(self.book.contents())

    @invariant()
    def every_prompt_once(self) -> None:
        """In the file, among the discarded that it doesn't know yet, or under way: together the first `admitted` positions."""
        if not hasattr(self, "book"):
            return
        gone = [prompt_id for _, prompt_id, _ in lines_of(self.path)]
        known = [*gone, *(one.prompt_id for one in self.book.unreported), *self.book.outstanding()]
        assert sorted(known) == sorted(names(*range(self.book.admitted)))
        assert len(gone) == lines_counted(self.ledger) == self.book.trained + self.book.discarded - len(self.book.unreported)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
