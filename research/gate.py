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
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

import mlx_h2o
from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
)
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration import routing
from mlx_h2o.integration.recorder import LookingCache
from mlx_h2o.loading.load import CALIBRATION_TEXT, EMBEDDED_MODEL
from mlx_h2o.model_caches.compress import CHUNK, REPEAT, Reading, read_twice

Array = npt.NDArray[Any]
#: Rows at the beginning that are always kept.
SINK = 4
#: The weight of the ridge, relative to the mean diagonal.
RIDGE = 1e-2
#: The last queries whose mass a prompt is ranked by (`salient`).
WINDOW = 64
#: Parts of the rows that are kept.
PARTS = (4, 8, 16)


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


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    routing.install()
    use_openblas()
    model, tokenizer = mlx_h2o.load(args.model)
    model.set_dtype(mx.float32)
    repeat = tokenizer.encode(REPEAT, add_special_tokens=False)

    def prompts(text: Path, count: int) -> list[mx.array]:
        rows = samples_of(tokenizer.encode(text.read_text()), count, args.tokens, None)
        return [rows[i : i + 1] for i in range(count)]

    def reading(tokens: mx.array) -> list[tuple[Array, Array, Array]]:
        return heads_of(read_twice(model, tokens, repeat, CHUNK, lambda _: None))

    fitted = list(zip(*map(reading, prompts(CALIBRATION_TEXT, args.samples)), strict=True))
    gates = []
    for of_head in fitted:
        x = np.concatenate([features(k, v) for k, v, _ in of_head])
        y = np.concatenate([np.log(w + 1e-6) for _, _, w in of_head])
        gram = x.T @ x
        gram[np.diag_indices_from(gram)] += RIDGE * np.trace(gram) / len(gram)
        gates.append(np.linalg.solve(gram, x.T @ y))
    tested = [(reading(one), windows_of(model, one)) for one in prompts(args.text, args.tested)]
    print("| kept | the gate | salient, by the last queries | distance from the mean key |")
    print("|---|---:|---:|---:|")
    for part in PARTS:
        found = []
        for heads, windows in tested:
            for gate, (k, v, w), window in zip(gates, heads, windows, strict=True):
                apart = ((k - k.mean(0)) ** 2).sum(-1)
                rankings = features(k, v) @ gate, salience(k, v, window), apart
                found.append([captured(ranking, w, part) for ranking in rankings])
        mean = np.mean(found, axis=0)
        print(f"| 1/{part} | {' | '.join(f'{x:.3f}' for x in mean)} |", flush=True)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default=EMBEDDED_MODEL)
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--samples", type=int, default=6, help="that gates are fitted on")
    made.add_argument("--tested", type=int, default=2)
    return made


if __name__ == "__main__":
    main()
