"""The options of bounded caches: written, typed and explained here, for all that take them.

`make_prompt_cache`, `install` and `ModelSettings.of` take them by name. A name that is none of them
is answered with what was probably meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from mlx_h2o.budgets.layer_budgets import LayerBudgets
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.policies import Policy
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.packed import DEFAULT_GROUP_SIZE
from mlx_h2o.storage.pins import Span


class PolicyOptions(TypedDict, total=False):
    """Settings of a policy that is given by its name, or is the default.

    A policy has some of them, with defaults of its own (docs/reference/policies.md). Those of a
    policy that you registered yourself are taken too.
    """

    sink: int
    """First tokens of the conversation that are never evicted."""
    recent: int | float
    """Newest tokens that are never evicted: a number of tokens, or a share of the slots (0.25)."""
    unit: Literal["head", "layer"]
    """Whether each KV head chooses for itself ("head"), or one choice serves a whole layer."""
    evict_every: int
    """Steps from one eviction to the next; each makes room for as many tokens."""
    age_normalised: bool
    """Divide a token's scores by the steps that it has been attended to."""
    value_weighted: bool
    """Weigh a token's scores by the length of its value."""
    prompt: Literal["window", "full"]
    """Which queries score a prompt chunk: the last `window` of it, or all."""
    window: int
    """Queries at the end of a prompt chunk that score it."""
    pool: int
    """Neighbouring positions over which a prompt's scores are averaged."""
    decay: float
    """What remains of a score after each step, from 0 to 1."""
    mass_weight: float
    """Weight of the attention that a token received."""
    distance_weight: float
    """Weight of how far a token's key is from the mean of the evicted ones."""
    value_weight: float
    """Weight of the length of a token's value."""
    age_weight: float
    """Weight of a token's age."""
    importance_weight: float
    """Weight of importance; the rest is for being unlike other tokens."""
    least_similarity: float
    """Cosine from which on two keys count as alike."""
    least_share: float
    """Part of an even share of the slots that each head keeps at least."""
    chunk: int
    """Tokens that are kept or evicted together."""
    horizon: int
    """How many positions ahead later queries are imagined."""


class CacheOptions(PolicyOptions, total=False):
    """Everything that can be said of a model's bounded caches, beside `max_size`."""

    max_bytes: int | str | None
    """Instead of max_size: memory for all bounded layers and one sequence. Bytes, "64MB", or "25%"
    of what a 16-bit cache of `context` tokens takes. Unless you say `bits`, they are chosen with
    the slots by the model's profile, and nothing is evicted before the memory is full."""
    context: int | None
    """Tokens that a conversation may reach; by default what the model was trained to see."""
    policy: str | Policy | None
    """What chooses the tokens to evict: a name of `policy_names()`, or a policy. The default is
    "salient", and "distinct" (by keys only) in models that attend by themselves."""
    remainder: bool
    """Whether evicted tokens go on answering, summed up in one more column of the attention."""
    budgets: str | Path | Profile | LayerBudgets | None
    """How slots are shared out among layers and heads: "uniform", a `Profile`, or the path of one;
    by default the model's own profile, if it has one. Instead of a size: a list with the slots of
    each of the model's caches, or a function of a cache's index and KV heads."""
    bits: int | None
    """Store keys and values packed in 2, 3, 4, 5, 6 or 8 bits; 16 or None: as they come."""
    k_bits: int | None
    """Bits of keys alone, instead of `bits`."""
    v_bits: int | None
    """Bits of values alone, instead of `bits`."""
    group_size: int
    """Packed elements that share a scale and a bias: 32, 64 or 128."""
    recent_bits: int | None
    """Bits of the newest tokens, where those are to differ; 16: as they come."""
    undo: int
    """How many of the last tokens can be taken back after evictions; speculative decoding needs as
    many as it drafts at once. It costs memory."""
    frames: Sequence[Frame | None] | Literal[False] | str | None
    """Scale and centre of each channel of packed keys (`frames_of`): one or None for each of the
    model's caches, or "none"; by default the profile's."""
    positions: Literal["absolute", "rolling"]
    """With "rolling" queries see the kept keys without the gaps of evicted tokens. It needs a plain
    RoPE, remainder=False and no bits."""
    pins: Sequence[Span]
    """Pairs (first, one past the last) of positions that are never evicted; `pin` adds more."""
    profile: Literal["first use", "never"]
    """Whether a size in bytes has a model without a profile measured, quickly and once."""


#: What options are where they are not given; the others are None.
DEFAULTS: dict[str, Any] = {
    "remainder": True,
    "group_size": DEFAULT_GROUP_SIZE,
    "undo": 0,
    "positions": "absolute",
    "pins": (),
    "profile": "first use",
}
#: The names of all options, and of those that are no policy's.
NAMES = tuple(CacheOptions.__annotations__)
CACHE_NAMES = tuple(name for name in NAMES if name not in PolicyOptions.__annotations__)


def completed(options: CacheOptions) -> dict[str, Any]:
    """Every option that is no policy's, by name, with the default where it is not given."""
    return {name: options.get(name, DEFAULTS.get(name)) for name in CACHE_NAMES}
