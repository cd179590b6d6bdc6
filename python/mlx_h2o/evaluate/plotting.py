"""matplotlib, which is optional."""

from __future__ import annotations

from typing import Any


def drawing() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("A chart needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
