"""Export metrics with OpenTelemetry: by OTLP to a collector, or as a page that Prometheus reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.train.telemetry.dashboards import GuardedCalls, ScalarWriter


class OpenTelemetryWriter(ScalarWriter):
    """Gauge for each scalar: ``megalite.lm_loss``. OpenTelemetry sends their latest values regularly.

    Its own environment variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_METRIC_EXPORT_INTERVAL,
    OTEL_EXPORTER_PROMETHEUS_HOST, OTEL_EXPORTER_PROMETHEUS_PORT, OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES.

    Raises:
        UserError: OpenTelemetry is not installed, or Prometheus' port is in use.
    """

    def __init__(self, config: LoggingConfig, world_size: int) -> None:
        super().__init__(config, world_size)
        output = f"--opentelemetry {config.opentelemetry}"
        try:
            # Imported here because they are optional packages that only one rank needs.
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource

            reader, self._stop = _prometheus() if config.opentelemetry == "prometheus" else _otlp()
        except ImportError as error:
            raise UserError(
                f"{output} needs the package {error.name}, which is not installed: "
                "pip install 'megalite[opentelemetry]', or omit the flag"
            ) from None
        except OSError as error:
            raise UserError(
                f"{output} cannot be served ({error.strerror}): "
                "set OTEL_EXPORTER_PROMETHEUS_PORT to a free port"
            ) from None
        resource = Resource({"service.name": "megalite"}).merge(OTELResourceDetector().detect())
        self._provider = MeterProvider([reader], resource)
        self._meter = self._provider.get_meter("megalite")
        self._gauges: dict[str, Any] = {}
        self._send = GuardedCalls(output)

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        for tag, value in {"iteration": iteration, **scalars}.items():
            name = "megalite." + re.sub(r"[^\w./-]", "_", tag)
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value)

    def close(self, *, has_failed: bool = False) -> None:
        self._send(self._provider.shutdown)  # which sends the last values
        self._stop()


def _otlp() -> tuple[Any, Callable[[], None]]:
    """Return a reader that sends to a collector, and what ends it besides the reader's own shutdown."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter()), lambda: None


def _prometheus() -> tuple[Any, Callable[[], None]]:
    """Return a reader for the page that Prometheus reads, and what ends the server of the page."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import start_http_server

    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost")
    server, thread = start_http_server(int(os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464")), host)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return PrometheusMetricReader(), stop
