"""Errors of a rank whose process lives: those of its device and of collectives are told in a sentence, a bug stays what it is."""

from __future__ import annotations

import logging
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenkeel.actors.ranks.collective_calls import as_rank_failure
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.correction.errors import ActorLost, DataError, RankFailed, StepAborted
from evenkeel.learner.config import LearnerConfig

CUDA = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call"
MEMORY = r"^learner rank 1: out of memory in step \({}\); lower learner.tokens_per_microbatch, "
FAILED = r"^learner rank 1: its device or a collective has failed in step \({}\)$"


class Failing:
    """In place of what a rank drives."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def begin_save(self, *_: Any) -> None:
        self.calls += 1
        raise self.error

    is_saved = begin_save

    def sequences_read(self, *_: Any, step: int) -> Any:
        self.begin_save()


def rank_that_raises(error: Exception) -> tuple[LearnerRankActor, Failing]:
    actor, learner = LearnerRankActor(LearnerConfig(), 1, bind=""), Failing(error)
    actor._learner = learner  # type: ignore[assignment]
    return actor, learner


def sentence(error: BaseException) -> str:
    failure = as_rank_failure(error, "learner rank 1", "step")
    assert isinstance(failure, RankFailed) and failure.rank == "learner rank 1" and failure.__cause__ is error
    return str(failure)


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MEMORY.format("OutOfMemoryError: CUDA .* 2.00 GiB")),
        (torch.AcceleratorError("CUDA error: out of memory"), MEMORY.format("AcceleratorError: CUDA error: out of memory")),
        (MemoryError(), MEMORY.format("MemoryError")),
        (torch.AcceleratorError(CUDA), FAILED.format("AcceleratorError: CUDA error: an illegal memory access was encountered")),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), FAILED.format("RuntimeError: CUDA error: CUBLAS.*")),
        (dist.DistBackendError("NCCL error in: a.cpp:1"), FAILED.format("DistBackendError: NCCL error in: a.cpp:1")),
        (dist.DistNetworkError("The client socket has timed out"), FAILED.format("DistNetworkError: The client .* timed out")),
    ],
    ids=["torch's memory", "a GPU's memory", "Python's memory", "an illegal access", "cuBLAS", "NCCL", "a network"],
)
def test_a_fault_of_a_device_or_a_collective_is_told_in_a_sentence(error: Exception, expected: str) -> None:
    assert matches(expected, sentence(error)), sentence(error)


def test_memory_that_a_cpu_does_not_have_is_told_in_a_sentence() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert matches(MEMORY.format("RuntimeError: .*can't allocate memory: .*"), sentence(found.value))


def test_a_connection_between_two_ranks_that_breaks_is_told_in_a_sentence() -> None:
    """Gloo's own words: both live, and one of them leaves the group while the other waits for it."""
    store, limit = dist.HashStore(), timedelta(seconds=30)
    with ThreadPoolExecutor(2) as threads:
        groups: list[Any] = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))
    groups.pop()
    with pytest.raises(RuntimeError) as found:
        groups[0].allreduce([torch.zeros(2)]).wait()
    assert matches(FAILED.format("RuntimeError: .*gloo/.*"), sentence(found.value)), found.value


@pytest.mark.parametrize(
    "error",
    [
        *(KeyError("w1"), AssertionError("no batch"), TypeError("of None"), DataError("the disk is full"), StepAborted("at once")),
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
    ],
    ids=repr,
)
def test_a_bug_and_what_is_told_already_stay_what_they_are(error: Exception) -> None:
    assert as_rank_failure(error, "learner rank 1", "step") is error
    actor, _ = rank_that_raises(error)
    for call in (lambda: actor.begin_save(1, Path("a"), Path("b")), actor.is_saved):
        with pytest.raises(type(error)) as found:
            call()
        assert found.value is error


def test_a_rank_tells_whoever_asks_and_its_log_has_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Asked again under the same number, it says the same, and does nothing twice. The sentence crosses processes."""
    actor, learner = rank_that_raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with caplog.at_level(logging.ERROR, "evenkeel.ranks"):
        for _ in range(2):
            with pytest.raises(ActorLost, match=r"^learner rank 1: out of memory in begin_save \(OutOfMemoryError: CUDA out of") as found:
                actor.begin_save(1, Path("a"), Path("b"))
    assert learner.calls == 1 and caplog.text.count("Traceback") == 1 and "in begin_save" in caplog.text
    there = pickle.loads(pickle.dumps(found.value))
    assert isinstance(there, RankFailed) and (there.rank, str(there)) == ("learner rank 1", str(found.value))
    with pytest.raises(RankFailed, match=r"^learner rank 1: out of memory in is_saved "):
        actor.is_saved()
    packed: Any = SimpleNamespace(wide=(), num_sequences=2)
    with pytest.raises(RankFailed, match=r"^learner rank 1: out of memory in fetch ") as fetching:
        actor.fetch(packed, None, 3, 60.0, everything=False)
    assert fetching.value.rank == "learner rank 1", "by which the run ends it and goes back"
