"""Creates a layer's memory, from the widths of its first rows or from a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_h2o.attention.backends.choice import has_ranges, pack
from mlx_h2o.attention.ops import FLOAT_DTYPES
from mlx_h2o.budgets.cost import LayerShare, RowWidths, slots_for_bytes
from mlx_h2o.budgets.growth import Stage, starts_narrow, while_narrow
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer import saved_state
from mlx_h2o.layer.eviction import recent_size
from mlx_h2o.layer.layer import Layer, RowType, new_fields
from mlx_h2o.policies.shapes import check_shapes
from mlx_h2o.slots.paged_slots import PagedSlotStore
from mlx_h2o.slots.remainder import Remainder, plain_rows_for
from mlx_h2o.slots.slot_store import SlotStore, position_dtype, under

if TYPE_CHECKING:
    from mlx_h2o.slots.recent_window import RecentWindow


def open_layer(
    settings: CacheSettings, keys: mx.array, values: mx.array
) -> tuple[Layer, LayerShare]:
    """An empty layer for rows like these, and its share of a model's budget.

    Args:
        settings: The layer's settings; its size is in tokens, in bytes or per head.
        keys: `[B, H, L, D]`.
        values: `[B, H, L, Dv]`.

    Raises:
        ValueError: The rows are not floats, or the size does not suit them.
    """
    if keys.dtype not in FLOAT_DTYPES or values.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"Keys and values must be float32, float16 or bfloat16; got {keys.dtype} and "
            f"{values.dtype}."
        )
    B, H, _, D = keys.shape
    Dv, sizes = values.shape[-1], (keys.dtype.size, values.dtype.size)
    widths = _row_widths(settings, D, Dv, *sizes)
    budgets, filling = _sized(settings, B, H, widths)
    reserved = 0
    if not settings.attending and settings.remainder:
        reserved = plain_rows_for(min(budgets))
    of_slots = [budget - reserved for budget in budgets]
    for budget in set(of_slots):
        settings.policy.check_budget(budget, "max_size", settings.max_size)
    window = None
    if settings.packing.recent is not None:
        window = window_of(settings, recent_size(settings, of_slots))
        of_slots = [budget - window.size for budget in of_slots]
    settings.check_rows(H, D)
    check_shapes(settings.policy, H, D, Dv)
    if settings.budgets is None:
        settings = replace(settings.resized(budgets), filling=filling)
    store = _store_class(settings)(of_slots, reserved)
    if window is not None:
        # So that there are fields to read while all tokens are in the recent window.
        store.reserve(1, new_fields(settings, keys[:, :, :1], values[:, :, :1], 0))
    types = {"keys": RowType.of(keys), "values": RowType.of(values)}
    remainder = Remainder.empty(B, H, D, Dv)
    return Layer(settings, types, store, remainder, window), LayerShare(H, widths)


def _sized(
    settings: CacheSettings, batch: int, heads: int, widths: RowWidths
) -> tuple[list[int], tuple[Stage, ...]]:
    """Slots of each KV head, and the stages of its growth; errors as in `budgets_of`."""
    budgets = budgets_of(settings, batch, heads, widths)
    if not starts_narrow(settings.max_bytes, settings.undo, settings.attending):
        return budgets, settings.filling
    narrow = budgets_of(settings, batch, heads, widths.narrow)
    first, later = while_narrow((tuple(narrow), ()), (tuple(budgets), ()))
    return list(first), later


def budgets_of(settings: CacheSettings, batch: int, heads: int, widths: RowWidths) -> list[int]:
    """Slots of each KV head.

    Args:
        settings: The layer's settings.
        batch: Sequences, B.
        heads: KV heads, H.
        widths: The widths of a row.

    Raises:
        ValueError: There are too few slots, or not one number for each head.
    """
    policy, remembers = settings.policy, settings.remembers
    if settings.budgets is not None:
        if len(settings.budgets) != heads:
            raise ValueError(f"{len(settings.budgets)} budgets were given for {heads} KV heads.")
        return list(settings.budgets)
    if settings.max_bytes is not None:
        least = policy.least_budget()
        rows = batch * heads
        size = slots_for_bytes(settings.max_bytes, rows, widths, policy, remembers, least)
    else:
        assert settings.max_size is not None
        size = settings.max_size - widths.remainder_slots(remembers)
    return [size] * heads


def window_of(settings: CacheSettings, size: int) -> RecentWindow:
    """An empty recent window."""
    from mlx_h2o.slots.recent_window import RecentWindow  # with `recent_bits` only

    policy, packing = settings.policy, settings.packing
    return RecentWindow(
        size, packing, policy.needs_attention, policy.keeps_value_lengths(packing), pack
    )


def config_of(layer: Layer | None) -> dict[str, Any]:
    """The config that `restored` needs beside the arrays, as JSON types; None before any rows."""
    if layer is None:
        return {"offset": 0, "aged_from": 0, "reserved": 0, "runs": [], "recent": None}
    return {
        "offset": layer.offset,
        "aged_from": layer.aged_from,
        "reserved": layer.store.reserved,
        "runs": [vars(run).copy() for run in layer.runs],
        "recent": layer.window.config() if layer.window else None,
    }


def restored(
    settings: CacheSettings,
    share: LayerShare | None,
    config: dict[str, Any],
    arrays: dict[str, mx.array],
) -> tuple[Layer, LayerShare]:
    """The layer in a file, and its share of a model's budget.

    Args:
        settings: The layer's settings.
        share: The layer's share, if the file has it.
        config: The cache's config; it has runs.
        arrays: The arrays by name.

    Raises:
        ValueError: Numbers and arrays do not fit together.
    """
    policy, packing, remembers = settings.policy, settings.packing, settings.remembers
    numbers = saved_state.checked_window(config, policy, packing)
    runs = saved_state.checked_runs(config, policy, numbers)
    saved_state.check_arrays(arrays, runs, policy, packing, remembers, numbers)
    newest = config["offset"] - (numbers["length"] if numbers else 0)
    saved_state.check_indices(arrays, runs, config["reserved"], settings, newest)
    fields = under("slots.", arrays)
    fields["positions"] = fields["positions"].astype(position_dtype(config["offset"]))
    store = _store_class(settings).of(runs, config["reserved"], fields)
    window = None
    if numbers:
        window = window_of(settings, numbers["size"])
        window.length, window.oldest = numbers["length"], numbers["oldest"]
        window.get_back(under("recent.", arrays))
    types, widths = _types_and_widths(settings, store)
    heads, B = store.heads, types["keys"].batch
    settings.check_rows(heads, widths.key)
    share = share or LayerShare(heads, widths)
    if (share.heads, share.widths) != (heads, widths):
        raise ValueError(f"The share {share} is not that of {heads} heads of {widths}.")
    remainder = Remainder.empty(B, heads, widths.key, widths.value)
    if remembers:
        remainder = Remainder(**under("remainder.", arrays))
    of_arrays = store, remainder, window, arrays.get("victims")
    return Layer(settings, types, *of_arrays, config["offset"], config["aged_from"]), share


def _store_class(settings: CacheSettings) -> type[SlotStore]:
    return PagedSlotStore if lies_in_range(settings) else SlotStore


def lies_in_range(settings: CacheSettings) -> bool:
    """Whether slots should lie in a reserved range: not where a journal keeps whole fields."""
    return has_ranges() and not settings.undo


def _types_and_widths(
    settings: CacheSettings, store: SlotStore
) -> tuple[dict[str, RowType], RowWidths]:
    """The row types and widths of a store's rows before they are packed."""
    types, widths, sizes = {}, [], []
    for name in ("keys", "values"):
        fields = settings.packing.rows(name, store.fields)
        batch, _, width = fields.shape
        types[name] = RowType(batch, store.heads, width, fields.dtype)
        widths.append(width)
        sizes.append(fields.dtype.size)
    return types, _row_widths(settings, widths[0], widths[1], sizes[0], sizes[1])


def _row_widths(
    settings: CacheSettings, key: int, value: int, key_size: int, value_size: int
) -> RowWidths:
    """The widths and bytes of rows with so many elements of so many bytes each."""
    return RowWidths(
        *(key, value, key_size, value_size, settings.packing, settings.undo),
        framed=settings.frame is not None,
    )
