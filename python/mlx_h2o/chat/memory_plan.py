"""The memory that a conversation will take, computed before its prompt is read.

The bytes of the caches follow from their settings exactly. The further bytes of reading a chunk are
measured: two short chunks of a meaningless token go through the model, into caches that are
dropped, and the bytes that they take are scaled to the length of the chunk. Over caches of the
model's own, MLX's attention may hold the scores of all queries and keys (on a CPU it does). For
such models three chunks are measured; one part of their bytes is scaled with the queries, the other
with queries times keys. Evicting writes new slots while the old ones exist, so the caches count
twice in the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_h2o import _checks
from mlx_h2o._byte_size import size_text
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache, past_training_text
from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.compression.reading import (
    NEWEST,
    REQUEST,
    Readings,
    is_read_twice,
    most_of_two_readings,
)
from mlx_h2o.compression.twice import CHUNK, query_thinning
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.loaded import logits_of
from mlx_h2o.hosts.recorder import trained_context
from mlx_h2o.layer.layer_factory import lies_in_range
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.slots import reserved_range
from mlx_h2o.slots.slot_store import FEW, GROWTH_STEP

#: Tokens that mlx-lm reads at once.
USUAL_CHUNK = 2048
#: The longest measured chunks. Shorter ones measure more of what does not grow.
_LONGEST, _LONGEST_BESIDE_OWN = 256, 1024
#: A planned peak is this near to the measured one: tests/chat/test_memory_plan.py.
MARGIN = 0.1
#: A phone's memory, and the part of it that one app may use. Apple publishes no figure; developers
#: report half (more with the entitlement com.apple.developer.kernel.increased-memory-limit).
PHONE, OF_PHONE = 8 << 30, 0.5
# The note about caches that are not bounded by us.
OWN = "caches of the model's own are estimated"


@dataclass(frozen=True)
class MemoryPlan:
    """A conversation's memory in bytes, all of MLX's memory.

    Attributes:
        weights: Bytes of the model's weights.
        kv: Bytes of all caches once the prompt is read.
        full_kv: Bytes of mlx-lm's own caches then, in 16 bits.
        peak: The most while the prompt is read, weights included.
        decoding: The most while tokens are decoded, weights included.
        prompt: Tokens of the prompt.
        chunk: Tokens that are read at once.
        notes: Memory that is not counted.
    """

    weights: int
    kv: int
    full_kv: int
    peak: int
    decoding: int
    prompt: int
    chunk: int
    notes: tuple[str, ...] = ()

    @property
    def fits_phone(self) -> bool:
        """Whether an app on an iPhone with 8 GB may use the peak."""
        return self.peak <= PHONE * OF_PHONE

    def as_json(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        return {**asdict(self), "fits_phone": self.fits_phone}

    def __str__(self) -> str:
        left = PHONE * OF_PHONE - self.peak
        phone = f"fits, with {size_text(left)} left" if left >= 0 else "does NOT fit"
        lines = [
            f"weights {size_text(self.weights)}",
            f"KV memory {size_text(self.kv)} ({size_text(self.full_kv)} in mlx-lm's own caches)",
            f"peak {size_text(self.peak)} while {self.prompt:,} tokens are read, {self.chunk:,} at "
            f"once; {size_text(self.decoding)} while decoding (within {MARGIN:.0%})",
            f"on a phone of {PHONE >> 30} GB, of which an app may hold about half: {phone}",
        ]
        return "\n".join([*lines, *self.notes])


def plan(
    model: nn.Module,
    max_bytes: int | str | None = None,
    *,
    prompt: int,
    chunk: int = USUAL_CHUNK,
    reading: Readings = "once",
    **settings: Any,
) -> MemoryPlan:
    """The memory of a conversation of one sequence, before its prompt is read.

    Args:
        model: An mlx-lm model; a few hundred meaningless tokens go through it, or up to 1,800 if it
            has caches of its own.
        max_bytes: Bytes of the KV memory, as in `make_prompt_cache`.
        prompt: Tokens of the prompt.
        chunk: Tokens that are read at once; mlx-lm calls it `prefill_step_size`.
        reading: "twice" or "auto": a prompt that exceeds the slots is read twice, in chunks of
            its own size, as `--reading` does.
        settings: The other settings of `make_prompt_cache`, such as `max_size` or `bits`.

    Raises:
        ValueError: Settings are unknown, exclude each other, or do not suit this model.
    """
    prompt = _checks.whole("prompt", prompt, 1, _checks.MOST_TOKENS)
    chunk = min(_checks.whole("chunk", chunk, 1, _checks.MOST_TOKENS), prompt)
    of_caches = ModelSettings.of(max_bytes=max_bytes, **settings)
    return planned_memory(model, of_caches, prompt, chunk, reading)


def planned_memory(
    model: nn.Module, settings: ModelSettings, prompt: int, chunk: int, reading: Readings = "once"
) -> MemoryPlan:
    """The same as `plan`, with `ModelSettings`.

    Args:
        model: An mlx-lm model.
        settings: Settings of the model's caches, with a size.
        prompt: Tokens of the prompt.
        chunk: Tokens that are read at once.
        reading: How often, as in `plan`.

    Raises:
        ValueError: This prompt cannot be read twice.
    """
    mx.eval(model.parameters())
    weights = sum(weight.nbytes for _, weight in flattened(model))
    caches = bounded_caches(model, settings)
    bounded = bounded_members(caches)
    is_twice = is_read_twice(model, caches, prompt - NEWEST, reading)
    chunk = CHUNK if is_twice else chunk
    kv = sum(kv_bytes(entry, prompt) for entry in bounded)
    others = [entry for _, entry in entries(caches) if not isinstance(entry, BoundedKVCache)]
    spans = [_most_rows(entry, prompt, chunk) for entry in others]
    # States of fixed size are not attended to.
    attended = [entry for entry in others if hasattr(entry, "keys")]
    pairs = max((_most_pairs(entry, prompt, chunk) for entry in attended), default=0)
    whole, one, read, used = _beside(model, settings, chunk, pairs)
    grown = sum(_grown(entry, most, read) for entry, most in zip(used, spans, strict=True))
    notes = [f"{len(others)} {OWN}"] if others else []
    trained = trained_context(model, 0)
    if 0 < trained < prompt and not settings.rolls:
        notes.append(past_training_text(prompt, trained))
    active = weights + kv + grown
    full = sum(map(plain_bytes, layer_kinds(model))) * prompt + grown
    peak = active + kv + whole
    if is_twice:
        most = most_of_two_readings(model, caches, prompt - NEWEST, begun=False)
        group, _ = query_thinning(model, prompt)
        # The logits of one KV head's queries of a chunk, of which two are there at once.
        logits = 2 * group * (CHUNK + REQUEST) * prompt * mx.float32.size
        peak = max(peak, active - kv + most + whole + logits)
    return MemoryPlan(weights, kv + grown, full, peak, active + one, prompt, chunk, tuple(notes))


def flattened(model: nn.Module) -> list[tuple[str, mx.array]]:
    """The model's weights by name."""
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def kv_bytes(cache: BoundedKVCache, tokens: int) -> int:
    """Bytes of a cache for one sequence after so many tokens.

    Slots are allocated in steps. In a reserved range they take memory page by page, and what the
    last pages hold beyond them is not counted here.
    """
    share, settings = cache.share, cache.settings
    assert share is not None
    settings = settings.grown(tokens) or settings
    assert settings.budgets is not None
    widths = share.widths.narrow if tokens <= FEW else share.widths
    room = -(-tokens // GROWTH_STEP) * GROWTH_STEP
    key = widths.packing.row_bytes("keys", widths.key, widths.key_size)
    if lies_in_range(settings) and max(settings.budgets) * key >= reserved_range.FEWEST_BYTES:
        room = tokens
    cost = widths.cost(settings.policy, settings.remembers)
    return sum(cost.of(min(budget, room)) for budget in settings.budgets)


def _beside(
    model: nn.Module, settings: ModelSettings, chunk: int, pairs: int
) -> tuple[int, int, int, list[Any]]:
    """What a chunk and a token take beside weights and caches.

    Args:
        model: An mlx-lm model.
        settings: The settings of its caches.
        chunk: Tokens that are read at once.
        pairs: Queries of a chunk times keys that they see in a cache of the model's own; 0 where
            it has none.

    Returns:
        Bytes of a chunk, bytes of one token, and the model's own caches after so many tokens.
    """
    longest = min(_LONGEST, chunk)
    if pairs:  # very short chunks take most bytes for other things than scores
        longest = min(_LONGEST_BESIDE_OWN, max(chunk, _LONGEST))
    lengths = sorted({max(longest // 4, 1), max(longest // 2, 1), longest})
    measures = []
    for length in lengths if pairs else lengths[-2:]:
        caches = bounded_caches(model, settings)
        measures.append((length, _bytes_of_chunk(model, caches, length)))
    one = _bytes_of_chunk(model, caches, 1)
    others = [entry for _, entry in entries(caches) if not isinstance(entry, BoundedKVCache)]
    return max(_extended(measures, chunk, pairs), one), one, longest + 1, others


def _extended(measures: Sequence[tuple[int, int]], chunk: int, pairs: int) -> int:
    """Bytes that a chunk takes, from those of shorter chunks, which saw no keys but their own.

    Args:
        measures: Lengths and bytes of one or two chunks; of three if queries times keys count too.
        chunk: Tokens of the chunk.
        pairs: Its queries times the keys that they see.
    """
    (length, most), *before = reversed(measures)
    if not before:
        return most
    (shorter, less), *first = before
    slope = max(most - less, 0) / (length - shorter)
    scores = 0.0  # bytes for each query and key
    if first:
        of_first = (less - first[0][1]) / (shorter - first[0][0])
        scores = (slope - of_first) / (length - first[0][0])
        # The rest grows with the chunk; it does not shrink.
        scores = min(max(scores, 0.0), slope / (length + shorter))
    each = slope - scores * (length + shorter)
    beyond = scores * (pairs - length**2) if first else 0.0
    return int(most + each * (chunk - length) + beyond)


def _bytes_of_chunk(model: nn.Module, caches: Sequence[Any], length: int) -> int:
    """The most bytes that reading so many tokens takes, beyond those held afterwards."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits_of(model, mx.zeros((1, length), mx.int32), caches)
    mx.eval([entry.state for entry in caches])
    most, active = mx.get_peak_memory(), mx.get_active_memory()
    return max(most - max(active, before), 0)


def _most_rows(entry: Any, tokens: int, chunk: int) -> int:
    """The most tokens in a cache of the model's own while so many are read."""
    if (window := getattr(entry, "max_size", None)) is not None:
        # Queries attend to a chunk before it is cut.
        return int(min(tokens, window + chunk - 1))
    return tokens


def _most_pairs(entry: Any, tokens: int, chunk: int) -> int:
    """The most queries times keys of a chunk, the last and shorter one included."""
    whole, rest = tokens - tokens % chunk, tokens % chunk
    return max(chunk * _most_rows(entry, whole, chunk), rest * _most_rows(entry, tokens, rest))


def _grown(entry: Any, most: int, read: int) -> int:
    """Bytes of a cache of the model's own with so many tokens, from its bytes after some."""
    try:
        nbytes, rows = int(entry.nbytes), int(entry.keys.shape[2])
    except (AttributeError, NotImplementedError):
        return int(getattr(entry, "nbytes", 0))  # a state of fixed size, or an unknown cache
    return nbytes * max(most, read) // rows
