"""Metrics of an engine, most of them SGLang's own: its schedulers write them into files, as prometheus_client does with several processes,
and its owner reads those when Prometheus asks.

SGLang's option for it, enable_metrics, is set in the schedulers alone (sglang_plugin/hooks.py). In the owner it would count each token of
each answer on the event loop, and a second engine of a process could not start: its metrics would have the names of the first. Of the
histograms that it would have there, the one of whole requests is made of what SGLang says of each answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

# What SGLang shows of parts that no engine here has (engine_arguments.py): it is always 0.
_UNUSED = tuple(
    f"sglang:{part}"
    for part in ("spec_", "num_prefill_", "num_decode_", "pending_prealloc_", "routing_key_", "num_unique_running_routing_keys")
)
# The model is a path, and what else is the same for all engines; a rank's number stays.
_SAME = frozenset({"model_name", "engine_type", "pid", "pp_rank", "moe_ep_rank"})
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class EngineMetrics(Collector):
    """Metrics of the schedulers that write into a folder, and of whole requests.

    Names follow Prometheus's conventions: `sglang_` for SGLang's `sglang:`, which are for recording rules, and bytes for its GB of 2^30.
    """

    def __init__(self, folder: Path, request_seconds: Histogram) -> None:
        self._folder, self._request_seconds = folder, request_seconds

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets; called by the registry. Nothing of SGLang's, once the engine has been shut down."""
        yield from self._request_seconds.collect()
        for family in MultiProcessCollector.merge(map(str, self._folder.glob("*.db"))):  # type: ignore[no-untyped-call]
            if not family.name.startswith(_UNUSED):
                is_gb = family.name.endswith("_gb")
                shown = Metric(_conventional(family.name), family.documentation, family.type)
                for name, labels, value, *_ in family.samples:
                    kept = {label: of for label, of in labels.items() if label not in _SAME}
                    shown.add_sample(_conventional(name), kept, value * 2**30 if is_gb else value)
                yield shown


def request_histogram() -> Histogram:
    """Of an engine's owner, who observes each answer."""
    told = "From SGLang's taking a request for an answer until the answer is whole, waiting and pauses for weights included."
    return Histogram("evenkeel_engine_request_seconds", told, buckets=_SECONDS, registry=None)


def _conventional(name: str) -> str:
    return name.replace(":", "_").removesuffix("_gb") + ("_bytes" if name.endswith("_gb") else "")
