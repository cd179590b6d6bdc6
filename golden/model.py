"""Golden 5: the embedded model. Prompt tokens, the next 64 greedy tokens, and the kept tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as once
from typing import Any

import mlx.core as mx
import numpy as np

from golden.group import Arrays, Parameters, parameters_of, policy_of
from golden.margins import watching
from golden.trajectory import field_by_position
from golden.twice import watching_shares
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.compression.reading import NEWEST, two_readings
from mlx_h2o.compression.twice import REPEAT
from mlx_h2o.hosts import routing
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT, load
from mlx_h2o.models.make import make_prompt_cache
from mlx_h2o.policies import Policy, make_policy

NAME = "model"

# Nats between the most likely token and the next: float32 logits agree to 1e-4 or so.
LEAST_LOGIT_GAP = 2e-3

MAX_SIZE = 96

# Slots by an earlier profile of the model, so that another profile changes no vector.
PROFILED = {
    "distinct": [[10, 128], [48, 64], [96, 48], [32, 326]],
    "h2o": [[13, 128], [48, 64], [96, 48], [32, 323]],
    "streaming": [[9, 128], [48, 64], [96, 48], [32, 327]],
    "keydiff": [[13, 128], [48, 64], [96, 48], [32, 323]],
}


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 100
    for name in ("distinct", "h2o", "streaming", "keydiff"):
        for budgets in ("uniform", "profile"):
            seed += 16
            policy = make_policy(name)
            yield (
                f"{name}-{budgets}",
                {
                    "seed": seed,
                    "model": EMBEDDED_MODEL,
                    "dtype": "float32",
                    "prompt_tokens": 200,
                    "prefill": 128,
                    "tokens": 64,
                    "max_size": MAX_SIZE,
                    "budgets": budgets,
                    "policy": parameters_of(policy),
                    "remainder": True,
                    "slots": shared_out(policy, budgets),
                },
            )
    policy = make_policy("salient")
    yield (
        "salient-twice",
        {
            "seed": seed + 16,
            "model": EMBEDDED_MODEL,
            "dtype": "float32",
            "prompt_tokens": 200,
            "prefill": 128,
            "tokens": 64,
            "reading": "twice",
            "policy": parameters_of(policy),
            "remainder": True,
            "slots": [[64, 64]] * 4,
        },
    )


def shared_out(policy: Policy, budgets: str) -> list[list[int]]:
    """The slots of each layer and head, so that no reader needs the profile."""
    if budgets == "profile":
        return PROFILED[policy.name]
    caches = make_prompt_cache(embedded()[0], MAX_SIZE, policy=policy, budgets="uniform")
    return [list(cache.budgets) for cache in caches]


@once
def embedded() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    routing.install()
    return load(EMBEDDED_MODEL, mx.float32)


def inputs(parameters: Parameters) -> Arrays:
    """The prompt: tokens of the sample text from number 7 * seed on; the request to repeat it."""
    p, tokenizer = parameters, embedded()[1]
    tokens = tokenizer.encode(SAMPLE_TEXT.read_text(encoding="utf-8"))
    first = 7 * p["seed"]
    prompt = mx.array(tokens[first : first + p["prompt_tokens"]], dtype=mx.int32)
    if "reading" not in p:
        return {"prompt": prompt}
    request = tokenizer.encode(REPEAT, add_special_tokens=False)
    return {"prompt": prompt, "request": mx.array(request, mx.int32)}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    return continued(parameters, inputs["prompt"])[0]


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    with watching() as margins, watching_shares(margins):
        results, gap = continued(parameters, inputs["prompt"])
    return results, min(margins) if gap >= LEAST_LOGIT_GAP else 0.0


def continued(p: Parameters, prompt: mx.array) -> tuple[Arrays, float]:
    """Greedy continuation: the results, and the smallest gap between the two largest logits."""
    model, _ = embedded()
    caches = [
        H2OKVCache(budgets=slots, policy=policy_of(p["policy"]), remainder=p["remainder"])
        for slots in p["slots"]
    ]
    logits, begun = mx.zeros(0), 0
    if "reading" in p:
        begun = prompt.size - NEWEST
        tokens = np.array(prompt[:begun]).tolist()
        readings = two_readings(model, embedded()[1], tokens, caches, p["reading"], p["prefill"])
        assert readings is not None
        while readings.step():
            pass
    for first in range(begun, prompt.size, p["prefill"]):
        logits = model(prompt[None, first : first + p["prefill"]], cache=caches)[0, -1]
        mx.eval(logits)
    after_prompt = positions_of(caches)
    said, gap = list[int](), float("inf")
    while True:
        best = np.sort(np.array(logits))[-2:]
        gap = min(gap, float(best[1] - best[0]))
        said.append(int(np.argmax(np.array(logits))))
        if len(said) == p["tokens"]:
            break
        logits = model(mx.array([[said[-1]]]), cache=caches)[0, -1]
    return (
        {
            "tokens": mx.array(said, dtype=mx.int32),
            "kept.prompt": after_prompt,
            "kept": positions_of(caches),
            "logits": logits,
        },
        gap,
    )


def positions_of(caches: list[H2OKVCache]) -> mx.array:
    """Positions `[layers, 1, H, most]`, ascending, padded with -1."""
    most = max(cache.size() for cache in caches)
    return mx.stack([mx.array(field_by_position(cache, "kept", most)) for cache in caches])
