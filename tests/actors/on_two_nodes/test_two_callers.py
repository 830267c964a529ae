"""Two callers of the same real ranks, each of which numbers its calls by itself: the second is refused by number, in one sentence.

Otherwise the ranks could wait for each other in different calls for good.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.correction.errors import EngineError
from tests.actors.on_two_nodes.test_learner_ranks_in_ray import PLAN, learner, two_steps, two_steps_and_back
from tests.failures.measured import REAL, Measured

pytestmark = pytest.mark.slow


def test_a_second_caller_is_refused_and_changes_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with learner(tmp_path) as group:
            undisturbed = await two_steps_and_back(group, tmp_path)
            stepping = asyncio.create_task(two_steps(group))
            refused = 0
            while not stepping.done():
                second = LearnerGroup(list(group.ranks.values()), version=2, step_s=120.0)
                with pytest.raises(EngineError, match=r"came as collective call 1, but \d+ is the next.* Only one LearnerGroup may"):
                    await second.export(PLAN)
                refused += 1
            assert await stepping == undisturbed and refused >= 2

    asyncio.run(asyncio.wait_for(scenario(), 300.0))
    follows = "the second is refused by number, in one sentence; no bit changes"
    Measured("two callers of the learner's ranks", follows, None, "nothing", REAL).write()
