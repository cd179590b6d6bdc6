"""Values and remainder of a compressed prompt, fitted to the attention of its second reading.

Source: Attention Matching (https://arxiv.org/abs/2602.16284), whose kept rows get a bias each and
new values. Here no bytes are added: kept values, the remainder's value and its count are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.engine.layer import Layer
from mlx_h2o.model_caches import compress
from mlx_h2o.model_caches.compress import RereadCache
from mlx_h2o.storage.packed import dense
from mlx_h2o.storage.remainder import Remainder

RIDGE = 1e-3
MOST_QUERIES = 4096


class Remembering(RereadCache):
    """A layer in the second reading that keeps the queries."""

    def __init__(self, first: Any):
        super().__init__(first)
        self.queries: list[mx.array] = []
        self.scale = 1.0

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.queries.append(call.q)
        self.scale = call.scale
        return super().look(call, keys, values)


def refit(layer: Layer, seen: Remembering, ridge: float = RIDGE, what: str = "vrc") -> None:
    """Fit a layer's kept values and remainder."""
    frame = layer.settings.frame
    q = mx.concatenate(seen.queries, axis=2)
    every = -(-q.shape[2] // MOST_QUERIES)
    q = q[:, :, ::every]
    keys = seen.keys
    if frame is not None:
        q, keys = frame.enter_queries(q), frame.enter(keys)
    B, Hq, n, D = q.shape
    H = keys.shape[1]
    grouped = (q.astype(mx.float32) * seen.scale).reshape(B, H, -1, D)
    r = layer.evictions.remainder.column(q, seen.scale, layer.settings.saturations(H))
    r = r.reshape(B, H, -1)
    count, mean_value = layer.evictions.remainder.count, layer.evictions.remainder.mean_value
    counts, means = np.array(count), np.array(mean_value)
    parts: list[list[np.ndarray]] = []
    for run in layer.runs:
        fields = layer.store.views(run)
        k, v = (np.array(dense(layer.packing.rows(x, fields)).astype(mx.float32)) for x in ("keys", "values"))
        out = np.array(v)
        for b in range(B):
            for h in range(run.heads):
                H_ = run.first + h
                g = np.array(grouped[b, H_])
                full = g @ np.array(keys[b, H_].astype(mx.float32)).T
                top = full.max(axis=1, keepdims=True)
                full = np.exp(full - top)
                z = full.sum(axis=1)
                target = (full @ np.array(seen.values[b, H_].astype(mx.float32))) / z[:, None]
                kept = np.exp(g @ k[b, h].T - top) / z[:, None]
                rest = np.exp(np.array(r[b, H_]) - top[:, 0]) / z
                if "c" in what and counts[b, H_] > 0:
                    t = 1 - kept.sum(axis=1)
                    factor = float(np.clip((rest * t).sum() / max((rest * rest).sum(), 1e-30), 0.1, 10))
                    counts[b, H_] *= factor
                    rest = rest * factor
                P = np.concatenate([kept, rest[:, None]], axis=1)
                P /= P.sum(axis=1, keepdims=True)
                V = np.concatenate([v[b, h], means[b, H_][None]])
                gram = P.T @ P
                gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram), dtype=gram.dtype)
                V = V + np.linalg.solve(gram, P.T @ (target - P @ V))
                out[b, h] = V[:-1]
                means[b, H_] = V[-1]
        parts.append([out])
    if "v" in what:
        for i, (run, (out,)) in enumerate(zip(layer.runs, parts, strict=True)):
            fields = layer.packing.fields("values", mx.array(out).astype(layer.types["values"].dtype))
            parts[i] = fields  # type: ignore[call-overload]
        for name in parts[0]:
            layer.store.write(name, [part[name] for part in parts])
    old = layer.evictions.remainder
    if "r" in what:
        layer.evictions.remainder = Remainder(mx.array(counts), old.mean_key, old.var_key, mx.array(means))


def compressed_and_fitted(empty, model, tokenizer, tokens, *, room, chunk, ridge=RIDGE, what="vrc"):
    seen: list[Remembering] = []

    def make(first: Any) -> Remembering:
        seen.append(Remembering(first))
        return seen[-1]

    real, compress.RereadCache = compress.RereadCache, make
    try:
        caches = compress.compress_into(empty, model, tokenizer, tokens, room=room, chunk=chunk)
    finally:
        compress.RereadCache = real
    if ridge is not None:
        for entry, one in zip(compress.bounded_entries(caches), seen, strict=True):
            refit(entry._layer, one, ridge, what)
    return caches
