"""What limiting one head alone moves the predictions by, beside its loss and its nats.

    python -m research.sensitivity [--model builtin:recall-4m] [--draws 8]

Each head of a model is limited to few slots, one after the other, over one window of the
calibration text: the divergence (KL) from the full cache's predictions is what a profile's losses
should be in proportion to. Beside it stand the head's error in parts of the residual, and that
error in nats, as `calibration/sensitivity.py` estimates it from some draws. The last table says how
far the logarithms of both are from that of the divergence, up to a common factor.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np

from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.calibration.sensitivity import WINDOW, Errors, Movable, nats_felt
from mlx_h2o.integration.recorder import Watcher, looked_through
from mlx_h2o.loading.load import EMBEDDED_MODEL
from mlx_h2o.policies import make_policy
from research.mending import divergence
from research.real_model import calibration_passes, loaded

#: A model with more heads gets the last table alone.
MOST_ROWS = 16


def main() -> None:
    """Parse and run; the tables are Markdown."""
    args = parser().parse_args()
    model, tokenizer = loaded(args.model)
    window = calibration_passes(tokenizer, 1, args.tokens)
    made = Errors(model, window, make_policy(DEFAULT_POLICY))
    losses = made.losses / args.tokens
    nothing = [mx.zeros_like(error) for error in made.errors]

    def predicted(added: list[mx.array]) -> mx.array:
        logits = looked_through(model, window, Watcher(), lambda i: Movable(added[i]))
        return logits.astype(mx.float32)

    full = predicted(nothing)
    draws = [
        nats_felt(model, window, labels, made.errors, made.kv_heads)
        for labels in (mx.random.categorical(full, key=mx.random.key(i)) for i in range(args.draws))
    ]
    alone, names = list[float](), []
    for layer, (error, heads) in enumerate(zip(made.errors, made.kv_heads, strict=True)):
        of_head = mx.arange(error.shape[1]) // (error.shape[1] // heads)
        for head in range(heads):
            added = list(nothing)
            added[layer] = mx.where((of_head == head)[:, None, None], error, 0)
            alone += divergence(full, predicted(added))
            names.append(f"{layer}.{head}")
    if len(names) <= MOST_ROWS:
        each(names, alone, losses, np.mean(draws, axis=0) / args.tokens)
    print("| estimate | off the divergence, in logarithms |")
    print("|---|---:|")
    print(f"| loss | {off(losses, alone):.2f} |")
    for count in sorted({1, args.draws}):
        nats = np.mean(draws[:count], axis=0) / args.tokens
        print(f"| nats, {count} draw{'s' * (count > 1)} | {off(nats, alone):.2f} |")


def each(names: list[str], alone: list[float], losses: np.ndarray, nats: np.ndarray) -> None:
    """Print a line for each head, in thousandths."""
    print("| head | divergence | loss | nats | divergence over loss |")
    print("|---|---:|---:|---:|---:|")
    for name, far, loss, felt in zip(names, alone, losses, nats, strict=True):
        numbers = (1000 * far, 1000 * loss, 1000 * felt, far / loss)
        print(f"| {name} | {' | '.join(f'{x:.2f}' for x in numbers)} |")
    print()


def off(estimate: np.ndarray, alone: list[float]) -> float:
    """Standard deviation of the logarithm of an estimate over the divergence."""
    return float(np.std(np.log(estimate / np.array(alone))))


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", default=EMBEDDED_MODEL)
    made.add_argument("--tokens", type=int, default=WINDOW)
    made.add_argument("--draws", type=int, default=8)
    return made


if __name__ == "__main__":
    main()
