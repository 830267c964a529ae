"""deploy/ray-cluster.yaml against Ray's own schema, and against what evenkeel's actors ask for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.config import RayConfig

CLUSTER = Path(__file__).parents[2] / "deploy" / "ray-cluster.yaml"


@pytest.fixture
def cluster() -> dict[str, Any]:
    return dict(yaml.safe_load(CLUSTER.read_text()))


def test_ray_takes_it(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))


@pytest.mark.parametrize("path", [("idle_timeout_minuts",), ("available_node_types", "rollout", "min_worker"), ("provider", "kind")])
def test_a_mistyped_key_is_refused(cluster: dict[str, Any], path: tuple[str, ...]) -> None:
    """The check above means something: Ray's schema does refuse. `provider` alone is open, but must keep its type."""
    section = cluster
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = section.pop("type") if path[0] == "provider" else 1
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validate_config(prepare_config(cluster))


def test_the_autoscaled_type_offers_what_a_rollout_worker_asks_for(cluster: dict[str, Any]) -> None:
    resource = RayConfig().rollout_resource
    offering = {name: kind for name, kind in cluster["available_node_types"].items() if resource in kind.get("resources", {})}
    assert list(offering) == ["rollout"]
    assert 0 < offering["rollout"]["min_workers"] < offering["rollout"]["max_workers"]


def test_the_head_runs_no_engine(cluster: dict[str, Any]) -> None:
    assert "GPU" not in cluster["available_node_types"][cluster["head_node_type"]]["resources"]


def test_the_bounds_agree(cluster: dict[str, Any]) -> None:
    """max_workers counts every node but the head; a smaller one would hold the pool back silently."""
    assert cluster["max_workers"] == sum(kind.get("max_workers", 0) for kind in cluster["available_node_types"].values())
