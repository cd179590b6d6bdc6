"""Growth: the slots of a layer's heads while a conversation gets longer, in stages.

While a conversation has no more tokens than there are slots a head, every head keeps all tokens.
From then on slots are shared out anew whenever the conversation has doubled, by the profile's
curves for that length, until the shares are those of a long one. Each layer changes by its own
offset, so all change at the same token. Where positions need more bits (`slots/slot_store.py`),
there are fewer slots from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_h2o import _checks
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.slots.slot_store import FEW

#: Most stages of one layer in a file: tokens double from stage to stage.
MOST_STAGES = 64
#: Slots per KV head that no conversation fills: later stages would be beyond all positions.
NEVER_FULL = _checks.MOST_TOKENS // 64


class Stage(NamedTuple):
    """The slots of a layer's heads from some length on.

    Attributes:
        beyond: Tokens of the conversation from which the stage applies.
        budgets: Slots of each KV head.
    """

    beyond: int
    budgets: tuple[int, ...]


#: A layer's slots of each KV head, at first and in later stages.
Stages = tuple[tuple[int, ...], tuple[Stage, ...]]


def stages_of_model(
    sizes: Sequence[Sequence[int]], means: Sequence[int], least: int, profile: Profile
) -> list[Stages]:
    """Each layer's stages: no token is evicted while all of them fit.

    Layers whose rows have different widths have different means. Their slots are shared out once,
    when the first of them is full, since each layer's size at a stage in between is not known.

    Args:
        sizes: Slots of each layer's KV heads in the end.
        means: Mean slots of each layer's KV heads, before a profile shares them out.
        least: Slots that every head must have.
        profile: The profile by which they were shared out.
    """
    if min(means) >= NEVER_FULL:
        return [((mean,) * len(of), ()) for mean, of in zip(means, sizes, strict=True)]
    if len(set(means)) > 1:
        full = min(means)
        return [
            ((mean,) * len(of_layer), (Stage(full, tuple(of_layer)),))
            for mean, of_layer in zip(means, sizes, strict=True)
        ]
    first, *later = stages_of_profile(profile, means[0], least)
    return [
        (
            tuple(first[1][layer]),
            tuple(Stage(beyond, tuple(budgets[layer])) for beyond, budgets in later),
        )
        for layer in range(len(sizes))
    ]


def stages_of_profile(profile: Profile, mean: int, least: int) -> list[tuple[int, list[list[int]]]]:
    """The shares of slots as a conversation grows.

    Args:
        profile: The model's profile.
        mean: Slots per KV head on average, the same at every stage.
        least: Slots that every head must have.

    Returns:
        The tokens from which each stage applies, and slots `[layers][H]`. The first stage applies
        from 0 and is uniform, the last has the profile's budgets.
    """
    stages = [(0, [[mean] * heads for heads in profile.model.kv_heads])]
    beyond = mean
    # At least one stage is capped at its length; more follow while the profile's grid is longer.
    while 2 * beyond < profile.grid[-1] or beyond == mean:
        stages.append((beyond, profile.budgets(mean, least, 2 * beyond)))
        beyond *= 2
    stages.append((beyond, profile.budgets(mean, least)))
    return stages


def starts_narrow(max_bytes: int | None, undo: int, attending: bool) -> bool:
    """Whether slots are first counted with narrow positions.

    That needs a size in bytes, which a later stage can keep to; it excludes steps to undo and
    models that compute attention themselves.

    Args:
        max_bytes: The size, if it is in bytes.
        undo: Steps that can be taken back.
        attending: Whether this library computes the attention.
    """
    return max_bytes is not None and not undo and attending


def while_narrow(narrow: Stages, wide: Stages) -> Stages:
    """One layer's stages: with narrow positions at first, then with wide ones."""
    (budgets, before), (first, later) = narrow, wide
    narrow_stages = [first, *(stage.budgets for stage in later if stage.beyond <= FEW)]
    return budgets, (
        *(stage for stage in before if stage.beyond < FEW),
        Stage(FEW, narrow_stages[-1]),
        *(stage for stage in later if stage.beyond > FEW),
    )


def checked_filling(stages: Any) -> tuple[Stage, ...]:
    """The stages to come, in order.

    Raises:
        ValueError: They are invalid.
    """
    if not _checks.is_list(stages) or len(stages) > MOST_STAGES:
        raise ValueError(
            f"filling must be a list of (tokens, budgets); got {_checks.shown(stages)}."
        )
    out: list[Stage] = []
    for stage in stages:
        if not _checks.is_list(stage) or len(stage) != 2:
            raise ValueError(
                f"filling must be a list of (tokens, budgets); got {_checks.shown(stage)}."
            )
        least = out[-1].beyond + 1 if out else 1
        beyond = _checks.whole("filling", stage[0], least)
        out.append(Stage(beyond, _checks.wholes("filling", stage[1])))
    return tuple(out)


def due(stages: Sequence[Stage], tokens: int) -> int:
    """How many of the stages apply when so many tokens have come."""
    return sum(stage.beyond < tokens for stage in stages)
