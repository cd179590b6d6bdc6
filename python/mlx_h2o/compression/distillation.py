"""Kept rows of a compressed prompt, moved by a gradient until the model predicts as with all rows.

After *Cartridges* (arXiv 2506.06266), which trains keys and values on conversations about a
document that the model makes up. Here rows that a prompt left (`compression/compress.py`) are
trained, and the lessons are a repetition of the prompt and continuations that the model writes
after it. With p the full cache's predictions and q those with the kept rows and the remainder,
Adam moves keys and values towards the least

    KL(p || q), a mean over the tokens of one lesson a step.

Rows are rounded in every step as the packing rounds them, and the gradient passes through the
rounding. At the end they are packed as before, so a cache has the bytes that it had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.compression.twice import REPEAT, first_reading
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.hosts.loaded import is_plain, logits_of
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.layer.layer import Layer
from mlx_h2o.slots.packed import dense

#: The most steps. A prompt of 512 tokens gains little after some 160 (docs/results/experiments.md).
MOST_STEPS = 10_000
#: Tokens of a lesson. The repetition is cut into so many; each of the continuations has as many.
LESSON = 128
CONTINUATIONS = 4
#: Adam's rate, relative to the root mean square of a layer's keys or values. With 0.01 a prompt of
#: recall-4m diverged more than before; with 0.003 and 0.001 less (docs/results/experiments.md).
RATE = 1e-3
#: The logit of a place without a row.
NO_ROW = -1e9
#: What moves.
NAMES = ("keys", "values")

Rows = dict[str, mx.array]
#: Called with the number of further tokens done.
Tell = Callable[[int], None]


@dataclass(frozen=True)
class Lesson:
    """Tokens after a prompt.

    Attributes:
        tokens: `[1, L]`.
        first: Predictions before it do not count.
    """

    tokens: mx.array
    first: int


def tokens_of_work(steps: int) -> int:
    """The tokens of which `distil` tells: those that it writes, and those of its steps."""
    return (CONTINUATIONS + steps) * LESSON if steps else 0


class RowsOfLayer:
    """The rows that a layer keeps of one prompt, padded to its largest head.

    Args:
        layer: The layer, which holds the rows of one prompt.

    Attributes:
        rows: "keys" and "values", `[H, S, D]` float32, with the layer's key scaling.
        there: 0 where a head has a row, else `NO_ROW`, `[H, 1, S]`.
    """

    def __init__(self, layer: Layer):
        self.layer = layer
        most = max(run.length for run in layer.runs)
        rows: dict[str, list[mx.array]] = {name: [] for name in NAMES}
        there = list[list[list[float]]]()
        for run in layer.runs:
            fields, lacking = layer.store.views(run), most - run.length
            for name, of_name in rows.items():
                near_rows = dense(layer.packing.rows(name, fields)).astype(mx.float32)[0]
                of_name.append(mx.pad(near_rows, [(0, 0), (0, lacking), (0, 0)]))
            there += [[[0.0] * run.length + [NO_ROW] * lacking]] * run.heads
        self.rows = {name: mx.concatenate(of_name) for name, of_name in rows.items()}
        self.there = mx.array(there)
        self.sizes = {name: mx.sqrt(mx.square(rows).mean()) for name, rows in self.rows.items()}

    def moved(self, by: Rows) -> Rows:
        """The rows, moved by so many times their root mean square."""
        return {name: rows + self.sizes[name] * by[name] for name, rows in self.rows.items()}

    def write(self, rows: Rows) -> None:
        """Store rows in the place of those that there are."""
        layer = self.layer
        for name, all_heads in rows.items():
            of_runs = [
                layer.packing.fields(
                    name,
                    all_heads[None, run.first : run.last, : run.length].astype(
                        layer.types[name].dtype
                    ),
                )
                for run in layer.runs
            ]
            for field in of_runs[0]:
                layer.store.write(field, [fields[field] for fields in of_runs])


def rounded(layer: Layer, rows: Rows) -> Rows:
    """Rows `[H, S, D]` as a layer's packing rounds them; the gradient is that of the rows."""
    near = {}
    for name, exact in rows.items():
        own = mx.stop_gradient(exact)
        stored = layer.packing.fields(name, own.astype(layer.types[name].dtype)[None])
        near_rows = dense(layer.packing.rows(name, stored)).astype(mx.float32)[0]
        near[name] = exact + near_rows - own
    return near


class LearningCache(Looking):
    """One layer's kept rows and remainder, before a lesson whose rows are all there.

    Args:
        kept: The layer's rows as they were.
        rows: The rows as they are now.
        offset: Tokens of the prompt.
    """

    def __init__(self, before: RowsOfLayer, rows: Rows, offset: int):
        self.layer, self.there = before.layer, before.there
        self.rows, self.offset = rows, offset

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        """None, whatever the arguments: `look` determines the mask."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same rows."""
        return keys, values

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to the kept rows, the remainder and, causally, the lesson itself.

        Args:
            call: Queries `[1, Hq, L, D]`; its mask is not read.
            keys: Keys of the lesson, `[1, H, L, D]`.
            values: Values of the lesson, `[1, H, L, Dv]`.

        Returns:
            `[1, Hq, L, Dv]`.
        """
        settings, q = self.layer.settings, call.q
        if settings.frame is not None:  # a query's logits all move alike, so weights stay
            keys, q = settings.frame.enter(keys), settings.frame.enter_queries(q)
        new = {"keys": keys[0].astype(mx.float32), "values": values[0].astype(mx.float32)}
        new = rounded(self.layer, new)
        _, Hq, L, D = q.shape
        H = keys.shape[1]
        queries = (q.astype(mx.float32) * call.scale).reshape(H, -1, D)

        def logits(rows: mx.array) -> mx.array:
            return softcapped(queries @ rows.swapaxes(-1, -2), call.softcap)

        later = mx.triu(mx.full((L, L), NO_ROW), k=1)
        own = logits(new["keys"]) + mx.tile(later, (Hq // H, 1))
        columns = [logits(self.rows["keys"]) + self.there, own]
        parts = [self.rows["values"], new["values"]]
        if settings.remainder:
            rest, orders = self.layer.remainder, settings.saturations(H)
            columns.append(rest.column(q, call.scale, orders, call.softcap).reshape(H, -1, 1))
            parts.append(rest.mean_value[0, :, None])
        if call.sinks is not None:
            sinks = mx.repeat(call.sinks.astype(mx.float32).reshape(H, -1), L, axis=1)
            columns.append(sinks[..., None])
            parts.append(mx.zeros((H, 1, values.shape[-1])))
        weights = mx.softmax(mx.concatenate(columns, axis=-1), axis=-1)
        out = weights @ mx.concatenate(parts, axis=1)
        return out.reshape(1, Hq, L, -1).astype(call.q.dtype)


def distil(
    model: nn.Module,
    tokenizer: Any,
    tokens: mx.array,
    bounded: Sequence[Any],
    steps: int,
    tell: Tell,
) -> None:
    """Move the rows that a compressed prompt left.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: The prompt, `[1, T]`.
        bounded: The bounded caches, which have read it; their rows change.
        steps: Steps of Adam.
        tell: Called with the number of further tokens done, `tokens_of_work` in all.

    Raises:
        ValueError: An operation of the model has no gradient; nothing was changed.
    """
    full = full_reading(model, tokens)
    taught = lessons(model, tokenizer, tokens, full, tell)
    of_layers = [RowsOfLayer(cast(Layer, entry.layer)) for entry in bounded]
    moves = [{name: mx.zeros_like(rows) for name, rows in of.rows.items()} for of in of_layers]

    def predictions(lesson: Lesson, learning: Sequence[Looking] = ()) -> mx.array:
        own = [e if learning and is_plain(e) else copy.deepcopy(e) for e in full]
        again = iter(learning)
        if learning:
            own = [replaced(entry, lambda: next(again)) for entry in own]
        logits = logits_of(model, lesson.tokens, own)[:, lesson.first :].astype(mx.float32)
        logarithms: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return logarithms

    def apart(by: list[Rows], lesson: Lesson, targets: mx.array) -> mx.array:
        now = [
            LearningCache(of, rounded(of.layer, of.moved(move)), tokens.shape[1])
            for of, move in zip(of_layers, by, strict=True)
        ]
        kl: mx.array = mx.exp(targets) * (targets - predictions(lesson, now))
        return kl.sum(axis=-1).mean()

    optimizer, gradient_of = optim.Adam(learning_rate=RATE), mx.grad(apart)
    for i in range(steps):
        lesson = taught[i % len(taught)]
        targets = predictions(lesson)
        mx.eval(targets)
        try:
            gradient = gradient_of(moves, lesson, targets)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                "This model has an operation without a gradient, so rows cannot be moved: leave "
                f"steps at 0 ({error})."
            ) from error
        moves = optimizer.apply_gradients({"rows": gradient}, {"rows": moves})["rows"]
        mx.eval(moves, optimizer.state)
        tell(LESSON)
    for of, move in zip(of_layers, moves, strict=True):
        of.write(of.moved(move))


def full_reading(model: nn.Module, tokens: mx.array) -> list[Any]:
    """The model's own full caches, which have read a prompt."""
    full = stock_caches(model)
    for _ in first_reading(model, tokens, full):
        pass
    return full


def lessons(
    model: nn.Module, tokenizer: Any, tokens: mx.array, caches: Sequence[Any], tell: Tell
) -> list[Lesson]:
    """A repetition of a prompt in parts, and continuations that the model writes, in turn.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: The prompt, `[1, T]`.
        caches: The model's own full caches, which have read the prompt; they stay as they are.
        tell: As in `distil`.
    """
    request = mx.array([tokenizer.encode(REPEAT, add_special_tokens=False)], tokens.dtype)
    repeated = [
        Lesson(
            mx.concatenate([request, tokens[:, start : start + LESSON]], axis=1),
            max(request.shape[1] - 1, 0),
        )
        for start in range(0, tokens.shape[1], LESSON)
    ]
    # Side by side: the weights are read once for all of them.
    cache = [type(entry).merge([entry] * CONTINUATIONS) for entry in caches]
    last, drawn_tokens = mx.repeat(tokens[:, -1:], CONTINUATIONS, axis=0), list[mx.array]()
    for key in mx.random.split(mx.random.key(0), LESSON):
        logits = logits_of(model, last, cache)[:, -1].astype(mx.float32)
        last = mx.random.categorical(logits, key=key)[:, None].astype(tokens.dtype)
        mx.eval(last)
        drawn_tokens.append(last)
        tell(CONTINUATIONS)
    together = mx.concatenate(drawn_tokens, axis=1)
    written = [Lesson(together[i : i + 1], 0) for i in range(CONTINUATIONS)]
    # One continuation after each so many parts, so that a few steps see both kinds.
    every = max(len(repeated) // CONTINUATIONS, 1)
    mixed = list[Lesson]()
    for i, part in enumerate(repeated):
        mixed.append(part)
        if written and (i + 1) % every == 0:
            mixed.append(written.pop())
    return mixed + written
