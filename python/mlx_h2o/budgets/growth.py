"""Growth of budgets with the conversation: no token is evicted before the memory is full.

A size, in tokens or in bytes, is a total number of slots. While a conversation has no more tokens
than there are slots a head, every head keeps all tokens. From then on slots are shared out anew
whenever the conversation has doubled, by the profile's curves for that length, until the shares are
those of a long one. Each layer changes by its own offset, so all change at the same token. Where
positions need more bits (`storage/slot_store.py`), there are fewer slots from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_h2o._utils import checks
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.storage.slot_store import FEW

#: Most stages of one layer in a file: tokens double from stage to stage.
MOST_STAGES = 64


class Stage(NamedTuple):
    """The slots of a layer's heads from some length on.

    Attributes:
        beyond: Tokens of the conversation from which the stage applies.
        budgets: Slots of each KV head.
    """

    beyond: int
    budgets: tuple[int, ...]


def stages_of(profile: Profile, mean: int, least: int) -> list[tuple[int, list[list[int]]]]:
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


#: A layer's slots of each KV head, at first and in later stages.
Stages = tuple[tuple[int, ...], tuple[Stage, ...]]


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
    begun = [first, *(stage.budgets for stage in later if stage.beyond <= FEW)]
    return budgets, (
        *(stage for stage in before if stage.beyond < FEW),
        Stage(FEW, begun[-1]),
        *(stage for stage in later if stage.beyond > FEW),
    )


def checked_filling(stages: Any) -> tuple[Stage, ...]:
    """The stages to come, in order.

    Raises:
        ValueError: They are invalid.
    """
    if not checks.is_list(stages) or len(stages) > MOST_STAGES:
        raise ValueError(
            f"filling must be a list of (tokens, budgets); got {checks.shown(stages)}."
        )
    out: list[Stage] = []
    for stage in stages:
        if not checks.is_list(stage) or len(stage) != 2:
            raise ValueError(
                f"filling must be a list of (tokens, budgets); got {checks.shown(stage)}."
            )
        least = out[-1].beyond + 1 if out else 1
        beyond = checks.whole("filling", stage[0], least)
        out.append(Stage(beyond, checks.wholes("filling", stage[1])))
    return tuple(out)


def due(stages: Sequence[Stage], tokens: int) -> int:
    """How many of the stages apply when so many tokens have come."""
    return sum(stage.beyond < tokens for stage in stages)
