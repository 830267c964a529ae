"""The queries of the Grafana board, and what of them is a number of the catalogue as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deploy.grafana.board import ROWS
from evenkeel.actors.metrics.catalogue import CATALOGUE, Kind
from evenkeel.actors.metrics.step_metrics import members

QUERIES = {f"{panel.title}: {legend}": query for panels in ROWS.values() for panel in panels for legend, query in panel.queries.items()}
_PLAIN = re.compile(r'(evenkeel_\w+)\{run="\$run", role="controller"\}')
_BY_NAME = {metric.prometheus_name + "_total" * (metric.kind is Kind.COUNTER): metric for metric in CATALOGUE.values()}
PLAIN = {place: _BY_NAME[found[1]] for place, query in QUERIES.items() if (found := _PLAIN.fullmatch(query))}
"""Place -> metric, of queries that ask for nothing but that."""


def wanted(place: str, line: Mapping[str, float]) -> list[float]:
    """Values that a plain query has to give, in order, when the driver has published this line. Empty: the line has none."""
    metric = PLAIN[place]
    found = members(line, metric.name).values() if metric.is_family else [line[metric.name]] if metric.name in line else []
    return sorted(found)
