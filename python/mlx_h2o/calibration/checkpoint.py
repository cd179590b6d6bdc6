"""Finished layers of a calibration, kept in a file so that it can go on after Ctrl-C."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_h2o.budgets.json_arrays import as_text, of_text


@dataclass(frozen=True)
class LayerLosses:
    """The losses of one layer's heads.

    Attributes:
        errors: `[H, orders, spans, grid]` (`Measured.errors`).
        packing: `[bits, H]`.
    """

    errors: np.ndarray
    packing: np.ndarray


class CalibratedLayers:
    """The finished layers of one calibration.

    Args:
        path: The file that keeps them, a line each; None keeps them in memory.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._layers: dict[int, LayerLosses] = {}

    def begin(self, calibration: dict[str, Any]) -> None:
        """Read the file if it belongs to this very calibration; else start it anew.

        Args:
            calibration: Everything that the losses depend on, as JSON types.
        """
        self._layers = {}
        if self.path is None:
            return
        first = json.dumps(calibration)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        if lines[:1] == [first]:
            for line in lines[1:]:
                try:
                    layer, *arrays = json.loads(line)
                    self._layers[layer] = LayerLosses(*map(of_text, arrays))
                except (ValueError, TypeError):  # the last line may be half written
                    break
        self.path.write_text(first + "\n")
        for layer in self._layers:
            self._write(layer)

    def add(self, layer: int, losses: LayerLosses) -> None:
        """Add a finished layer."""
        self._layers[layer] = losses
        self._write(layer)

    def all(self, count: int) -> list[LayerLosses]:
        """Every layer's losses, in order."""
        return [self._layers[layer] for layer in range(count)]

    def end(self) -> None:
        """Remove the file, once the profile is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def __len__(self) -> int:
        return len(self._layers)

    def _write(self, layer: int) -> None:
        if self.path is None:
            return
        losses = self._layers[layer]
        line = json.dumps([layer, as_text(losses.errors), as_text(losses.packing)])
        # Without the file the calibration goes on too.
        with suppress(OSError), self.path.open("a") as file:
            file.write(line + "\n")
