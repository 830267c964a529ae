"""What a restart reads back, and what it refuses: a missing or foreign file, counts that don't add up."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from actors.alarms import Replacement
from actors.resume import OtherVersionError, TrainingState
from actors.trajectory_queue import TrajectoryQueue
from correction.config import CorrectionConfig
from correction.errors import DataError
from correction.monitor import Monitor
from tests.actors.cases import group, prompts


@pytest.fixture
def state() -> TrainingState:
    """After one step of two groups: one finished, one drawn, one discarded and unreported, one in flight."""
    queue = TrajectoryQueue(groups_per_step=2, max_staleness=1)
    tickets = queue.admit(prompts(0, 4))
    for ticket in tickets:
        queue.put(group(ticket))
    first = [g.group_id for g in queue.draw(0, 2)]
    queue.publish(1)
    queue.settle(first)
    later = queue.admit(prompts(4, 6))
    queue.put(group(later[0]))
    queue.draw(1, 1)
    queue.discard([3], "rewards all alike")
    monitor = Monitor()
    monitor.update(1, {"k3_kl": 1e-3})
    replacement = Replacement(CorrectionConfig(), CorrectionConfig.model_validate({"preset": "icepop"}))
    return TrainingState(1, 1, 12.5, queue.snapshot(), {"groups/refilled_total": 3.0}, monitor.state_dict(), replacement)


def test_round_trip(state: TrainingState, tmp_path: Path) -> None:
    state.save(tmp_path)
    loaded = TrainingState.load(tmp_path)
    assert loaded == state
    assert loaded.prompt_position == 6
    queue = loaded.queue
    assert (queue.admitted, queue.trained, queue.discarded) == (6, 2, 1)
    assert [t.group_id for t in queue.in_flight] == [5] and [g.group_id for g in queue.finished] == [2, 4]
    assert queue.unreported == (("train/0/3", "rewards all alike"),)


@pytest.mark.parametrize("field", ["in_flight", "finished"])
def test_lost_groups_are_refused(state: TrainingState, tmp_path: Path, field: str) -> None:
    replace(state, queue=replace(state.queue, **{field: ()})).save(tmp_path)
    with pytest.raises(DataError, match=r"6 groups admitted, but 2 trained, 1 discarded and .* the checkpoint has lost or doubled prompts"):
        TrainingState.load(tmp_path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no complete checkpoint"):
        TrainingState.load(tmp_path)
    (tmp_path / "controller.pickle").write_bytes(pickle.dumps({"format": 99}))
    with pytest.raises(OtherVersionError, match=r"written by a later version of evenkeel .its format is 99, this version's 4"):
        TrainingState.load(tmp_path)


@pytest.mark.parametrize("gone", ["actors.gone", "actors.resume"], ids=["module", "class"])
@pytest.mark.parametrize("is_format_3", [True, False], ids=["format 3", "this format"])
def test_a_state_of_an_earlier_version_says_so(tmp_path: Path, gone: str, is_format_3: bool) -> None:
    """Its pickle names a module or a class that is no more, which is no damage; the weights beside it can be trained on."""
    state = f"c{gone}\nGone\n.".encode()  # protocol 0: a global, and the end
    content = b"(S'format'\nI3\nS'state'\n" + state[:-1] + b"d." if is_format_3 else pickle.dumps({"format": 4, "state": state})
    (tmp_path / "controller.pickle").write_bytes(content)
    with pytest.raises(OtherVersionError) as caught:
        TrainingState.load(tmp_path)
    said = str(caught.value)
    assert "written by an earlier version of evenkeel" in said and "damaged" not in said
    assert said.endswith(f"Start a new run from its weights: model={tmp_path.parent / 'hf'}")


def test_format_3_with_classes_that_are_still_there_is_of_an_earlier_version(state: TrainingState, tmp_path: Path) -> None:
    (tmp_path / "controller.pickle").write_bytes(pickle.dumps({"format": 3, "state": state}))
    with pytest.raises(OtherVersionError, match=r"written by an earlier version of evenkeel .its format is 3"):
        TrainingState.load(tmp_path)
