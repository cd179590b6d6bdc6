"""The state of a saved cache, and the checks it must pass before use.

Files come from anywhere. An out-of-range number in one could make MLX allocate without end, or a
kernel write outside its arrays. Every check here raises ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o import _checks
from mlx_h2o._checks import MOST_TOKENS
from mlx_h2o.attention.ops import FLOAT_DTYPES
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.policies import Policy, make_policy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import BIASES, SCALES, Packing
from mlx_h2o.slots.remainder import STATISTICS
from mlx_h2o.slots.slot_store import NARROW, WIDE, Run

MOST_SHARERS = 2**10
# Numbers of plain rows that a remainder may have (`plain_rows_for`).
PLAIN_ROWS = (1, 2, 4, 6, 8)

Arrays = dict[str, mx.array]
Expected = dict[str, tuple[tuple[int, ...], mx.Dtype]]


#: The names in a file of a key scaling's (`Frame`'s) centre and scale.
FRAME = ("frame.centre", "frame.scale")


def frame_arrays(frame: Frame | None) -> Arrays:
    """The arrays of a key scaling, by their names in a file."""
    return {} if frame is None else dict(zip(FRAME, frame.arrays, strict=True))


def frame_apart(arrays: Arrays) -> tuple[Frame | None, Arrays]:
    """The key scaling in a file's arrays, or None, and the other arrays.

    Raises:
        ValueError: A part of it is missing, or its numbers are invalid.
    """
    frame = [arrays[name] for name in FRAME if name in arrays]
    if not frame:
        return None, arrays
    if len(frame) < len(FRAME) or any(part.dtype != mx.float32 for part in frame):
        raise ValueError(f"A frame is {' and '.join(FRAME)}, both float32.")
    return Frame(*frame), {name: x for name, x in arrays.items() if name not in FRAME}


def used_only(arrays: Arrays, config: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """A cache's arrays and configuration without the memory that no token uses yet.

    Memory grows in steps of `slot_store.GROWTH_STEP` slots, so the file of a short conversation
    would consist mostly of zeros. A cache read from such arrays grows with its next token.

    Args:
        arrays: The cache's arrays, by name.
        config: The cache's config.
    """
    runs = [Run(**numbers) for numbers in config["runs"]]
    if not runs:
        return arrays, config
    reserved, window = config["reserved"], config["recent"]
    # (safetensors drops arrays without any row.)
    used = [max(reserved + run.length, 1) for run in runs]
    rows = max(window["length"], 1) if window else 0
    tight, start = [], 0
    for run, slots in zip(runs, used, strict=True):
        tight.append(vars(run) | {"start": start, "allocated": slots})
        start += run.heads * slots

    def of_slots(array: mx.array) -> mx.array:
        parts = []
        for run, slots in zip(runs, used, strict=True):
            end = run.start + run.heads * run.allocated
            shape = (array.shape[0], run.heads, run.allocated, *array.shape[2:])
            part = array[:, run.start : end].reshape(shape)[:, :, :slots]
            parts.append(part.flatten(1, 2))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    saved = {}
    for name, array in arrays.items():
        if name.startswith("slots."):
            saved[name] = of_slots(array)
        else:
            saved[name] = array[:, :, :rows] if name.startswith("recent.") else array
    return saved, config | {"runs": tight}


def settings_of(
    config: dict[str, Any], frame: Frame | None = None
) -> tuple[CacheSettings, LayerShare | None]:
    """The settings of a saved cache, and its share of its model's budget if the file has it.

    Args:
        config: The cache's config.
        frame: The keys' key scaling, or None.
    """
    saved = dict(config["policy"])
    check_ranges(config)
    rope = None
    if config.get("rope"):
        from mlx_h2o.slots.rope import Rope

        rope = Rope.of_config(config["rope"])
    settings = CacheSettings(
        config["max_size"],
        config["max_bytes"],
        config["budgets"],
        make_policy(saved.pop("name"), **saved),
        config["remainder"],
        Packing(**config["packing"]),
        config["attending"],
        config["undo"],
        config["saturation"],
        frame,
        filling=config["filling"],
        rope=rope,
        ranks=config.get("ranks", 1),
        pins=config["pins"],
    )
    share = None
    if config.get("share"):
        share = LayerShare.of_config(
            config["share"], settings.packing, settings.undo, frame is not None
        )
    return settings, share


def check_ranges(config: dict[str, Any]) -> None:
    """Check the numbers of a cache that are not settings and need no arrays to compare with."""
    _checks.whole("offset", config["offset"], 0, MOST_TOKENS)
    _checks.whole("aged_from", config["aged_from"], 0, max(config["offset"] - 1, 0))
    if config["own"] not in (None, True, False):
        raise ValueError(f"own must be true, false or null; got {_checks.shown(config['own'])}.")


def sharers_of(config: dict[str, Any]) -> int:
    """How many layers attend to a saved cache's rows; the file has it if there are several."""
    return _checks.whole("sharers", config.get("sharers", 1), 1, MOST_SHARERS)


def checked_runs(
    config: dict[str, Any], policy: Policy, window: dict[str, int] | None
) -> list[Run]:
    """The runs of heads, which follow each other without a gap and hold the tokens not evicted.

    Args:
        config: The config of a cache that has rows.
        policy: The cache's policy.
        window: The recent window's numbers, from `checked_window`.
    """
    attending = config["attending"]
    reserved = _checks.whole("reserved", config["reserved"], 0)
    if (reserved in PLAIN_ROWS) != (config["remainder"] and not attending) or reserved > 8:
        raise ValueError(f"reserved={reserved} does not go with attending={attending}.")
    recent = window or {"size": 0, "length": 0}
    ordered = config["offset"] - recent["length"]
    runs: list[Run] = []
    head = start = 0
    for numbers in config["runs"]:
        run = Run(**{name: _checks.whole(name, x, 0, MOST_TOKENS) for name, x in numbers.items()})
        full = run.length == run.budget
        chosen = full and (recent["length"] == recent["size"])
        if (
            (run.first, run.start) != (head, start)
            or run.last <= run.first
            or not run.length + reserved <= run.allocated <= run.budget + reserved
            or run.length > ordered
            or run.victims > policy.evict_every
            or (run.victims and not full)
            or (chosen and not run.victims)
        ):
            raise ValueError(f"The heads from {run.first} on hold what cannot be: {run}.")
        policy.check_budget(run.budget + recent["size"], "budget")
        runs.append(run)
        head, start = run.last, start + run.heads * run.allocated
        _checks.whole("slots", start, 0, MOST_TOKENS)
    budgets = config["budgets"] or ()
    if len(budgets) != head:
        raise ValueError(f"There are {len(budgets)} budgets for {head} KV heads.")
    for run in runs:
        # (A resized cache's budgets do not count the reserved rows.)
        sizes = {run.budget + recent["size"], run.budget + recent["size"] + reserved}
        if not sizes.issuperset(budgets[run.first : run.last]):
            raise ValueError(f"Heads of {run.budget} slots have budgets of {budgets}.")
    return runs


def checked_window(
    config: dict[str, Any], policy: Policy, packing: Packing
) -> dict[str, int] | None:
    """The recent window's numbers, or None where all rows are stored alike.

    Args:
        config: The config of a cache that has rows.
        policy: The cache's policy.
        packing: How the rows are stored.
    """
    window = config["recent"]
    if packing.recent is None:
        if window:
            raise ValueError("There is a recent window where all rows are stored alike.")
        return None
    size = _checks.whole("recent.size", window["size"], 1, MOST_TOKENS)
    length = _checks.whole("recent.length", window["length"], 0, min(size, config["offset"]))
    oldest = _checks.whole("recent.oldest", window["oldest"], 0, size - 1)
    protected = min(policy.recent_slots(budget) for budget in config["budgets"] or (0,))
    if size != protected or (oldest and length < size):
        raise ValueError(f"The recent window {window} is not that of {protected} protected tokens.")
    return {"size": size, "length": length, "oldest": oldest}


def check_arrays(
    arrays: Arrays,
    runs: Sequence[Run],
    policy: Policy,
    packing: Packing,
    remembers: bool,
    window: dict[str, int] | None,
) -> None:
    """Check that exactly the expected arrays are there and fit the runs and each other.

    Args:
        arrays: The arrays by name.
        runs: The runs of heads.
        policy: The cache's policy.
        packing: How the rows are stored.
        remembers: Whether the cache keeps statistics of evicted tokens.
        window: The recent window's numbers, or None.
    """
    heads, slots = runs[-1].last, sum(run.heads * run.allocated for run in runs)
    batch = arrays["slots.positions"].shape[0] if arrays["slots.positions"].ndim == 2 else 0
    if batch < 1:
        raise ValueError("Positions must be [batch, slots].")
    types = {name: row_type(name, arrays, packing) for name in ("keys", "values")}
    widths = {name: width for name, (width, _) in types.items()}
    expected = row_shapes("slots.", (batch, slots), types, packing)
    positions = arrays["slots.positions"].dtype
    expected["slots.positions"] = (batch, slots), NARROW if positions == NARROW else WIDE
    if policy.needs_attention:
        expected["slots.scores"] = (batch, slots), mx.float32
    measured = policy.keeps_value_lengths(packing)
    if measured:
        expected["slots.value_lengths"] = (batch, slots), mx.float16
    if remembers:
        for name in STATISTICS:
            width = {"count": (), "mean_value": (widths["values"],)}.get(name, (widths["keys"],))
            expected[f"remainder.{name}"] = (batch, heads, *width), mx.float32
    if "victims" in arrays or any(run.victims for run in runs):
        expected["victims"] = (batch, heads, policy.evict_every), mx.int32
    if window is not None:
        recent = packing.recent
        assert recent is not None
        keys = arrays["recent.keys"]
        rows = keys.shape[2] if keys.ndim == 4 else -1
        _checks.whole("rows of the recent window", rows, window["length"], window["size"])
        expected |= row_shapes("recent.", (batch, heads, rows), types, recent)
        if policy.needs_attention:
            expected["recent.scores"] = (batch, heads, rows), mx.float32
        if measured:
            expected["recent.value_lengths"] = (batch, heads, rows), mx.float16
    if missing_or_more := expected.keys() ^ arrays.keys():
        raise ValueError(f"Arrays are missing or too many: {sorted(missing_or_more)}.")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if (array.shape, array.dtype) != (shape, dtype):
            raise ValueError(f"{name} must be {shape} {dtype}; it is {array.shape} {array.dtype}.")


def row_type(name: str, arrays: Arrays, packing: Packing) -> tuple[int, mx.Dtype]:
    """Width and dtype of "keys" or "values" before they were packed.

    Args:
        name: "keys" or "values".
        arrays: The arrays by name.
        packing: How the rows are stored.
    """
    bits, rows = packing.bits(name), arrays[f"slots.{name}"]
    dtype = rows.dtype if bits is None else arrays[f"slots.{name}{SCALES}"].dtype
    width = rows.shape[-1] if rows.ndim else 0
    if bits is not None:
        width = width * 32 // bits
    if width < 1 or dtype not in FLOAT_DTYPES or (bits and width % packing.group_size):
        raise ValueError(f"The {name} cannot be {width} wide and of {dtype}.")
    return width, dtype


def row_shapes(
    prefix: str,
    rows: tuple[int, ...],
    types: dict[str, tuple[int, mx.Dtype]],
    packing: Packing,
) -> Expected:
    """Shapes and dtypes of the arrays of keys and values `[*rows, width]`, by name.

    Args:
        prefix: The prefix of the arrays' names.
        rows: The shape before the width.
        types: Width and dtype of keys and values.
        packing: How the rows are stored.
    """
    expected: Expected = {}
    for name, (width, dtype) in types.items():
        bits = packing.bits(name)
        if bits is None:
            expected[prefix + name] = (*rows, width), dtype
            continue
        expected[prefix + name] = (*rows, width * bits // 32), mx.uint32
        for part in (SCALES, BIASES):
            expected[prefix + name + part] = (*rows, width // packing.group_size), dtype
    return expected


def check_indices(
    arrays: Arrays, runs: Sequence[Run], reserved: int, settings: CacheSettings, newest: int
) -> None:
    """Check positions (in range, each once in a head, marked if pinned) and victims (in range).

    Args:
        arrays: The arrays, checked by `check_arrays`.
        runs: The runs of heads.
        reserved: Slots at the start of each range that hold no token.
        settings: The cache's settings.
        newest: The next logical position that is not in a slot.
    """
    stored, policy = np.array(arrays["slots.positions"].astype(WIDE)), settings.policy
    positions = np.maximum(stored, -1 - stored)
    victims = np.array(arrays["victims"]) if "victims" in arrays else None
    for run in runs:
        shape = (len(positions), run.heads, run.allocated)
        ordered = positions[:, run.start : run.start + run.heads * run.allocated].reshape(shape)
        ordered = np.sort(ordered[..., reserved : reserved + run.length], axis=-1)
        if ordered.size and (
            ordered.min() < 0 or ordered.max() >= newest or not np.diff(ordered).all()
        ):
            raise ValueError("Slots hold tokens that never came, or one of them twice.")
        if run.victims:
            assert victims is not None
            left = victims[:, run.first : run.last, policy.evict_every - run.victims :]
            if left.min() < 0 or left.max() >= run.length or not np.diff(np.sort(left)).all():
                raise ValueError("Slots to be overwritten are not in use, or named twice.")
    pinned = np.zeros(positions.shape, bool)
    for first, end in settings.pins:
        pinned |= (positions >= first) & (positions < end)
    if (stored[~pinned] < 0).any():
        raise ValueError("Slots hold tokens as pinned that no pin names.")
