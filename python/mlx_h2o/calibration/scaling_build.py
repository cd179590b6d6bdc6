"""Building key scaling (`Frame`: centre and scale of each channel) from one text, for any context.

Key scaling starts as each channel's mean and greatest distance from it, and is fitted to the
queries' use of the keys (`calibration/scaling_fit.py`). It belongs to a range of positions: a slow
rotary channel that hardly moves over a thousand tokens takes every value over ten thousand, and
scaling from the thousand would clip it or leave it no levels. RoPE only turns each pair of channels
by an angle, so the text's keys can be turned to later positions by the model's own RoPE, without
reading a longer text.

A model's key scaling comes from its profile, from the user's cache folder, or is made now and kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o._files import replacing
from mlx_h2o._progress import progress_bar
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.profile import (
    LayerFrames,
    Profile,
    check_frames,
    frames_of_json,
    json_of_frames,
)
from mlx_h2o.budgets.profile_store import kept_place
from mlx_h2o.calibration.scaling_fit import FrameSample, KeyUse, fitted
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.loaded import is_plain
from mlx_h2o.hosts.recorder import (
    LookingCache,
    Watcher,
    looked_through,
    trained_context,
    windows_of,
)
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.loading.load import CALIBRATION_TEXT, MIXED_TEXT
from mlx_h2o.slots.key_scaling import Frame

#: Contexts for which key scaling is made; beyond the last its scaling is used.
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# Most turns of a short text to later positions; more add no information.
MOST_TURNS = 64
# If keys are turned to this many places or more, each turn takes a part of the tokens.
PARTS = 8
# The first tokens of a text stay in place: heads attend to them from everywhere, and there are no
# such tokens later on.
FIRST = 4

#: Passes and their length, read from the bundled texts.
FRAME_PASSES, FRAME_LENGTH = 2, 1024


def frame_tokens(tokenizer: Any) -> list[int]:
    """Tokens of the bundled texts for key scaling, the mixed text first."""
    text = MIXED_TEXT.read_text(encoding="utf-8") + CALIBRATION_TEXT.read_text(encoding="utf-8")
    tokens: list[int] = tokenizer.encode(text)[: FRAME_PASSES * FRAME_LENGTH]
    return tokens


def frame_passes(model: nn.Module, tokens: Sequence[int]) -> mx.array:
    """A text for key scaling as passes `[B, T]` of the model, all from position 0.

    Raises:
        ValueError: The text is too short.
    """
    return mx.concatenate(windows_of(tokens, min(FRAME_LENGTH, trained_context(model))))


def frames_of_text(
    model: nn.Module,
    passes: mx.array,
    contexts: Sequence[int] = CONTEXTS,
    progress: Callable[[int], None] | None = None,
) -> dict[int, tuple[np.ndarray, ...]]:
    """Every layer's key scaling for each context.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        passes: Token ids `[B, T]`, all at positions 0 to T - 1.
        contexts: Ends of ranges of positions from 0.
        progress: Called with the number of layers done.

    Returns:
        By context, one array a layer: centre and scale `[2, H, D]`.
    """
    routing.install()
    watcher = Watcher()
    layers: list[dict[int, np.ndarray]] = []
    looked_through(model, passes, watcher, lambda _: _Framing(watcher, contexts, layers, progress))
    return {context: tuple(layer[context] for layer in layers) for context in contexts}


def frames_of(model: nn.Module, passes: mx.array) -> list[Frame | None]:
    """Key scaling for each of a model's caches, for contexts no longer than a text's passes.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        passes: Token ids `[B, T]`, all at positions 0 to T - 1.

    Returns:
        One entry a cache; None if it is no plain `KVCache`. Beside attention sinks and capped
        logits there is no centre.
    """
    T = passes.shape[1]
    layers = iter(frames_of_text(model, passes, (T,))[T])
    frames: list[Frame | None] = []
    for entry in stock_caches(model):
        frames.append(Frame(*map(mx.array, next(layers))) if is_plain(entry) else None)
    return frames


class _Framing(LookingCache):
    """A looking cache that makes its layer's key scaling from the keys that it sees."""

    knows_softcap = True

    def __init__(
        self,
        watcher: Watcher,
        contexts: Sequence[int],
        layers: list[dict[int, np.ndarray]],
        progress: Callable[[int], None] | None,
    ):
        self.watcher, self.contexts, self.layers = watcher, contexts, layers
        self.progress = progress

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        mx.eval(call.q, keys, values)
        turn = turning(self.watcher.layer, keys[:1, :, :1])
        out, use = KeyUse.attended(call, keys, values)
        self.layers.append(frames_of_keys(keys, turn, self.contexts, _can_be_centred(call), use))
        if self.progress:
            self.progress(len(self.layers))
        return out


def _can_be_centred(call: AttentionCall) -> bool:
    """Whether a centre is possible: attention sinks and capped logits do not move with it."""
    return call.sinks is None and not call.softcap


def frames_of_keys(
    keys: mx.array,
    turn: Turn | None,
    contexts: Sequence[int],
    centred: bool = True,
    use: KeyUse | None = None,
) -> dict[int, np.ndarray]:
    """One layer's key scaling for each context.

    Args:
        keys: Keys as cached at positions 0 to T - 1, `[B, H, T, D]`.
        turn: Turns keys to later positions; None leaves them as they are.
        contexts: Ends of ranges of positions from 0.
        centred: Whether there is a centre.
        use: The queries' use of the keys; None for key scaling that is not fitted.

    Returns:
        By context: centre and scale `[2, H, D]`.
    """
    keys = keys.astype(mx.float32)
    frames: dict[int, np.ndarray] = {}
    for context in contexts:
        spread = _Spread.over(context, keys.shape[2], turn)
        parts = spread.parts(keys)
        frame = Frame.of(*parts, centred=centred)
        if use is not None:
            weights, queries = spread.weights(use.weights), spread.parts(use.queries)
            frame = fitted(frame, sample_of(parts, weights, queries), centred)
        frames[context] = np.array(mx.stack([*frame.arrays]))
    return frames


@dataclass(frozen=True)
class _Spread:
    """The tokens of a text, spread evenly over a context.

    Attributes:
        turn: Turns rows to later positions, or None.
        places: Tokens, and by how many positions they are turned.
        times: How often each token occurs, without the first ones.
    """

    turn: Turn | None
    places: list[tuple[slice, int]]
    times: float

    @classmethod
    def over(cls, context: int, length: int, turn: Turn | None) -> _Spread:
        """The places of a text's tokens in a longer context.

        Args:
            context: Tokens of the context.
            length: Tokens of the text.
            turn: Turns keys to other positions, or None if that is not known.
        """
        if context <= length or turn is None:
            return cls(turn, [(slice(0, context), 0)], 1)
        count = min(-(-context // length), MOST_TURNS)
        stride = min(count, PARTS)
        places = [(slice(0, FIRST), 0)]
        for i in range(count):
            delta = round(i * (context - length) / (count - 1))
            places.append((slice(FIRST + i % stride, length, stride), delta))
        return cls(turn, places, count / stride)

    def parts(self, rows: mx.array) -> list[mx.array]:
        """Rows `[B, heads, T, D]` place by place, `[B, heads, n, D]`."""
        return [
            self.turn(rows[:, :, tokens], by) if self.turn and by else rows[:, :, tokens]
            for tokens, by in self.places
        ]

    def weights(self, of_tokens: mx.array) -> list[mx.array]:
        """Tokens' weights `[B, H, T]` place by place, `[B, H, n]`."""
        first, *others = (of_tokens[:, :, tokens] for tokens, _ in self.places)
        return [self.times * first, *others]


def sample_of(
    keys: list[mx.array], weights: list[mx.array], queries: list[mx.array]
) -> FrameSample:
    """The sample that key scaling is fitted to, from the parts of a text.

    Args:
        keys: Parts `[B, H, n, D]`.
        weights: Parts `[B, H, n]`: the cost of an error in each row.
        queries: Parts `[B, Hq, m, D]`.
    """
    H, D = keys[0].shape[1], keys[0].shape[3]
    rows = mx.concatenate(keys, axis=2).swapaxes(0, 1).reshape(H, -1, D)
    costs = mx.concatenate(weights, axis=2).swapaxes(0, 1).reshape(H, -1)
    squares = mx.square(mx.concatenate(queries, axis=2).astype(mx.float32)).mean(axis=(0, 2))
    energies = squares.reshape(H, -1, D).mean(axis=1)
    return FrameSample(rows, costs, energies)


ROPE_NAMES = ("rope", "rotary_emb", "rotary", "rope_emb")

#: Turns keys `[B, H, L, D]` by the angle of so many positions.
Turn = Callable[[mx.array, int], mx.array]


def turning(layer: nn.Module | None, keys: mx.array) -> Turn | None:
    """A block's own RoPE as a turn of keys that already have theirs; None if it is unsuitable.

    It must do nothing for 0 positions, and two turns must add up. A RoPE that scales the rows it
    turns, or uses other angles for longer texts, is unsuitable.

    Args:
        layer: A transformer block.
        keys: Some keys of the block, `[B, H, 1, D]`.
    """
    for name, module in layer.named_modules() if layer is not None else ():
        if name.split(".")[-1] in ROPE_NAMES and callable(module):
            turn = turn_by(module)
            try:
                here, there = turn(keys, 0), turn(turn(keys, 300), 700)
                close = mx.allclose(here, keys, rtol=1e-3, atol=1e-3)
                adds = mx.allclose(there, turn(keys, 1000), rtol=1e-2, atol=1e-2)
                moves = mx.abs(there - keys).max() > 0
                if (close & adds & moves).item():
                    return turn
            except (TypeError, ValueError):  # it has other arguments
                continue
    return None


def turn_by(rope: Callable[..., mx.array]) -> Turn:
    """A RoPE that only adds an angle, as a turn of keys that already have theirs."""

    def turn(keys: mx.array, delta: int) -> mx.array:
        B, H, L, D = keys.shape
        # One token a sequence, so that all are turned by the same angle.
        rows = keys.astype(mx.float32).transpose(0, 2, 1, 3).reshape(B * L, H, 1, D)
        turned = rope(rows, offset=delta)
        return turned.reshape(B, L, H, D).transpose(0, 2, 1, 3)

    return turn


#: The format of a file of key scaling, its version, and the end of its name.
FORMAT, VERSION, SUFFIX = "mlx-h2o frames", 2, ".frames.json"

Frames = dict[int, LayerFrames]


def found_frames(identity: ModelIdentity, profile: Profile | None) -> Frames | None:
    """The key scaling of a profile, or else of this user's file; None without either."""
    if profile is not None and profile.measured and profile.measured.frames:
        return profile.measured.frames
    try:
        data = json.loads(kept_place(identity, SUFFIX).read_text())
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            return None
        if ModelIdentity.of_json(data["model"]).difference(identity) is not None:
            return None
        frames = frames_of_json(data["frames"])
        check_frames(frames, identity.kv_heads, identity.key_widths)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return frames


def made_frames(model: nn.Module, identity: ModelIdentity) -> Frames | None:
    """Key scaling from the bundled texts, kept for the next time; None without a tokenizer."""
    tokenizer = getattr(model, "mlx_h2o_tokenizer", None)
    if tokenizer is None:
        return None
    place = kept_place(identity, SUFFIX)
    print(f"Making frames for packed keys (once, kept in {place})", file=sys.stderr)
    passes, layers = frame_passes(model, frame_tokens(tokenizer)), len(identity.kv_heads)
    with progress_bar("making frames") as bar:
        frames = frames_of_text(model, passes, progress=lambda done: bar(done, layers))
    head = {"format": FORMAT, "version": VERSION, "model": asdict(identity)}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as temporary:
            temporary.write_text(json.dumps(head | {"frames": json_of_frames(frames)}))
    except OSError as error:
        print(f"It could not be kept: {error}", file=sys.stderr)
    return frames
