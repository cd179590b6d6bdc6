"""The options of bounded caches: named, typed and explained here for every function with them.

`make_prompt_cache`, `install` and `ModelSettings.of` take them by name. An unknown name raises an
error that suggests the probable one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from mlx_h2o.budgets.profile import Profile
from mlx_h2o.policies import Policy
from mlx_h2o.policies.registry import field_of_text
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.pins import Span
from mlx_h2o.spill.setting import Spill

#: Slots: a number for every KV head of a layer, a list with each head's, or None for a cache that
#: does not grow.
OneLayer = int | Sequence[int] | None
#: A list with an entry for each of a model's own caches, or a function that gives it for a cache's
#: index and number of KV heads.
LayerBudgets = Sequence[OneLayer] | Callable[[int, int], OneLayer]


class CacheOptions(TypedDict, total=False):
    """All options of a model's bounded caches, except `max_size`."""

    max_bytes: int | str | None
    """Memory for all bounded layers and one sequence, instead of max_size: bytes, "64MB", or "25%"
    of the bytes of a 16-bit cache of `context` tokens. Unless `bits` is given, bits and slots are
    chosen by the model's profile. No token is evicted before the memory is full."""
    context: int | None
    """The most tokens of a conversation; by default the length that the model was trained for."""
    policy: str | Policy | None
    """The eviction policy: `Salient(recent=64)`, or the same as text, "salient:recent=64" (names:
    `policy_names()`). The default is "salient" (by attention mass, distance, value and age), and
    "distinct" (by keys alone) in models that compute attention themselves."""
    remainder: bool
    """Whether evicted tokens keep contributing, summarised in one more column of the attention."""
    budgets: str | Path | Profile | LayerBudgets | None
    """The shares of slots among layers and heads: "uniform", a `Profile`, or the path of one; by
    default the model's own profile, if it has one. Instead of a size: a list with the slots of each
    of the model's caches, or a function of a cache's index and KV heads."""
    bits: int | None
    """Bits of packed keys and values: 2, 3, 4, 5, 6 or 8; 16 or None for dense rows."""
    k_bits: int | None
    """Bits of keys alone, instead of `bits`."""
    v_bits: int | None
    """Bits of values alone, instead of `bits`."""
    group_size: int
    """Packed elements that share a scale and a bias: 32, 64 or 128. Where 64 does not divide the
    width of a model's keys and values, the default is one that does."""
    recent_bits: int | None
    """Bits of the newest tokens, where they differ from the others; 16 for dense rows."""
    undo: int
    """How many of the last tokens can be taken back after evictions; speculative decoding needs as
    many as it drafts at once. It costs memory."""
    frames: Sequence[Frame | None] | Literal[False] | str | None
    """Key scaling (`frames_of`): scale and centre of each channel of packed keys. One `Frame` or
    None for each of the model's caches, or "none"; by default the profile's."""
    positions: Literal["absolute", "rolling"]
    """With "rolling", queries see the kept keys without the gaps left by evicted tokens. It needs a
    plain RoPE, and turns off the remainder and the choice of bits; `remainder=True` or bits beside
    it are refused."""
    pins: Sequence[Span]
    """Pairs (first, one past the last) of positions that are never evicted; `pin` adds more."""
    profile: Literal["first use", "never"]
    """Whether a model without a profile is measured for a size in bytes, quickly and once."""
    spill: str | Path | Spill | None
    """A folder in which each conversation gets a file of all its rows, from which evicted ones come
    back; "auto" for one in the user's cache folder, or a `Spill`. The file goes with its
    conversation, or with its process."""


#: The names of all options; their defaults are `settings.DEFAULTS`.
NAMES = tuple(CacheOptions.__annotations__)


def policy_and_options(spec: str) -> tuple[str, dict[str, Any]]:
    """The policy's text and the options of its caches: "h2o:recent=64:bits=8" has both.

    Raises:
        ValueError: A field is not written FIELD=VALUE.
    """
    policy, *fields = spec.split(":")
    options: dict[str, Any] = {}
    for text in fields:
        name, value = field_of_text(text)
        if name in NAMES:
            options[name] = value
        else:
            policy += f":{text}"
    return policy, options
