"""A description of a list of caches: which ones are bounded, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_h2o._byte_size import size_text
from mlx_h2o.attention.backends import choice
from mlx_h2o.caches.base import BoundedKVCache, past_training_text
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.caches.most_bytes import most_of_bounded, most_of_own
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import is_cache
from mlx_h2o.slots.remainder import SATURATION

#: The number of lines of a summary between the first and the last.
KINDS = 3


@dataclass
class LayerDescription:
    """One entry of a model's cache list.

    Attributes:
        layer: The index in the list ("3", or "3.1" within a CacheList).
        kind: The cache's class.
        bounded: Whether its memory has a bound.
        reason: Why it is bounded, or why not.
        budgets: Slots per KV head of a bounded cache, once known.
        nbytes: Bytes in memory now.
        own: What a cache of the model's own is that is left as it is; else empty.
        alike: The reason without what alike layers may differ in: slots and saturations.
        sizes: The fewest and the most slots of a KV head, or empty.
        choice: How the bits of its rows were chosen, or empty.
    """

    layer: str
    kind: str
    bounded: bool
    reason: str
    budgets: list[int] | None
    nbytes: int
    own: str = ""
    alike: str = ""
    sizes: tuple[int, ...] = ()
    choice: str = ""

    def __str__(self) -> str:
        state = "bounded" if self.bounded else "NOT bounded"
        return f"layer {self.layer}: {self.kind}, {state}: {self.reason} ({size_text(self.nbytes)})"


class Description(list[LayerDescription]):
    """One entry a layer; printed, it is a summary of at most five lines.

    `"\\n".join(map(str, description))` describes every layer. If kernels are not used on this GPU
    there is one line more.
    """

    #: The most bytes of all layers' caches in a conversation; None if not known.
    most: int | None = None
    #: The most bytes of caches and computation while a prompt was read, if measured.
    peak: int | None = None
    #: What to say where the conversation, or its context, is longer than the model was trained for.
    past_training = ""

    def __str__(self) -> str:
        return "\n".join(self.summary())

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in memory now."""
        return sum(layer.nbytes for layer in self)

    @property
    def memory(self) -> str:
        """One line: how many layers are bounded, what the others have, and bytes.

        "24 of 32 layers bounded (8 with a sliding window of 512 tokens), 96 MB at most, 31 MB now,
        peak while reading 40 MB".
        """
        own = Counter(layer.own for layer in self if layer.own)
        rest = [f"{count} with {kind}" for kind, count in own.items()]
        others = f" ({', '.join(rest)})" if rest else ""
        ours = sum(not layer.own for layer in self)
        parts = [f"{ours} of {len(self)} layers bounded{others}"]
        now = self.nbytes
        if not all(layer.bounded for layer in self):
            parts.append("no bound for all")
        elif self.most is not None:
            parts.append(f"{size_text(max(self.most, now))} at most")
        parts.append(f"{size_text(now)} now")
        if self.peak is not None:
            parts.append(f"peak while reading {size_text(self.peak)}")
        return ", ".join(parts)

    def summary(self) -> list[str]:
        """The memory in one line, what alike layers have in common, and which may grow."""
        bounded = [layer for layer in self if layer.bounded]
        lines = [self.memory]
        alike: dict[tuple[str, str], list[LayerDescription]] = {}
        for layer in bounded:
            alike.setdefault((layer.kind, layer.alike), []).append(layer)
        kinds = sorted(alike.values(), key=len, reverse=True)
        shown = kinds if len(kinds) <= KINDS else kinds[: KINDS - 1]
        lines += [f"{_places(layers)}: {layers[0].kind}, {_reason(layers)}" for layers in shown]
        if rest := kinds[len(shown) :]:
            count = sum(map(len, rest))
            lines.append(f"{count} other layers of {len(rest)} kinds")
        chosen = next((layer.choice for layer in bounded if layer.choice), "")
        if chosen and len(kinds) < KINDS:
            lines.append(f"chosen by the profile: {chosen.partition(';')[0]}")
        if self.past_training:
            lines.append(self.past_training)
        if growing := [layer for layer in self if not layer.bounded]:
            lines.append(f"NOT bounded: {_places(growing)}: {growing[0].reason}")
        return lines + unused_kernels()


def unused_kernels() -> list[str]:
    """A line about kernels that are not used on the default device, if there are any."""
    gpu = choice.gpu()
    refused = gpu.self_check.refused if gpu else []
    if not refused:
        return []
    first, rest = refused[0], len(refused) - 1
    others = f", and {rest} more" if rest else ""
    return [
        f"kernels NOT used on this GPU: {first.variant}: {first.why}{others}; MLX's operations do "
        "their work (`mlx_h2o doctor` lists all)"
    ]


def _places(layers: Sequence[LayerDescription]) -> str:
    """The layers' indices, in as few words as possible."""
    names = [layer.layer for layer in layers]
    if len(names) == 1:
        return f"layer {names[0]}"
    run = all(name.isdecimal() for name in names) and int(names[-1]) - int(names[0]) == (
        len(names) - 1
    )
    return f"layers {names[0]} to {names[-1]}" if run else f"{len(names)} layers from {names[0]} on"


def _reason(layers: Sequence[LayerDescription]) -> str:
    """The common reason of alike layers, with the slots of all."""
    slots = [count for layer in layers for count in layer.sizes]
    return f"{_spread(slots)} {layers[0].alike}" if slots else layers[0].alike


def _spread(numbers: Sequence[float]) -> str:
    """ "8", or "8 to 16" where numbers differ."""
    low, high = (f"{n}".removesuffix(".0") for n in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def describe(cache: list[Any], peak: int | None = None) -> Description:
    """For each layer whether it is bounded, and why; printed, a summary.

    Args:
        cache: A model's caches.
        peak: The most bytes that they and the computation took while a prompt was read, if known.
    """
    described = Description(_described(layer, entry) for layer, entry in entries(cache))
    described.most, described.peak = _most_bytes(cache), peak
    for _, entry in entries(cache):
        if isinstance(entry, BoundedKVCache) and entry.trained:
            tokens = max(entry.offset, entry.context or 0)
            if tokens > entry.trained:
                described.past_training = past_training_text(tokens, entry.trained)
    return described


def _most_bytes(cache: list[Any]) -> int | None:
    """The most bytes of a model's caches between two steps; None if one grows or is not known."""
    of_all = [entry for _, entry in entries(cache)]
    # Each layer's caches, one a sequence in a batch.
    bounded = [e.caches if isinstance(e, BatchH2OKVCache) else [e] for e in of_all if _is_ours(e)]
    own = [entry for entry in of_all if not _is_ours(entry) and not _holds_none(entry)]
    most = [None if _nbytes(entry) == 0 else most_of_own(entry) for entry in own]
    if None in most or any(layer.share is None for layers in bounded for layer in layers):
        return None
    ours = sum(most_of_bounded(layers) * _batch(layers[0]) for layers in zip(*bounded, strict=True))
    return ours + sum(nbytes for nbytes in most if nbytes is not None)


def _batch(entry: BoundedKVCache) -> int:
    """The sequences of a cache."""
    return entry.layer.types["keys"].batch if entry.layer else 1


def _is_ours(entry: Any) -> bool:
    return isinstance(entry, BoundedKVCache | BatchH2OKVCache)


def _holds_none(entry: Any) -> bool:
    """Whether a cache is that of a layer that attends to an image alone (`stock_caches`)."""
    return is_cache(entry, "RotatingKVCache") and not entry.max_size


def _nbytes(entry: Any) -> int:
    try:
        return int(entry.nbytes)
    except (AttributeError, NotImplementedError):  # some caches of a library have no nbytes
        return 0


def _described(layer: str, entry: Any) -> LayerDescription:
    name = type(entry).__name__
    nbytes = _nbytes(entry)
    if isinstance(entry, BatchH2OKVCache) and entry.caches:
        return replace(_described(layer, entry.caches[0]), kind=name, nbytes=nbytes)
    if isinstance(entry, BoundedKVCache):
        policy = entry.policy.name
        answer = "evicted tokens go on answering" if entry.answers else "no remainder"
        if not entry.attending:
            answer += ", as plain rows" if entry.answers else ""
        sizes = entry.budgets or [entry.settings.max_size or 0]
        framed = " in a frame" if entry.frame else ""
        alike = f"slots a KV head{entry.packing}{framed}, policy {policy}, {answer}"
        if entry.settings.rope:
            alike += ", positions without gaps"
        if entry.sharers > 1:
            alike += f", attended to by {entry.sharers} layers"
        if entry.settings.filling:
            alike += ", shared out anew when the memory is full"
        reason = f"{_spread(sizes)} {alike}{_saturation(entry)}"
        if entry.choice:
            reason += f" (chosen: {entry.choice})"
        described = layer, name, True, reason, entry.budgets, nbytes
        ends = min(sizes), max(sizes)
        return LayerDescription(*described, alike=alike, sizes=ends, choice=entry.choice)
    if _holds_none(entry):
        reason, own = "it attends to the image, and holds no tokens", "cross-attention"
    elif is_cache(entry, "RotatingKVCache"):
        reason = f"the model's own sliding window of {entry.max_size} tokens"
        own = f"a sliding window of {entry.max_size} tokens"
    elif is_cache(entry, "ArraysCache"):
        reason, own = "a state of fixed size, not a list of tokens", "a state of fixed size"
    elif is_cache(entry, "ChunkedKVCache"):
        reason = f"the model's own chunks of {entry.chunk_size} tokens"
        own = f"chunks of {entry.chunk_size} tokens"
    else:
        reason = "a cache of the model's own kind, left as it is; it may grow with the conversation"
        return LayerDescription(layer, name, False, reason, None, nbytes, f"a {name} that may grow")
    return LayerDescription(layer, name, True, reason, None, nbytes, own, reason)


def _saturation(entry: BoundedKVCache) -> str:
    """The saturation of a cache's remainder, if it has one and it is not the default."""
    ts = entry.settings.config()["saturation"]
    if not (entry.attending and entry.answers) or ts == SATURATION:
        return ""
    return f", saturation {_spread(ts if isinstance(ts, list) else [ts])}"
