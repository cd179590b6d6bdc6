"""Draw one head's key channels as the model makes them, and with key scaling (`Frame`) for packing.

    python -m research.draw_frames [OUT]       docs/reference/key-scaling.png by default

The keys are of a text that the key scaling was not fitted on; the head is the one whose channels
differ most, unless `--layer` and `--head` name one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_h2o
from mlx_h2o.evaluate.plotting import drawing
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.models.make import make_prompt_cache
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows

OUT = Path(__file__).parents[1] / "docs" / "reference" / "key-scaling.png"
TOKENS = 1024
BITS = 4
GROUP_SIZE = 64
PLAIN, LOST = "#8c8c8c", "#c44e52"


def keys_and_frames(name: str) -> tuple[list[mx.array], list[Frame]]:
    """Each layer's keys `[H, T, D]` of the bundled story, and its key scaling."""
    model, tokenizer = mlx_h2o.load(name)
    tokens = mx.array([tokenizer.encode(SAMPLE_TEXT.read_text())[:TOKENS]])
    full = stock_caches(model)
    mx.eval(model(tokens, cache=full))
    packed = make_prompt_cache(model, max_bytes="50%", context=TOKENS, bits=BITS)
    keys = [entry.keys[0, :, :TOKENS].astype(mx.float32) for entry in full]
    return keys, [entry.frame for entry in packed]


def most_unlike(keys: list[mx.array]) -> tuple[int, int]:
    """Layer and head in which one channel's mean is farthest above the others' spread."""

    def contrast(of_head: np.ndarray) -> float:
        return float(np.abs(of_head.mean(axis=0)).max() / np.median(of_head.std(axis=0)))

    pairs = [
        (contrast(np.array(layer[head])), i, head)
        for i, layer in enumerate(keys)
        for head in range(layer.shape[0])
    ]
    _, layer, head = max(pairs)
    return layer, head


def lost(rows: mx.array) -> np.ndarray:
    """Root mean square of the error of packing, by channel `[D]`, of rows `[T, D]`."""
    restored = PackedRows.of(rows[None, None], BITS, GROUP_SIZE).dequantized()[0, 0]
    return np.array(mx.sqrt(mx.square(rows - restored).mean(axis=0)))


def panel(axes: Any, rows: np.ndarray, title: str) -> None:
    """Each channel's range and mean."""
    at = np.arange(rows.shape[1])
    low, high = rows.min(axis=0), rows.max(axis=0)
    axes.bar(at, high - low, bottom=low, width=0.8, color=PLAIN)
    axes.plot(at, rows.mean(axis=0), ".", color="black", markersize=3)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel("range and mean")
    axes.spines[["top", "right"]].set_visible(False)


def draw(name: str, where: tuple[int, int] | None, path: Path) -> None:
    """Draw and write the picture."""
    pyplot = drawing()
    keys, frames = keys_and_frames(name)
    layer, head = where or most_unlike(keys)
    rows = keys[layer][head]
    one = Frame(*(part[head : head + 1] for part in frames[layer].arrays))
    framed = one.enter(rows[None, None])[0, 0]
    figure, (before, after, errors) = pyplot.subplots(
        3, 1, figsize=(9, 7.5), sharex=True, layout="constrained"
    )
    panel(before, np.array(rows), "as the model makes them")
    panel(after, np.array(framed), "in the frame: (key - centre) / scale")
    at = np.arange(rows.shape[1])
    spread = np.array(rows).std(axis=0)
    back = lost(framed) * np.array(one.scale)[0]
    errors.bar(at - 0.2, lost(rows) / spread, width=0.4, color=LOST, label="as they come")
    errors.bar(at + 0.2, back / spread, width=0.4, color="#2a7f62", label="in the frame")
    errors.set_title(f"lost by {BITS} bits, in each channel's deviations", loc="left", fontsize=10)
    errors.set_xlabel("key channel")
    errors.legend(frameon=False, fontsize=9)
    errors.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{name}: keys of layer {layer}, KV head {head}, over {TOKENS} tokens")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Parse and draw."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("out", nargs="?", type=Path, default=OUT)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--layer", type=int)
    options.add_argument("--head", type=int, default=0)
    args = options.parse_args()
    where = None if args.layer is None else (args.layer, args.head)
    draw(args.model, where, args.out)


if __name__ == "__main__":
    main()
