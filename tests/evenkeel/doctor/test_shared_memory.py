"""What the doctor asks of the nodes' /dev/shm, through which engines get their weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenkeel.doctor.on_nodes import on_nodes
from tests.evenkeel.doctor.test_doctor import DENSE, HEAD, eight, node


@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
def test_shared_memory_is_asked_of_nodes_with_engines(transport: str) -> None:
    """A bucket of Qwen3-8B, its embedding, has 1.16 GiB. On a head without GPUs and on a node for ranks alone there are no engines; every
    engine gets its first version from the object store, whatever the transport."""
    config = eight("ray.address=auto", f"weight_sync.transport={transport}")
    few = {"shared_memory": 1 << 30}
    without = [node(), replace(HEAD, **few), node(name="ranks", rollout_units=0.0, **few)]
    assert on_nodes(without, config, DENSE) == []
    (told,) = on_nodes([*without, node(name="late", rollout_units=1.0, **few)], config, DENSE)
    assert told.severity == "fail" and told.sentence.startswith("late: /dev/shm has 1 GiB free"), told
