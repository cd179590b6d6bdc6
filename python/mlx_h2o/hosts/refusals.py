"""Refusals: models that cannot be bounded, and settings that a model cannot have, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_h2o.budgets.plan import LayerKind
from mlx_h2o.budgets.settings import ModelSettings, check_rolling
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import is_cache, is_plain
from mlx_h2o.policies import Policy

#: The libraries' caches whose memory does not grow with the conversation.
FIXED_SIZE = ("RotatingKVCache", "ArraysCache", "ChunkedKVCache")


class NothingToBound(ValueError):
    """A model whose memory is bounded already."""


def require_boundable(name: str, kinds: Sequence[LayerKind], caches: Sequence[Any]) -> None:
    """Raise unless a model's memory grows in plain KV caches, any token of which may be evicted.

    Args:
        name: The model's name.
        kinds: The model's use of its plain KV caches.
        caches: The model's own caches.

    Raises:
        NothingToBound: None of its caches grows.
        ValueError: It has caches of its own kind, it picks keys by an index of all tokens, or its
        layers share keys in an unknown way.
    """
    if any(kind.indexes for kind in kinds):
        raise ValueError(
            f"{name} picks the keys to attend to by an index of all tokens (sparse attention), "
            "beside which no token can be forgotten: leave its caches as they are."
        )
    if any(kind.derived and kind.sharers > 1 for kind in kinds):
        raise ValueError(
            f"Layers of {name} share keys that are made of the cached ones, or that an mlx-lm "
            "before 0.32.1 hands out otherwise: update mlx-lm, or leave its caches as they are."
        )
    if kinds:
        return
    others = {
        type(entry).__name__
        for _, entry in entries(caches)
        if not is_cache(entry, *FIXED_SIZE) and not is_plain(entry)  # plain ones are unused
    }
    if others:
        raise ValueError(
            f"{name} keeps its tokens in caches of its own ({', '.join(sorted(others))}), which "
            "mlx-h2o does not know: leave them as they are."
        )
    raise NothingToBound(f"{name} has no plain KV cache to bound: its memory is bounded already.")


def check_settings(
    name: str, kinds: Sequence[LayerKind], settings: ModelSettings, policy: Policy
) -> None:
    """Raise ValueError if a model that attends in its own way cannot have the settings.

    Args:
        name: The model's name.
        kinds: The model's use of its plain KV caches.
        settings: The requested settings.
        policy: The policy that the settings name.
    """
    attending = all(kind.routed for kind in kinds)
    if settings.rolls:
        check_rolling(attending, settings.remainder, settings.packing)
    handed = attending and not any(kind.derived for kind in kinds)
    if not attending and policy.needs_attention:
        raise ValueError(
            f"{name} attends by itself, so policy {policy.name!r} would never see its attention: "
            'choose one that looks at keys only ("keydiff", "streaming", or "distinct" with '
            "mass_weight=0)."
        )
    if settings.packing.packs and not handed:
        raise ValueError(
            f"{name} attends to keys that this library does not hand out, so they cannot be "
            "packed: omit bits, k_bits and v_bits."
        )
    if settings.undo and not handed:
        raise ValueError(
            f"{name} attends to keys that this library does not hand out, so tokens cannot be "
            "taken back one by one: omit undo."
        )
    if settings.undo and any(kind.sharers > 1 for kind in kinds):
        raise ValueError(
            f"Layers of {name} share keys and values, so tokens cannot be taken back one by one: "
            "omit undo."
        )
