"""Bugs, each a few lines that somebody might write: a simulation that doesn't find them shows nothing.

Each is planted in the product's own classes while its context lasts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from evenkeel.actors.carriers import DiscardReason, Ticket
from evenkeel.actors.checkpoints import reader as checkpoint_reader
from evenkeel.actors.checkpoints import writer as checkpoint_writer
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.groups.book import Entry, GroupBook, GroupState
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.actors.pool.dispatch import WaitingWork
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.actors.ranks import collective_calls
from evenkeel.actors.ranks.collective_calls import CollectiveCaller
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.actors.service import correction_service
from evenkeel.actors.weights.weight_sync import PublishedVersions, WeightSync
from evenkeel.correction.errors import LedgerError
from evenkeel.rollout import continuation
from evenkeel.rollout.trajectory import UnfinishedGroup, VersionSpan

Bug = Callable[[], AbstractContextManager[Any]]


@contextmanager
def a_group_is_drawn_twice() -> Iterator[None]:
    """It is in a batch, and as good as finished."""
    draw = GroupBook.draw

    def careless(book: GroupBook, version: int, places: int) -> list[Any]:
        groups = draw(book, version, places)
        for group in groups[:1]:
            book._undraw(book._entries[group.group_id], GroupState.FINISHED)
            heapq.heappush(book._finished, group.group_id)
        return groups

    with mock.patch.object(GroupBook, "draw", careless):
        yield


@contextmanager
def a_discarded_prompt_is_not_counted() -> Iterator[None]:
    """Its place becomes free all the same."""
    discard = GroupBook._discard

    def forgetful(book: GroupBook, entry: Entry, reason: DiscardReason) -> None:
        discard(book, entry, reason)
        book.discarded_by_reason[reason] -= 1
        book.admitted -= 1

    with mock.patch.object(GroupBook, "_discard", forgetful):
        yield


@contextmanager
def a_discarded_prompt_is_counted_for_another_reason() -> Iterator[None]:
    """All totals are right."""
    discard = GroupBook._discard

    def mistaken(book: GroupBook, entry: Entry, reason: DiscardReason) -> None:
        discard(book, entry, reason)
        book.discarded_by_reason[reason] -= 1
        book.discarded_by_reason[DiscardReason.LOST] += 1

    with mock.patch.object(GroupBook, "_discard", mistaken):
        yield


@contextmanager
def a_prompt_is_discarded_for_another_reason() -> Iterator[None]:
    """Everywhere alike: in the counts, and in the ledger."""
    discard = GroupBook._discard
    with mock.patch.object(GroupBook, "_discard", lambda book, entry, _: discard(book, entry, DiscardReason.LOST)):
        yield


@contextmanager
def a_settled_prompt_is_lost() -> Iterator[None]:
    """It leaves as if it were trained, and nobody has."""
    settle = GroupBook.settle

    def careless(book: GroupBook, *given: Any, **named: Any) -> Any:
        discarded = settle(book, *given, **named)
        if waiting := [entry for entry in book._entries.values() if entry.state is GroupState.WAITING]:
            book._release(waiting[0])
            book.trained += 1
        return discarded

    with mock.patch.object(GroupBook, "settle", careless):
        yield


@contextmanager
def a_discarded_prompt_is_revived() -> Iterator[None]:
    """It is under way again, as another group, after the ledger has its line."""
    settle = GroupBook.settle

    def careless(book: GroupBook, *given: Any, **named: Any) -> Any:
        discarded = settle(book, *given, **named)
        for entry in list(book._entries.values())[:1]:
            for one in discarded[:1]:
                entry.ticket = replace(entry.ticket, prompt=replace(entry.ticket.prompt, prompt_id=one.prompt_id))
        return discarded

    with mock.patch.object(GroupBook, "settle", careless):
        yield


@contextmanager
def a_late_receipt_counts_for_the_newest_version() -> Iterator[None]:
    """The next version was published while it was on its way."""
    accept = WeightSync._accept

    def hasty(sync: WeightSync, target: Any, receipt: Any, snapshot: Any) -> None:
        accept(sync, target, receipt, snapshot)
        if target.version >= 0:
            target.version = sync.version

    with mock.patch.object(WeightSync, "_accept", hasty):
        yield


@contextmanager
def staleness_is_off_by_one() -> Iterator[None]:
    """Younger groups are drawn before older ones have their place."""

    def reserved(book: GroupBook, version: int, *, older_than: int) -> int:
        needed = waiting = 0
        for admitted_version in sorted(v for v in book._undrawn if v < older_than):
            waiting += book._undrawn[admitted_version]
            later_steps = max(0, admitted_version + book.max_staleness + 1 - version)
            needed = max(needed, waiting - later_steps * book.groups_per_step)
        return needed

    with mock.patch.object(GroupBook, "_reserved", reserved):
        yield


@contextmanager
def places_forget_what_is_not_published() -> Iterator[None]:
    """Groups are admitted as if the engines had the learner's version."""

    def places(book: GroupBook) -> int:
        return (book.max_staleness + 1) * book.groups_per_step - (book.admitted - book.trained - book.discarded)

    with mock.patch.object(GroupBook, "free_places", property(places)):
        yield


@contextmanager
def a_dirty_engine_gets_work() -> Iterator[None]:
    """A failed update asks for checksums next time, and takes no receipt back."""

    def mark_dirty(sync: WeightSync, target: Any, reason: str) -> None:
        target.is_verified = False
        sync._callbacks.dirty(target, reason)

    with mock.patch.object(WeightSync, "_mark_dirty", mark_dirty):
        yield


@contextmanager
def a_resume_forgets_what_was_being_sampled() -> Iterator[None]:
    """The book waits for groups that nobody samples."""
    with mock.patch.object(BatchSource, "take_unfinished", lambda source: []):
        yield


@contextmanager
def a_draw_is_not_taken_back() -> Iterator[None]:
    """What a dead service had drawn is in nobody's hands."""
    with mock.patch.object(GroupBook, "take_back", lambda *_: None):
        yield


@contextmanager
def the_batch_in_training_is_taken_back_too() -> Iterator[None]:
    """It is drawn again for the next batch."""
    take_back = GroupBook.take_back
    with mock.patch.object(GroupBook, "take_back", lambda book, version: take_back(book, version - 1)):
        yield


@contextmanager
def the_ledger_counts_at_the_draw() -> Iterator[None]:
    """A step's line has what the next batch has drawn already."""
    settle = Ledger.settle

    def early(ledger: Ledger, step: int, **books: Any) -> None:
        settle(ledger, step, **books)
        open_ids = sorted(ledger._open, key=lambda prompt_id: int(prompt_id.rpartition("/")[2]))
        if len(open_ids) > 2:  # the oldest will be trained next; most of the time that is so
            ledger._write([{"step": step + 1, "prompt_id": open_ids[0], "outcome": "trained"}])

    with mock.patch.object(Ledger, "settle", early):
        yield


@contextmanager
def groups_of_a_lost_worker_are_dropped() -> Iterator[None]:
    """What was handed to a worker once doesn't come back."""
    add_groups = WaitingWork.add_groups

    def only_new(work: WaitingWork, tickets: Sequence[Ticket]) -> None:
        seen = work.__dict__.setdefault("seen", set())
        add_groups(work, [ticket for ticket in tickets if ticket.group_id not in seen])
        seen.update(ticket.group_id for ticket in tickets)

    with mock.patch.object(WaitingWork, "add_groups", only_new):
        yield


@contextmanager
def everybody_makes_the_checksums() -> Iterator[None]:
    """Each engine that joins has the whole snapshot hashed for itself, instead of one for all."""

    async def each(versions: PublishedVersions, published: Any) -> Any:
        if published.snapshot.checksums is None:
            await versions._hash(published)
        return published.snapshot.checksums

    with mock.patch.object(PublishedVersions, "_checksums", each):
        yield


@contextmanager
def the_checkpoint_comes_before_the_ledgers_flush() -> Iterator[None]:
    """A step's lines go to the file with the next step's, and a checkpoint's mark counts on them."""
    append = Ledger._append

    def late(ledger: Ledger, lines: bytes) -> None:
        held, ledger.__dict__["held"] = ledger.__dict__.get("held", b""), lines
        append(ledger, held)

    with mock.patch.object(Ledger, "_append", late), mock.patch.object(Ledger, "flush", lambda ledger: ledger._mark):
        yield


@contextmanager
def a_checkpoint_forgets_groups_whose_tokens_are_lost() -> Iterator[None]:
    """They are neither among its finished groups nor among those to be sampled."""
    of = BookSnapshot.of

    def forgetful(contents: BookContents, *rest: Any) -> BookSnapshot:
        snapshot, finished = of(contents, *rest), {one.group_id for one in contents.finished}
        return replace(snapshot, in_flight=tuple(ticket for ticket in snapshot.in_flight if ticket.group_id not in finished))

    with mock.patch.object(BookSnapshot, "of", forgetful):
        yield


@contextmanager
def a_continued_answer_is_of_the_version_that_ended_it() -> Iterator[None]:
    """Also the tokens that another engine had sampled before."""
    with mock.patch.object(continuation, "_without_seams", lambda spans: (VersionSpan(spans[-1].version, 0, spans[-1].end),)):
        yield


@contextmanager
def what_is_handed_back_is_as_good_as_finished() -> Iterator[None]:
    """Nobody goes on with it."""
    take = RolloutPool._take

    def careless(pool: RolloutPool, worker: Any, ticket: Ticket, outcome: Any, *rest: Any) -> None:
        if not isinstance(outcome, UnfinishedGroup):
            take(pool, worker, ticket, outcome, *rest)

    with mock.patch.object(RolloutPool, "_take", careless):
        yield


@contextmanager
def whoever_goes_on_forgets_what_was_read_first() -> Iterator[None]:
    """It has all turns, and not what stood before the second one."""
    so_far = GroupBook.so_far

    def forgetful(book: GroupBook, group_id: int) -> UnfinishedGroup | None:
        there = so_far(book, group_id)
        return there and replace(there, answers=tuple(replace(one, later=one.later[1:]) for one in there.answers))

    with mock.patch.object(GroupBook, "so_far", forgetful):
        yield


@contextmanager
def the_first_sampled_token_of_a_batch_is_masked() -> Iterator[None]:
    """Somebody takes it for the prompt's last."""
    pack = correction_service.pack_groups

    def careless(*groups: Any, **how: Any) -> Any:
        packed = pack(*groups, **how)
        mask = packed.batch.loss_mask.clone()
        mask[mask.nonzero()[:1]] = False
        return replace(packed, batch=replace(packed.batch, loss_mask=mask))

    with mock.patch.object(correction_service, "pack_groups", careless):
        yield


@contextmanager
def the_last_checkpoint_is_taken_on_trust() -> Iterator[None]:
    """A resume reads it without comparing files with the manifest."""
    with mock.patch.object(checkpoint_reader, "_verify", lambda *_: []):
        yield


@contextmanager
def a_call_that_never_began_is_only_late() -> Iterator[None]:
    """All ranks answer, so nothing counts as lost, and the deadline ends the run."""

    async def none(caller: CollectiveCaller) -> list[str]:
        return []

    with mock.patch.object(CollectiveCaller, "_not_begun", none):
        yield


@contextmanager
def a_lost_call_is_one_failed_checkpoint_more() -> Iterator[None]:
    """As if the disk had failed: nobody goes back for it, and at the end it is tried again until that ends the run."""
    with mock.patch.object(checkpoint_writer, "ActorLost", LedgerError):
        yield


@contextmanager
def what_is_handed_to_the_disk_is_on_it() -> Iterator[None]:
    """A checkpoint doesn't wait for the ledger's lines that a slow disk has not taken yet."""
    with mock.patch.object(Ledger, "flush", lambda ledger: ledger._mark):
        yield


@contextmanager
def a_flush_leaves_refused_lines_for_later() -> Iterator[None]:
    """They wait in memory for the next step's, and a checkpoint counts on them."""

    async def done(writer: DiskWriter) -> None:
        await writer._thread.done()

    with mock.patch.object(DiskWriter, "done", done):
        yield


@contextmanager
def lost_groups_are_still_as_good_as_finished() -> Iterator[None]:
    """They are drawn once more, and can't be read again."""
    lose = GroupBook.lose

    def careless(book: GroupBook, group_ids: Any) -> None:
        groups = {group_id: book._entries[group_id].group for group_id in group_ids}
        lose(book, group_ids)
        for group in groups.values():
            if group is not None:
                book.finish(group, now=None)

    with mock.patch.object(GroupBook, "lose", careless):
        yield


@contextmanager
def lost_groups_have_no_place_reserved() -> Iterator[None]:
    """Younger ones take theirs, while they are sampled again."""
    undraw = GroupBook._undraw

    def careless(book: GroupBook, entry: Entry, state: GroupState) -> None:
        undraw(book, entry, state)
        if state is GroupState.WAITING:
            book._undrawn[entry.ticket.admitted_version] -= 1

    with mock.patch.object(GroupBook, "_undraw", careless):
        yield


@contextmanager
def a_return_may_go_unheard() -> Iterator[None]:
    """A worker hears of it by the call for that alone, which may be lost."""
    generate, number = RolloutWorker.generate_group, RolloutWorker._number_of_update

    def sample(worker: RolloutWorker, ticket: Ticket, _: int = 0) -> Any:
        return generate(worker, ticket, worker._generation)

    def number_alone(worker: RolloutWorker, version: int, generation: int) -> int:
        with mock.patch.object(worker, "_follow", lambda _: None):
            return number(worker, version, generation)

    with mock.patch.multiple(RolloutWorker, generate_group=sample, _number_of_update=number_alone):
        yield


@contextmanager
def a_rank_that_raises_is_not_lost() -> Iterator[None]:
    """Whatever torch says of its device ends the run, as a bug does."""
    with mock.patch.object(collective_calls, "as_rank_failure", lambda error, *_: error):
        yield


BUGS: tuple[Bug, ...] = (
    a_group_is_drawn_twice,
    a_discarded_prompt_is_not_counted,
    a_discarded_prompt_is_counted_for_another_reason,
    a_late_receipt_counts_for_the_newest_version,
    staleness_is_off_by_one,
    places_forget_what_is_not_published,
    a_dirty_engine_gets_work,
    a_resume_forgets_what_was_being_sampled,
    a_prompt_is_discarded_for_another_reason,
    a_settled_prompt_is_lost,
    a_discarded_prompt_is_revived,
    a_draw_is_not_taken_back,
    the_batch_in_training_is_taken_back_too,
    the_ledger_counts_at_the_draw,
    groups_of_a_lost_worker_are_dropped,
    everybody_makes_the_checksums,
    the_checkpoint_comes_before_the_ledgers_flush,
    a_checkpoint_forgets_groups_whose_tokens_are_lost,
    a_continued_answer_is_of_the_version_that_ended_it,
    what_is_handed_back_is_as_good_as_finished,
    whoever_goes_on_forgets_what_was_read_first,
    the_first_sampled_token_of_a_batch_is_masked,
    the_last_checkpoint_is_taken_on_trust,
    a_call_that_never_began_is_only_late,
    a_lost_call_is_one_failed_checkpoint_more,
    what_is_handed_to_the_disk_is_on_it,
    a_flush_leaves_refused_lines_for_later,
    lost_groups_are_still_as_good_as_finished,
    lost_groups_have_no_place_reserved,
    a_return_may_go_unheard,
    a_rank_that_raises_is_not_lost,
)


def title(bug: Bug) -> str:
    return getattr(bug, "__name__", "").replace("_", " ")
