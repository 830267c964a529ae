"""The ledger: every prompt of a run, once; kept apart from the book of groups, so that it can check the book.

    handed out = trained + discarded + under way        lines of ledger.jsonl = trained + discarded

One line of ledger.jsonl for each prompt that has left the book, with what became of it, and of its tokens:

    sampled = trained + discarded + lost                that workers were given by engines; that the service has in the batch; others

Memory holds the ids of the prompts that are
taken from the data and have no line yet, and of the others counts alone, so that it doesn't grow with the run. The book is compared with
them id by id, and the discarded ones reason by reason, at every step, checkpoint and resume; a prompt that was lost, doubled or used before
is an error that names it. Prompts come in the order of their ids (epoch, position), so that one that comes again is known without those
that are gone.

A checkpoint has the file's length and checksum (`LedgerMark`). A resume compares them and cuts off what came later, without parsing a line.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from evenkeel.actors.carriers import DiscardedGroup, GroupTokens
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.actors.json_lines import append_whole
from evenkeel.correction.errors import LedgerError
from evenkeel.rollout.prompt_place import PromptPlace, task_of

_CHUNK_BYTES = 4 << 20
HandOver = Callable[[Callable[[], None]], object]
TRAINED = "trained"
"""Outcome, in ledger.jsonl, of a prompt whose group was trained on. Any other outcome is the reason why it was not."""
# Number of ids that an error about an imbalance names; the others are only counted.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class LedgerMark:
    """Position in ledger.jsonl: its length and checksum at one moment."""

    lines: int = 0
    bytes: int = 0
    crc32: int = 0
    """CRC-32 of these bytes."""
    aside: int = 0
    """Lines of damaged files that resumes have set aside."""
    last: dict[str, str] = field(default_factory=dict)
    """Id of the last prompt handed out of each task, by its name."""


def at_once(write: Callable[[], None]) -> None:
    """Write the lines at once, so that they are in the file when the step is settled."""
    write()


class Ledger:
    """The driver's record of all prompts, fed by what is handed out and written, never by the book of groups."""

    def __init__(self, path: Path, *, hand_over: HandOver = at_once) -> None:
        """The ledger of a run that begins. Lines left by a start without a checkpoint are removed.

        Args: hand_over: called with a function that writes a step's lines; it has to call these functions in order. The step doesn't wait
            for the disk.
        """
        self._path, self._hand_over, self._writing = path, hand_over, threading.Lock()
        self._mark, self._last = LedgerMark(), dict[str, str]()
        self._open: set[str] = set()
        self._admitted = self._trained = 0
        # Number of prompts by reason.
        self._discarded = Counter[str]()
        # Lines of steps that are not in the file yet: still to be written, or refused by a full disk.
        self._unwritten: list[bytes] = []
        if path.is_file():
            os.truncate(path, 0)

    @classmethod
    def resumed(
        cls, path: Path, book: BookSnapshot, mark: LedgerMark | None, *, hand_over: HandOver = at_once
    ) -> tuple[Ledger, str | None]:
        """Go on from a checkpoint; lines of later steps are taken back.

        Returns: the ledger, and a warning if the file is not as the checkpoint has it; it is set aside then. None: it is.
        Raises: LedgerError if the checkpoint is out of balance.
        """
        mark = mark or LedgerMark()
        if found := imbalance_of(book, mark):
            raise LedgerError(f"{path}: {found}")
        warning = None
        if difference := _difference(path, mark):
            names = (path.with_name(f"ledger.damaged{number}.jsonl") for number in ("", *(f"-{i}" for i in range(2, 1000))))
            aside = next(name for name in names if not name.exists())
            if path.exists():
                path.rename(aside)
            warning = (
                f"{path} is damaged: {difference}. It is set aside as {aside.name}; the run goes on by the checkpoint's counts, and begins "
                "a new file"
            )
            mark = LedgerMark(aside=mark.aside + mark.lines, last=mark.last)
        elif path.is_file():
            os.truncate(path, mark.bytes)
        ledger = cls.__new__(cls)
        ledger._path, ledger._mark, ledger._last, ledger._unwritten = path, mark, mark.last, []
        ledger._hand_over, ledger._writing = hand_over, threading.Lock()
        ledger._open = set(outstanding_ids(book)) | {group.prompt_id for group in book.unreported}
        ledger._admitted, ledger._trained = book.admitted, book.trained
        ledger._discarded = _reported_by_reason(book)
        return ledger, warning

    def hand_out(self, prompt_ids: Iterable[str]) -> None:
        """Count prompts that the run takes from its data, before anybody else hears of them.

        Raises: LedgerError for one that was used before.
        """
        for prompt_id in prompt_ids:
            task, last = task_of(prompt_id), self._mark.last
            if prompt_id in self._open or (_order(prompt_id) and _order(prompt_id) <= _order(last.get(task, ""))):
                raise LedgerError(f"{prompt_id} used before ({last.get(task)} came later)")
            self._open.add(prompt_id)
            self._admitted += 1
            self._mark = replace(self._mark, last=last | {task: prompt_id})

    def settle(
        self,
        step: int,
        *,
        trained: Sequence[str],
        discarded: Sequence[DiscardedGroup],
        contents: BookContents,
        tokens: Mapping[str, GroupTokens] = MappingProxyType({}),
    ) -> None:
        """Write down the prompts that a step trained and those given up since the last one, and compare the book with them.

        Args:
            discarded: since the last call.
            contents: of the book after that.
            tokens: of those that were trained, by prompt.
        Raises: LedgerError naming the prompts that the books don't agree on; nothing is written then.
        """
        outcomes = [*((prompt_id, TRAINED) for prompt_id in trained), *((group.prompt_id, str(group.reason)) for group in discarded)]
        left = Counter(prompt_id for prompt_id, _ in outcomes)
        where, strange = f"step {step}", [one for one, times in left.items() if times > 1 or one not in self._open]
        self._refuse(where, "left twice, or never handed out", strange)
        by_reason = self._discarded + Counter(str(group.reason) for group in discarded)
        self._compare(where, contents, self._open - left.keys(), self._trained + len(trained), by_reason)
        accounts = {**tokens, **{group.prompt_id: group.tokens for group in discarded}}
        for prompt_id, one in accounts.items():
            if one.sampled != one.trained + one.discarded + one.lost:
                raise LedgerError(f"{where}: out of balance: the tokens of {prompt_id}: {one}")
        self._write([{"step": step, "prompt_id": one, "outcome": outcome} | _as_line(accounts.get(one)) for one, outcome in outcomes])
        self._open -= left.keys()
        self._trained, self._discarded = self._trained + len(trained), by_reason

    def compare(self, contents: BookContents) -> None:
        """Compare the book with the prompts handed out and the lines written. Raises: LedgerError naming what they don't agree on."""
        self._compare(f"checkpoint of version {contents.version}", contents, self._open, self._trained, self._discarded)
        self._last = self._mark.last

    def _compare(self, where: str, contents: BookContents, mine: set[str], trained: int, by_reason: Counter[str]) -> None:
        """Args: mine: ids of prompts handed out that have no line. trained, by_reason: numbers of those that have one."""
        held = Counter([*(ticket.prompt.prompt_id for ticket in contents.tickets), *(group.prompt_id for group in contents.unreported)])
        self._refuse(where, "twice in the book", [prompt_id for prompt_id, times in held.items() if times > 1])
        self._refuse(where, "lost: neither trained nor discarded, and no longer under way", mine - held.keys())
        self._refuse(where, "under way, but they have left, or were never handed out", held.keys() - mine)
        books = Counter({str(reason): groups for reason, groups in contents.discarded_by_reason.items()})
        books.subtract(Counter(str(group.reason) for group in contents.unreported))
        theirs = {"admitted": contents.admitted, TRAINED: contents.trained, **+books}
        ours = {"admitted": self._admitted, TRAINED: trained, **+by_reason}
        if theirs != ours:
            raise LedgerError(f"{where}: out of balance: the book counts {theirs}, and the prompts handed out and lines written are {ours}")

    def flush(self) -> LedgerMark:
        """Put all lines on disk.

        Returns: how far the file has come; what was handed out since `compare` is not in the checkpoint, and comes again.
        Raises: LedgerError if somebody else writes to the file; OSError if the disk doesn't take the lines.
        """
        self._write_out()
        if self._mark.bytes:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            if size != self._mark.bytes:
                raise LedgerError(f"{self._path}: {size} bytes long, but this run has written {self._mark.bytes}; who else writes to it?")
        return replace(self._mark, last=self._last)

    def _write(self, records: Sequence[Mapping[str, object]]) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        mark = self._mark
        self._mark = replace(mark, lines=mark.lines + len(records), bytes=mark.bytes + len(lines), crc32=zlib.crc32(lines, mark.crc32))
        self._unwritten.append(lines)
        self._hand_over(self._try_to_write_out)

    def _try_to_write_out(self) -> None:
        with suppress(OSError):  # a checkpoint, which needs them on disk, says so
            self._write_out()

    def _write_out(self) -> None:
        """Write all lines that are not in the file yet. Two threads may call it, in turn. Raises: OSError if the disk doesn't take them."""
        with self._writing:
            count = len(self._unwritten)  # others may come meanwhile
            if count:
                self._append(b"".join(self._unwritten[:count]))
                del self._unwritten[:count]

    def _append(self, lines: bytes) -> None:
        append_whole(self._path, lines)

    def _refuse(self, where: str, what: str, prompt_ids: Iterable[str]) -> None:
        if named := sorted(prompt_ids, key=lambda prompt_id: (_order(prompt_id), prompt_id)):
            raise LedgerError(f"{where}: out of balance: {listed(named)} {what}")


def _as_line(tokens: GroupTokens | None) -> dict[str, int]:
    """What a line says of tokens; what is 0 is left out."""
    return {} if tokens is None else {name: count for name, count in asdict(tokens).items() if count}


def outstanding_ids(book: BookSnapshot) -> list[str]:
    """Ids of the prompts that are under way."""
    return [*(ticket.prompt.prompt_id for ticket in book.in_flight), *(group.prompt.prompt_id for group in book.finished)]


def imbalance_of(book: BookSnapshot, mark: LedgerMark | None) -> str | None:
    """What doesn't add up in a snapshot of the book, and in the ledger's mark if there is one, with ids; None: it is balanced."""
    held = outstanding_ids(book)
    unreported = [group.prompt_id for group in book.unreported]
    if twice := [prompt_id for prompt_id, times in Counter([*held, *unreported]).items() if times > 1]:
        return f"twice among the prompts under way: {listed(twice)}"
    if book.admitted != book.trained + book.discarded + len(held):
        return (
            f"{book.admitted} groups admitted, but {book.trained} trained, {book.discarded} discarded and {len(held)} under way "
            f"({listed(held)})"
        )
    by_reason = {str(reason): groups for reason, groups in book.discarded_by_reason.items()}
    if sum(by_reason.values()) != book.discarded:
        return f"{book.discarded} groups discarded, but by reason {by_reason}; without a line in the ledger yet: {_without_line(book)}"
    if extra := dict(Counter(str(group.reason) for group in book.unreported) - Counter(by_reason)):
        return f"by reason {by_reason} groups discarded, {extra} fewer than those without a line in the ledger yet: {_without_line(book)}"
    if mark is not None and mark.lines + mark.aside != (settled := book.trained + book.discarded - len(unreported)):
        return (
            f"the ledger has {mark.lines + mark.aside} lines, but {settled} prompts were trained or discarded, not counting those "
            f"that have no line yet ({listed(unreported)})"
        )
    return None


def _reported_by_reason(book: BookSnapshot) -> Counter[str]:
    """Discarded groups that have a line in the ledger."""
    by_reason = Counter({str(reason): groups for reason, groups in book.discarded_by_reason.items()})
    return by_reason - Counter(str(group.reason) for group in book.unreported)


def _without_line(book: BookSnapshot) -> str:
    return listed([f"{group.prompt_id} ({group.reason})" for group in book.unreported])


def _difference(path: Path, mark: LedgerMark) -> str:
    """How the file differs from its state at the mark; empty: it doesn't."""
    if not mark.bytes:
        return ""
    if not path.is_file():
        return f"it is not there, and had {mark.lines} lines"
    crc32 = lines = read = 0
    with path.open("rb") as file:
        while chunk := file.read(min(_CHUNK_BYTES, mark.bytes - read)):
            crc32, lines, read = zlib.crc32(chunk, crc32), lines + chunk.count(b"\n"), read + len(chunk)
    if read < mark.bytes:
        return f"it has {read} bytes and {lines} lines of {mark.bytes} bytes and {mark.lines} lines"
    return "" if crc32 == mark.crc32 else f"the checksum of its first {mark.lines} lines is {crc32:08x} instead of {mark.crc32:08x}"


def _order(prompt_id: str) -> tuple[int, ...]:
    """(epoch, position in it) of a task's prompt; empty for another name."""
    place = PromptPlace.parse(prompt_id)
    return (place.epoch, place.position) if place else ()


def listed(prompt_ids: Sequence[str]) -> str:
    """Some of them, and how many more."""
    more = len(prompt_ids) - _NAMED
    return (", ".join(prompt_ids[:_NAMED]) or "none") + (f" and {more} more" if more > 0 else "")
