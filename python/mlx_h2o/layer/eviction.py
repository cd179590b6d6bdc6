"""Eviction: which rows of a chunk are kept, and which slots are overwritten next (the victims)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.budgets.tensor_parallel import mean_of_ranks
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.policy_view import evictable_of, slots_of
from mlx_h2o.policies import selection
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.slots.slot_store import Fields, Run


def settle(
    layer: Layer, attended: Sequence[Fields], window_masses: Sequence[mx.array | None] | None = None
) -> None:
    """After attention: reduce a chunk that exceeds the budget, then choose the next victims.

    Args:
        layer: The layer that owns the slots.
        attended: For each run, the fields of all slots attended to, with updated scores.
        window_masses: For each run, the attention mass `[B, heads, M]` of the last `window` queries
            of a prompt chunk; None after a decode step.
    """
    masses = window_masses or [None] * len(layer.runs)
    parts_by_run = list(zip(layer.runs, attended, strict=True))
    if any(run.budget < fields["positions"].shape[2] for run, fields in parts_by_run):
        worths = [
            _worth(layer, run, fields, mass)
            for (run, fields), mass in zip(parts_by_run, masses, strict=True)
        ]
        parts = zip(layer.runs, attended, worths, strict=True)
        layer.keep([_reduced(layer, run, fields, worth) for run, fields, worth in parts])
    elif layer.policy.needs_attention:
        layer.write_scores([fields["scores"] for fields in attended])
    choose_victims(layer)


def choose_victims(layer: Layer) -> None:
    """Choose the next `evict_every` victims of every full run that has none left."""
    if not layer.slots_are_next:
        return
    due = [run for run in layer.runs if run.length == run.budget and not run.victims]
    if not due:
        return
    store, victims = layer.store, layer.victims
    chosen = []
    for run in layer.runs:
        if run in due:
            chosen.append(_victims(layer, run, store.views(run)))
        elif victims is not None:
            chosen.append(victims[:, run.first : run.last])
        else:
            shape = (store.fields["keys"].shape[0], run.heads, layer.policy.evict_every)
            chosen.append(mx.zeros(shape, mx.int32))
    layer.name_victims(due, chosen[0] if len(chosen) == 1 else mx.concatenate(chosen, axis=1))


def resize(layer: Layer, settings: CacheSettings) -> None:
    """Give the heads the budgets of other settings; tokens that no longer fit are evicted."""
    assert settings.budgets is not None
    beyond, size = None, 0
    if layer.window is not None:
        beyond = layer.resize_window(recent_size(settings, settings.budgets))
        size = layer.window.size
    budgets = [budget - size for budget in settings.budgets]
    layer.regroup(settings, budgets)
    if not layer.offset:  # no tokens are held yet
        return
    settle(layer, layer.attended(beyond))
    # Heads whose budgets are now equal form one run.
    layer.regroup(settings, budgets)
    choose_victims(layer)


def recent_size(settings: CacheSettings, budgets: Sequence[int]) -> int:
    """The number of tokens that every head protects, which the recent window holds.

    Raises:
        ValueError: No tokens are protected.
    """
    policy = settings.policy
    size = min(policy.recent_slots(budget) for budget in budgets)
    if size < 1:
        raise ValueError(
            f"recent_bits needs protected tokens: policy {policy.name!r} with "
            f"recent={policy.recent} protects none in a head of {min(budgets)} slots."
        )
    return size


def _victims(layer: Layer, run: Run, fields: Fields) -> mx.array:
    """The slots of a full run to overwrite next, `[B, heads, evict_every]`."""
    slots = slots_of(layer, run, fields, layer.lost(run))
    return selection.select_victims(
        agreed(layer.settings, layer.policy.priority(slots)[..., : run.length]),
        slots.positions[..., : run.length],
        slots.evictable[..., : run.length],
        layer.policy.evict_every,
        layer.policy.unit,
    )


def agreed(settings: CacheSettings, priority: mx.array) -> mx.array:
    """Priorities `[B, H, N]`; where a policy selects for a whole layer, the same on all ranks."""
    if settings.ranks == 1 or settings.policy.unit == "head":
        return priority
    mean = mean_of_ranks(priority.mean(axis=1, keepdims=True), settings.ranks)
    return mx.broadcast_to(mean, priority.shape)


def keep_best(layer: Layer, settings: CacheSettings, worths: Sequence[mx.array], room: int) -> None:
    """Keep the rows worth most by another measure than the policy's; recent rows may go.

    Args:
        layer: The layer that owns the slots.
        settings: The settings with each head's budget from now on.
        worths: The worth of each head's rows, `[B, N]`.
        room: Slots of each head's budget that stay free for later tokens.
    """
    assert settings.budgets is not None
    layer.regroup(settings, settings.budgets)
    best = []
    for run, fields in zip(layer.runs, layer.attended(), strict=True):
        worth = mx.stack(list(worths[run.first : run.last]), axis=1)
        may_go = fields["positions"] >= layer.policy.sink
        best.append(_best(layer, run, fields, worth, run.budget - room, may_go))
    layer.keep(best)
    # Heads whose rows are now as many form one run.
    layer.regroup(settings, settings.budgets)
    # A long prompt had a range for all of its rows.
    layer.store.leave_range()
    choose_victims(layer)


def _worth(layer: Layer, run: Run, fields: Fields, window_mass: mx.array | None) -> mx.array:
    """The worth of a run's rows, `[B, heads, N]`."""
    N = fields["positions"].shape[2]
    if run.budget >= N:  # all rows fit, so no worth is needed
        return mx.zeros(fields["positions"].shape)
    evicted = layer.lost_beside(fields)
    # Head by head, so that only one head's rows are copied to float32 at a time.
    priorities = []
    for i in range(run.heads):
        one = replace(run, first=run.first + i, last=run.first + i + 1)
        slots = slots_of(layer, one, _head(fields, i), evicted)
        mass = None if window_mass is None else window_mass[:, i : i + 1]
        priorities.append(layer.policy.prompt_priority(slots, mass)[..., :N])
    return mx.concatenate(priorities, axis=1)


def _reduced(layer: Layer, run: Run, fields: Fields, worth: mx.array) -> Fields:
    """The rows of a run that fit its budget; the others are folded into the remainder."""
    may_go = evictable_of(layer, run, fields["positions"])
    return _best(layer, run, fields, worth, run.budget, may_go)


def _best(
    layer: Layer, run: Run, fields: Fields, worth: mx.array, count: int, may_go: mx.array
) -> Fields:
    """The `count` rows worth most, protected ones included; the others are folded."""
    positions = fields["positions"]
    if count >= positions.shape[2]:
        return fields
    worth, unit = agreed(layer.settings, worth), layer.policy.unit
    best = selection.select_kept(worth, true_positions(positions), may_go, count, unit)
    if layer.settings.remembers:
        dropped = mx.put_along_axis(mx.ones(positions.shape), best, mx.zeros(best.shape), axis=-1)
        for i in range(run.heads):
            layer.fold(_head(fields, i), dropped[:, i : i + 1], run.first + i)
    return {
        name: mx.take_along_axis(field, best.reshape(*best.shape, *[1] * (field.ndim - 3)), axis=2)
        for name, field in fields.items()
    }


def _head(fields: Fields, index: int) -> Fields:
    """One head of a run's fields."""
    return {name: field[:, index : index + 1] for name, field in fields.items()}
