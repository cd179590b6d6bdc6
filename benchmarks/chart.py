"""The benchmark's results as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import attention, model
from benchmarks.measuring import Samples
from benchmarks.report import Report
from mlx_h2o.evaluate.plotting import drawing

_COLOURS = {"float32": "#2a7f62", "float16": "#c44e52", "bfloat16": "#4c72b0"}
_THEIRS, _OURS = "#8c8c8c", "#2a7f62"


def draw(report: Report, path: str | Path) -> None:
    """Speed over MLX, share of bandwidth and tokens per second, as far as measured, as a PNG.

    Raises:
        ValueError: matplotlib is not installed, or there is nothing to draw.
    """
    panels = [over_mlx, of_bandwidth] if report.attention else []
    if packed_results(report):
        panels.append(packed_rows)
    if report.decoding:
        panels.append(tokens_per_second)
    if not panels:
        raise ValueError("A chart shows attention or the model: measure one of them.")
    pyplot = drawing()
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    for panel, axes in zip(panels, all_axes[0], strict=True):
        panel(report, axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.machine['cpu']}, {report.machine['threads']} threads")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def of_first_shape(report: Report) -> dict[str, list[attention.Result]]:
    """The results of the first shape measured, by dtype."""
    by_dtype: dict[str, list[attention.Result]] = {}
    for result in report.attention:
        if result.case.shape == report.attention[0].case.shape:
            by_dtype.setdefault(result.case.dtype, []).append(result)
    return by_dtype


def over_mlx(report: Report, axes: Any) -> None:
    """Speed over MLX's, by slots."""
    for dtype, results in of_first_shape(report).items():
        speeds = [result.samples.speed(attention.SCORES, attention.MLX) for result in results]
        slots = [result.case.slots for result in results]
        axes.plot(slots, speeds, "o-", color=_COLOURS[dtype], label=dtype)
    axes.axhline(1, color=_THEIRS, linewidth=1)
    axes.set_title(f"attention with scores, {report.attention[0].case.shape}")
    axes.set_ylabel("times as fast as MLX without scores")
    axes.set_yscale("log")
    with_slots(report, axes)


def of_bandwidth(report: Report, axes: Any) -> None:
    """Share of the read bandwidth, by slots: attention and, dashed, the step with eviction."""
    for dtype, results in of_first_shape(report).items():
        slots = [result.case.slots for result in results]
        for arm, style in ((attention.OFF, "o-"), (attention.STEP_DISTINCT, "o--")):
            shares = [100 * result.share_of_bandwidth(arm) for result in results]
            label = f"{dtype}, {arm}"
            axes.plot(slots, shares, style, color=_COLOURS[dtype], label=label)
    axes.set_title("keys and values per second")
    axes.set_ylabel("% of the bandwidth of a plain read")
    axes.set_ylim(bottom=0)
    with_slots(report, axes)


def packed_results(report: Report) -> list[attention.Result]:
    """The results that have packed rows."""
    return [result for result in report.attention if result.case.packs]


def packed_rows(report: Report, axes: Any) -> None:
    """Milliseconds of attention with scores, dense and packed, by dtype."""
    arms = (attention.SCORES, *attention.PACKED)
    results = packed_results(report)
    height = 0.8 / len(results)
    for n, result in enumerate(results):
        dtype = result.case.dtype
        rows = [row + n * height for row in range(len(arms))]
        times = [1e3 * result.samples.median(arm) for arm in arms]
        axes.barh(rows, times, height, color=_COLOURS[dtype], label=dtype)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(arms))], ["dense", *arms[1:]])
    axes.invert_yaxis()
    axes.set_title(f"packed rows, {attention.PACKED_SLOTS} slots")
    axes.set_xlabel("milliseconds")
    axes.legend(fontsize=8, frameon=False)


def with_slots(report: Report, axes: Any) -> None:
    """Slots on the horizontal axis."""
    slots = sorted({result.case.slots for result in report.attention})
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, [str(n) for n in slots])
    axes.set_xlabel("slots per KV head")
    axes.legend(fontsize=8, frameon=False)


def tokens_per_second(report: Report, axes: Any) -> None:
    """Decoding of the whole model."""
    samples: Samples | None = report.decoding
    assert samples is not None
    rows = range(len(samples.arms))
    speeds = [1 / samples.median(arm) for arm in samples.arms]
    colours = [_THEIRS if arm in (model.WINDOW, model.STREAMING) else _OURS for arm in samples.arms]
    axes.barh(rows, speeds, color=colours)
    axes.set_yticks(rows, samples.arms)
    axes.invert_yaxis()
    for row, speed in enumerate(speeds):
        axes.annotate(f" {speed:.0f}", (speed, row), va="center", fontsize=9)
    axes.set_title("decoding inside the budget")
    axes.set_xlabel("tokens/s")
    axes.margins(x=0.12)
