"""Times of attention and of whole steps, in turns, with the bandwidth that they come to.

A measurement goes over several layers one after the other, as a model does, so that what a cache of
the device holds is not read again at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_h2o.doctor import arms, predicted
from mlx_h2o.doctor.arms import ATTENTION, STEPS, Size
from mlx_h2o.doctor.chips import Chip
from mlx_h2o.doctor.report import Begun, Over, Section

#: Bytes of keys and values that a measurement goes over, and layers at most.
CYCLED_BYTES, MOST_LAYERS = 128 << 20, 12
ROUNDS = 7
SLOTS = (1024, 2048, 4096, 8192, 16384, 32768)


def section(
    begun: Begun,
    slots: tuple[int, ...],
    rounds: int,
    chip: Chip | None,
    progress: Callable[[int, int], None],
    over: Over,
) -> None:
    """Time every arm at every size until time is over.

    Args:
        begun: Takes the section.
        slots: N of each KV head.
        rounds: Visits of each arm; the median is told.
        chip: The device, where its published figures are known.
        progress: Told after each size.
        over: Whether there is time for no more.
    """
    found = begun(
        Section(
            "timings",
            f"one token of a layer ({arms.QUERY_HEADS} query heads, {arms.KV_HEADS} KV heads, "
            f"width {arms.WIDTH}, {_dtype()})",
            ("arm", "slots", "us", "over MLX's", "GB/s", "of the chip's", "predicted us"),
            data=[],
        )
    )
    found.notes.append(
        "Medians over rounds in which every arm had its turn, in microseconds a call. GB/s: the "
        "bytes that must be moved, over the time."
    )
    if chip is not None:
        found.notes.append(chip.note)
    sizes = [Size(count, arms.usual_dtype()) for count in slots]
    for i, size in enumerate(sizes):
        for names, make in ((ATTENTION, arms.attention), (STEPS, arms.step)):
            _measure(found, size, names, make, rounds, chip)
        mx.clear_cache()
        progress(i + 1, len(sizes))
        if over() and i + 1 < len(sizes):
            found.notes.append(f"No time was left for {_listed(slots[i + 1 :])} slots.")
            break


def _measure(
    found: Section,
    size: Size,
    names: tuple[str, ...],
    make: Callable[[Size, str], Callable[[], mx.array] | None],
    rounds: int,
    chip: Chip | None,
) -> None:
    """Rows of some arms at one size; the first arm is MLX's."""
    layers = max(1, min(MOST_LAYERS, CYCLED_BYTES // size.dense_bytes))
    works = {name: [make(size, name) for _ in range(layers)] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):  # the first is not counted: it compiles
        for name, work in works.items():
            calls = [call for call in work if call is not None]
            if not calls:
                continue
            start = time.perf_counter()
            mx.eval([call() for call in calls])
            if turn:
                seconds[name].append((time.perf_counter() - start) / len(calls))
    for name in names:
        if not seconds[name]:
            found.notes.append(f"{name}: there are no kernels for it here.")
            continue
        found.data.append(_figures(name, size, seconds, names[0], chip))
        found.rows.append(_cells(found.data[-1]))


def _figures(
    name: str, size: Size, seconds: dict[str, list[float]], base: str, chip: Chip | None
) -> dict[str, Any]:
    """One arm's figures at one size."""
    median = statistics.median(seconds[name])
    work = predicted.work_of(name, size)
    moved = work.bytes / median
    figures: dict[str, Any] = {
        "arm": name,
        "slots": size.slots,
        "seconds": median,
        "fastest": min(seconds[name]),
        "over_mlx": median / statistics.median(seconds[base]),
        "bytes": work.bytes,
        "bytes_per_second": moved,
    }
    if chip is not None:
        figures["of_chip"] = moved / chip.bandwidth
        figures["predicted_seconds"] = predicted.seconds(work, chip)
    return figures


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    """The same for people."""
    of_chip, expected = figures.get("of_chip"), figures.get("predicted_seconds")
    return (
        figures["arm"],
        str(figures["slots"]),
        f"{1e6 * figures['seconds']:.1f}",
        f"{figures['over_mlx']:.2f}",
        f"{figures['bytes_per_second'] / 1e9:.1f}",
        "" if of_chip is None else f"{of_chip:.0%}",
        "" if expected is None else f"{1e6 * expected:.1f}",
    )


def _dtype() -> str:
    return str(arms.usual_dtype()).rpartition(".")[2]


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
