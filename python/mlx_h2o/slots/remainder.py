"""The remainder: statistics of a KV head's evicted tokens, and the softmax column made of them.

Evicting a row folds it into its head's count, mean key, per-dimension key variance and mean value
(Welford; merging by Chan et al. 1979). A query then has one more softmax column,

    x = 1/2 scale^2 sum_d q_d^2 var_d
    r = log n + scale q.mean_k + x / sqrt(1 + x / t)                     value: mean_v

For Gaussian keys the log-sum-exp of the evicted logits tends to r with x unsaturated (the moment
generating function of a Gaussian; MomentKV, arXiv 2606.01563, uses the first order). Real keys have
lighter tails: measured on two models, the term follows the saturated form within a tenth for x from
0.04 to 133, and the unsaturated x ruins models with sharp heads. The best t differs from head to
head, and for some it is 0: the first order alone (docs/reference/policies.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o import _checks
from mlx_h2o.slots.softmax import join

# t: the second-order term turns from x to sqrt(t x) there; 0 omits it. Fitted on full-cache runs:
# 2 has the least output error in models with very sharp heads, 4 elsewhere
# (docs/results/experiments.md).
SATURATION = 4.0

# Keep x finite whatever the queries and keys, so that r never becomes a NaN.
LARGEST_QUERY = 1e15
LARGEST_TERM = 1e30

# The names of the statistics, in the order in which kernels take them.
STATISTICS = ("count", "mean_key", "var_key", "mean_value")


@dataclass
class Remainder:
    """Running statistics of the evicted rows of H KV heads, float32.

    Attributes:
        count: Rows folded in, `[B, H]`; one by one it stops at 2^24, where log n hardly moves.
        mean_key: `[B, H, D]`.
        var_key: Per-dimension (population) variance of the keys, `[B, H, D]`.
        mean_value: `[B, H, Dv]`.
    """

    count: mx.array
    mean_key: mx.array
    var_key: mx.array
    mean_value: mx.array

    @classmethod
    def empty(cls, batch: int, heads: int, key_width: int, value_width: int) -> Remainder:
        """An empty remainder: nothing is folded in, and its column has no weight.

        Args:
            batch: Sequences, B.
            heads: KV heads, H.
            key_width: Width of a key, D.
            value_width: Width of a value, Dv.
        """
        return cls(
            mx.zeros((batch, heads)),
            mx.zeros((batch, heads, key_width)),
            mx.zeros((batch, heads, key_width)),
            mx.zeros((batch, heads, value_width)),
        )

    @staticmethod
    def bytes_per_head(key_width: int, value_width: int) -> int:
        """Bytes that one KV head's remainder takes: 2 D + Dv + 1 float32."""
        return 4 * (2 * key_width + value_width + 1)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The statistics by name, for saving and evaluating."""
        return {name: getattr(self, name) for name in STATISTICS}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def heads(self, first: int, last: int) -> Remainder:
        """The remainder of heads first to last - 1."""
        return Remainder(**{name: array[:, first:last] for name, array in self.arrays.items()})

    def with_heads(self, first: int, part: Remainder) -> Remainder:
        """This remainder with the statistics of some heads replaced, from head `first` on."""
        last = first + part.count.shape[1]
        merged = {}
        for name, array in self.arrays.items():
            whole = (array[:, :first], getattr(part, name), array[:, last:])
            pieces = [piece for piece in whole if piece.shape[1]]
            merged[name] = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
        return Remainder(**merged)

    def fold(self, keys: mx.array, values: mx.array, weights: mx.array | None = None) -> Remainder:
        """The remainder with these rows added; order and grouping do not matter.

        Args:
            keys: `[B, H, M, D]`.
            values: `[B, H, M, Dv]`.
            weights: The count of each row, broadcastable to `[B, H, M]` (0 leaves the row out).
        """
        keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        if weights is None:
            weights = mx.ones((1, 1, keys.shape[2]))
        weights = mx.broadcast_to(weights.astype(mx.float32), keys.shape[:3])
        added = weights.sum(axis=-1)
        # A weighted mean over the rows. With no rows it is meaningless, but nothing is folded in.
        share = (weights / mx.maximum(added, 1e-30)[..., None])[..., None, :]
        mean_key = (share @ keys).squeeze(2)
        var_key = (share @ mx.square(keys - mean_key[:, :, None])).squeeze(2)
        mean_value = (share @ values).squeeze(2)

        count = self.count + added
        part = (added / mx.maximum(count, 1e-30))[..., None]
        step = mean_key - self.mean_key
        return Remainder(
            count,
            self.mean_key + part * step,
            self.var_key + part * (var_key - self.var_key) + part * (1 - part) * mx.square(step),
            self.mean_value + part * (mean_value - self.mean_value),
        )

    def without(self, keys: mx.array, values: mx.array) -> Remainder:
        """The remainder as if these rows, which were folded in before, had not been.

        Chan's formula solved for one part. Rounding cannot make a variance negative here, and a
        remainder that nothing is left of has no weight, as an empty one.

        Args:
            keys: `[B, H, M, D]`.
            values: `[B, H, M, Dv]`.
        """
        keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        m, n = keys.shape[2], self.count[..., None]
        left = mx.maximum(n - m, 0)
        some, is_left = mx.maximum(left, 1), left > 0
        mean = keys.mean(axis=2)
        var = mx.square(keys - mean[:, :, None]).mean(axis=2)
        mean_key = (n * self.mean_key - m * mean) / some
        apart = left * m / mx.maximum(n, 1) * mx.square(mean_key - mean)
        var_key = mx.maximum((n * self.var_key - m * var - apart) / some, 0)
        mean_value = (n * self.mean_value - m * values.mean(axis=2)) / some
        parts = (mean_key, var_key, mean_value)
        return Remainder(left.squeeze(-1), *(mx.where(is_left, part, 0) for part in parts))

    def column(
        self,
        q: mx.array,
        scale: float,
        saturation: float | Sequence[float] = SATURATION,
        softcap: float = 0.0,
    ) -> mx.array:
        """The logit r `[B, Hq, L]` of the remainder's column, minus infinity while it is empty.

        Args:
            q: Queries `[B, Hq, L, D]`.
            scale: The attention's scale.
            saturation: t of the module's formula, one for all heads or each head's `[H]`; 0 is
                first order.
            softcap: c of the attention's capped logits, or 0. With a cap both orders are those of
                c tanh(s / c) around the mean logit s, and r - log n stays below c as every capped
                logit does.

        Raises:
            ValueError: A saturation is negative, or their number is not that of the heads.
        """
        ts = saturations("saturation", saturation, self.count.shape[1])
        B, Hq, L, D = q.shape
        grouped = (q.astype(mx.float32) * scale).reshape(B, self.count.shape[1], -1, D)
        mean = grouped @ self.mean_key[..., None]
        square = mx.square(mx.clip(grouped, -LARGEST_QUERY, LARGEST_QUERY))
        x = square @ (0.5 * self.var_key)[..., None]
        x = mx.minimum(x, LARGEST_TERM)
        if softcap:
            tanh = mx.tanh(mean / softcap)
            mean, x = softcap * tanh, mx.square(1 - mx.square(tanh)) * x
        weight = mean + saturated(x, ts)
        weight = mx.minimum(weight, softcap) if softcap else weight
        r = mx.log(self.count)[..., None] + weight.squeeze(-1)
        return r.reshape(B, Hq, L)

    def join(self, out: mx.array, lse: mx.array, r: mx.array) -> tuple[mx.array, mx.array]:
        """Attention over the kept slots and the remainder's column together.

        Args:
            out: Attention over the kept slots `[B, Hq, L, Dv]`.
            lse: The log-sum-exp of `out`, `[B, Hq, L]`.
            r: The column's logit `[B, Hq, L]`.

        Returns:
            out and lse of the joint softmax, shaped and typed as given.
        """
        return join(out, lse, r, self.mean_value)

    def plain_rows(self, rows: int) -> tuple[mx.array, mx.array]:
        """The remainder as ordinary rows, for attention outside this package.

        Rows at mean_k +- sqrt(var) * signs with log(n / rows) added to their logits by the mask
        give the column's logit to second order, and saturate of themselves.

        Args:
            rows: R; 1 for the mean alone, else an even number.

        Returns:
            Keys `[B, H, R, D]` and values `[B, H, R, Dv]`, float32.
        """
        signs = antithetic_signs(rows, self.mean_key.shape[-1])
        keys = self.mean_key[:, :, None] + mx.sqrt(self.var_key)[:, :, None] * signs
        B, H, Dv = self.mean_value.shape
        return keys, mx.broadcast_to(self.mean_value[:, :, None], (B, H, rows, Dv))


def saturated(x: mx.array, saturation: Sequence[float]) -> mx.array:
    """The second-order term `[B, H, M, 1]` of x, with the t of each head; t = 0 omits the term."""
    t = mx.array(list(saturation), mx.float32).reshape(-1, 1, 1)
    # Division by t = 0 would give NaN where x is 0 too.
    return mx.where(t > 0, x * mx.rsqrt(1 + x / mx.where(t > 0, t, 1)), 0)


def checked_saturation(name: str, value: Any) -> float | tuple[float, ...]:
    """One t for all heads, or one for each head, as Python's own types.

    Args:
        name: The caller's name for it, used in messages.
        value: A number, a list or an array.

    Raises:
        ValueError: A value is not a finite number, or negative.
    """
    listed = _checks.is_list(value)
    values = value.tolist() if hasattr(value, "tolist") else value
    ts = tuple(_checks.finite(name, t) for t in (values if listed else [values]))
    if not ts or min(ts) < 0:
        raise ValueError(f"{name} must be 0 (first order) or more; got {_checks.shown(value)}.")
    return ts if listed else ts[0]


def saturations(name: str, value: Any, heads: int) -> tuple[float, ...]:
    """The t of each of `heads` KV heads; arguments as in `checked_saturation`.

    Args:
        name: The setting's name, for the message.
        value: One number, or one for each KV head.
        heads: The number of KV heads.

    Raises:
        ValueError: As there, or the number of values is not `heads`.
    """
    ts = checked_saturation(name, value)
    if isinstance(ts, float):
        return (ts,) * heads
    if len(ts) != heads:
        raise ValueError(
            f"{name} must be one number, or one for each of {heads} KV heads; got {len(ts)}."
        )
    return ts


def antithetic_signs(rows: int, width: int) -> mx.array:
    """Fixed sign vectors `[rows, width]` in pairs s, -s; rows of a Hadamard matrix.

    Entry d of pair j is (-1) ** popcount((j + 1) & d), so that every language computes the same.
    """
    if rows == 1:
        return mx.zeros((1, width))
    pairs = [[(-1.0) ** ((j + 1) & d).bit_count() for d in range(width)] for j in range(rows // 2)]
    half = mx.array(pairs)
    return mx.concatenate([half, -half])


def plain_rows_for(budget: int) -> int:
    """How many plain rows a head of `budget` slots can afford: 8 of 128 pays, 8 of 64 does not."""
    return max(1, min(8, budget // 16 // 2 * 2))
