"""One token or one chunk of a layer: attention -> scores -> policy -> slots.

`update_and_attend` has the signature of its counterparts in C and Swift, and the same order: attend
to old and new rows first, evict after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_h2o.attention.backends.choice import accepts, step_together
from mlx_h2o.attention.backends.decoder import DecodeStep
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer import eviction
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.scoring import RunResult, mean_of, observe, observe_derived
from mlx_h2o.slots.journal import single_steps
from mlx_h2o.slots.pins import is_pinned
from mlx_h2o.slots.slot_store import Fields
from mlx_h2o.spill.setting import PLAIN

if TYPE_CHECKING:
    from mlx_h2o.attention.backends.self_check import Error
    from mlx_h2o.attention.backends.self_check_variants import FusedVariant
    from mlx_h2o.layer.return_state import ReturnState


def update_and_attend(layer: Layer, call: AttentionCall, k: mx.array, v: mx.array) -> mx.array:
    """Store new rows, attend to all rows, choose the tokens to evict.

    Args:
        layer: The layer.
        call: Queries `[B, Hq, L, D]` with scale, mask and attention sinks; only the last L columns
            of an array mask are read, since kept slots are always visible.
        k: New keys `[B, H, L, D]`, with RoPE applied at `layer.offset`, like those held
            (`Layer.check_rows`).
        v: New values `[B, H, L, Dv]`, like those held.

    Returns:
        `[B, Hq, L, Dv]`.

    Raises:
        ValueError: The call does not fit the rows.
    """
    length = k.shape[2]
    if layer.settings.filling:
        grow(layer, length)
    several = 1 < length <= layer.settings.undo + 1
    if several:
        layer.journal.settle()
        if isinstance(call.mask, str):
            call = call.with_mask(None)  # single steps see no rows after their own
        # Rows come back, and go to a file, between two steps.
        if layer.back is not None or layer.spill is not None or not _fused(layer, call, k, v):
            return _token_by_token(layer, call, k, v)
    _check_frame(layer, call)
    if layer.back is not None:
        _bring_back(layer, layer.back, call, k)
    if several or (length == 1 and _fused(layer, call, k, v)):
        if layer.spill is not None:
            layer.spill.take(layer.offset, PLAIN, {"keys": k, "values": v})
        decoder, tokens = layer.planned(k, v)
        out = decoder.step(DecodeStep(call.q, k, v, call.scale, call.sinks, tokens))
        return _tied(out, layer.newest_queries())
    frame = layer.settings.frame
    if frame is not None:
        k = frame.enter(k)
    return _evicting(layer, _observed(layer, call, layer.take_in(k, v)))


def _bring_back(layer: Layer, back: ReturnState, call: AttentionCall, k: mx.array) -> None:
    """Let evicted rows come back if it is time, and note the queries for the next time."""
    from mlx_h2o.layer.returning import bring_back, is_due  # with files only

    if is_due(back, layer, k.shape[2]):
        bring_back(layer, call, k)
    back.note(call.q, layer.layout.heads)  # `store` would take the arrays back


def grow(layer: Layer, length: int) -> None:
    """Give a layer the budgets for a conversation that is longer by so many tokens.

    Earlier steps can then not be taken back. So between drafted tokens growth waits
    (`Journal.settled`), and of a chunk that can be taken back only the first token counts.
    """
    if length == 1 and not layer.journal.settled:
        return
    certain = 1 if length <= layer.settings.undo + 1 else length
    grown = layer.settings.grown(layer.offset + certain)
    if grown is not None:
        eviction.resize(layer, grown)


def attend_to_shared(
    layer: Layer, call: AttentionCall, attended: Sequence[Fields]
) -> tuple[mx.array, list[RunResult]]:
    """Attend with one of several layers that share their rows; nothing is evicted yet.

    Args:
        layer: The layer that owns the rows and has stored the new ones (`Layer.take_in`).
        call: As in `update_and_attend`.
        attended: The result of `take_in`.

    Returns:
        `[B, Hq, L, Dv]`, and each run's observations, for `evict_after_sharers`.

    Raises:
        ValueError: The call does not fit the rows.
    """
    _check_frame(layer, call)
    results = _observed(layer, call, attended)
    return _output(results), results


def evict_after_sharers(layer: Layer, rounds: Sequence[Sequence[RunResult]]) -> list[mx.array]:
    """Choose the tokens to evict when all sharing layers have attended to the same rows.

    Args:
        layer: The layer that owns the rows.
        rounds: The observations of each layer, by run.

    Returns:
        Arrays to evaluate with an output of this step.
    """
    _evicting(layer, [mean_of([results[i] for results in rounds]) for i in range(len(layer.runs))])
    return layer.side_state()


def _fused(layer: Layer, call: AttentionCall, k: mx.array, v: mx.array) -> bool:
    """Whether the default device's kernels do the next call in fused steps.

    The first token of all goes op by op, so that there are arrays to lend. So does a step that
    brings a pinned token, which is marked as it is stored.
    """
    return (
        layer.offset > 0
        and not _brings_pin(layer, k.shape[2])
        and accepts(layer.settings, call, k, v, prove_fused)
    )


def prove_fused(variant: FusedVariant, settings: CacheSettings) -> Error:
    """Compare small fused steps of the default device with the definition (`fused_case.check`)."""
    from mlx_h2o.layer import fused_case  # on a GPU only

    return fused_case.check(variant, settings, update_and_attend)


def _brings_pin(layer: Layer, length: int) -> bool:
    """Whether a pinned token is among the next to enter the slots: new ones, or the window's."""
    pins = layer.settings.pins
    if not pins:
        return False
    first = layer.offset - (layer.window.size if layer.window else 0)
    return any(is_pinned(pins, first + i) for i in range(length))


def decode_together(
    layers: Sequence[Layer], call: AttentionCall, k: mx.array, v: mx.array
) -> mx.array | None:
    """One token in each of several layers of one sequence each, in one fused step if possible.

    Args:
        layers: The layers.
        call: Queries `[B, Hq, 1, D]`, one sequence for each layer.
        k: New keys `[B, H, 1, D]`, one sequence for each layer.
        v: New values `[B, H, 1, Dv]`.

    Returns:
        `[B, Hq, 1, Dv]`; None, and nothing changes, where a layer has no fused step.
    """
    for layer in layers:
        if not _fused(layer, call, k, v):
            return None
    like = k[:1], v[:1]
    planned = []
    for layer in layers:
        layer.check_rows(*like)
        if layer.spill is not None:
            layer.spill.step_begins()
    for i, layer in enumerate(layers):
        grow(layer, 1)
        if layer.back is not None:
            one = slice(i, i + 1)
            _bring_back(layer, layer.back, call.with_queries(call.q[one]), k[one])
        if layer.spill is not None:
            own = {"keys": k[i : i + 1], "values": v[i : i + 1]}
            layer.spill.take(layer.offset, PLAIN, own)
        planned.append(layer.planned(*like))
    decoders, tokens = zip(*planned, strict=True)
    out = step_together(decoders, tokens, call, k, v)
    return _tied(out, [queries for layer in layers for queries in layer.newest_queries()])


def attend_to_derived(
    layer: Layer, call: AttentionCall, attended: Sequence[Fields], k: mx.array, v: mx.array
) -> mx.array:
    """Attend to keys and values that a model derived from the rows attended to (MLA).

    Args:
        layer: The layer that has stored the new rows (`Layer.take_in`).
        call: As in `update_and_attend`; an array mask covers all N.
        attended: The result of `take_in`, for one run.
        k: `[B, Hk, N, D]`, derived from the cached keys or values.
        v: `[B, Hk, N, Dv]`, derived from them too.

    Returns:
        `[B, Hq, L, Dv]`.
    """
    return _evicting(layer, [observe_derived(layer, call, attended[0], k, v)])


def _evicting(layer: Layer, results: Sequence[RunResult]) -> mx.array:
    """The output of all runs; first the observations decide which tokens are evicted."""
    newest = [of_run.newest_scores for of_run in results if of_run.newest_scores is not None]
    if layer.window is not None and newest:
        layer.write_newest_scores(mx.concatenate(newest, axis=1))
    eviction.settle(layer, [of_run.fields for of_run in results], [s.window_mass for s in results])
    return _tied(_output(results), layer.side_state())


def _tied(out: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    """An output whose evaluation evaluates other arrays too."""
    tied: mx.array = mx.depends(out, list(arrays)) if arrays else out
    return tied


def _observed(layer: Layer, call: AttentionCall, attended: Sequence[Fields]) -> list[RunResult]:
    """Each run's observations over its rows; queries get the layer's key scaling (`Frame`)."""
    frame = layer.settings.frame
    if frame is not None:
        call = call.with_queries(frame.enter_queries(call.q))
    runs = zip(layer.runs, attended, strict=True)
    return [observe(layer, run, call, fields) for run, fields in runs]


def _output(results: Sequence[RunResult]) -> mx.array:
    """The output of all runs, `[B, Hq, L, Dv]`."""
    outs = [of_run.out for of_run in results]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)


def _check_frame(layer: Layer, call: AttentionCall) -> None:
    """Raise ValueError where a key scaling's centre would move some logits and not others."""
    frame = layer.settings.frame
    if frame is not None and frame.moves and (call.sinks is not None or call.softcap):
        what = "Attention sinks" if call.sinks is not None else "Capped logits"
        raise ValueError(
            f"{what} do not move with a key scaling's centre, so the Frame of a layer that has "
            "them needs a centre of zeros."
        )


def _token_by_token(layer: Layer, call: AttentionCall, k: mx.array, v: mx.array) -> mx.array:
    """Process a chunk that can be taken back as single steps, one after the other."""
    outs = []
    for i, column in enumerate(single_steps(call.mask, k.shape[2], not layer.length)):
        token = slice(i, i + 1)
        one = call.token(i, column)
        outs.append(update_and_attend(layer, one, k[:, :, token], v[:, :, token]))
    return mx.concatenate(outs, axis=2)
