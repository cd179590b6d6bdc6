"""Does a gate know which rows a later reading asks for, better than the policy does?

    python -m research.gate TEXT [--model builtin:recall-4m]

For each KV head a ridge regression from a row's key and value, as cached, to the logarithm of the
row's worth (the greatest weight that any query of a second reading gives it, as KVzip has it;
`model_caches/compress.py`). Fitted on the bundled calibration text, tested on another. Beside it
the policy's ranking of a prompt, by the mass of its last queries, and the distance of a key from
the mean key alone. A ranking's figure is the part of the second reading's mass of worths that the
best rows have, averaged over heads, over the part that the truly best rows have.

Related: Fast KVzip (https://arxiv.org/abs/2601.17668), whose gates are small networks on hidden
states, trained by gradients on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
)
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.evaluate.equal_bytes import caches_in_16_bits
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.integration.recorder import LookingCache
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.model_caches.compress import CHUNK
from mlx_h2o.model_caches.make import plain_bytes
from mlx_h2o.model_caches.rereading import REPEAT, Reading, read_twice
from research.mending import begun, header, line, profile_of
from research.mending import parser as trial_parser

Array = npt.NDArray[Any]
#: Rows at the beginning that are always kept.
SINK = 4
#: The weight of the ridge, relative to the mean diagonal.
RIDGE = 1e-2
#: The last queries whose mass a prompt is ranked by (`salient`).
WINDOW = 64
#: Parts of the rows that are kept.
PARTS = (4, 8, 16)
#: Slots for what follows a prompt.
ROOM = 96
#: Rankings of a prompt's rows; the first is the aim.
RANKINGS = ("KVzip", "the gate", "salient", "salient and the gate", "distance from the mean key")


def features(keys: Array, values: Array) -> Array:
    """What a gate sees of rows: key, value, logarithms of their lengths, and 1, `[T, F]`."""
    lengths = [np.log((x * x).sum(-1, keepdims=True) + 1e-6) for x in (keys, values)]
    return np.concatenate([keys, values, *lengths, np.ones((len(keys), 1))], axis=1)


def standardised(x: Array) -> Array:
    return (x - x.mean()) / (x.std() + 1e-6)


def captured(ranking: Array, worth: Array, part: int) -> float:
    """The mass of worth among the best rows by a ranking, over that among the truly best."""
    count = len(worth) // part
    return float(worth[np.argsort(-ranking)[:count]].sum() / np.sort(worth)[-count:].sum())


def salience(keys: Array, values: Array, window: Array) -> Array:
    """The policy's worth of a prompt's rows, by the mass `window` of its last queries."""
    ages = np.arange(len(keys), 0, -1.0)
    apart = ((keys - keys.mean(0)) ** 2).sum(-1)
    terms = [np.log(window + 1e-6), np.log(apart + 1e-12), np.log((values**2).sum(-1) + 1e-12)]
    mass, distance, length = map(standardised, terms)
    return mass + 0.3 * distance + 0.3 * length - 0.3 * standardised(np.log(ages))


def heads_of(reading: Reading) -> list[tuple[Array, Array, Array]]:
    """Keys, values and worths of each head of a reading of one prompt, without sinks."""
    found = []
    for (keys, values), worths in zip(reading.rows, reading.worths, strict=True):
        for h in range(keys.shape[1]):
            rows = (np.array(x[0, h].astype(mx.float32))[SINK:] for x in (keys, values))
            found.append((*rows, np.array(worths[0, h])[SINK:]))
    return found


class Ending(LookingCache):
    """One layer in a plain reading of a whole prompt, and the mass from its last queries."""

    mass: mx.array

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend causally."""
        rows: dict[str, Any] = {"scale": call.scale, "mask": "causal", "sinks": call.sinks}
        last = call.q[:, :, -WINDOW:]
        _, self.mass, _ = scaled_dot_product_attention_with_mass(last, keys, values, **rows)
        out: mx.array = scaled_dot_product_attention(call.q, keys, values, **rows)
        return mx.depends(out, [self.mass])


def windows_of(model: nn.Module, tokens: mx.array) -> list[Array]:
    """Each head's mean attention from a prompt's last queries."""
    caches = [Ending() for _ in model.layers]
    mx.eval(model(tokens, cache=caches)[:, -1])
    masses = [np.array(one.mass[0])[:, SINK:] / WINDOW for one in caches]
    return [mass for layer in masses for mass in layer]


class Gates:
    """A ridge regression for each KV head of a model.

    Args:
        model: The model.
        readings: Keys, values and worths of each head of several prompts, `[prompts][heads]`.
    """

    def __init__(self, readings: Sequence[Sequence[tuple[Array, Array, Array]]]):
        self.of_heads = []
        for of_head in zip(*readings, strict=True):
            x = np.concatenate([features(k, v) for k, v, _ in of_head])
            y = np.concatenate([np.log(w + 1e-6) for _, _, w in of_head])
            gram = x.T @ x
            gram[np.diag_indices_from(gram)] += RIDGE * np.trace(gram) / len(gram)
            self.of_heads.append(np.linalg.solve(gram, x.T @ y))

    def rankings(
        self, heads: Sequence[tuple[Array, Array, Array]], windows: Sequence[Array]
    ) -> dict[str, list[Array]]:
        """Each head's worths of a prompt's rows by each ranking."""
        found: dict[str, list[Array]] = {name: [] for name in RANKINGS}
        for gate, (k, v, w), window in zip(self.of_heads, heads, windows, strict=True):
            known, asked = features(k, v) @ gate, salience(k, v, window)
            apart = ((k - k.mean(0)) ** 2).sum(-1)
            each = w, known, asked, asked + standardised(known), apart
            for name, ranking in zip(RANKINGS, each, strict=True):
                found[name].append(ranking)
        return found


def kept_by(model: nn.Module, tokens: mx.array, rankings: Sequence[Array], given: int) -> list[Any]:
    """Caches with the bytes of `given` plain tokens that keep a prompt's best rows.

    Slots are shared out by the profile. Sinks and the newest quarter of a head's rows stay.
    """
    T = tokens.shape[1]
    full = stock_caches(model)
    mx.eval(model(tokens, cache=full)[:, -1])
    cache = caches_in_16_bits(model, ModelSettings.of(1, policy="salient"), given, T)
    mean = sum(sum(entry.budgets) for entry in cache) // len(rankings)
    shares = profile_of(model).budgets(mean, cache[0].policy.least_budget(), T)
    each = iter(rankings)
    for entry, of_layer, slots in zip(cache, full, shares, strict=True):
        worths = []
        for count in slots:
            worth = np.concatenate([np.full(SINK, np.inf), next(each)])
            worth[T - entry.policy.recent_slots(count) :] = np.inf
            worths.append(worth)
        entry.resize([count + ROOM for count in slots])
        rows = of_layer.keys[..., :T, :], of_layer.values[..., :T, :]
        rate = mx.full((1, len(slots), T), 1 / T)
        entry.hold(*rows, mx.array(np.stack(worths)[None].astype(np.float32)), rate, ROOM)
    return cache


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    trial = begun(args)
    model, tokenizer = trial.stage.model, trial.stage.tokenizer
    repeat = tokenizer.encode(REPEAT, add_special_tokens=False)

    def reading(tokens: mx.array) -> list[tuple[Array, Array, Array]]:
        return heads_of(read_twice(model, tokens, repeat, CHUNK, lambda _: None))

    passes = samples_of(
        tokenizer.encode(CALIBRATION_TEXT.read_text()), args.fitted, args.tokens, None
    )
    gates = Gates([reading(passes[i : i + 1]) for i in range(args.fitted)])
    rankings = []
    for i in range(args.samples):
        tokens = trial.prompts[i : i + 1]
        rankings.append(gates.rankings(reading(tokens), windows_of(model, tokens)))
    print("| kept | " + " | ".join(RANKINGS[1:]) + " |\n|---|" + "---:|" * len(RANKINGS[1:]))
    for part in PARTS:
        found = [
            [captured(rank, w, part) for rank, w in zip(one[name], one["KVzip"], strict=True)]
            for name in RANKINGS[1:]
            for one in rankings
        ]
        mean = np.mean(np.reshape(found, (len(RANKINGS) - 1, -1)), axis=1)
        print(f"| 1/{part} | {' | '.join(f'{x:.3f}' for x in mean)} |", flush=True)
    full = trial.answered(trial.chunked(lambda _: stock_caches(model)))
    plain = sum(map(plain_bytes, layer_kinds(model))) * args.tokens
    print()
    header()
    for part in args.parts:
        for name in RANKINGS:
            each = iter(rankings)

            def after(
                prompts: mx.array, part: int = part, name: str = name, each: Any = each
            ) -> Any:
                return kept_by(model, prompts, next(each)[name], args.tokens // part)

            got = trial.answered(after, together=1)
            line(args.model, part, f"the best rows by {name}", full, got, got.nbytes / plain)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = trial_parser()
    made.add_argument("--fitted", type=int, default=6, help="passes that gates are fitted on")
    return made


if __name__ == "__main__":
    main()
