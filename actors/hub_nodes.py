"""A model of the hub on every node that has a learner rank, before the ranks start: who comes later would let the others wait for it."""

from __future__ import annotations

from pathlib import Path

from actors.config import DeadlinesConfig
from actors.hub import model_folder
from actors.hub_name import HubName
from actors.placement import RankPlaces, on_their_nodes


async def fetch_where_ranks_are(model: Path, places: RankPlaces, deadlines: DeadlinesConfig) -> None:
    """Nothing for a folder. A node that has it in its cache downloads nothing; of several tasks on one node one does.

    Raises: DataError as model_folder; DeadlineExceeded past deadlines.start_s.
    """
    if HubName.of(model) is not None and places.group is not None:
        await on_their_nodes(places, model_folder, model, what=str(model), limits=deadlines)
