"""The server's metrics, for Prometheus (the package prometheus-client)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

COUNTERS = {
    "prompt_tokens": "Prompt tokens read.",
    "generated_tokens": "Tokens generated.",
    "evicted_tokens": "Tokens evicted, mean over heads.",
    "failed_steps": "Steps that raised.",
}
TIMES = {
    "queue_seconds": "Time until a request was let in.",
    "token_seconds": "Time of one step of all that run, each of which gives one token.",
}
GAUGES = {
    "kv_bytes_running": "Bytes of caches that are in use.",
    "kv_bytes_reserved": "Bytes that they may take.",
    "kv_bytes_idle": "Bytes of idle conversations.",
    "kv_bytes_peak": "Most bytes of both at once.",
    "kv_bytes_bound": "Bytes that all may take; 0: no bound.",
    "slots": "Tokens that running caches hold, mean over layers.",
    "running": "Requests that run.",
    "queue": "Requests that wait.",
    "idle": "Idle caches.",
    "shrunk": "How often an idle conversation shrank.",
    "forgotten": "Idle caches that made room.",
}


class Metrics:
    """Counters, times and gauges of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry}
        self._counters = {
            name: Counter(f"mlx_h2o_{name}", COUNTERS[name], **own) for name in COUNTERS
        }
        self._times = {name: Histogram(f"mlx_h2o_{name}", TIMES[name], **own) for name in TIMES}
        text = "Requests, by the status of the answer."
        self._requests = Counter("mlx_h2o_requests", text, ["status"], **own)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one of COUNTERS."""
        self._counters[name].inc(amount)

    def observe(self, name: str, seconds: float) -> None:
        """Record one of TIMES."""
        self._times[name].observe(seconds)

    def answered(self, status: int) -> None:
        """Count a request by the status of its answer."""
        self._requests.labels(status=str(status)).inc()

    def watch(self, look: Callable[[], Mapping[str, float]]) -> None:
        """Register a function that returns GAUGES, all read at one moment."""

        class Gauges:
            def collect(self) -> Iterable[Any]:
                """All gauges."""
                for name, value in look().items():
                    yield GaugeMetricFamily(f"mlx_h2o_{name}", GAUGES[name], value=value)

        self._registry.register(Gauges())

    def text(self) -> str:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry).decode()
