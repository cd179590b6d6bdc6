"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MISSING = "Install prometheus-client (pip install 'mlx-h2o[server]') for /metrics.\n"


class Metrics:
    """Counters, gauges and times of one server; nothing is counted without prometheus-client.

    Attributes:
        available: Whether it is installed.
        content_type: Of `text`.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self.content_type = "text/plain; charset=utf-8"
        try:
            import prometheus_client
        except ImportError:
            self.available = False
            return
        self.available = True
        self.content_type = prometheus_client.CONTENT_TYPE_LATEST
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()

    def count(self, name: str, text: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        if self.available:
            self._of(self._client.Counter, name, text, labels).inc(amount)

    def observe(self, name: str, text: str, value: float) -> None:
        """Note a time in seconds."""
        if self.available:
            self._of(self._client.Histogram, name, text, {}).observe(value)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Let a number be asked for whenever someone looks."""
        if self.available:
            self._of(self._client.Gauge, name, text, {}).set_function(value)

    def _of(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self._made:
            self._made[name] = kind(f"mlx_h2o_{name}", text, list(labels), registry=self._registry)
        made = self._made[name]
        return made.labels(**labels) if labels else made

    def text(self) -> str:
        """All of them as Prometheus reads them."""
        if not self.available:
            return MISSING
        shown: bytes = self._client.generate_latest(self._registry)
        return shown.decode()
