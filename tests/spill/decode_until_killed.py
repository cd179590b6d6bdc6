"""Decodes greedily from a file of rows, or from the beginning, until it is killed.

It says each token's position and id. Arguments: the folder, and the file to go on from, if any.
"""

import sys
from pathlib import Path

import mlx.core as mx

from mlx_h2o import Spill, make_prompt_cache, resume
from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.loading.load import load
from mlx_h2o.spill import state_keeping

#: Tokens of the prompt.
PROMPT = 40


def prompt():
    return mx.random.randint(0, 200, (1, PROMPT), key=mx.random.key(3))


def begun(model, spill):
    """Caches that hold the prompt but for its last token."""
    cache = make_prompt_cache(model, 40, bits=6, spill=spill)
    mx.eval(model(prompt()[:, :-1], cache=cache))
    return cache


def go_on(model, cache, token):
    """Greedy decoding: positions and tokens, endlessly."""
    while True:
        position = cache[0].offset
        token = model(mx.array([[token]]), cache=cache)[0, -1].argmax().item()
        yield position + 1, token


if __name__ == "__main__":
    use_openblas()
    state_keeping.EVERY = 16
    model, _ = load("builtin:recall-4m")
    folder, *path = sys.argv[1:]
    if path:
        cache = resume(path[0])
        known = dict(
            map(int, line.split()) for line in Path(folder, "said").read_text().splitlines()
        )
        token = known[cache[0].offset]
    else:
        cache = begun(model, Spill(Path(folder), keep=True))
        token = prompt()[0, -1].item()
    print("from", cache[0].offset, flush=True)
    for position, said in go_on(model, cache, token):
        print(position, said, flush=True)
