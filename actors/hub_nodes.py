"""A model of the hub on every node that has a learner rank, before the ranks start: who comes later would let the others wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.config import DeadlinesConfig
from actors.hub import model_folder
from actors.hub_name import HubName
from actors.placement import RankPlaces
from actors.supervision import USUAL_START, wait_for


async def fetch_where_ranks_are(model: Path, places: RankPlaces, deadlines: DeadlinesConfig) -> None:
    """Nothing for a folder. A node that has it in its cache downloads nothing; of several tasks on one node one does.

    Raises: DataError as model_folder; DeadlineExceeded past deadlines.start_s.
    """
    if HubName.of(model) is None or places.group is None:
        return
    fetch: Any = ray.remote(_fetch)
    asked = [
        fetch.options(
            num_cpus=0,
            max_retries=0,
            runtime_env={"env_vars": dict(places.environment)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=bundle),
        ).remote(model)
        for bundle in range(places.group.bundle_count)
    ]
    limit_s, notice_s = deadlines.start_s, deadlines.notice_s
    waits = [
        wait_for(one, f"{model} -> the node of bundle {i}", deadline_s=limit_s, notice_s=notice_s, usual_s=USUAL_START * limit_s)
        for i, one in enumerate(asked)
    ]
    await asyncio.gather(*waits)


def _fetch(model: Path) -> None:
    model_folder(model)
