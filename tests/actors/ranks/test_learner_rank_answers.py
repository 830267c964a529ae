"""What leaves a learner rank, and from where: rank 0 alone answers, and a broadcast takes tensors as they lie on the rank's device."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from evenkeel.actors.carriers import ExportPlan
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.correction.correct import correct
from evenkeel.correction.errors import SyncError
from evenkeel.engines.rendezvous import Rendezvous, rendezvous_store
from evenkeel.engines.weights import WeightBucket, digest_of, in_float8, tensor_checksum
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from lab.ports import free_port
from tests.actors.weights.rank_pieces import Pieces, rank_with
from tests.learner.learner_cases import TIS, learner_on, masters, off_policy_batch, random_batch, save_model


class Silent:
    """Where metrics would go."""

    def set(self, *_: Any) -> None: ...


def tokens_in(answer: Any) -> int:
    """Elements of all tensors that an answer holds."""
    if isinstance(answer, Tensor):
        return answer.numel()
    parts = answer if isinstance(answer, tuple) else [getattr(answer, name) for name in getattr(answer, "__slots__", ())]
    return sum(tokens_in(part) for part in parts)


def test_rank_zero_alone_answers_of_a_batch(tmp_path: Path) -> None:
    """Every rank computes all numbers of all tokens; from each of them they would cross the network and fill the store."""
    batch = random_batch(0, groups=2)
    held: dict[int, list[int]] = {}
    with learner_on(save_model(tmp_path / "m")) as learner:
        corrected = correct(replace(batch, proximal_logprobs=learner.logprobs(batch)), TIS)
        for rank in (0, 1):
            actor = LearnerRankActor(LearnerConfig(), rank, bind="")
            actor._learner, actor._kept, actor._endpoint = learner, KeptWeights(learner), Silent()  # type: ignore[assignment]
            actor.load_reference(1, tmp_path / "m")
            answers = [
                actor.proximal(2, batch, 0),
                actor.reference_logprobs(3, batch, 0),
                actor.at_sampling(4, batch, 0, 0, True),
                actor.step(5, corrected, TIS, 0, 1.0),
            ]
            held[rank] = [tokens_in(answer) for answer in answers]
    n = batch.num_tokens
    assert held[0][:3] == [n, n, 2 * n] and held[0][3] >= 3 * n
    assert held[1] == [0, 0, 0, 0]


def test_float8_leaves_the_learner_s_own_weights_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engines get, with checksums of that, is made of the bfloat16 weights; those are the same afterwards.

    After a step, because before it the float32 masters, of which float8 is another, equal the weights.
    """
    stored: dict[str, Tensor] = {}

    def put(value: Any) -> Any:
        if isinstance(value, WeightBucket):
            stored.update({name: one.clone() for name, one in value.tensors().items()})
        return value

    monkeypatch.setattr(ray, "put", put)
    with learner_on(save_model(tmp_path / "m"), dtype="bfloat16", learning_rate=1e-3) as learner:
        learner.step(correct(off_policy_batch(learner), TIS), TIS, step=0)
        before = {name: one.clone() for piece in learner.weights() for name, one in piece.items()}
        actor = LearnerRankActor(LearnerConfig(dtype="bfloat16"), 0, bind="")
        actor._learner = learner
        snapshot = actor.export(1, 0, ExportPlan(8_000, checksums=True, float8=True))
        after = {name: one for piece in learner.weights() for name, one in piece.items()}
        by_master = masters(learner)
        assert before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())
    expected = in_float8(before)
    assert len(expected) > len(before) and {one.dtype for one in before.values()} == {torch.bfloat16}
    of_masters = in_float8(by_master)
    assert any(tensor_checksum(of_masters[name]) != tensor_checksum(one) for name, one in expected.items() if name not in before)
    assert {name: tensor_checksum(one) for name, one in expected.items()} == {name: tensor_checksum(one) for name, one in stored.items()}
    assert snapshot is not None and snapshot.checksums is not None
    assert snapshot.checksums.by_name == {name: tensor_checksum(one) for name, one in expected.items()}
    assert snapshot.checksums.digest == digest_of(snapshot.checksums.by_name)
    assert {spec.name for bucket in snapshot.specs for spec in bucket} == expected.keys()


def test_what_is_broadcast_are_the_learner_s_own_tensors() -> None:
    """Not copies: those would lie on the host, and NCCL takes nothing from there."""
    sent: dict[str, Tensor] = {}

    class Broadcaster:
        def begin(self, tensors: dict[str, Tensor]) -> None:
            sent.update(tensors)

        def finish(self) -> None: ...

    pieces = Pieces(is_contiguous=False)
    actor = rank_with(pieces)
    actor._broadcaster = Broadcaster()  # type: ignore[assignment]
    snapshot = actor.export(1, 0, ExportPlan(8, stores=False, broadcasts=True))
    assert snapshot is not None and snapshot.broadcast_error == ""
    assert list(sent) == ["w0", "w1", "w2"] and all(sent[f"w{i}"] is tensor for i, tensor in enumerate(pieces.tensors))


def test_a_piece_is_gathered_while_the_one_before_is_on_its_way() -> None:
    """`begin` waits for the bucket before; only the last one is waited for with nothing else to do."""
    done: list[Any] = []

    class Broadcaster:
        def begin(self, tensors: dict[str, Tensor]) -> None:
            done.append(("begin", len(pieces.gathered)))

        def finish(self) -> None:
            done.append("finish")

    pieces = Pieces()
    actor = rank_with(pieces)
    actor._broadcaster = Broadcaster()  # type: ignore[assignment]
    actor.export(1, 0, ExportPlan(8, stores=False, broadcasts=True))
    assert done == [("begin", 1), ("begin", 2), ("begin", 3), "finish"]


def test_a_tensor_on_another_device_than_the_group_s_is_refused_before_anything_is_sent() -> None:
    """gloo would take it, and so hide what NCCL refuses; torch's meta device stands for the other one."""
    port = free_port()
    broadcaster = WeightBroadcaster("127.0.0.1", port, 1, "weights-0", 20.0, torch.device("cpu"))
    try:
        broadcaster.send({"a": torch.zeros(2)})
        with pytest.raises(SyncError, match=r"weights-0: b lies on device meta, .* takes tensors on cpu alone. Set .*: object_store"):
            broadcaster.send({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})
    finally:
        broadcaster.close()


def test_the_port_where_rank_zero_will_listen_is_nobody_elses_until_then() -> None:
    """Seconds lie between, in which the ranks import Megatron: whoever was given the port meanwhile ended the start."""
    rank = LearnerRankActor(LearnerConfig(), 0, bind="")
    host, port = rank.address()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    store = rendezvous_store(host, port, rank=0, world_size=1, timeout=timedelta(seconds=30))
    store.set("here", "it is")
    assert store.get("here") == b"it is" and rank.address() != (host, port)


def test_the_store_of_a_weight_group_is_there_from_before_the_join_until_the_group_is_given_up() -> None:
    """A member that has come to it before hears what becomes of the group; one that comes later finds nobody."""
    rank = rank_with(Pieces())
    rank._learner.placement = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    host, port = rank.serve_broadcast(3, "weights-0-1", 20.0)
    meeting = Rendezvous(host, port, "weights-0-1", timeout=timedelta(seconds=20))
    meeting.arrive()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(rank.open_broadcast, host, port, 3, "weights-0-1", 20.0)
        while not rank._group_name:
            time.sleep(0.01)
        rank.close_broadcast("weights-0-1")
        with pytest.raises(SyncError, match="weights-0-1: group was not built: the learner has left it meanwhile"):
            opening.result(20)
    while not meeting.is_given_up():
        time.sleep(0.01)
    host, port = rank.serve_broadcast(3, "weights-0-2", 20.0)
    rank.close_broadcast("weights-0-2")
    with pytest.raises(DistNetworkError):
        Rendezvous(host, port, "weights-0-2", timeout=timedelta(seconds=1))
