"""A short real conversation of the embedded model: by the device's kernels, and by the definition.

Both are fed the same tokens, so that a choice between two words that are as good as each other does
not send them different ways; what is compared is the word that each would say next.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.caches.describe import unused_kernels
from mlx_h2o.doctor.report import Begun, Section
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT, load
from mlx_h2o.model_caches.make import make_prompt_cache

PROMPT, TOKENS, SLOTS = 384, 48, 96
# Words whose logits are nearer than this are as good as each other.
TIE = 0.05
STORES: dict[str, dict[str, Any]] = {
    "as they come": {},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
}


def section(begun: Begun, tokens: int = TOKENS, prompt: int = PROMPT) -> None:
    """The conversation through bounded caches that evict at every token.

    Args:
        begun: Takes the section.
        tokens: The tokens that are fed one by one.
        prompt: The tokens that are read before them, in one piece.
    """
    model, tokenizer = load(EMBEDDED_MODEL)
    text = tokenizer.encode(SAMPLE_TEXT.read_text())[: prompt + tokens]
    found = begun(
        Section(
            "conversation",
            f"a conversation of {EMBEDDED_MODEL}, {prompt} + {tokens} tokens in {SLOTS} slots",
            ("rows", "words alike", "largest logit error", "tokens/s"),
            data={},
        )
    )
    for name, store in STORES.items():
        start = time.perf_counter()
        ours = _logits(model, text, prompt, store)
        seconds = time.perf_counter() - start
        with only_reference():
            theirs = _logits(model, text, prompt, store)
            alike = _alike(ours, theirs)
            error = mx.abs(ours - theirs).max().item()
        found.rows.append(
            (name, f"{alike} of {tokens}", f"{error:.2g}", f"{len(text) / seconds:.0f}")
        )
        found.data[name] = {"alike": alike, "tokens": tokens, "error": error, "seconds": seconds}
        if alike < tokens:
            found.failures.append(f"{tokens - alike} words of {tokens} differ, rows {name}")
    found.notes += unused_kernels()


def _logits(model: nn.Module, text: list[int], prompt: int, store: dict[str, Any]) -> mx.array:
    """What the model says after each token behind the prompt, `[tokens, vocabulary]` float32."""
    cache = make_prompt_cache(model, SLOTS, budgets="uniform", **store)
    mx.eval(model(mx.array([text[:prompt]]), cache=cache))
    said = []
    for token in text[prompt:]:
        said.append(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32))
        mx.eval(said[-1])
    return mx.stack(said)


def _alike(ours: mx.array, theirs: mx.array) -> int:
    """After how many tokens both say the same word, or one that is as good by the definition."""
    word = ours.argmax(axis=-1, keepdims=True)
    lost = theirs.max(axis=-1, keepdims=True) - mx.take_along_axis(theirs, word, axis=-1)
    alike: int = (lost <= TIE).sum().item()  # type: ignore[assignment]
    return alike
