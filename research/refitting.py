"""Does a compressed prompt lose less when its kept values are fitted?

    python -m research.refitting TEXT [--model builtin:recall-4m] [--parts 16 32]

As `research.mending`, but each prompt is read twice and cut down (`mlx_h2o compress`) to the same
bytes, with room for what follows. Its values stay or are fitted (`engine/value_fit.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.engine import value_fit
from mlx_h2o.evaluate.equal_bytes import caches_in_16_bits
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.model_caches import compress
from mlx_h2o.model_caches.compress import compress_into
from mlx_h2o.model_caches.make import plain_bytes
from mlx_h2o.model_caches.rereading import Reading
from research.mending import CHUNK, begun, header, line, parser

#: Slots for what follows the prompt.
ROOM = 96


def read_once(read: Callable[..., Reading]) -> Callable[..., Reading]:
    """A reader that remembers what it read, and all that fitting needs of it."""
    done: dict[bytes, Reading] = {}

    def again(model: nn.Module, tokens: mx.array, *rest: Any) -> Reading:
        name, (repeat, chunk, tell, _) = np.array(tokens).tobytes(), rest
        if name not in done:
            done[name] = read(model, tokens, repeat, chunk, tell)
        return done[name]

    return again


def main() -> None:
    """Parse and run; the table is Markdown."""
    made = parser()
    made.add_argument("--ridges", type=float, nargs="+", default=[value_fit.RIDGE])
    args = made.parse_args()
    trial = begun(args)
    model = trial.stage.model
    full = trial.answered(trial.chunked(lambda _: stock_caches(model)))
    # A prompt is read once for all ridges.
    compress.read_twice = read_once(compress.read_twice)
    plain = sum(map(plain_bytes, layer_kinds(model))) * args.tokens
    header()
    for part in args.parts:
        for ridge in (None, *args.ridges):
            fitted = ridge is not None
            value_fit.RIDGE = ridge or value_fit.RIDGE

            def after(prompts: mx.array, part: int = part, fitted: bool = fitted) -> list[Any]:
                settings = ModelSettings.of(1, policy="salient")
                empty = caches_in_16_bits(model, settings, args.tokens // part, args.tokens)
                of = model, trial.stage.tokenizer, prompts
                return compress_into(empty, *of, room=ROOM, chunk=CHUNK, fitted=fitted)

            name = "values as they are" if ridge is None else f"values fitted, ridge {ridge:g}"
            got = trial.answered(after, together=1)
            line(args.model, part, name, full, got, got.nbytes / plain)


if __name__ == "__main__":
    main()
