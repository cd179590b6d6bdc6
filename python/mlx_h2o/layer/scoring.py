"""Scoring: queries attend, and the policy updates the scores with the attention observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.operands import Seed
from mlx_h2o.attention.backends.reference import QUERY_BLOCK
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.policy_view import ranked_of, rows_of
from mlx_h2o.policies import Observation, ObservedMass
from mlx_h2o.slots.packed import AnyRows, dense, first_rows
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.slots.slot_store import Fields, Run
from mlx_h2o.slots.softmax import block_of


@dataclass(frozen=True)
class RunResult:
    """The result of attention over one run of heads.

    Attributes:
        out: `[B, Hq of the run, L, Dv]`.
        fields: The fields of the run's slots, `[B, heads, N, ...]`, with updated scores.
        newest_scores: Scores of the recent window's tokens `[B, heads, M]`, or None without them.
        window_mass: Attention mass of each row from the last `window` queries of a prompt
            `[B, heads, N + M]`; None where the policy needs none.
    """

    out: mx.array
    fields: Fields
    newest_scores: mx.array | None
    window_mass: mx.array | None


def observe(layer: Layer, run: Run, call: AttentionCall, fields: Fields) -> RunResult:
    """Attend with a run's queries to its slots, the recent window and the remainder.

    Args:
        layer: The layer that owns the run; it holds the new rows.
        run: The run of neighbouring KV heads.
        call: The call, for all heads of the layer.
        fields: The fields of the run's slots, `[B, heads, N, ...]`.
    """
    heads = layer.store.heads
    group = call.q.shape[1] // heads
    if run.heads < heads:
        call = call.of_heads(run.first * group, run.last * group)
    keys, values = rows_of(layer, run, fields)
    if layer.settings.rope is not None:
        from mlx_h2o.slots.rope import without_gaps

        places = true_positions(fields["positions"])
        keys = without_gaps(dense(keys), places, layer.offset, layer.settings.rope)
    remainder, saturation = None, tuple[float, ...]()
    if layer.settings.remainder and layer.lost_beside(fields):
        remainder = layer.remainder.heads(run.first, run.last)
        saturation = layer.settings.saturations(heads)[run.first : run.last]
    ranked = ranked_of(layer, run, fields)
    attention = _Attention(layer, call, keys, values, ranked, run.heads, remainder, saturation)
    return attention.result(fields)


def mean_of(rounds: Sequence[RunResult]) -> RunResult:
    """The mean over several layers that attended to the same rows.

    A slot's mass is a mean over query heads, so the result is as if all were heads of one layer.
    The output is the last layer's.
    """
    first = rounds[0]
    fields = first.fields
    if "scores" in fields:
        fields = {**fields, "scores": _mean([one.fields["scores"] for one in rounds])}
    newest, mass = first.newest_scores, first.window_mass
    if newest is not None:
        newest = _mean([one.newest_scores for one in rounds])
    if mass is not None:
        mass = _mean([one.window_mass for one in rounds])
    return RunResult(rounds[-1].out, fields, newest, mass)


def _mean(arrays: Sequence[mx.array | None]) -> mx.array:
    mean: mx.array = mx.stack([array for array in arrays if array is not None]).mean(axis=0)
    return mean


def observe_derived(
    layer: Layer, call: AttentionCall, fields: Fields, keys: mx.array, values: mx.array
) -> RunResult:
    """Attend to keys and values `[B, Hk, N, ...]` that a model derived from a layer's rows.

    Args:
        layer: The layer that owns the rows.
        call: The queries, scale, mask and sinks.
        fields: The fields of the rows attended to.
        keys: `[B, Hk, N, D]`, derived from the rows.
        values: `[B, Hk, N, Dv]`, derived from the rows.
    """
    heads = layer.runs[0].heads
    return _Attention(layer, call, keys, values, fields, heads, own=False).result(fields)


@dataclass(frozen=True)
class _Attention:
    """Attention of L queries to the N rows of some KV heads.

    Attributes:
        layer: The layer, whose policy's scores are accumulated.
        call: The queries `[B, Hq, L, D]`.
        keys: `[B, H, N, D]`, the new rows last.
        values: `[B, H, N, Dv]`.
        ranked: "positions" `[B, heads, N]` and, where the policy uses attention, "scores".
        heads: KV heads of the cache; keys derived from the cached ones may have more.
        remainder: The remainder to attend to beside the slots, or None.
        saturation: t of each head's second-order term, `[H]`.
        own: Whether keys and values are the cache's own.
    """

    layer: Layer
    call: AttentionCall
    keys: AnyRows
    values: AnyRows
    ranked: Fields
    heads: int
    remainder: Remainder | None = None
    saturation: tuple[float, ...] = ()
    own: bool = True

    def result(self, fields: Fields) -> RunResult:
        """Attend block by block and accumulate scores; `fields` are the slots'."""
        policy, L, N = self.layer.policy, self.call.q.shape[2], self.keys.shape[2]
        observes = policy.needs_attention
        windowed = observes and L > 1 and policy.prompt == "window"
        # Earlier queries only attend; the policy does not observe them.
        first_observed = (L - min(policy.window, L)) if windowed else (0 if observes else L)
        outs = []
        if first_observed:
            outs.append(scaled_dot_product_attention(**self._operands(0, first_observed)[1]))
        scores, window_mass = self.ranked.get("scores"), None
        # A window is one block, and so is a call without logits to observe.
        step = L if windowed or policy.sums_mass else QUERY_BLOCK
        for start in range(first_observed, L, step):
            end = min(start + step, L)
            out, n_keys, observation = self._observe(start, end)
            outs.append(out)
            assert scores is not None
            if windowed:
                window_mass = mass_of_window(self.layer, observation, self.ranked, L)
                observation.stands_for = stands_for(L, N, end - start)
            part = policy.accumulate(scores[..., :n_keys], observation)
            rest = scores[..., n_keys:]
            scores = mx.concatenate([part, rest], axis=-1) if rest.size else part
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
        if scores is None:
            return RunResult(out, fields, None, window_mass)
        slots = fields["positions"].shape[2]
        fields = {**fields, "scores": scores[..., :slots]}
        return RunResult(out, fields, scores[..., slots:], window_mass)

    def _observe(self, start: int, end: int) -> tuple[mx.array, int, Observation]:
        """Attend with queries start to end - 1: output, keys, observation."""
        n_keys, operands = self._operands(start, end)
        observation: Observation
        if self.layer.policy.sums_mass:
            out, mass, _ = scaled_dot_product_attention_with_mass(**operands)
            mass = mass.reshape(mass.shape[0], self.heads, -1, n_keys).mean(axis=2)
            observation = ObservedMass(mass)
        else:
            out, logits, lse = scaled_dot_product_attention_with_scores(**operands)
            observation = Observation(logits, lse, self.heads)
        return out, n_keys, observation

    def _operands(self, start: int, end: int) -> tuple[int, dict[str, Any]]:
        """How many keys the queries start to end - 1 attend to, and the arguments of attention."""
        call, L, N = self.call, self.call.q.shape[2], self.keys.shape[2]
        block = block_of(call.mask, start, end, L, N, self.own)
        q = call.q[:, :, start:end]
        seed: Seed | None = None
        if self.remainder is not None:
            column = self.remainder.column(q, call.scale, self.saturation, call.softcap)
            seed = column, self.remainder.mean_value
        return block.keys, {
            "q": q,
            "k": first_rows(self.keys, block.keys),
            "v": first_rows(self.values, block.keys),
            "scale": call.scale,
            "mask": block.mask,
            "sinks": call.sinks,
            "seed": seed,
            "softcap": call.softcap,
        }


def mass_of_window(layer: Layer, observation: Observation, fields: Fields, L: int) -> mx.array:
    """Mass of the last `window` queries of the whole prompt, `[B, H, N]`.

    A chunk shorter than the window lacks queries of earlier chunks; each slot's mean mass per step
    takes their place.

    Args:
        layer: The layer.
        observation: The observation of the last queries.
        fields: The fields of the rows attended to.
        L: Queries of the chunk.
    """
    missing = layer.policy.window - L
    if missing <= 0:
        return observation.mass
    births = mx.maximum(true_positions(fields["positions"]), layer.aged_from)
    ages = mx.maximum(layer.offset - L - births, 1).astype(mx.float32)
    return observation.mass + missing * layer.policy.mean_mass(fields["scores"], ages)


def stands_for(L: int, N: int, window: int) -> mx.array:
    """How many of a chunk's L queries each of a window's queries stands for, per slot `[N]`.

    Every old slot was attended to by all L queries, `window` of them in the window; new row j by
    L - j and by min(window, L - j).

    Args:
        L: Queries of the chunk.
        N: Slots.
        window: The number of queries in the window.
    """
    new = mx.arange(L, 0, -1).astype(mx.float32)
    old = mx.full((N - L,), L / window)
    return mx.concatenate([old, new / mx.minimum(new, window)])
