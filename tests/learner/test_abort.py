"""A step that is aborted ends on all ranks before the same micro-batch, and leaves weights and optimizer as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenkeel.correction.correct import correct
from evenkeel.correction.errors import DeadlineExceeded, StepAborted
from evenkeel.learner.training import step as training_step
from evenkeel.learner.training.step import Abort
from tests.learner.learner_cases import TIS, learner_on, off_policy_batch, save_model, weights

MICROBATCHES = 6


class Ranks:
    """Threads that meet in each micro-batch, as ranks do in its collectives."""

    def __init__(self, count: int, pauses_s: list[float]) -> None:
        self.aborts = [Abort() for _ in range(count)]
        self.begun = [0] * count
        self.ended: list[str] = [""] * count
        self._meeting, self._pauses_s = threading.Barrier(count), pauses_s
        self._threads = [threading.Thread(target=self._work, args=(rank,)) for rank in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self, rank: int) -> None:
        own = self.aborts[rank]
        try:
            with own.during(1):
                for _ in range(MICROBATCHES):
                    time.sleep(self._pauses_s[rank])
                    own.before_microbatch()
                    self.begun[rank] += 1
                    self._meeting.wait(10.0)
                own.too_late()
            self.ended[rank] = "updated"
        except StepAborted:
            self.ended[rank] = "aborted"
        except threading.BrokenBarrierError:
            self.ended[rank] = "waited for a rank that had stopped"

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20.0)


@given(pauses_ms=st.lists(st.integers(0, 3), min_size=2, max_size=4), after_ms=st.integers(0, 20))
@example(pauses_ms=[0, 3], after_ms=2)
@settings(max_examples=25, deadline=None)
def test_all_ranks_end_before_the_same_microbatch_or_none_does(pauses_ms: list[int], after_ms: int) -> None:
    """Whenever the end is asked for, and however far one is ahead of another."""
    ranks = Ranks(len(pauses_ms), [one / 1000 for one in pauses_ms])
    time.sleep(after_ms / 1000)
    places = [one.hold(1) for one in ranks.aborts]
    before = None if None in places else max(place for place in places if place is not None)
    for one in ranks.aborts:
        one.release(1, before)
    ranks.join()
    assert len(set(ranks.ended)) == len(set(ranks.begun)) == 1, (places, ranks.ended, ranks.begun)
    assert ranks.ended[0] == ("updated" if before is None or before == MICROBATCHES else "aborted")
    assert ranks.begun[0] == (MICROBATCHES if ranks.ended[0] == "updated" else before)


def test_a_call_that_has_not_come_yet_ends_before_its_first_microbatch() -> None:
    one = Abort()
    with one.during(1):
        one.before_microbatch()
    assert one.hold(1) is None, "it is over"
    assert [one.hold(2), one.hold(2)] == [0, 0], "asked again, as after a lost answer"
    one.release(2, 0)
    with pytest.raises(StepAborted), one.during(2):
        one.before_microbatch()
    with one.during(3):
        one.before_microbatch()  # one call, not all that come


def test_a_rank_that_nobody_releases_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "_RELEASED_S", 0.05)
    one = Abort()
    one.hold(1)
    with pytest.raises(DeadlineExceeded, match="nobody released it"), one.during(1):
        one.before_microbatch()


def stopping(own: Abort, *, begun: int) -> Callable[[], None]:
    """In the place of `before_microbatch`: asks for the end when so many micro-batches have begun."""
    before, count = own.before_microbatch, 0

    def counted() -> None:
        nonlocal count
        if count == begun:
            own.release(1, own.hold(1))
        count += 1
        before()

    return counted


@pytest.mark.parametrize("begun", [0, 3])
def test_an_aborted_step_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int) -> None:
    """Two steps come to the same bits with and without one in between that is aborted: momenta and gradients are of finished steps."""
    folder = save_model(tmp_path / "m")
    found = []
    for is_aborted in (False, True):
        with learner_on(folder, learning_rate=1e-2, tokens_per_microbatch=64) as learner:
            first, other, last = (correct(off_policy_batch(learner, seed), TIS) for seed in range(3))
            learner.step(first, TIS, step=0)
            if is_aborted:
                with monkeypatch.context() as patch, pytest.raises(StepAborted), learner.abort.during(1):
                    patch.setattr(learner.abort, "before_microbatch", stopping(learner.abort, begun=begun))
                    learner.step(other, TIS, step=1)
            result = learner.step(last, TIS, step=1)
            assert result.microbatches > begun + 1
            found.append(weights(learner))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_has_changed_the_weights_goes_on_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of several optimizer steps, asked to end in the second."""
    with learner_on(save_model(tmp_path / "m"), learning_rate=1e-2, tokens_per_microbatch=64, optimizer_steps_per_batch=2) as learner:
        corrected, before = correct(off_policy_batch(learner), TIS), weights(learner)
        whole = learner.step(corrected, TIS, step=0).microbatches
        monkeypatch.setattr(learner.abort, "before_microbatch", stopping(learner.abort, begun=whole - 1))
        with learner.abort.during(1):
            assert learner.step(corrected, TIS, step=0).optimizer_steps == 2
            assert learner.abort.hold(1) is None
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
