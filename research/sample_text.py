"""Write a text that a model makes up: for small models, which know nothing but their own stories.

    python -m research.sample_text MODEL OUT [--tokens 8192] [--length 480] [--seed 0]

Stories of `--length` tokens are sampled side by side from the model's first token on, and written
one after the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx

import mlx_h2o
from mlx_h2o.hosts.stock_caches import stock_caches


def sampled(model_name: str, tokens: int, length: int, seed: int) -> str:
    """`tokens` tokens of stories, with a blank line between them."""
    model, tokenizer = mlx_h2o.load(model_name)
    mx.random.seed(seed)
    count = -(-tokens // length)
    row = mx.full((count, 1), tokenizer.bos_token_id)
    cache, rows = stock_caches(model), []
    for _ in range(length):
        row = mx.random.categorical(model(row, cache=cache)[:, -1])[:, None]
        mx.eval(row)
        rows.append(row)
    stories = mx.concatenate(rows, axis=1).tolist()
    return "\n\n".join(tokenizer.decode(story).strip() for story in stories) + "\n"


def main() -> None:
    """Parse, sample, write."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("model")
    options.add_argument("out", type=Path)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--length", type=int, default=480)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    text = sampled(args.model, args.tokens, args.length, args.seed)
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
