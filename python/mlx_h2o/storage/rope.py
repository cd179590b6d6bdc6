"""Rolling positions: queries see the kept tokens at neighbouring positions, without gaps.

RoPE is in the cached keys, so a token that stays is ever further from the queries, up to distances
that no model was trained to see. Turned on by as many positions as tokens were forgotten after it,
a key is as far from the query as there are kept tokens between them, however long the conversation
is (as StreamingLLM assigns positions within the cache: Xiao et al. 2023, section 3.2). Only what a
query sees is turned; what is stored stays as it came, so no error adds up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o._utils import checks

# Of a file's rope.
MOST_DIMS = 2**16


@dataclass(frozen=True)
class Rope:
    """A plain RoPE, as `mlx.nn.RoPE` has it: channels are turned in pairs, by base^(-2i / dims).

    Attributes:
        dims: Channels that are turned, the first ones.
        base: Of the frequencies.
        scale: Factor on positions.
        traditional: Whether pairs are neighbours; else they are half of `dims` apart.
    """

    dims: int
    base: float
    scale: float = 1.0
    traditional: bool = False

    def turned(self, keys: mx.array, by: mx.array) -> mx.array:
        """Keys turned on by some positions.

        Args:
            keys: `[B, H, N, D]`, D at least `dims`.
            by: Positions of each, `[B, H, N]`, of either sign.

        Returns:
            `[B, H, N, D]`, of the keys' dtype.
        """
        exponents = mx.arange(self.dims // 2).astype(mx.float32) * (-2.0 / self.dims)
        angles = (by.astype(mx.float32) * self.scale)[..., None] * mx.power(self.base, exponents)
        cos, sin = mx.cos(angles), mx.sin(angles)
        first, second = self.pairs(keys.astype(mx.float32))
        pair = [first * cos - second * sin, first * sin + second * cos]
        if self.traditional:
            turned = mx.stack(pair, axis=-1)
            turned = turned.reshape(*turned.shape[:-2], self.dims)
        else:
            turned = mx.concatenate(pair, axis=-1)
        turned, rest = turned.astype(keys.dtype), keys[..., self.dims :]
        return mx.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned

    def pairs(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """The channels of rows `[..., D]` that are turned together, `[..., dims / 2]` each."""
        x, half = rows[..., : self.dims], self.dims // 2
        return (x[..., ::2], x[..., 1::2]) if self.traditional else (x[..., :half], x[..., half:])

    def pair_lengths(self, rows: mx.array) -> mx.array:
        """The lengths of those pairs, which no turn changes, `[..., dims / 2]` float32."""
        first, second = self.pairs(rows.astype(mx.float32))
        return mx.sqrt(mx.square(first) + mx.square(second))

    def config(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def of_config(cls, config: Any) -> Rope:
        """What `config` gave.

        Raises:
            ValueError: It gave something else.
        """
        if not isinstance(config, dict) or set(config) != set(cls.__dataclass_fields__):
            raise ValueError(
                f"A rope has {', '.join(cls.__dataclass_fields__)}; got {checks.shown(config)}."
            )
        dims = checks.whole("rope.dims", config["dims"], 2)
        base, scale = (checks.finite(f"rope.{name}", config[name]) for name in ("base", "scale"))
        if dims % 2 or dims > MOST_DIMS or base <= 0:
            raise ValueError(f"No rope has dims={dims} and base={base}.")
        return cls(dims, base, scale, checks.switch("rope.traditional", config["traditional"]))


def forgotten_after(positions: mx.array, offset: int) -> mx.array:
    """How many of the tokens after each row its head does not hold.

    Args:
        positions: Of all rows held, `[B, H, N]`, each once in a head, in any order.
        offset: The next position.

    Returns:
        `[B, H, N]` int32.
    """
    held_before = mx.argsort(mx.argsort(positions, axis=-1), axis=-1).astype(mx.int32)
    return (offset - positions.shape[-1]) - (positions - held_before)


def without_gaps(keys: mx.array, positions: mx.array, offset: int, rope: Rope) -> mx.array:
    """Keys as queries at the newest positions are to see them, `[B, H, N, D]`.

    Args:
        keys: As they came, `[B, H, N, D]`.
        positions: Theirs, `[B, H, N]`.
        offset: The next position.
        rope: That is in them.
    """
    return rope.turned(keys, forgotten_after(positions, offset))
