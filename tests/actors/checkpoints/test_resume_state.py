"""What a restart reads back, and what it refuses: a missing file, other questions, counts that don't add up."""

from __future__ import annotations

import ast
import json
import re
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenkeel.actors.carriers import DiscardedGroup, DiscardReason, GroupTokens
from evenkeel.actors.checkpoints.state import COLUMNS, AnswerLengths, Replacement, TrainingState
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.ledger import LedgerMark
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.early_warning.monitor import Monitor
from evenkeel.correction.errors import DataError
from evenkeel.rollout.trajectory import (
    FailureKind,
    FinishReason,
    KeptTokens,
    LaterReading,
    RoutedExperts,
    TopLogprobs,
    UnfinishedGroup,
    VersionSpan,
    ids_of,
    logprobs_of,
)
from tests.actors.cases import at_hand, group, prompt, prompts, snapshot_of
from tests.test_layers import ROOT, imports


@pytest.fixture
def state() -> TrainingState:
    """After one step of two groups: two drawn, one discarded and unreported, one in flight."""
    book = GroupBook(groups_per_step=2, max_staleness=1, dynamic_sampling=True)
    for ticket in book.admit(prompts(0, 4), now=0.0):
        book.finish(at_hand(group(ticket, rewards=(1.0, 1.0) if ticket.group_id == 3 else (0.0, 1.0))), now=0.0)
    book.settle(1, 1, [g.group_id for g in book.draw(0, 2)], now=0.0)
    book.finish(at_hand(group(book.admit(prompts(4, 6), now=0.0)[0])), now=0.0)
    assert [one.group_id for one in book.draw(1, 2)] == [2, 4]
    monitor = Monitor()
    monitor.update(1, {"k3_kl": 1e-3})
    replacement = Replacement(CorrectionConfig(), CorrectionConfig.model_validate({"preset": "icepop"}))
    lengths = AnswerLengths((250.5, 300.0), 2, 0.5)
    return TrainingState(1, 1, 12.5, snapshot_of(book), {"groups/refilled_total": 3.0}, monitor.state_dict(), replacement, lengths=lengths)


def test_round_trip(state: TrainingState, tmp_path: Path) -> None:
    state.save(tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "who may read one of its files may read all"
    loaded = TrainingState.load(tmp_path)
    assert loaded == state
    book = loaded.book
    assert (book.admitted, book.trained, book.discarded) == (6, 2, 1)
    assert [t.group_id for t in book.in_flight] == [5] and [g.group_id for g in book.finished] == [2, 4]
    assert book.unreported == (DiscardedGroup("train/0/3", DiscardReason.UNIFORM, GroupTokens(sampled=4, discarded=4)),)
    assert book.discarded_by_reason == {DiscardReason.UNIFORM: 1}
    assert {type(reason) for reason in (*book.discarded_by_reason, book.unreported[0].reason)} == {DiscardReason}


def test_no_call_of_the_encoder_has_more_than_one_text(state: TrainingState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the interpreter's lock until it returns, and so the event loop of the run, beside which a thread writes the state: for all
    groups of a large run together that would be tenths of a second."""
    open_file, pieces = Path.open, list[str]()

    class Recorded:
        def __init__(self, path: Path, *mode: Any, **named: Any) -> None:
            self._file = open_file(path, *mode, **named)

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, piece: str) -> None:
            pieces.append(piece)
            self._file.write(piece)

        def writelines(self, lines: Iterable[str]) -> None:
            for line in lines:
                self.write(line)

    long = 'word "' * 3000
    finished = [replace(one, trajectories=tuple(replace(t, text=long) for t in one.trajectories)) for one in state.book.finished]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *of_path, **named: Recorded(*of_path, **named))
        replace(state, book=replace(state.book, finished=tuple(finished))).save(tmp_path)
    assert max(map(len, pieces)) <= len(json.dumps(long)) < len("".join(pieces)) / 4
    assert "".join(pieces) == json.dumps(json.loads("".join(pieces))), "as one call would write it, and as checkpoints always had it"
    assert TrainingState.load(tmp_path).book.finished == tuple(finished)


def test_all_that_a_trajectory_may_have_comes_back(state: TrainingState, tmp_path: Path) -> None:
    """Bit for bit and type for type: narrow arrays, numbers that are not finite, half of a surrogate pair, no reward."""
    (first, *others) = state.book.finished
    answer = replace(
        first.trajectories[0],
        behavior_logprobs=logprobs_of((-0.1, float("-inf"))),
        version_spans=(VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)),
        top_logprobs=TopLogprobs(2, array("i", [1, 2, 3, 2**31 - 1]), array("f", [-0.1, -0.2, -0.3, -0.4])),
        kept_tokens=KeptTokens.of([(7, 2**31 - 1, 0), ()]),
        routed_experts=RoutedExperts(1, 1, array("B", [0, 255])),
        text="half \ud800 and \0",
        reward=None,
        error="no",
        failure=FailureKind.REWARD_TIMEOUT,
    )
    empty = replace(
        answer, response_ids=ids_of(()), behavior_logprobs=logprobs_of(()), version_spans=(), top_logprobs=None, kept_tokens=None
    )
    wide = replace(empty, routed_experts=RoutedExperts(1, 1, array("h", [0, 300])))
    group = replace(first, trajectories=(answer, wide))
    so_far = UnfinishedGroup(5, (replace(answer, later=(LaterReading(1, ids_of([9, 8])),), branches=(answer,)), wide), 1.5)
    book = replace(state.book, finished=(group, *others), so_far=(so_far,))
    changed = replace(state, book=book, totals={"a": np.float32(0.5)})  # type: ignore[dict-item]
    changed.save(tmp_path)
    loaded = TrainingState.load(tmp_path)
    assert loaded == replace(changed, totals={"a": 0.5})
    assert [t.routed_experts.ids.typecode for t in loaded.book.finished[0].trajectories if t.routed_experts] == ["B", "h"]
    assert type(loaded.book.finished[0].trajectories[0].finish_reason) is FinishReason
    assert type(loaded.book.finished[0].trajectories[0].failure) is FailureKind


def test_a_state_without_kinds_of_failures_is_read(state: TrainingState, tmp_path: Path) -> None:
    """Earlier versions kept only the message; such a trajectory is as failed as before."""
    (first, *others) = state.book.finished
    failed = replace(first.trajectories[0], reward=None, error="no")
    state = replace(state, book=replace(state.book, finished=(replace(first, trajectories=(failed,)), *others)))
    state.save(tmp_path)
    path = tmp_path / "controller.json"
    text, taken_out = re.subn(r'"failure": null,? ?', "", path.read_text())
    path.write_text(text.replace(", }", "}"))
    loaded = TrainingState.load(tmp_path)
    assert taken_out and loaded == state
    assert loaded.book.finished[0].failures == ((FailureKind.REWARD, "no"),)


def test_prompts_are_the_tasks_again(state: TrainingState, tmp_path: Path) -> None:
    """Their metadata may be anything, and are not kept; a question that is another one by now is named."""
    with_metadata = {n: replace(prompt(n), metadata={"made": (n, {1: object})}) for n in range(6)}
    state.with_prompts_of(with_metadata.__getitem__).save(tmp_path)
    loaded = TrainingState.load(tmp_path)
    assert {ticket.prompt.prompt_id: ticket.prompt.metadata for ticket in loaded.book.in_flight} == {"train/0/5": {}}
    whole = loaded.with_prompts_of(with_metadata.__getitem__)
    assert whole.book.in_flight[0].prompt is with_metadata[5] and whole.book.finished[0].prompt is with_metadata[2]
    with pytest.raises(DataError, match=r"its question 4 is train/0/4 'another', but the run asked train/0/4 'question 4' there"):
        loaded.with_prompts_of(lambda n: replace(prompt(n), text="another" if n == 4 else prompt(n).text))


@pytest.mark.parametrize(("field", "ids"), [("in_flight", "train/0/2, train/0/4"), ("finished", "train/0/5")])
def test_lost_groups_are_refused(state: TrainingState, tmp_path: Path, field: str, ids: str) -> None:
    replace(state, book=replace(state.book, **{field: ()})).save(tmp_path)
    said = rf"lost or doubled prompts: 6 groups admitted, but 2 trained, 1 discarded and \d under way \({ids}\)"
    with pytest.raises(DataError, match=said):
        TrainingState.load(tmp_path)


def test_a_doubled_group_is_named(state: TrainingState, tmp_path: Path) -> None:
    book = state.book
    replace(state, book=replace(book, in_flight=(book.in_flight[0],) * 2, finished=book.finished[:1])).save(tmp_path)
    with pytest.raises(DataError, match="twice among the prompts under way: train/0/5"):
        TrainingState.load(tmp_path)


def test_a_ledger_of_another_length_is_refused(state: TrainingState, tmp_path: Path) -> None:
    """2 trained and 1 discarded, of which one is not reported yet: 2 lines."""
    replace(state, ledger=LedgerMark(lines=2)).save(tmp_path)
    assert TrainingState.load(tmp_path).ledger == LedgerMark(lines=2)
    replace(state, ledger=LedgerMark(lines=3)).save(tmp_path)
    with pytest.raises(DataError, match=r"the ledger has 3 lines, but 2 prompts were trained or discarded, .*\(train/0/3\)"):
        TrainingState.load(tmp_path)


def test_a_missing_file_is_refused(state: TrainingState, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a complete checkpoint"):
        TrainingState.load(tmp_path)
    state.save(tmp_path)
    (tmp_path / "groups.safetensors").unlink()
    with pytest.raises(DataError, match=r"groups.safetensors: damaged, no state can be read from it"):
        TrainingState.load(tmp_path)
    state.save(tmp_path)
    (tmp_path / "controller.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"controller.json: damaged, no state can be read from it"):
        TrainingState.load(tmp_path)


def test_arrays_that_can_not_be_written_are_an_error_of_the_disk(state: TrainingState, tmp_path: Path) -> None:
    """Which one failed checkpoint more is made of; safetensors has an error of its own for it, which would end a healthy run."""
    (tmp_path / COLUMNS).mkdir()
    with pytest.raises(OSError, match=rf"{COLUMNS}: Error while serializing: .*Is a directory"):
        state.save(tmp_path)


def test_reading_a_state_runs_nothing() -> None:
    """No module by which a checkpoint is read imports what unpickles, or has torch or numpy load a file, which may unpickle."""
    of_actors = ["actors/checkpoints/state.py", "actors/groups/ledger.py"]
    of_learner = [*(f"learner/weights/{name}.py" for name in ("checkpoint", "checkpoint_files", "file_sums")), "learner/hf/tensor_files.py"]
    imported: set[str] = set()
    for path in (ROOT / name for name in (*of_actors, *of_learner)):
        found = list(ast.walk(ast.parse(path.read_text())))
        imported |= {name.split(".")[0] for _, name in imports(path)}
        parts = [node for node in found if isinstance(node, ast.Attribute)]
        assert {ast.unparse(part) for part in parts}.isdisjoint({"torch.load", "torch.serialization", "np.load", "numpy.load"}), path
    assert "safetensors" in imported, "no import was seen"
    assert imported.isdisjoint({"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
