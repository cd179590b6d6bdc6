"""Write the files that Swift's tests load, so that files are known to pass between Python and
Swift.

The caches are python-caches.safetensors in swift/Tests/MLXH2OTests/Fixtures. Swift's caches are
swift-caches.safetensors beside it: `MLX_H2O_RECORD=1 swift test --filter FileTests` writes it, and
tests/conformance/test_swift_package.py reads it. `--stages` writes the shares of slots of growing
conversations instead, stages.json, which tests/budgets/test_filling.py reads too. `--compressed`
writes a file of `mlx_h2o compress`, compressed.safetensors, and the embedded model's continuation
from it, compressed.json; after that Swift's test has a session answer, and writes its conversation,
swift-conversation.safetensors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

import mlx_h2o
from mlx_h2o import cli
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.budgets.growth import Stage, stages_of_profile
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.hosts import routing
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT
from mlx_h2o.slots.key_scaling import Frame

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from golden.margins import LEAST_MARGIN, watching  # noqa: E402
from golden.model import LEAST_LOGIT_GAP  # noqa: E402

FIXTURES = ROOT / "swift/Tests/MLXH2OTests/Fixtures"
# Profiles, with slots per head for each: from very few to more than a calibration's length.
PROFILES = {
    "python/mlx_h2o/data/recall-4m/mlx_h2o_profile.json": (16, 94, 128, 700, 3000),
    "swift/Tests/MLXH2OTests/Fixtures/profile.json": (14, 20, 41, 100),
}
LEAST = 12
#: Characters of the sample text to compress, the text after it, and tokens to generate.
DOCUMENT, QUESTION, ANSWER = 300, " And so it was that Mr Elliot", 24


def main() -> None:
    mx.random.seed(11)
    frame = Frame.of(mx.random.normal((1, 2, 64, 32)) + 3 * mx.random.normal((1, 2, 1, 32)))
    caches = [
        H2OKVCache(budgets=[20, 28], policy="distinct"),
        H2OKVCache(budgets=[24, 24], policy="h2o", bits=8, group_size=32, remainder=False),
        H2OKVCache(
            budgets=[20, 28], policy="ema", k_bits=8, v_bits=4, group_size=32, recent_bits=16
        ),
        H2OKVCache(
            budgets=[20, 28],
            policy="salient",
            bits=6,
            group_size=32,
            frame=frame,
            saturation=[0.0, 2.5],
        ),
        H2OKVCache(budgets=[24, 24], policy="salient"),
    ]
    # The cache is saved in the second stage; the third is still to come.
    filling = (Stage(24, (30, 18)), Stage(48, (20, 28)), Stage(96, (18, 30)))
    caches[4].follow(replace(caches[4].settings, filling=filling))
    with only_reference():
        for cache in caches:
            for length in [40] + [1] * 50:
                q = mx.random.normal((1, 4, length, 32)).astype(mx.bfloat16)
                k, v = (mx.random.normal((1, 2, length, 32)).astype(mx.bfloat16) for _ in range(2))
                keys, values = cache.update_and_fetch(k, v)
                mask = "causal" if length > 1 else None
                mx.eval(cache.attend(q, keys, values, scale=0.18, mask=mask))
    plain = KVCache()
    plain.update_and_fetch(mx.random.normal((1, 2, 9, 32)), mx.random.normal((1, 2, 9, 32)))
    FIXTURES.mkdir(parents=True, exist_ok=True)
    mlx_h2o.save_prompt_cache(
        FIXTURES / "python-caches.safetensors", [*caches, plain], {"from": "python"}
    )


def stages() -> list[dict[str, Any]]:
    """The shares of slots of growing conversations, by these profiles."""
    return [
        {
            "profile": path,
            "mean": mean,
            "least": LEAST,
            "stages": [
                list(stage) for stage in stages_of_profile(Profile.load(ROOT / path), mean, LEAST)
            ],
        }
        for path, means in PROFILES.items()
        for mean in means
    ]


def compress(out: Path) -> None:
    """A document compressed as by the command, with a pin; the room beside it is soon used up."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "document.txt"
        document.write_text(SAMPLE_TEXT.read_text(encoding="utf-8")[:DOCUMENT], encoding="utf-8")
        options = ["--to", "40%", "--room", "6", "--pin-span", "20:24", "--json"]
        model = ["--model", EMBEDDED_MODEL]
        assert cli.main(["compress", str(document), *model, "--out", str(out), *options]) == 0


def continued(file: Path) -> dict[str, Any]:
    """The model's continuation from a file: the prompt, the likeliest tokens, and the tokens held
    then.

    Raises:
        ValueError: Rounding could choose another token or another victim.
    """
    routing.install()
    model, tokenizer = mlx_h2o.load(EMBEDDED_MODEL, mx.float32)
    caches = mlx_h2o.load_prompt_cache(file)
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False)
    tokens: list[int] = []
    gap = float("inf")
    with only_reference(), watching() as margins:
        while len(tokens) < ANSWER:
            inputs = mx.array([[tokens[-1]] if tokens else prompt])
            logits = np.array(model(inputs, cache=caches)[0, -1])
            second, first = np.sort(logits)[-2:]
            gap = min(gap, float(first - second))
            tokens.append(int(logits.argmax()))
    if gap < LEAST_LOGIT_GAP or min(margins) < LEAST_MARGIN:
        raise ValueError(f"Choices are too close: {gap:.1e} and {min(margins):.1e}.")
    positions = [
        [sorted(row) for run in cache.store.runs for row in cache.slots(run).positions[0].tolist()]
        for cache in caches
    ]
    return {"prompt": prompt, "tokens": tokens, "kept": positions}


def record_compressed() -> None:
    file = FIXTURES / "compressed.safetensors"
    compress(file)
    (FIXTURES / "compressed.json").write_text(json.dumps(continued(file)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--compressed", action="store_true", help="a compressed document instead")
    instead.add_argument("--stages", action="store_true", help="shares of slots instead")
    arguments = parser.parse_args()
    if arguments.compressed:
        record_compressed()
    elif arguments.stages:
        lines = ",\n".join(json.dumps(one) for one in stages())
        (FIXTURES / "stages.json").write_text(f"[\n{lines}\n]\n")
    else:
        main()
