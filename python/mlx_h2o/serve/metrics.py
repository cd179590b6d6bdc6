"""The server's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "Install prometheus-client (pip install 'mlx-h2o[server]') for /metrics.\n"


@dataclass(frozen=True, eq=False)
class _Gauges:
    """Gauges that belong together, as prometheus-client collects them."""

    family: Callable[..., Any]
    texts: Mapping[str, str]
    look: Callable[[], Mapping[str, float]]

    def collect(self) -> Iterator[Any]:
        """All gauges, read at one moment."""
        now = self.look()
        for name, text in self.texts.items():
            yield self.family(f"mlx_h2o_{name}", text, value=now[name])


class Metrics:
    """Counters, gauges and times of one server; nothing is counted without prometheus-client.

    Attributes:
        available: Whether prometheus-client is installed.
        content_type: The content type of `text`.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self.content_type = "text/plain; charset=utf-8"
        try:
            import prometheus_client
            import prometheus_client.core
        except ImportError:
            self.available = False
            return
        self.available = True
        self.content_type = prometheus_client.CONTENT_TYPE_LATEST
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()

    def count(self, name: str, text: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter.

        Args:
            name: The counter's name.
            text: Its help text.
            amount: The amount to add.
        """
        if self.available:
            self._of(self._client.Counter, name, text, labels).inc(amount)

    def observe(self, name: str, text: str, value: float) -> None:
        """Record a duration, or a share.

        Args:
            name: The histogram's name.
            text: Its help text.
            value: The duration in seconds, or a number from 0 to 1.
        """
        if self.available:
            self._of(self._client.Histogram, name, text, {}).observe(value)

    def gauges(self, texts: Mapping[str, str], look: Callable[[], Mapping[str, float]]) -> None:
        """Register gauges; each time they are scraped, all are read at one moment.

        Args:
            texts: The gauges' help texts, by their names.
            look: Returns their values, by their names.
        """
        if self.available:
            self._registry.register(_Gauges(self._client.core.GaugeMetricFamily, texts, look))

    def _of(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self._made:
            self._made[name] = kind(f"mlx_h2o_{name}", text, list(labels), registry=self._registry)
        made = self._made[name]
        return made.labels(**labels) if labels else made

    def text(self) -> str:
        """All metrics in Prometheus's text format."""
        if not self.available:
            return MISSING
        shown: bytes = self._client.generate_latest(self._registry)
        return shown.decode()
