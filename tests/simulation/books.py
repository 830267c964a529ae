"""What has to hold at every moment of a simulated run, written against what crosses between the parts."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from evenkeel.correction.batch import PackedBatch
from evenkeel.rollout.trajectory import GroupFacts
from tests.simulation.engine import READ
from tests.simulation.learner import Weights
from tests.simulation.schedule import SAMPLES


class ViolationError(AssertionError):
    """Something that never may be, was."""


class Books:
    """The simulation's own account of a run, through all crashes and resumes."""

    def __init__(self, *, max_staleness: int, groups_per_step: int, dynamic_sampling: bool = False, is_disturbed: bool = True) -> None:
        self._dynamic_sampling, self._is_disturbed = dynamic_sampling, is_disturbed
        # By position of a prompt: tokens that engines have sampled for it, ever; and those that the learner got of it last.
        self._given, self._got = Counter[int](), Counter[int]()
        # By position of a prompt that was sampled: what makes its answers not worth training; empty: nothing.
        self._worth: dict[int, str] = {}
        # Positions of prompts that the run has said that it gives up.
        self._given_up: set[int] = set()
        self._max_staleness, self._places = max_staleness, (max_staleness + 1) * groups_per_step
        self._groups_per_step = groups_per_step
        self.violation = ""
        """The first thing that was wrong."""
        self.weights: Weights | None = None
        """Those that the learner has."""
        self.receipts: dict[str, int] = {}
        """By worker of the present driver: version of the last receipt that has come; -1: it has said that it is dirty."""
        self.exports: Counter[object] = Counter()
        """By version, and for checksums ("hash", version), of the present driver."""
        self._learners = 0
        # All that the learner has ever had.
        self._known: set[Weights] = set()
        # What the book's counts are made of, when they were looked at last.
        self._seen: tuple[int, ...] = ()
        self.saved: dict[str, int] = {}
        """Checkpoints that the run has called complete, and keeps, by folder name: their steps."""
        # By the step of a checkpoint: steps before it without a line of numbers, as a full disk had refused that.
        self._lines_lacking: dict[int, set[int]] = {0: set()}
        # References to tokens that the service could not read, by its answers.
        self._unreadable: list[Any] = []
        # How often the driver has noted that a group's tokens are lost: an answer that it left unread counts for nothing.
        self._losses: Callable[[int], int] = lambda _: 0

    def heard(self, text: str) -> None:
        """The run says so."""
        if found := re.match(r"group \d+ \(\S+/(\d+)\) is discarded, ", text):
            self._given_up.add(int(found[1]))

    def refuse(self, what: str) -> None:
        """Raises: ViolationError, which ends the run even if who called this catches it."""
        self.violation = self.violation or what
        raise ViolationError(what)

    # -- at every step of the loop -----------------------------------------------------------------------------------

    def check_book(self, book: Any) -> None:
        """The balance, and the bound of staleness, of the book's own counts and contents."""
        self._losses = book.losses
        seen = (len(book._entries), book.admitted, book.trained, book.discarded, *book._by_state.values())
        if seen == self._seen:
            return
        self._seen = seen
        counts = book.counts()
        under_way = counts["in_flight"] + counts["finished"] + counts["drawn"]
        if counts["admitted"] != counts["trained"] + counts["discarded"] + under_way:
            self.refuse(f"the book is out of balance: {counts}")
        if len(book.outstanding()) != under_way:
            self.refuse(f"the book holds {len(book.outstanding())} groups, and counts {under_way}")
        if under_way > self._places:
            self.refuse(f"{under_way} groups are under way, more than the {self._places} that keep the staleness within its bound")

    # -- work and weights --------------------------------------------------------------------------------------------

    def gets_work(self, worker: str, published: int) -> None:
        held = self.receipts.get(worker)
        if held is None or held < published:  # a broadcast reaches some before all have it, which is when it is published
            self.refuse(f"{worker} got work at version {published}, and its last receipt is of {held}")

    def is_exported(self, version: int, *, may_be_copied: bool) -> None:
        """The learner copies its weights once for all who read them; what was broadcast first, and failed, or somebody needs, once more."""
        self.exports[version] += 1
        if self.exports[version] > (3 if may_be_copied else 1):
            self.refuse(f"version {version} is exported {self.exports[version]} times")

    def is_hashed(self, version: int) -> None:
        self.exports["hash", version] += 1
        if self.exports["hash", version] > 1:
            self.refuse(f"the checksums of version {version} are made {self.exports['hash', version]} times")

    def can_not_be_read(self, groups: Iterable[Any]) -> None:
        """The driver hears from the service that these groups' tokens are gone."""
        self._unreadable += [group.payload for group in groups]

    def are_drawn(self, groups: Iterable[Any]) -> None:
        """The service is to pull them."""
        for group in groups:
            if self._unreadable and any(group.payload is payload for payload in self._unreadable) and self._losses(group.group_id):
                self.refuse(f"group {group.group_id} is drawn again, though the driver knows that its tokens are lost")

    # -- tokens ------------------------------------------------------------------------------------------------------

    def are_given(self, prompt_id: str, tokens: int) -> None:
        """An engine has sampled so many for a prompt."""
        if "held_out" not in prompt_id:
            self._given[int(prompt_id.rpartition("/")[2])] += tokens

    def _check_tokens(self, ledger: bytes) -> None:
        """Each line balances; what it calls trained the learner had, and what it calls sampled was. Without faults that is all that was."""
        for line in ledger.splitlines():
            record = json.loads(line)
            position = int(record["prompt_id"].rpartition("/")[2])
            sampled, trained, *others = (record.get(name, 0) for name in ("sampled", "trained", "discarded", "lost"))
            if sampled != trained + sum(others):
                self.refuse(f"tokens don't balance: {record}")
            if trained != (self._got[position] if record["outcome"] == "trained" else 0):
                self.refuse(f"the learner got {self._got[position]} tokens of prompt {position}, and the ledger says {record}")
            given = self._given[position]
            if sampled > given or (sampled < given and not self._is_disturbed):
                self.refuse(f"{given} tokens were sampled for prompt {position}, and the ledger says {record}")

    # -- training ----------------------------------------------------------------------------------------------------

    def trains(self, weights: Weights, batch: PackedBatch) -> None:
        """A batch reaches the learner."""
        groups: list[int] = batch.group_ids.unique().tolist()
        if twice := sorted(set(groups) & set(weights.trained)):
            self.refuse(f"groups {twice} are trained a second time, at version {weights.version}")
        if len(groups) != self._groups_per_step:
            self.refuse(f"a batch of {len(groups)} groups instead of {self._groups_per_step}, at version {weights.version}")
        rollouts = range(batch.num_sequences) if batch.rollout_ids is None else batch.rollout_ids.tolist()
        of_groups = Counter(group for group, _ in set(zip(batch.group_ids.tolist(), rollouts, strict=True)))
        if others := {group: count for group, count in of_groups.items() if count != SAMPLES}:
            self.refuse(f"groups with another number of rollouts than {SAMPLES}, by id: {others}; a branch is none of its own")
        sequences = zip(batch.group_ids.tolist(), pairwise(batch.offsets.tolist()), strict=True)
        got = Counter(group for group, (start, end) in sequences for sampled in batch.loss_mask[start:end].tolist() if sampled)
        self._got.update({group: got[group] - self._got[group] for group in groups})
        lineage = (*weights.ancestors, weights.name)
        tokens = zip(batch.token_ids.tolist(), batch.weight_versions.tolist(), batch.loss_mask.tolist(), strict=True)
        for token, version, is_response in tokens:
            if not is_response:
                continue
            if version < 0:
                self.refuse(f"a token without a version in the batch of version {weights.version}")
            if not 0 <= weights.version - version <= self._max_staleness:
                self.refuse(f"a token of version {version} in the batch of version {weights.version}, bound {self._max_staleness}")
            if lineage[version] != token:
                where = f"of version {lineage.index(token)}" if token in lineage else "of no weights that these come from"
                self.refuse(f"a token that says version {version} was sampled by weights {where}; trained at version {weights.version}")

        self._check_turns(batch)

    def _check_turns(self, batch: PackedBatch) -> None:
        """Between two turns stands what was read there, whole and once, whoever went on with the answer."""
        ids, masks, offsets = batch.token_ids.tolist(), batch.loss_mask.tolist(), batch.offsets.tolist()
        for start, end in pairwise(offsets):
            first = next((i for i in range(start, end) if masks[i]), end)
            runs = [[ids[i] for i in run] for is_sampled, run in groupby(range(first, end), key=masks.__getitem__) if not is_sampled]
            for turn, run in enumerate(runs, 1):
                if run[0] - READ - 100 * turn != len(run) or run[1:] != [READ] * (len(run) - 1):
                    self.refuse(f"before turn {turn} of {len(runs)} of a sequence, {run} was read")

    def trained(self, weights: Weights) -> None:
        self.weights = weights
        self._known.add(weights)

    def new_learner(self, weights: Weights) -> int:
        """One begins. Returns: its number."""
        self._learners += 1
        self.weights = weights
        self._known.add(weights)
        return self._learners

    def restored(self, weights: Weights) -> None:
        """A learner goes on from a checkpoint."""
        if weights not in self._known:
            self.refuse(f"a resume goes on from weights that never were, by their name and history, at version {weights.version}")
        self.weights = weights

    def is_sampled(self, group: GroupFacts) -> None:
        """A worker's answer counts."""
        why = "rewards all alike" if self._dynamic_sampling and group.is_uniform(by_turn=False) else ""
        self._worth[int(group.prompt_id.rpartition("/")[2])] = why if group.is_trainable else "fewer than two valid trajectories"

    def _check_reasons(self, ledger: bytes) -> None:
        """What a worker has answered is discarded for what was wrong with it, and for nothing else; anything else for want of an answer."""
        for line in ledger.splitlines():
            record = json.loads(line)
            position, outcome = int(record["prompt_id"].rpartition("/")[2]), record["outcome"]
            is_for_want = outcome in ("no usable answer", "lost with several engines")
            if outcome != "trained" and not is_for_want and outcome != self._worth.get(position):
                self.refuse(f"prompt {position} is discarded ({outcome}), and its answers were: {self._worth.get(position) or 'good'}")
            if is_for_want and position not in self._given_up:
                self.refuse(f"prompt {position} is discarded ({outcome}), and nobody has given it up")

    # -- the ledger --------------------------------------------------------------------------------------------------

    def step_ended(self, number: int, ledger: bytes, book: Any) -> None:
        """A step is settled: the ledger says what the weights know, and with the book it has every prompt once.

        Args: ledger: its file, and the lines that are on their way to it.
        """
        assert self.weights is not None
        trained, discarded = read_ledger(ledger)
        self._check_reasons(ledger)
        self._check_tokens(ledger)
        known = set(self.weights.trained)
        if trained != known:
            extra, lacking = _told(trained - known), _told(known - trained)
            self.refuse(f"step {number}: the ledger calls {extra} trained, the weights don't; it lacks {lacking}, which they know")
        if both := discarded & known:
            self.refuse(f"step {number}: {_told(both)} were trained, and the ledger calls them discarded")
        counts, held = book.counts(), {int(prompt_id.rpartition("/")[2]) for prompt_id in book.outstanding()}
        all_of_them = trained | discarded | held
        if missing := set(range(counts["admitted"])) - all_of_them:
            unreported = {int(group.prompt_id.rpartition("/")[2]) for group in book.unreported}
            if missing - unreported:
                self.refuse(f"step {number}: prompts {_told(missing - unreported)} are nowhere: {counts['admitted']} were admitted")
        if twice := (trained | discarded) & held:
            self.refuse(f"step {number}: {_told(twice)} have left by the ledger, and the book holds them")

    def is_saved(self, name: str, step: int, *, keep: int) -> None:
        """A checkpoint is told to be complete. Older ones than the newest `keep` may be removed from now on."""
        self.saved[name] = step
        newest = sorted(self.saved.values())[-keep:]
        self.saved = {name: saved for name, saved in self.saved.items() if saved in newest}

    def is_written(self, step: int, folder: Path, mark: Any, *, is_flushed: bool) -> None:
        """A checkpoint of this step is told to be complete: what it says of other files is in them.

        Args:
            mark: how far the ledger has come, as the checkpoint has it.
            is_flushed: the disk was not full when all lines were to be written.
        """
        ledger = (folder / "ledger.jsonl").read_bytes() if mark.bytes else b""
        if (len(ledger[: mark.bytes]), zlib.crc32(ledger[: mark.bytes])) != (mark.bytes, mark.crc32):
            self.refuse(f"the checkpoint of step {step} counts on {mark.lines} lines of the ledger, which are not all on disk")
        lacking = self._lacking(step, folder)
        if is_flushed and (new := lacking - self._known_lacking(step)):
            self.refuse(f"the checkpoint of step {step} is complete, and the lines of steps {_told(new)} are not on disk")
        self._lines_lacking[step] = lacking

    def _known_lacking(self, step: int) -> set[int]:
        """Of the last checkpoint up to there that was told. (A crash may come between one that is whole and its telling.)"""
        return self._lines_lacking[max(saved for saved in self._lines_lacking if saved <= step)]

    def _lacking(self, step: int, folder: Path) -> set[int]:
        """Steps up to this one that have no line of numbers. Raises: ViolationError for one that has two."""
        path = folder / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
        if sorted(set(steps)) != steps:
            self.refuse(f"metrics.jsonl has the steps {steps}")
        return set(range(1, step + 1)) - set(steps)

    def resumed(self, step: int, damaged: Iterable[str], folder: Path) -> None:
        """The run goes on at this step. What was called complete, and was not damaged since, is not lost."""
        self._lines_lacking = {saved: lacking for saved, lacking in self._lines_lacking.items() if saved <= step}
        self._lines_lacking.setdefault(step, self._known_lacking(step))
        if new := self._lacking(step, folder) - self._lines_lacking[step]:
            self.refuse(f"the run goes on at step {step}, and the lines of steps {_told(new)} are gone")
        whole = [saved for name, saved in self.saved.items() if name not in set(damaged)]
        if whole and step < max(whole):
            self.refuse(f"the run goes on at step {step}, though a whole checkpoint of step {max(whole)} was told")
        self.saved = {name: saved for name, saved in self.saved.items() if saved <= step}


def read_ledger(content: bytes) -> tuple[set[int], set[int]]:
    """Positions of trained and of discarded prompts. Raises: ViolationError for one that stands there twice."""
    trained: set[int] = set()
    discarded: set[int] = set()
    for line in content.splitlines():
        record = json.loads(line)
        position = int(record["prompt_id"].rpartition("/")[2])
        if position in trained or position in discarded:
            raise ViolationError(f"prompt {position} stands twice in the ledger")
        (trained if record["outcome"] == "trained" else discarded).add(position)
    return trained, discarded


def _told(positions: Iterable[int]) -> str:
    return str(sorted(positions)[:8])
