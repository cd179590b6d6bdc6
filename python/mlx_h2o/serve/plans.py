"""Plans of caches for the served model: empty caches by settings, and their most bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.integration.refusals import NothingToBound
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.model_caches.make import bounded_caches
from mlx_h2o.serve.marks import Mark, mark
from mlx_h2o.serve.most_bytes import most_bytes
from mlx_h2o.serve.served_model import ServedModel

#: The most different settings whose empty caches are kept.
MOST_PLANS = 64


class Plans:
    """Empty caches by settings, made once for each; any thread may call this.

    Args:
        provider: The provider of the model.
        bound: Bytes of all caches of the server, or None.
    """

    def __init__(self, provider: ServedModel, bound: int | None):
        self._provider, self._bound = provider, bound
        self._made: dict[str, tuple[list[Any], int]] = {}
        self._making = threading.Lock()

    def of(self, label: str, settings: Mapping[str, Any]) -> tuple[list[Any], int]:
        """Empty caches with these settings, and the most bytes that they may take (0 without a
        bound).

        Args:
            label: The settings as text.
            settings: As `ModelSettings.of` takes them.

        Raises:
            ValueError: The model cannot have such caches, or they exceed the bound.
            NotLoaded: The model could not be loaded.
        """
        model = self._provider.require()
        with self._making:
            if label not in self._made:
                if len(self._made) >= MOST_PLANS:
                    del self._made[next(iter(self._made))]
                self._made[label] = self._plan(model, label, settings)
            return self._made[label]

    def _plan(self, model: Any, label: str, settings: Mapping[str, Any]) -> tuple[list[Any], int]:
        try:
            # If the model is measured at all, it is measured when it is loaded.
            empty = bounded_caches(model, ModelSettings.of(**{**settings, "profile": "never"}))
        except NothingToBound:
            empty = stock_caches(model)
        mark(empty, Mark(label))
        if self._bound is None:
            return empty, 0
        need = most_bytes(empty, model, int(self._provider.cli_args.prefill_step_size))
        if need > self._bound:
            raise ValueError(
                f"These caches may take {need:,} bytes, and the server holds {self._bound:,} in "
                "all: ask for fewer."
            )
        return empty, need
