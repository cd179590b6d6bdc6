"""Ownership of a layer's arrays: they are here, or lent to a decoder that changes them in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.choice import pack
from mlx_h2o.attention.backends.decoder import Decoder, Lent
from mlx_h2o.attention.backends.decoders import decoder_for, fits_device
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.storage.packed import value_lengths
from mlx_h2o.storage.pins import stored_positions
from mlx_h2o.storage.recent_window import RecentWindow
from mlx_h2o.storage.remainder import Remainder
from mlx_h2o.storage.slot_store import Run, SlotStore

#: The fields of some rows, by name: `[B, heads, N, ...]` each.
Fields = dict[str, mx.array]


@dataclass
class Evictions:
    """A layer's evicted tokens (the remainder) and its next victims.

    Attributes:
        remainder: The statistics of the evicted tokens.
        victims: Slots to overwrite next, `[B, H, evict_every]` int32; each run knows how many of
            them are left. None until some are named.
    """

    remainder: Remainder
    victims: mx.array | None = None


class Memory:
    """A layer's slots, recent window, remainder and victims.

    During fused decode steps a decoder has the arrays. `store` and `evictions` first take them
    back; `runs` and `window` have current lengths at any time, and current arrays after one of
    those two.

    Args:
        store: The layer's slots.
        window: The recent window, or None if all rows are stored alike.
        evictions: The remainder and the victims.
    """

    def __init__(self, store: SlotStore, window: RecentWindow | None, evictions: Evictions):
        self.window = window
        self._store = store
        self._evictions: Evictions | Decoder = evictions

    @property
    def runs(self) -> list[Run]:
        """The runs of neighbouring heads with equal budgets."""
        return self._store.runs

    @property
    def plan(self) -> SlotStore:
        """The slots' layout and lengths, without their arrays."""
        return self._store

    @property
    def store(self) -> SlotStore:
        """The slots with their arrays, taken back from a decoder if need be."""
        self.take_back()
        return self._store

    @property
    def evictions(self) -> Evictions:
        """The remainder and the victims, taken back from a decoder if need be."""
        return self.take_back()

    @property
    def decoder(self) -> Decoder | None:
        """The decoder that has the arrays now, or None."""
        return self._evictions if isinstance(self._evictions, Decoder) else None

    def arrays(self, remembers: bool) -> dict[str, mx.array]:
        """Every array held, by name; the remainder's too if the layer keeps one (`remembers`)."""
        evictions = self.evictions
        arrays = {f"slots.{name}": field for name, field in self._store.fields.items()}
        if remembers:
            of_remainder = evictions.remainder.arrays.items()
            arrays |= {f"remainder.{name}": array for name, array in of_remainder}
        if evictions.victims is not None:
            arrays["victims"] = evictions.victims
        if self.window is not None:
            arrays |= {f"recent.{name}": field for name, field in self.window.fields.items()}
        return arrays

    def nbytes(self, remembers: bool) -> int:
        """Bytes of all arrays, and of slots in a reserved range those in use."""
        slots = self._store.nbytes
        if isinstance(self._evictions, Decoder):
            return self._evictions.nbytes - self._store.capacity + slots
        beside = self.arrays(remembers).items()
        return slots + sum(a.nbytes for name, a in beside if not name.startswith("slots."))

    def attended(self, beyond: Fields | None = None) -> list[Fields]:
        """For each run, all fields of its slots, then of rows beyond its budget."""
        store = self.store
        if beyond is None:
            return [store.views(run) for run in store.runs]
        parts = []
        for run in store.runs:
            new = {name: row[:, run.first : run.last] for name, row in beyond.items()}
            if run.length:
                old = store.views(run)
                new = {name: mx.concatenate([old[name], new[name]], axis=2) for name in new}
            parts.append(new)
        return parts

    def lent(self, settings: CacheSettings, keys: mx.array, values: mx.array) -> Decoder:
        """The default device's decoder, which gets the arrays, with room for rows like these.

        Args:
            settings: The layer's settings; `decoders.accepts` must be true of them.
            keys: `[B, H, 1, D]`.
            values: `[B, H, 1, Dv]`.
        """
        decoder = self.decoder
        slots_short = any(run.length == run.allocated < run.budget for run in self.runs)
        short = slots_short or (self.window is not None and self.window.needs_room)
        if decoder is not None and not short and fits_device(decoder):
            return decoder
        evictions = self.take_back()
        if slots_short:
            self._store.reserve(1, fields_of(settings, keys, values, 0))
        victims = evictions.victims
        if victims is None:
            shape = (keys.shape[0], self._store.heads, settings.policy.evict_every)
            victims = mx.zeros(shape, mx.int32)
        window = self.window.lend() if self.window is not None else None
        lent = Lent(self._store.lend(), evictions.remainder, victims, window)
        # The decoder now has the only reference, so that it writes in place.
        self._evictions = decoder_for(lent, settings)
        return self._evictions

    def fit_positions(self, tokens: int) -> None:
        """Make positions as wide as so many tokens need."""
        if not self._store.positions_fit(tokens):
            self.store.fit_positions(tokens)

    def take_back(self) -> Evictions:
        """Take all arrays back from the decoder."""
        if isinstance(self._evictions, Decoder):
            lent = self._evictions.end()
            self._store.get_back(lent.fields)
            if self.window is not None and lent.window is not None:
                self.window.get_back(lent.window)
            self._evictions = Evictions(lent.remainder, lent.victims)
        return self._evictions

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy; steps planned ahead are kept, so that they go on alike."""
        self.take_back()
        return vars(self)


def marked(settings: CacheSettings, rows: Fields | None) -> Fields | None:
    """Rows with positions as slots store them, which mark pins."""
    if rows is None or not settings.pins:
        return rows
    return {**rows, "positions": stored_positions(rows["positions"], settings.pins)}


def fields_of(settings: CacheSettings, keys: mx.array, values: mx.array, first: int) -> Fields:
    """New rows `[B, H, L, ...]` by field, for the positions from `first` on.

    Args:
        settings: The layer's settings.
        keys: `[B, H, L, D]`.
        values: `[B, H, L, Dv]`.
        first: The position of the first row.
    """
    B, H, L, _ = keys.shape
    new = mx.arange(first, first + L, dtype=mx.int32)
    fields = {
        **settings.packing.fields("keys", keys, pack),
        **settings.packing.fields("values", values, pack),
        "positions": mx.broadcast_to(new, (B, H, L)),
    }
    if settings.policy.needs_attention:
        fields["scores"] = mx.zeros((B, H, L))
    if settings.policy.keeps_value_lengths(settings.packing):
        fields["value_lengths"] = value_lengths(values)
    return fields
