"""A run's timeline for trace viewers: in the format of Perfetto and Chrome (ui.perfetto.dev, chrome://tracing), or sent to an OpenTelemetry
collector.

Source: "Trace Event Format" (Google, 2016): complete events ("ph": "X"), times in microseconds. Each lane is a process there. Spans of one
thread must lie within each other, so those of a lane that overlap are dealt out to as many threads as it takes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan, lane_order
from evenkeel.correction.errors import ConfigError

# Spans of one request to a collector, and seconds for it.
_AT_ONCE, _SEND_S = 1000, 10


def write_trace(folder: RunFolder, output: Path | None = None) -> Path:
    """Write the trace of a run, finished or under way. Args: output: None: trace.json in its folder. Raises: ConfigError without spans."""
    spans = _spans_of(folder)
    path = output or folder.path / "trace.json"
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans))}))
    return path


def send_spans(folder: RunFolder, endpoint: str) -> int:
    """Send them to an OpenTelemetry collector, by OpenTelemetry's own SDK; each lane is a service of the run's name there.

    Args: endpoint: for traces by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.
    Returns: how many. Raises: ConfigError without spans, without the package, or if the collector doesn't take them.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("--otlp needs OpenTelemetry's exporter: pip install 'evenkeel[otlp]'") from error
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, ended = _spans_of(folder), InMemorySpanExporter()
    tracers = {}
    for lane in {span.lane for span in spans}:
        provider = TracerProvider(resource=Resource.create({"service.name": lane, "service.namespace": folder.path.name}))
        provider.add_span_processor(SimpleSpanProcessor(ended))
        tracers[lane] = provider.get_tracer("evenkeel")
    for span in spans:
        one = tracers[span.lane].start_span(span.what, start_time=round(span.begin * 1e9), attributes=_told(span))
        one.end(round(span.end * 1e9))
    exporter, whole = OTLPSpanExporter(endpoint, timeout=_SEND_S), ended.get_finished_spans()
    for first in range(0, len(whole), _AT_ONCE):
        if exporter.export(whole[first : first + _AT_ONCE]) is not SpanExportResult.SUCCESS:
            raise ConfigError(f"--otlp {endpoint}: no collector took the spans there; it should be one for traces, ending in /v1/traces")
    return len(whole)


def _spans_of(folder: RunFolder) -> list[LaneSpan]:
    if not (spans := folder.read_timeline()):
        raise ConfigError(f"{folder.timeline_path}: holds no spans yet; a run writes them from the start of its first part on")
    return spans


def _told(span: LaneSpan) -> dict[str, Any]:
    """What else is known of a span."""
    return {name: value for name, value in asdict(span).items() if name in ("version", "group", "why") and value is not None}


def trace_events(spans: Iterable[LaneSpan]) -> Iterator[dict[str, Any]]:
    """Names of processes, then an event for each span; times count from the first one."""
    by_lane: dict[str, list[LaneSpan]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    origin = min(span.begin for of_lane in by_lane.values() for span in of_lane)
    for process, (lane, of_lane) in enumerate(sorted(by_lane.items(), key=lambda one: lane_order(one[0])), 1):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": lane}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        for thread, span in _threads(of_lane):
            begin, end = round((span.begin - origin) * 1e6), round((span.end - origin) * 1e6)
            yield {"ph": "X", "name": span.what, "pid": process, "tid": thread, "ts": begin, "dur": end - begin, "args": _told(span)}


def _threads(spans: Sequence[LaneSpan]) -> Iterator[tuple[int, LaneSpan]]:
    """Each span with a thread, from 1, that has no other one at that time; as few threads as possible."""
    free, busy, threads = list[int](), list[tuple[float, int]](), 0
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        while busy and busy[0][0] <= span.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            threads += 1
            heapq.heappush(free, threads)
        heapq.heappush(busy, (span.end, thread := heapq.heappop(free)))
        yield thread, span
