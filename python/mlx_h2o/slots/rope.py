"""Rolling positions: queries see the kept tokens at neighbouring positions, without gaps.

RoPE is in the cached keys, so a kept token moves ever further from the queries, up to distances
that no model was trained for. Here a key is turned forward by the number of tokens forgotten after
it. It is then as far from the query as there are kept tokens between them, however long the
conversation is (as StreamingLLM assigns positions within the cache: Xiao et al. 2023, section 3.2).
Only keys that a query attends to are turned; stored keys stay as they came, so no error adds up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o import _checks

# The most dims of a rope in a file.
MOST_DIMS = 2**16


@dataclass(frozen=True)
class Rope:
    """A plain RoPE, as in `mlx.nn.RoPE`: channels are turned in pairs, by base^(-2i / dims).

    Attributes:
        dims: Channels that are turned, the first ones of a row.
        base: The base of the frequencies.
        scale: The factor on positions.
        traditional: Whether the channels of a pair are neighbours; else they are `dims` / 2 apart.
    """

    dims: int
    base: float
    scale: float = 1.0
    traditional: bool = False

    def turned(self, keys: mx.array, by: mx.array) -> mx.array:
        """Keys turned forward by some positions.

        Args:
            keys: `[B, H, N, D]`, D at least `dims`.
            by: The positions to turn each key by, `[B, H, N]`, of either sign.

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

    def config(self) -> dict[str, Any]:
        """The settings as JSON types."""
        return asdict(self)

    @classmethod
    def of_config(cls, config: Any) -> Rope:
        """The rope of a `config`.

        Raises:
            ValueError: It is not the result of `config`.
        """
        if not isinstance(config, dict) or set(config) != set(cls.__dataclass_fields__):
            raise ValueError(
                f"A rope has {', '.join(cls.__dataclass_fields__)}; got {_checks.shown(config)}."
            )
        dims = _checks.whole("rope.dims", config["dims"], 2)
        base, scale = (_checks.finite(f"rope.{name}", config[name]) for name in ("base", "scale"))
        if dims % 2 or dims > MOST_DIMS or base <= 0:
            raise ValueError(f"A rope cannot have dims={dims} and base={base}.")
        return cls(dims, base, scale, _checks.switch("rope.traditional", config["traditional"]))


def forgotten_after(positions: mx.array, offset: int) -> mx.array:
    """The number of tokens after each row that its head has forgotten.

    Args:
        positions: Positions of all rows held, `[B, H, N]`, each once in a head, in any order.
        offset: The next position.

    Returns:
        `[B, H, N]` int32.
    """
    held_before = mx.argsort(mx.argsort(positions, axis=-1), axis=-1).astype(mx.int32)
    return (offset - positions.shape[-1]) - (positions - held_before)


def without_gaps(keys: mx.array, positions: mx.array, offset: int, rope: Rope) -> mx.array:
    """Keys turned for queries at the newest positions, `[B, H, N, D]`.

    Args:
        keys: The keys as they came, `[B, H, N, D]`.
        positions: The keys' positions, `[B, H, N]`.
        offset: The next position.
        rope: The RoPE applied to the keys.
    """
    return rope.turned(keys, forgotten_after(positions, offset))
