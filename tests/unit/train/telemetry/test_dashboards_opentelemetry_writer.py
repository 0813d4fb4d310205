"""OpenTelemetry: the calls of a stand-in, and, where the libraries are installed, what a reader gets."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from urllib.request import urlopen

import pytest

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers
from megalite.utils.errors import UserError

OTLP = LoggingConfig(opentelemetry="otlp", log_interval=10)
PROMETHEUS = LoggingConfig(opentelemetry="prometheus", log_interval=10)
MODULES = (
    *("opentelemetry", "opentelemetry.sdk", "opentelemetry.sdk.metrics", "opentelemetry.sdk.metrics.export"),
    *("opentelemetry.sdk.resources", "opentelemetry.exporter", "opentelemetry.exporter.otlp"),
    *("opentelemetry.exporter.otlp.proto", "opentelemetry.exporter.otlp.proto.http"),
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
)


def _write(writers: Writers, metrics: IterationMetrics) -> None:
    for interval in writers.intervals:
        writers.iteration(interval, metrics, Timers())
    writers.layer_norms(100, {"layers.0": 3.0})
    writers.validation(ValidationMetrics(100, 800, "valid", 2.5))


def _require_libraries() -> None:
    for name in ("opentelemetry.exporter.prometheus", MODULES[-1]):
        pytest.importorskip(name, exc_type=ImportError)


def test_calls(topology: Topology, metrics: IterationMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: MagicMock() for name in MODULES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    gauges: dict[str, list[float]] = {}

    def create_gauge(name: str) -> Any:
        assert name not in gauges
        gauges[name] = []
        return SimpleNamespace(set=gauges[name].append)

    provider = modules["opentelemetry.sdk.metrics"].MeterProvider.return_value
    provider.get_meter.return_value.create_gauge = create_gauge
    with Writers(OTLP, topology, "a: 1") as writers:
        _write(writers, metrics)
        _write(writers, metrics)
        provider.shutdown.assert_not_called()
    provider.shutdown.assert_called_once_with()
    assert gauges["megalite.lm_loss"] == [metrics.lm_loss] * 2
    assert gauges["megalite.samples"] == [800, 800]
    assert gauges["megalite.grad-norm_by_layer/layers.0"] == [3.0, 3.0]
    assert gauges["megalite.lm_loss_validation"] == [2.5, 2.5]
    assert gauges["megalite.iteration"] == [100] * 6


def test_without_the_package(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        UserError, match=r"--opentelemetry otlp needs the package opentelemetry.*: pip install"
    ):
        Writers(OTLP, topology, "a: 1")


def test_the_page_for_prometheus(
    topology: Topology, metrics: IterationMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    _require_libraries()
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
        with pytest.raises(UserError, match=r"--opentelemetry prometheus cannot be served \(Address already"):
            Writers(PROMETHEUS, topology, "a: 1")
    for _ in range(2):  # the first one frees the port
        with Writers(PROMETHEUS, topology, "a: 1") as writers:
            _write(writers, metrics)
            page = urlopen(f"http://localhost:{port}/metrics").read().decode()
        lines = [line.split(" ") for line in page.splitlines() if line.startswith("megalite_lm_loss")]
        values = {name.split("{")[0]: float(value) for name, value in lines}
        assert values == {"megalite_lm_loss": metrics.lm_loss, "megalite_lm_loss_validation": 2.5}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Return the address of a collector, and the bodies that it gets."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("localhost", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def test_the_last_values_are_sent_at_the_end(
    collector: tuple[str, list[bytes]],
    topology: Topology,
    metrics: IterationMetrics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _require_libraries()
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    address, bodies = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with Writers(OTLP, topology, "a: 1") as writers:
        _write(writers, metrics)
        assert bodies == []
    (resource,) = ExportMetricsServiceRequest.FromString(bodies[0]).resource_metrics
    assert ("service.name", "mine") in [
        (each.key, each.value.string_value) for each in resource.resource.attributes
    ]
    (scope,) = resource.scope_metrics
    values = {each.name: each.gauge.data_points[0].as_double for each in scope.metrics}
    assert values["megalite.lm_loss"] == metrics.lm_loss
