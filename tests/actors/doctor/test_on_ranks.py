"""What the doctor measures in the learner's ranks: every kind of group is found, and a wrong number in a result is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from actors.doctor.deep_facts import CollectiveFact
from actors.doctor.on_ranks import collectives
from learner.config import LearnerConfig
from learner.model import parallel
from tests.learner.learner_cases import run_ranks

NBYTES = 1 << 12


def measured(rank: int, ranks: int, port: int, layout: dict[str, Any]) -> tuple[list[CollectiveFact], list[CollectiveFact]]:
    """On sound groups, and where the last number of whatever rank 1 receives or adds up is one too high."""
    placement = parallel.join(LearnerConfig(**layout).on_this_machine(), rank, ranks, "127.0.0.1", port)
    actor = SimpleNamespace(learner=SimpleNamespace(placement=placement))
    try:
        sound = collectives(actor, NBYTES)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("recv", "all_reduce"):
                patch.setattr(dist, name, _off_by_one(getattr(dist, name)) if rank == 1 else getattr(dist, name))
            return sound, collectives(actor, NBYTES)
    finally:
        parallel.leave()


def _off_by_one(call: Any) -> Any:
    def wrong(tensor: Any, **options: Any) -> None:
        call(tensor, **options)
        tensor[-1] += 1

    return wrong


@pytest.mark.parametrize(
    ("kind", "operation"), [("pipeline_parallel", "send"), ("tensor_parallel", "all_reduce"), ("data_parallel", "all_reduce")]
)
def test_each_kind_of_group_is_measured_and_its_numbers_are_looked_at(kind: str, operation: str) -> None:
    by_rank = run_ranks(measured, {kind: 2})
    for rank, (sound, wrong) in enumerate(by_rank):
        assert [(one.group, one.operation, one.ranks, one.bytes, one.is_inside_a_node) for one in sound + wrong] == [
            (kind, operation, 2, NBYTES, True)
        ] * 2, "one group of two ranks, both on this machine"
        assert [one.is_right for one in sound + wrong] == [True, rank == 0]
        assert 0 < sound[0].seconds < float("inf")
