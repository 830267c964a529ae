"""A weight group over gloo with a member in a process of its own: what arrives, what overlaps, and that nobody waits for whom is gone."""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from evenkeel.correction.errors import SyncError
from evenkeel.engines.rendezvous import Rendezvous, gloo_towards, rendezvous_store
from evenkeel.learner.weights.broadcast import WeightBroadcaster, end_to_end
from lab.ports import free_port
from tests.learner.learner_cases import rank_context

NAME = "weights-overlap"
BUCKETS = [{"a": torch.arange(12.0), "b": torch.arange(8, dtype=torch.bfloat16)}, {"c": torch.arange(100.0) * 3}]


def member(port: int, sizes: list[tuple[int, torch.dtype]], pipe: Connection) -> None:
    """Receives a bucket each time it is told to, and says what came; then it is there, and silent."""
    limit = timedelta(seconds=300)
    Rendezvous("127.0.0.1", port, NAME, timeout=limit).arrive()
    store = rendezvous_store("127.0.0.1", port, rank=1, world_size=2, timeout=limit)
    backend, options = gloo_towards("127.0.0.1", psutil.net_if_addrs())
    board, name = PrefixStore(NAME, store), GroupName(NAME)
    group, _ = _new_process_group_helper(2, 1, [], Backend(backend), board, group_name=name, backend_options=options, timeout=limit)
    _world.pg_group_ranks[group] = {i: i for i in range(2)}
    for count, dtype in sizes:
        pipe.recv()
        received = torch.empty(count, dtype=dtype)
        dist.broadcast(received, src=0, group=group)
        pipe.send(received.view(torch.uint8).tolist())
    pipe.recv()


@contextmanager
def group_of_two(bucket_s: float) -> Iterator[tuple[WeightBroadcaster, Connection]]:
    port = free_port()
    ours, theirs = mp.Pipe()
    sent = [end_to_end(bucket) for bucket in BUCKETS]
    other = rank_context().Process(target=member, args=(port, [(one.numel(), one.dtype) for one in sent], theirs))
    other.start()
    try:
        yield WeightBroadcaster("127.0.0.1", port, 2, NAME, 300.0, torch.device("cpu"), bucket_s=bucket_s), ours
    finally:
        other.kill()
        other.join()


def test_a_bucket_is_on_its_way_while_the_next_is_gathered_and_whoever_leaves_waits_for_no_silent_member() -> None:
    """The same bytes arrive. A bucket that nobody takes has five minutes here; to leave takes none of them."""
    with group_of_two(bucket_s=300.0) as (sender, pipe):
        sender.begin(BUCKETS[0])
        assert sender._on_its_way is not None and sender._on_its_way.is_running, "the member doesn't take it yet, and the call is back"
        pipe.send("take it")
        second = threading.Thread(target=sender.begin, args=(BUCKETS[1],))
        second.start()
        pipe.send("take the next")
        received = [pipe.recv(), pipe.recv()]
        second.join()
        sender.finish()
        assert received == [end_to_end(bucket).view(torch.uint8).tolist() for bucket in BUCKETS]
        sender.begin(BUCKETS[0])
        began = time.monotonic()
        sender.close()
        with pytest.raises(SyncError, match=f"weight group {NAME}: broadcast failed: the learner has left it meanwhile"):
            sender.finish()
        assert time.monotonic() - began < 30
        with pytest.raises(SyncError, match="broadcast failed"):
            sender.begin(BUCKETS[0])


def waits_for_a_member(**how: Any) -> tuple[float, str]:
    """Returns: seconds until rank 0 of a group of three waits no more, one of whose members is there, and what it said; that member is
    told."""
    port = free_port()

    def come() -> None:
        meeting = Rendezvous("127.0.0.1", port, NAME, timeout=timedelta(seconds=60))
        meeting.arrive()
        came.set()
        while not meeting.is_given_up():
            assert not meeting.has_begun()
            time.sleep(0.01)
        told.set()

    came, told, began = threading.Event(), threading.Event(), time.monotonic()
    threading.Thread(target=come, daemon=True).start()
    if (given_up := how.get("given_up")) is not None:
        threading.Thread(target=lambda: (came.wait(60), given_up.set()), daemon=True).start()
    with pytest.raises(SyncError) as caught:
        WeightBroadcaster("127.0.0.1", port, 3, NAME, device=torch.device("cpu"), **how)
    assert told.wait(20), "the member that came waits on"
    return time.monotonic() - began, str(caught.value)


def test_nobody_waits_for_a_member_that_does_not_come() -> None:
    _, said = waits_for_a_member(join_s=3.0)
    assert said == f"weight group {NAME}: group was not built: 1 of 2 members came"


def test_nobody_waits_in_a_group_that_is_given_up() -> None:
    """Rank 0 has five minutes here."""
    took_s, said = waits_for_a_member(join_s=300.0, given_up=threading.Event())
    assert took_s < 30 and said.startswith(f"weight group {NAME}: group was not built: the learner has left it meanwhile")
