"""Caches for whole models: which layers can be bounded, with how many slots, and saved to files."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import routing
from mlx_h2o.budget import RowWidths, slots_for_bytes
from mlx_h2o.builtin import shipped_profiles
from mlx_h2o.cache import H2OKVCache
from mlx_h2o.packed import Packing
from mlx_h2o.policies import Policy, make_policy
from mlx_h2o.policies.distinct import KEYS_ONLY
from mlx_h2o.profile import FILE_NAME, Profile, identity_of

# A head of a profile that could only choose among one or two tokens would choose nothing.
FEWEST_CHOICES = 4
FILE_FORMAT = "mlx-h2o prompt cache"
FILE_VERSION = "1"


@dataclass
class LayerKind:
    """What a trial run told about a plain KV cache of a model.

    Attributes:
        heads: Hk.
        widths: Of its rows.
        routed: Whether the model asked the cache to attend.
        derived: Whether it attended to keys made of the cached ones (MLA).
    """

    heads: int
    widths: RowWidths
    routed: bool
    derived: bool


class _Trial(mlx_lm_cache.KVCache):
    """A plain cache that notes how the model attends to it."""

    attending = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routed = self.derived = False
        self.handed: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.handed = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        return self.handed

    def attend(
        self, q: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        assert self.handed is not None
        self.routed = True
        self.derived = keys is not self.handed[0] or values is not self.handed[1]
        return mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def kind(self) -> LayerKind | None:
        if self.keys is None or self.values is None:
            return None
        widths = RowWidths(
            self.keys.shape[-1], self.values.shape[-1], self.keys.dtype.size, self.values.dtype.size
        )
        return LayerKind(self.keys.shape[1], widths, self.routed, self.derived)


def layer_kinds(model: nn.Module) -> list[LayerKind]:
    """How the model uses each of its plain KV caches, in order.

    One token is sent through the model lazily: shapes become known, and nothing is computed.
    """
    routing.install()
    caches = mlx_lm_cache.make_prompt_cache(model)
    trials: list[_Trial] = []

    def trial() -> _Trial:
        trials.append(_Trial())
        return trials[-1]

    caches = [replaced(entry, trial) for entry in caches]
    model(mx.array([[0]]), cache=caches)
    kinds = [trial.kind() for trial in trials]
    return [kind for kind in kinds if kind is not None]


def make_prompt_cache(
    model: nn.Module,
    max_size: int | None = None,
    *,
    max_bytes: int | None = None,
    policy: str | Policy | None = None,
    remainder: bool = True,
    budgets: str | Path | Profile | None = None,
    bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    group_size: int = 64,
    recent_bits: int | None = None,
    **settings: Any,
) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by a bounded one.

    Sliding-window, state-space and other caches stay as the model made them (`describe` tells
    which, and why).

    Args:
        model: An mlx-lm model.
        max_size: Tokens' worth of memory per KV head and layer, on average; the remainder of the
            evicted is charged against it.
        max_bytes: Instead: bytes for all bounded layers together and one sequence, everything
            counted.
        policy: A policy, or its name; the default is "distinct" (in models that attend by
            themselves in its form that looks at keys only).
        remainder: Whether evicted tokens go on answering.
        budgets: "uniform", a `Profile`, or the path of one. By default the model's own profile
            where one ships with mlx-h2o or lies beside its weights (see `mlx_h2o.load`).
        bits: Store keys and values in so many bits (2, 3, 4, 5, 6 or 8); None stores them as they
            come.
        k_bits: Of keys alone, instead of `bits`.
        v_bits: Of values alone, instead of `bits`.
        group_size: Elements that share a scale and a bias: 32, 64 or 128.
        recent_bits: Of the newest tokens, where that is to differ (16: the model's own dtype).
        settings: Fields of the policy to change, such as `sink`, `recent` or `evict_every`.

    Raises:
        ValueError: No or two sizes, an unknown policy or setting, a budget without room to evict, a
            profile of another model, or a policy that this model cannot run.
    """
    if (max_size is None) == (max_bytes is None):
        raise ValueError("Give max_size (tokens) or max_bytes, one of them.")
    kinds = layer_kinds(model)
    name = type(model).__module__.rsplit(".", 1)[-1]
    if not kinds:
        raise ValueError(f"{name} has no plain KV cache to bound: its memory is bounded already.")
    attending = all(kind.routed for kind in kinds)
    derived = any(kind.derived for kind in kinds)
    if policy is None:
        policy = "distinct"
        if not attending:
            settings = {**KEYS_ONLY, **settings}
    chosen = make_policy(policy, **settings)
    if not attending and chosen.needs_attention:
        raise ValueError(
            f"{name} attends by itself, so policy {chosen.name!r} would never see its attention: "
            'choose one that looks at keys only ("keydiff", "streaming", or "distinct" with '
            "mass_weight=0)."
        )
    packing = Packing(k_bits or bits, v_bits or bits, group_size, recent_bits)
    if packing.packs and (derived or not attending):
        raise ValueError(
            f"{name} attends to keys that this library does not hand out, so they cannot be "
            "packed: leave bits, k_bits and v_bits away."
        )
    kinds = [replace(kind, widths=replace(kind.widths, packing=packing)) for kind in kinds]
    answers = remainder and not derived
    remembers = answers or chosen.uses_evicted_mean
    uniform = derived or not attending or chosen.unit == "layer"
    profile = _profile_for(model, kinds, budgets, uniform)

    sizes: list[list[int]] = []
    shared_out: dict[int, list[list[int]]] = {}  # layers of equal widths have equal means
    for layer, kind in enumerate(kinds):
        if max_size is not None:
            mean = max_size - kind.widths.remainder_slots(remembers)
        else:
            assert max_bytes is not None
            share = max_bytes // len(kinds)
            mean = slots_for_bytes(share, kind.heads, kind.widths, chosen, remembers)
        if profile is None:
            sizes.append([mean] * kind.heads)
        else:
            if mean not in shared_out:
                least = chosen.least_budget() + FEWEST_CHOICES
                shared_out[mean] = profile.budgets(mean, least)
            sizes.append(shared_out[mean][layer])
    if not attending:
        # One mask serves all layers, so all must hold the same number of tokens.
        least = min(min(layer) for layer in sizes)
        sizes = [[least] * len(layer) for layer in sizes]
    layers = iter(sizes)

    def bounded() -> H2OKVCache:
        return H2OKVCache(
            policy=chosen,
            remainder=answers,
            budgets=next(layers),
            attending=attending,
            k_bits=packing.k_bits,
            v_bits=packing.v_bits,
            group_size=group_size,
            recent_bits=recent_bits,
        )

    return [replaced(entry, bounded) for entry in mlx_lm_cache.make_prompt_cache(model)]


def replaced(entry: Any, make: Any) -> Any:
    """A cache list's entry with its plain KV caches, members of a CacheList too, replaced."""
    if isinstance(entry, mlx_lm_cache.CacheList):
        return mlx_lm_cache.CacheList(*(replaced(member, make) for member in entry.caches))
    return make() if type(entry) is mlx_lm_cache.KVCache else entry


def _profile_for(
    model: nn.Module,
    kinds: list[LayerKind],
    budgets: str | Path | Profile | None,
    uniform: bool,
) -> Profile | None:
    """The profile to share slots out by, or None for uniform budgets."""
    if budgets == "uniform" or (budgets is None and uniform):
        return None
    if uniform:
        raise ValueError(
            "All heads need the same budget here (one mask serves them all, or the policy's unit "
            'is the layer): pass budgets="uniform".'
        )
    identity = identity_of(model, [k.heads for k in kinds], [k.widths.key for k in kinds])
    if budgets is not None:
        profile = budgets if isinstance(budgets, Profile) else Profile.load(budgets)
        profile.require(identity)
        return profile
    folder = getattr(model, "mlx_h2o_folder", None)
    if folder is not None and (Path(folder) / FILE_NAME).exists():
        profile = Profile.load(Path(folder) / FILE_NAME)
        profile.require(identity)
        return profile
    for path in shipped_profiles():
        profile = Profile.load(path)
        if profile.model.difference(identity) is None:
            return profile
    return None


@dataclass
class LayerDescription:
    """One entry of a model's cache list.

    Attributes:
        layer: Its place in the list ("3", or "3.1" within a CacheList).
        kind: The cache's class.
        bounded: Whether its memory has a bound.
        reason: Why, or why not.
        budgets: Slots per KV head of a bounded cache, once known.
        nbytes: Bytes held now.
    """

    layer: str
    kind: str
    bounded: bool
    reason: str
    budgets: list[int] | None
    nbytes: int

    def __str__(self) -> str:
        state = "bounded" if self.bounded else "NOT bounded"
        return f"layer {self.layer}: {self.kind}, {state}: {self.reason} ({self.nbytes:,} bytes)"


def describe(cache: list[Any]) -> list[LayerDescription]:
    """Per layer what is bounded and what is not, and why."""
    return [_described(layer, entry) for layer, entry in entries(cache)]


def entries(cache: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The caches of a list, members of a CacheList too, each with its place ("3", "3.1")."""
    for i, entry in enumerate(cache):
        if isinstance(entry, mlx_lm_cache.CacheList):
            yield from entries(entry.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", entry


def _described(layer: str, entry: Any) -> LayerDescription:
    name = type(entry).__name__
    try:
        nbytes = entry.nbytes
    except (AttributeError, NotImplementedError):
        nbytes = 0
    if isinstance(entry, H2OKVCache):
        policy = entry.policy.name
        answer = "evicted tokens go on answering" if entry.answers else "no remainder"
        if not entry.attending:
            answer += ", as plain rows" if entry.answers else ""
        sizes = entry.budgets or [entry.max_size or 0]
        spread = f"{sizes[0]}" if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
        reason = f"{spread} slots a KV head{entry.packing}, policy {policy}, {answer}"
        return LayerDescription(layer, name, True, reason, entry.budgets, nbytes)
    if isinstance(entry, mlx_lm_cache.RotatingKVCache):
        reason = f"the model's own sliding window of {entry.max_size} tokens"
        return LayerDescription(layer, name, True, reason, None, nbytes)
    if isinstance(entry, mlx_lm_cache.ArraysCache):
        reason = "a state of fixed size, not a list of tokens"
        return LayerDescription(layer, name, True, reason, None, nbytes)
    if isinstance(entry, mlx_lm_cache.ChunkedKVCache):
        reason = f"the model's own chunks of {entry.chunk_size} tokens"
        return LayerDescription(layer, name, True, reason, None, nbytes)
    reason = "a cache of the model's own kind, left as it is; it may grow with the conversation"
    return LayerDescription(layer, name, False, reason, None, nbytes)


def save_prompt_cache(
    file_name: str | Path, cache: list[Any], metadata: dict[str, str] | None = None
) -> None:
    """Write a prompt cache, evicted or not, with positions, scores, policy and remainder.

    Args:
        file_name: A .safetensors path.
        cache: From `make_prompt_cache`, possibly with mlx-lm's own caches in it.
        metadata: Strings to keep with it.
    """
    arrays: dict[str, mx.array] = {}
    saved = [_saved(entry, f"{i}", arrays) for i, entry in enumerate(cache)]
    header = {
        "format": FILE_FORMAT,
        "version": FILE_VERSION,
        "metadata": json.dumps(metadata or {}),
        "entries": json.dumps(saved),
    }
    header["digest"] = _digest(arrays, header)
    # safetensors of mlx cannot hold empty arrays' names alone, so a file always has one array.
    mx.save_safetensors(str(file_name), arrays or {"empty": mx.zeros(1)}, header)


def load_prompt_cache(
    file_name: str | Path, return_metadata: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Read what `save_prompt_cache` wrote.

    Raises:
        ValueError: The file is missing, truncated, foreign, changed, or of another version.
    """
    try:
        with open(file_name, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            json.loads(file.read(size))
        arrays, header = _read(str(file_name))
        mx.eval(arrays)
    except (OSError, RuntimeError, ValueError, struct.error, MemoryError, OverflowError) as error:
        raise ValueError(f"{file_name} is no readable prompt cache: {error}") from error
    if header.get("format") != FILE_FORMAT:
        raise ValueError(
            f"{file_name} was not written by mlx_h2o.save_prompt_cache (mlx-lm's own files load "
            "with mlx_lm.models.cache.load_prompt_cache)."
        )
    if header.get("version") != FILE_VERSION:
        raise ValueError(
            f"{file_name} has format version {header.get('version')}; this mlx-h2o reads "
            f"{FILE_VERSION}."
        )
    digest = header.pop("digest", "")
    arrays.pop("empty", None)
    if digest != _digest(arrays, header):
        raise ValueError(f"{file_name} was changed or damaged after it was saved.")
    routing.install()
    cache = [
        _restored(entry, f"{i}", arrays) for i, entry in enumerate(json.loads(header["entries"]))
    ]
    if return_metadata:
        return cache, json.loads(header["metadata"])
    return cache


def _read(file_name: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    return cast(
        tuple[dict[str, mx.array], dict[str, str]],
        mx.load(file_name, format="safetensors", return_metadata=True),
    )


def _saved(entry: Any, prefix: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """Put an entry's arrays under its prefix; return the rest of it as JSON types."""
    if isinstance(entry, mlx_lm_cache.CacheList):
        members = [_saved(m, f"{prefix}.{i}", arrays) for i, m in enumerate(entry.caches)]
        return {"class": "CacheList", "members": members}
    if isinstance(entry, H2OKVCache):
        arrays.update({f"{prefix}.{name}": array for name, array in entry.arrays().items()})
        return {"class": "H2OKVCache", "config": entry.config()}
    name = type(entry).__name__
    if getattr(mlx_lm_cache, name, None) is not type(entry):
        raise ValueError(f"Cannot save a {name}: it is neither mlx-h2o's nor mlx-lm's cache.")
    scalars = {}
    for path, leaf in cast(list[tuple[str, Any]], tree_flatten([entry.state])):
        if isinstance(leaf, mx.array):
            arrays[f"{prefix}.{path}"] = leaf
        else:
            scalars[path] = leaf
    return {"class": name, "scalars": scalars, "meta_state": getattr(entry, "meta_state", None)}


def _restored(entry: dict[str, Any], prefix: str, arrays: dict[str, mx.array]) -> Any:
    """The cache that `_saved` described."""
    if entry["class"] == "CacheList":
        members = [_restored(m, f"{prefix}.{i}", arrays) for i, m in enumerate(entry["members"])]
        return mlx_lm_cache.CacheList(*members)
    own = {
        name.removeprefix(f"{prefix}."): array
        for name, array in arrays.items()
        if name.startswith(f"{prefix}.")
    }
    if entry["class"] == "H2OKVCache":
        return H2OKVCache.from_state((own, json.dumps(entry["config"])))
    cls = getattr(mlx_lm_cache, entry["class"], None)
    if cls is None:
        raise ValueError(f"This mlx-lm has no {entry['class']} to load.")
    leaves = sorted({**own, **entry["scalars"]}.items(), key=lambda item: _path_key(item[0]))
    state = cast(list[Any], tree_unflatten(leaves))[0] if leaves else []
    if entry.get("meta_state") is None:
        return cls.from_state(state)
    return cls.from_state(state, entry["meta_state"])


def _path_key(path: str) -> list[tuple[int, str]]:
    """Sorts "0.2" before "0.10"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in path.split(".")]


def _digest(arrays: dict[str, mx.array], header: dict[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all arrays, and the header."""
    digest = hashlib.sha256()
    for key in sorted(header):
        digest.update(f"{key}={header[key]}\n".encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        if array.size:
            flat = mx.contiguous(array.flatten())
            digest.update(np.array(flat.view(mx.uint8)).tobytes())
    return digest.hexdigest()
