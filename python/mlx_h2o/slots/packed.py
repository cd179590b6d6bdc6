"""Packed rows: keys and values in few bits, in the format of `mx.quantize`, which MLX reads.

Only the choice of scale and bias differs: they span a group's least to its greatest element.
`mx.quantize` makes zero and the larger edge exact and clips the other edge, which doubles the loss
of perplexity at 4 bits.

A value's length, by which a policy may weigh tokens, is computed here too. A dense value is
measured on arrival, and the logarithm of its length is kept beside its row in 16 bits (exact to a
thousandth), since reading all values again would cost a step as much as attention. A packed value
needs nothing more: its scales rank values as their lengths do (SmolLM2, an eighth of the bytes: the
same perplexity within its error, docs/results/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_h2o import _checks

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
# The value of `recent_bits` for rows in the model's own dtype.
UNPACKED = 16


def group_size_for(*widths: int) -> int | None:
    """A group size in which rows of all these widths can be packed: the usual one if possible."""
    fits = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    return DEFAULT_GROUP_SIZE if DEFAULT_GROUP_SIZE in fits else next(iter(fits), None)


@dataclass(frozen=True)
class PackedRows:
    """Rows in affine quantization: w = scale * level + bias, per group of a row's elements.

    Attributes:
        words: `[..., rows, width * bits / 32]` uint32.
        scales: `[..., rows, width / group_size]` in the model's dtype.
        biases: `[..., rows, width / group_size]` in the model's dtype.
        bits: Bits of a level: 2, 3, 4, 5, 6 or 8.
        group_size: Elements that share a scale and a bias: 32, 64 or 128.

    Raises:
        ValueError: The arrays, bits and group_size do not fit together.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}; got {self.bits}.")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size must be one of {GROUP_SIZES}; got {self.group_size}.")
        if self.words.dtype != mx.uint32:
            raise ValueError(f"Packed words are uint32; got {self.words.dtype}.")
        per_group = (*self.words.shape[:-1], self.shape[-1] // self.group_size)
        if self.shape[-1] % self.group_size or not (
            self.scales.shape == self.biases.shape == per_group
            and self.scales.dtype == self.biases.dtype
        ):
            raise ValueError(
                f"{self.bits}-bit words {self.words.shape} in groups of {self.group_size} need "
                f"scales and biases {per_group} of one dtype; got {self.scales.shape} "
                f"{self.scales.dtype} and {self.biases.shape} {self.biases.dtype}."
            )

    @classmethod
    def of(cls, rows: mx.array, bits: int, group_size: int) -> PackedRows:
        """Rows `[..., rows, width]`, each group packed by its range (`pack_by_range`).

        Args:
            rows: Dense rows, in the model's dtype.
            bits: Bits of a level.
            group_size: Elements that share a scale and a bias.

        Raises:
            ValueError: The width is not a multiple of the group size, or bits are unknown.
        """
        if bits not in BITS or group_size not in GROUP_SIZES or rows.shape[-1] % group_size:
            raise ValueError(
                f"Rows of width {rows.shape[-1]} cannot be packed in groups of {group_size} with "
                f"{bits} bits: bits are one of {BITS}, group_size is one of {GROUP_SIZES} and "
                "divides the width."
            )
        return cls(*pack_by_range(rows, bits, group_size), bits, group_size)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.words, self.scales, self.biases]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows as numbers, `[..., rows, width]`."""
        return (*self.words.shape[:-1], self.words.shape[-1] * 32 // self.bits)

    @property
    def ndim(self) -> int:
        return self.words.ndim

    @property
    def dtype(self) -> mx.Dtype:
        """The rows' dtype before they were packed."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __getitem__(self, index: Any) -> PackedRows:
        """A selection of the rows, by an index of the axes before the last."""
        words, scales, biases = (array[index] for array in self.arrays)
        return PackedRows(words, scales, biases, self.bits, self.group_size)

    def dequantized(self) -> mx.array:
        """The rows as float32, without rounding to the model's dtype."""
        scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
        return mx.dequantize(self.words, scales, biases, group_size=self.group_size, bits=self.bits)

    def with_bits(self, bits: int) -> PackedRows:
        """The same rows in another width, computed from their levels without a second quantization.

        More bits hold the same levels: every number stays as it is, and no precision comes back.
        Fewer bits keep a level's highest bits, and the bias moves to the middle of the numbers that
        now share a level; the error is at most that of packing anew (which cuts the group's range
        into 2^bits - 1 intervals, where these are 2^bits).
        """
        if bits == self.bits:
            return self
        scales, biases, levels = self.scales, self.biases, self._levels()
        if bits < self.bits:
            dropped = self.bits - bits
            levels = levels >> dropped
            middle = (2**dropped - 1) / 2 * scales.astype(mx.float32)
            biases = (biases.astype(mx.float32) + middle).astype(biases.dtype)
            scales = scales * 2**dropped
        return PackedRows(words_of(levels, bits), scales, biases, bits, self.group_size)

    def _levels(self) -> mx.array:
        """The stored levels, `[..., rows, width]` uint32."""
        scales = mx.ones(self.scales.shape)
        unscaled = mx.dequantize(
            self.words, scales, mx.zeros_like(scales), group_size=self.group_size, bits=self.bits
        )
        return unscaled.astype(mx.uint32)


def pack_by_range(
    rows: mx.array, bits: int, group_size: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Words, scales and biases of rows, packed from each group's least to its greatest element.

    A group with an infinity or a NaN comes back as NaNs.

    Args:
        rows: `[..., width]` of any float dtype, which scales and biases take.
        bits: Bits of an element.
        group_size: Elements that share a scale and a bias; divides the width.
    """
    top = 2**bits - 1
    *others, width = rows.shape
    groups = rows.astype(mx.float32).reshape(*others, width // group_size, group_size)
    least, greatest = groups.min(axis=-1), groups.max(axis=-1)
    # Levels use scale and bias as stored, so their rounding to the rows' dtype adds no error.
    scales, biases = ((greatest - least) / top).astype(rows.dtype), least.astype(rows.dtype)
    by, off = scales.astype(mx.float32)[..., None], biases.astype(mx.float32)[..., None]
    levels = mx.minimum(mx.round((groups - off) / by), top)
    # Groups without a range and NaNs fail these comparisons, so they get level 0.
    levels = mx.where((by > 0) & (levels > 0), levels, 0).astype(mx.uint32)
    return words_of(levels.reshape(rows.shape), bits), scales, biases


def words_of(levels: mx.array, bits: int) -> mx.array:
    """Levels `[..., width]` uint32 as words: one stream of bits, each level's lowest bit first."""
    # 32 levels fill a whole number of words, so each level has the same place in them in all rows.
    by_32 = levels.reshape(*levels.shape[:-1], levels.shape[-1] // 32, 32)
    words = []
    for word in range(bits):
        first, last = 32 * word // bits, -(-32 * (word + 1) // bits)
        shifts = [level * bits - 32 * word for level in range(first, last)]
        left, right = (mx.array([max(sign * s, 0) for s in shifts], mx.uint32) for sign in (1, -1))
        words.append(((by_32[..., first:last] << left) >> right).sum(axis=-1))
    return mx.stack(words, axis=-1).flatten(-2)


@dataclass(frozen=True)
class JoinedRows:
    """Rows of different kinds, one after the other: `[B, H, N, width]`.

    Attributes:
        parts: Dense or packed rows that differ only in kind and number.
    """

    parts: tuple[Rows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[:-2], sum(part.shape[-2] for part in self.parts), first[-1])

    @property
    def ndim(self) -> int:
        return self.parts[0].ndim

    @property
    def dtype(self) -> mx.Dtype:
        return self.parts[0].dtype

    def first(self, count: int) -> JoinedRows:
        """The first `count` rows."""
        parts: list[Rows] = []
        for part in self.parts:
            parts.append(part[:, :, :count])
            count = max(count - part.shape[2], 0)
        return JoinedRows(tuple(parts))

    def dequantized(self) -> mx.array:
        """All rows as float32."""
        parts = [dense(part).astype(mx.float32) for part in self.parts if part.shape[-2]]
        return mx.concatenate(parts, axis=-2)


#: Keys or values of one kind, dense or packed.
Rows = mx.array | PackedRows

#: Keys or values of one kind or of several.
AnyRows = Rows | JoinedRows


def dense(rows: AnyRows) -> mx.array:
    """Rows as an array of numbers."""
    return rows if isinstance(rows, mx.array) else rows.dequantized()


def first_rows(rows: AnyRows, count: int) -> AnyRows:
    """The first `count` rows of `[B, H, N, width]`."""
    return rows.first(count) if isinstance(rows, JoinedRows) else rows[:, :, :count]


#: A function that packs rows: `PackedRows.of`, or a faster one with the same result.
Pack = Callable[[mx.array, int, int], PackedRows]

# Suffixes of a field's name under which a store keeps the scales and biases of packed rows.
SCALES, BIASES = ".scales", ".biases"


@dataclass(frozen=True)
class Packing:
    """How a cache stores its keys and values.

    Attributes:
        k_bits: Bits of a key's element, or None for the model's own dtype.
        v_bits: Bits of a value's element, or None for the model's own dtype. Errors of keys matter
            more than errors of values, since they go through the exponential.
        group_size: Elements that share a scale and a bias.
        recent_bits: Bits of the newest tokens where they are stored in another width
            (`recent_window.py`), 16 for the model's own dtype, or None for the same as all others.
            What k_bits or v_bits leave unpacked stays so.

    Raises:
        ValueError: There is no format for the bits or the group size.
    """

    k_bits: int | None = None
    v_bits: int | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    recent_bits: int | None = None

    def __post_init__(self) -> None:
        _checks.choice("k_bits", self.k_bits, (*BITS, None))
        _checks.choice("v_bits", self.v_bits, (*BITS, None))
        _checks.choice("group_size", self.group_size, GROUP_SIZES)
        # UNPACKED stands for the model's own dtype.
        _checks.choice("recent_bits", self.recent_bits, (*BITS, UNPACKED, None))
        if self.recent_bits is not None and not self.packs:
            raise ValueError("recent_bits needs bits (or k_bits or v_bits) for the other tokens.")

    def __str__(self) -> str:
        """The text for messages: " in 8 bits", " with keys in 8 and values in 4 bits", or none."""
        if not self.packs:
            return ""
        if self.k_bits == self.v_bits:
            text = f" in {self.k_bits} bits"
        else:
            widths = (("keys", self.k_bits), ("values", self.v_bits))
            text = " with " + " and ".join(f"{n} in {bits} bits" for n, bits in widths if bits)
        if self.recent_bits is None:
            return text
        recent = "unpacked" if self.recent_bits == UNPACKED else f"in {self.recent_bits} bits"
        return f"{text}, the newest {recent}"

    def bits(self, name: str) -> int | None:
        """Bits of the field "keys" or "values"."""
        return self.k_bits if name == "keys" else self.v_bits

    @property
    def packs(self) -> bool:
        return self.k_bits is not None or self.v_bits is not None

    @property
    def recent(self) -> Packing | None:
        """How the newest tokens are stored, or None if as all others."""
        if self.recent_bits is None:
            return None
        bits = None if self.recent_bits == UNPACKED else self.recent_bits
        return Packing(
            bits if self.k_bits else None, bits if self.v_bits else None, self.group_size
        )

    def names(self, name: str) -> tuple[str, ...]:
        """The names of a store's arrays for "keys" or "values", in the order of `PackedRows`."""
        return (name,) if self.bits(name) is None else (name, name + SCALES, name + BIASES)

    def fields(self, name: str, rows: Rows, pack: Pack = PackedRows.of) -> dict[str, mx.array]:
        """The arrays that a store keeps for rows `[..., width]` of a field, by name.

        Args:
            name: "keys" or "values".
            rows: Dense rows, which are packed now, or packed rows of any width.
            pack: The function that packs dense rows.

        Raises:
            ValueError: The groups do not divide the width.
        """
        bits = self.bits(name)
        if bits is None:
            return {name: dense(rows)}
        if isinstance(rows, PackedRows):
            packed = rows.with_bits(bits)
        else:
            self._check(name, rows.shape[-1])
            packed = pack(rows, bits, self.group_size)
        return dict(zip(self.names(name), packed.arrays, strict=True))

    def fitting(self, keys: Sequence[int], values: Sequence[int]) -> Packing:
        """The same bits, in groups that divide the widths of all rows.

        Args:
            keys: Widths of keys.
            values: Widths of values.

        Raises:
            ValueError: No group size divides the widths, or the one that was asked for does not.
        """
        widths = [
            (name, width)
            for name, of in (("keys", keys), ("values", values))
            for width in of
            if self.bits(name) is not None
        ]
        usual = self.group_size == DEFAULT_GROUP_SIZE
        fits = group_size_for(*(width for _, width in widths)) if usual else None
        if fits is not None:
            return replace(self, group_size=fits)
        for name, width in widths:
            self._check(name, width)
        return self

    def _check(self, name: str, width: int) -> None:
        if width % self.group_size:
            fits = group_size_for(width)
            dense = f"none does, so give {name[0]}_bits={UNPACKED}"
            raise ValueError(
                f"{name} of width {width} cannot be packed in groups of {self.group_size}: "
                f"group_size must divide the width; {f'{fits} does' if fits else dense}."
            )

    def rows(self, name: str, fields: dict[str, mx.array]) -> Rows:
        """A field's rows, from the arrays that a store keeps."""
        bits = self.bits(name)
        if bits is None:
            return fields[name]
        words, scales, biases = (fields[part] for part in self.names(name))
        return PackedRows(words, scales, biases, bits, self.group_size)

    def row_bytes(self, name: str, width: int, element_size: int) -> int:
        """Bytes of one row of a field whose dense elements take `element_size`.

        Args:
            name: "keys" or "values".
            width: Elements of a row.
            element_size: Bytes of a dense element.
        """
        bits = self.bits(name)
        if bits is None:
            return width * element_size
        return width * bits // 8 + 2 * element_size * (width // self.group_size)


#: Least squared length: the logarithm of a zero vector must not stretch the scale of all.
LEAST_SQUARE = 1e-12


def value_lengths(values: AnyRows) -> mx.array:
    """Logarithms of the values' squared lengths `[...]`, by which a policy ranks values.

    Args:
        values: `[..., Dv]`. Dense rows give log ||v||^2 in float16. Packed rows give
            log sum_g (max_g - min_g)^2 over the groups g of a row in float32: a group's range is
            its scale times the highest level. Joined rows are measured part by part.
    """
    if isinstance(values, JoinedRows):
        return mx.concatenate([value_lengths(part).astype(mx.float32) for part in values.parts], -1)
    if isinstance(values, PackedRows):
        ranges = values.scales.astype(mx.float32) * float(2**values.bits - 1)
        return logarithm(ranges)
    return logarithm(values.astype(mx.float32)).astype(mx.float16)


def logarithm(elements: mx.array) -> mx.array:
    """Log of the sum of squares of `[..., n]` float32: `[...]`."""
    return mx.log(mx.maximum(mx.square(elements).sum(axis=-1), LEAST_SQUARE))
