"""A run's timeline for trace viewers."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError
from evenkeel.trace import send_spans, trace_events, write_trace


def test_a_lane_has_as_many_threads_as_spans_at_a_time_and_none_overlaps_in_its_thread() -> None:
    """Viewers draw spans of one thread as nested calls. The least number of threads is the largest number of spans at one moment."""
    draw = random.Random(0)
    begins = [draw.uniform(0.0, 100.0) for _ in range(300)]
    spans = [LaneSpan("sample", 1e9 + b, 1e9 + b + draw.uniform(0.1, 8.0), 2, i, lane="worker-0") for i, b in enumerate(begins)]
    drawn = [event for event in trace_events(spans) if event["ph"] == "X"]
    at_a_time = max(sum(other.begin <= one.begin < other.end for other in spans) for one in spans)
    by_thread = defaultdict(list)
    for event in drawn:
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(by_thread) == list(range(1, at_a_time + 1))
    for of_thread in by_thread.values():
        ordered = sorted(of_thread)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(ordered)), "to the microsecond"
    assert {event["args"]["group"] for event in drawn} == set(range(300))
    assert sum(event["dur"] for event in drawn) == pytest.approx(1e6 * sum(span.end - span.begin for span in spans), rel=1e-5)


def test_the_driver_comes_first_and_workers_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        with pytest.raises(ConfigError, match=r"timeline\.jsonl: holds no spans yet"):
            write_trace(folder)
        lanes = ["worker-10", "worker-2", "driver", "rank-0"]
        folder.append_spans([LaneSpan("wait", 1e9 + i, 1e9 + i + 0.5, None, None, "work", lane=lane) for i, lane in enumerate(lanes)])
        written = json.loads(write_trace(folder, tmp_path / "x.json").read_text())["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in written if event["name"] == "process_name"}
    assert sorted(named, key=lambda lane: named[lane]) == ["driver", "rank-0", "worker-2", "worker-10"]
    (of_driver,) = (event for event in written if event["ph"] == "X" and event["pid"] == named["driver"])
    assert (of_driver["ts"], of_driver["dur"], of_driver["args"]) == (2_000_000, 500_000, {"why": "work"}), "counted from the first span"


@contextmanager
def collector(status: int) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A server in a collector's place; its address, and what it gets."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if status == 200:
                got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        finally:
            server.shutdown()


def test_a_collector_gets_each_span_once_with_its_times_in_its_lane(tmp_path: Path) -> None:
    """In OpenTelemetry's own messages, decoded by its own package; 2,500 spans are three requests."""
    spans = [LaneSpan("sample", 1e9 + i, 1e9 + i + 0.5, i, None, None, lane=f"worker-{i % 3}") for i in range(2500)]
    with RunFolder.create(tmp_path / "run", "x") as folder, collector(200) as (url, got):
        folder.append_spans(spans)
        assert send_spans(folder, url) == 2500
    found = {
        (lane, span.name, span.start_time_unix_nano, span.end_time_unix_nano, span.attributes[0].value.int_value)
        for request in got
        for of_lane in request.resource_spans
        for lane in [next(one.value.string_value for one in of_lane.resource.attributes if one.key == "service.name")]
        for scope in of_lane.scope_spans
        for span in scope.spans
    }
    wanted = {(span.lane, "sample", round(span.begin * 1e9), round(span.end * 1e9), span.version) for span in spans}
    assert found == wanted and len(got) == 3


def test_a_file_and_a_collector_are_not_both_meant(tmp_path: Path) -> None:
    """It would write no file."""
    words = ["trace", str(tmp_path), "--output", str(tmp_path / "x.json"), "--otlp", "http://127.0.0.1:1/v1/traces"]
    with pytest.raises(ConfigError, match="takes --output or --otlp"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_collector_that_takes_nothing_is_said(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder, collector(404) as (url, _):
        folder.append_spans([LaneSpan("step", 1e9, 1e9 + 1, 0, None, None, lane="rank-0")])
        with pytest.raises(ConfigError, match="no collector took the spans there"):
            send_spans(folder, url)
