"""The views of the page. One place lists them: a view has a name, a title, and the function that makes its data of a run and a query.

What draws it is the function of that name in page/NAME.js.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenkeel.dashboard.correction_view import correction
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.overview import overview
from evenkeel.dashboard.pool_view import pool
from evenkeel.dashboard.timeline import timeline
from evenkeel.dashboard.tokens import tokens


@dataclass(frozen=True, slots=True)
class View:
    """A tab of the page."""

    name: str
    title: str
    data: Callable[[OpenRun, Mapping[str, str]], Any]
    """(run, query of the address) -> what JSON can hold, numpy's arrays included. Raises: ValueError for a query that it can't read."""
    shows_all_runs: bool = False
    """All runs at once; others show the one that is chosen."""


VIEWS = (
    View("overview", "Overview", overview, shows_all_runs=True),
    View("timeline", "Timeline", timeline),
    View("tokens", "Tokens", tokens),
    View("correction", "Correction", correction),
    View("pool", "Pool and books", pool),
)
