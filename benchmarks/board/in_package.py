"""Rivals whose caches are in mlx-lm or in the package: the window, packed rows, and policies.

A policy has the settings that its authors' code has, with even slots, dense rows and no remainder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import mlx.core as mx

from benchmarks.board import policies  # noqa: F401  # registers them
from benchmarks.board.reading import Read, Reading, Sized, having_read, through
from benchmarks.board.rivals import OURS, Rival
from benchmarks.board.tasks import Task
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.compression.compress import compress_into
from mlx_h2o.compression.reading import read_prompt
from mlx_h2o.compression.twice import Reading as TwoReadings
from mlx_h2o.evaluate.methods import (
    FULL,
    PACKED,
    WINDOW,
    WINDOW_KEEP,
    Method,
    parse_method,
)
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.spill.setting import Spill

#: Ours with a file of all rows, of which those that are wanted come back.
RETURNING = f"{OURS}, rows come back"
ARXIV = "https://arxiv.org/abs/"
MLX_LM = "https://github.com/ml-explore/mlx-lm"
#: Policies, the package's and those of `board/policies`, as `parse_method` reads them: source,
#: and why these settings.
POLICIES = {
    "streaming": (ARXIV + "2309.17453", "4 sinks, as in the paper"),
    "h2o-paper": (ARXIV + "2306.14048", "half heavy hitters, half recent, no sinks: section 5"),
    "tova": (ARXIV + "2401.06104", "no settings"),
    "snapkv:pool=5": (
        "https://github.com/FasterDecoding/SnapKV",
        "pool of 5 as in the code, which averages where ours takes the greatest",
    ),
    "chunkkv:pool=5": (ARXIV + "2502.00299", "chunks of 10, as in the paper"),
    "keydiff": (ARXIV + "2504.15364", "no settings"),
    "r-kv:importance_weight=0.07": (
        "https://github.com/Zefan-Cai/R-KV",
        "attention weighs 0.07 as in the code; 16 tokens leave at once, since the code's 128 are "
        "more than these caches hold",
    ),
}


def full_reading(reader: Reader, task: Task) -> Reading:
    """The full cache's reading, against which all others are scored."""
    return through(_caches(Method(FULL)))(reader, task, 1.0)


def rivals() -> list[Rival]:
    """Ours first, then mlx-lm's and the policies."""
    ours = Method(OURS, DEFAULT_POLICY)
    mlx_lm = [
        Rival(
            f"mlx-lm, {WINDOW}",
            MLX_LM,
            f"RotatingKVCache, keep={WINDOW_KEEP} as in its make_prompt_cache",
            through(_caches(Method(WINDOW))),
        ),
        *(
            Rival(
                name,
                MLX_LM,
                "QuantizedKVCache; keeps every token",
                through(_caches(Method(name))),
                keeps_all=True,
            )
            for name in PACKED
        ),
    ]
    published = [
        # Without what its paper does not have.
        Rival(
            f"{spec.split(':')[0]} (ours)",
            source,
            why,
            through(_caches(parse_method(f"{spec}:remainder=false"))),
        )
        for spec, (source, why) in POLICIES.items()
    ]
    return [
        Rival(
            OURS,
            "",
            "the default: bits, slots and remainder by the profile",
            through(_caches(ours)),
        ),
        Rival(
            f"{OURS}, read twice",
            "",
            '`reading="twice"`: the same bytes, but for the prompt\'s packed rows while it is read',
            through(_read_twice, one_by_one=True),
        ),
        Rival(
            f"{OURS} compress",
            "",
            "`mlx_h2o compress`: the prompt is read twice; packed rows, values fitted, remainder",
            _compressed(replace(parse_method(OURS), label=f"{OURS} compress"), fitted=True),
            prompts_only=True,
        ),
        Rival(
            RETURNING,
            "",
            "the default with `spill=`; what waits for the file and the last queries count, too",
            through(_returning, one_by_one=True),  # a file holds one conversation
        ),
        *mlx_lm,
        *published,
        Rival(
            "kvzip (ours)",
            "https://github.com/snu-mllab/KVzip",
            "16 bits, values as they are, no remainder; the softmax runs over the whole prompt",
            _compressed(replace(parse_method(f"{OURS}:bits=16"), remainder=False), fitted=False),
            prompts_only=True,
        ),
    ]


def _size(task: Task, share: float) -> int:
    """The tokens whose bytes a cache gets."""
    return max(round(share * task.sized), 1)


def _caches(method: Method) -> Sized:
    def sized(reader: Reader, part: Task, share: float) -> list[Any]:
        cache = replace(method, tokens=_size(part, share)).make(reader.model, part.context)
        return having_read(reader, cache, part)

    return sized


def returning_method(folder: Path) -> Method:
    """Ours, with the files of all rows in a folder."""
    settings = (("spill", Spill(folder)),)
    return Method(RETURNING, DEFAULT_POLICY, settings=settings)


def _returning(reader: Reader, part: Task, share: float) -> list[Any]:
    return written(_caches(returning_method(Path(gettempdir())))(reader, part, share))


def written(cache: list[Any]) -> list[Any]:
    """The cache, once its prompt's last rows are in the file.

    They wait in memory until four more tokens have come, which take no time here.
    """
    way = next(entry.spill for entry in cache if entry.spill is not None)
    way.conversation.file.flush()
    return cache


def _read_twice(reader: Reader, part: Task, share: float) -> list[Any]:
    ours, (prompt,) = Method(OURS, DEFAULT_POLICY, tokens=_size(part, share)), part.prompts
    cache = ours.make(reader.model, part.context)
    count, _ = read_prompt(reader.model, reader.tokenizer, prompt, cache, "twice")
    return having_read(reader, cache, replace(part, prompts=[prompt[count:]]))


def _compressed(method: Method, fitted: bool) -> Read:
    def sized(reader: Reader, part: Task, share: float) -> list[Any]:
        prompt = mx.array(part.prompts)
        cache = replace(method, tokens=_size(part, share)).make(reader.model, prompt.shape[1])
        room = len(part.continuations[0])
        how = TwoReadings(chunk=reader.chunk, room=room, fitted=fitted)
        compress_into(cache, reader.model, reader.tokenizer, prompt, how)
        return cache

    # Rows of a batch would share one layout of slots.
    return through(sized, one_by_one=True)
