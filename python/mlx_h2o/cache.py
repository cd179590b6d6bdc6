"""The bounded KV cache of one layer: attention -> scores -> policy -> slots."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx

from mlx_h2o import selection
from mlx_h2o.attention import FLOAT_DTYPES
from mlx_h2o.budget import RowWidths, slots_for_bytes
from mlx_h2o.decode_step import Decoding, HeadStep
from mlx_h2o.decoding import (
    MOST_QUERY_HEADS,
    can_decode,
    on_default_device,
    start_decoding,
)
from mlx_h2o.masks import Mask
from mlx_h2o.observing import observe
from mlx_h2o.packed import AnyRows, Packing, dense
from mlx_h2o.policies import Policy, Slots, make_policy
from mlx_h2o.recent import RecentZone
from mlx_h2o.remainder import Remainder, plain_rows_for
from mlx_h2o.store import Run, SlotStore


class H2OKVCache:
    """A KV cache that holds a fixed number of tokens and chooses which.

    While decoding, the new row overwrites the slot of the token that the policy chose to forget,
    and that token's row is folded into the remainder. A prompt chunk is attended together with the
    kept slots and then reduced to the budget with one gather. It stands where mlx-lm's `KVCache`
    stands (`update_and_fetch`, `make_mask`, `state`, ...); attention reaches `attend` through
    `mlx_h2o.routing`.

    Args:
        max_size: Slots per KV head on average; the remainder is charged against it.
        max_bytes: Instead: bytes that this layer's cache may take, everything counted.
        policy: A policy or its name.
        remainder: Whether evicted tokens go on answering.
        budgets: Instead of max_size: the slots of each KV head.
        attending: Whether this library computes the attention. False for models that attend by
            themselves: then the policy may look at keys only, all heads of all layers must have one
            budget, and the remainder goes in as plain rows.
        bits: Store keys and values packed, as `mx.quantize` packs them, in so many bits; each row
            is packed once, when it comes, and moved as it is from then on.
        k_bits: Of keys alone, instead of `bits`.
        v_bits: Of values alone, instead of `bits`.
        group_size: Elements that share a scale and a bias.
        recent_bits: Store the newest tokens, as many as every head of the layer protects, in so
            many bits instead; 16: in the model's own dtype. `recent.py` says what becomes of a
            token that is recent no longer.

    Raises:
        ValueError: No or several sizes, an unknown policy, or a budget without room to evict.
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        max_bytes: int | None = None,
        policy: str | Policy = "distinct",
        remainder: bool = True,
        budgets: Sequence[int] | None = None,
        attending: bool = True,
        bits: int | None = None,
        k_bits: int | None = None,
        v_bits: int | None = None,
        group_size: int = 64,
        recent_bits: int | None = None,
    ):
        if sum(size is not None for size in (max_size, max_bytes, budgets)) != 1:
            raise ValueError("Give exactly one of max_size, max_bytes and budgets.")
        if budgets is not None and not len(budgets):
            raise ValueError("budgets must hold one number of slots per KV head.")
        self.policy = make_policy(policy)
        if not attending and self.policy.needs_attention:
            raise ValueError(
                f"Policy {self.policy.name!r} must see attention, which this model computes by "
                'itself: choose one that looks at keys only ("keydiff", "streaming", or "distinct" '
                "with mass_weight=0)."
            )
        self.packing = Packing(k_bits or bits, v_bits or bits, group_size, recent_bits)
        if self.packing.packs and not attending:
            raise ValueError("A model that attends by itself cannot read packed keys and values.")
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.answers = remainder
        self.attending = attending
        self.budgets = list(budgets) if budgets is not None else None
        # Budgets are known now unless they depend on the model's widths.
        self._check_budgets(self.budgets or ([max_size] if max_size is not None else []))
        self.offset = 0
        self._store: SlotStore | None = None
        # The newest tokens, where they are stored in another width; all others are in the store.
        self._recent: RecentZone | None = None
        self._remainder: Remainder | None = None
        # Slots to overwrite next, [B, H, evict_every]; each run knows how many it has used.
        self._victims: mx.array | None = None
        # Where store, remainder and victims are while the kernel decodes.
        self._decoding: Decoding | None = None
        # Whether the model attends to the cached keys themselves (None: not known yet).
        self._own: bool | None = None
        self._row_types: dict[
            str, tuple[int, int, int, mx.Dtype]
        ] = {}  # batch, heads, width, dtype
        self._row: tuple[mx.array, mx.array] | None = None  # of a fused step, not taken in yet
        self._pending: dict[str, mx.array] | None = None  # rows of a chunk that goes over budget
        # What was given out and is not attended to yet.
        self._handed: tuple[mx.array, mx.array] | None = None

    @property
    def store(self) -> SlotStore | None:
        """Where the rows lie, once the first have come."""
        self._take_back()
        return self._store

    @property
    def remainder(self) -> Remainder | None:
        """What stays of the evicted."""
        self._take_back()
        return self._remainder

    # -- mlx-lm's cache protocol ------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new rows in; return what to attend to.

        Args:
            keys: `[B, Hk, L, D]` with RoPE applied at `offset`.
            values: `[B, Hk, L, Dv]`.

        Returns:
            Keys `[B, Hk, N, D]` and values `[B, Hk, N, Dv]`, old and new; only the new ones where
            nobody but `attend` can do anything with them (heads with different budgets, fused
            decode steps).
        """
        if self._handed is not None:
            raise RuntimeError(
                "This model did not ask the cache to attend. Call mlx_h2o.install(), or, for a "
                "model that attends by itself, choose a policy that looks at keys only and pass "
                "attending=False."
            )
        L = keys.shape[2]
        alike = keys.dtype == values.dtype  # as the fused step wants them
        fits = L == 1 and self._own and self.attending and alike
        if fits and can_decode(self.policy, keys, values, self.packing):
            self._check_rows(keys, values)
            self._row = self._handed = (keys, values)
            self.offset += 1
            return self._handed
        store = self._start(keys, values)
        self._take_in(store, keys, values, self.offset)
        self.offset += L
        fetched = self._fetch(store, keys, values)
        if self.attending:
            self._handed = fetched
            return fetched
        self._settle(store, [self._attended(store, run) for run in store.runs])
        side = self._side_state()
        return mx.depends(fetched[0], side), fetched[1]

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to what `update_and_fetch` just returned, then choose what to forget.

        Args:
            q: `[B, Hq, L, D]`.
            keys: The keys that `update_and_fetch` returned, or some made of them (MLA): then the
                remainder cannot answer, and the mask covers all N.
            values: The values likewise.
            scale: Factor on q.k.
            mask: None, "causal" or an array; against our own keys only its last L columns are read,
                since kept slots are always visible.
            sinks: Attention-sink logits `[Hq]`.

        Returns:
            `[B, Hq, L, Dv]`.
        """
        if self._store is None:
            raise RuntimeError("attend() before update_and_fetch(): there is nothing to attend to.")
        own = self._handed is not None and keys is self._handed[0] and values is self._handed[1]
        self._handed = None
        if self._row is not None:
            (new_keys, new_values), self._row = self._row, None
            if own and mask is None and q.shape[1] <= MOST_QUERY_HEADS * new_keys.shape[1]:
                return self._decode(q, new_keys, new_values, scale, sinks)
            if not own:
                raise RuntimeError(
                    "This model attended to the cached keys before and now attends to keys made of "
                    "them, which a bounded cache cannot follow."
                )
            self._take_in(self._taken_back(), new_keys, new_values, self.offset - 1)
        store = self._taken_back()
        self._own = own
        remembered = self.answers and self._evicted(store.runs[0])
        if not own and (len(store.runs) > 1 or remembered or self.packing.packs):
            raise RuntimeError(
                "This model attends to keys derived from the cached ones: it needs "
                'budgets="uniform", remainder=False and no bits.'
            )
        group = q.shape[1] // store.heads
        outs, seen, window_masses, recent_scores = [], [], [], []
        for run in store.runs:
            fields = self._attended(store, run)
            kept = fields["positions"].shape[2]
            heads = slice(run.first * group, run.last * group)
            whole = len(store.runs) == 1
            remainder = None
            if own and self.answers and self._evicted(run):
                assert self._remainder is not None
                remainder = self._remainder.heads(run.first, run.last)
            run_keys, run_values = self._keys_and_values(run, fields) if own else (keys, values)
            out, scores, window_mass = observe(
                self.policy,
                q if whole else q[:, heads],
                run_keys,
                run_values,
                self._positions_and_scores(run, fields),
                heads=run.heads,
                offset=self.offset,
                scale=scale,
                mask=mask,
                sinks=sinks if sinks is None or whole else sinks[heads],
                remainder=remainder,
                own=own,
            )
            if scores is not None:
                fields["scores"] = scores[..., :kept]
                recent_scores.append(scores[..., kept:])
            outs.append(out)
            seen.append(fields)
            window_masses.append(window_mass)
        if self._recent is not None and recent_scores:
            self._recent.write_scores(mx.concatenate(recent_scores, axis=1))
        self._settle(store, seen, window_masses)
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)
        tied: mx.array = mx.depends(out, self._side_state())
        return tied

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask that mlx-lm asks for before N new tokens.

        Returns:
            None or "causal" where attention is ours, or a boolean array `[N, kept + N]` if asked;
            with plain rows an array `[1, 1, N, rows + kept + N]` to add to the logits.
        """
        if window_size is not None:
            raise ValueError(
                "This model masks a sliding window over a full cache, which a bounded cache cannot "
                "serve: leave that layer's own cache in place."
            )
        kept = self.size()
        if self._store is not None and self._store.reserved and self._evicted_after(N):
            return self._plain_rows_mask(N, kept)
        if N == 1:
            return None
        if return_array:
            return mx.arange(kept + N) <= mx.arange(kept, kept + N)[:, None]
        return "causal"

    def size(self) -> int:
        """Tokens physically held by the head that holds most."""
        if self._store is None:
            return 0
        return self._recently_held + max(run.length for run in self._store.runs)

    def empty(self) -> bool:
        return self._store is None

    @property
    def nbytes(self) -> int:
        """Bytes of everything held: rows, positions, scores, remainder, victims."""
        if self._decoding is not None:
            return self._decoding.nbytes
        return sum(array.nbytes for array in self.arrays().values())

    @property
    def evicted(self) -> int:
        """Tokens dropped so far, mean over KV heads (rounded down)."""
        if self._store is None:
            return 0
        lost = sum(run.heads * self._evicted(run) for run in self._store.runs)
        return lost // self._store.heads

    def is_trimmable(self) -> bool:
        """Whether the newest tokens can be taken back: until the first eviction."""
        return self._store is None or all(not self._evicted(run) for run in self._store.runs)

    def trim(self, n: int) -> int:
        """Take back the newest n tokens; their attention stays in the scores of older ones.

        Returns:
            How many were taken back: 0 once anything was evicted.
        """
        if self._store is None or not self.is_trimmable():
            return 0
        n = min(n, self.offset)
        if n <= 0:
            return 0
        self.offset -= n
        older = n
        if self._recent is not None:
            self._take_back()
            older -= self._recent.trim(n)
        for run in self._store.runs:
            run.length -= older
        self._forget_victims()
        return n

    def resize(self, max_size: int | Sequence[int]) -> None:
        """Change the budget; what no longer fits goes into the remainder.

        Args:
            max_size: Slots for every KV head, or a list with each head's. The remainder is not
                charged again.
        """
        store = self.store
        heads = store.heads if store else 1
        budgets = [max_size] * heads if isinstance(max_size, int) else list(max_size)
        if store and len(budgets) != heads:
            raise ValueError(f"Give one budget for each of {heads} KV heads.")
        self._check_budgets(budgets)
        self.max_size, self.max_bytes, self.budgets = None, None, budgets
        if store is None:
            if isinstance(max_size, int):
                self.max_size, self.budgets = max_size, None
            return
        if self._recent is not None:
            budgets = self._resize_recent(budgets)
        store.regroup(budgets)
        self._forget_victims()
        self._settle(store, [self._attended(store, run) for run in store.runs])
        # Heads that have become alike form one run again.
        store.regroup(budgets)
        self._forget_victims()
        self._choose_victims(store)

    def _check_budgets(self, budgets: Sequence[int]) -> None:
        """Raise ValueError unless the policy and the model can work with these budgets."""
        for budget in budgets:
            self.policy.check_budget(budget)
        if len(set(budgets)) > 1 and not self.attending:
            raise ValueError("A model that attends by itself needs one budget for all heads.")
        if len(set(budgets)) > 1 and self.policy.unit == "layer":
            raise ValueError('unit="layer" needs one budget for all heads: pass budgets="uniform".')

    # -- saving -----------------------------------------------------------------------------------

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        arrays = {}
        if self.store is not None and self.remainder is not None:
            arrays = {f"slots.{name}": field for name, field in self.store.fields.items()}
            if self._remembers:
                arrays |= {f"remainder.{k}": array for k, array in self.remainder.arrays.items()}
            if self._victims is not None:
                arrays["victims"] = self._victims
        if self._recent is not None:
            arrays |= {f"recent.{name}": field for name, field in self._recent.fields.items()}
        return arrays

    def config(self) -> dict[str, Any]:
        """Everything else that a copy needs, as JSON types."""
        store = self._store
        return {
            "policy": {"name": self.policy.name, **asdict(self.policy)},
            "remainder": self.answers,
            "attending": self.attending,
            "packing": asdict(self.packing),
            "max_size": self.max_size if self.budgets is None else None,
            "max_bytes": self.max_bytes if self.budgets is None else None,
            "budgets": self.budgets,
            "offset": self.offset,
            "own": self._own,
            "reserved": store.reserved if store else 0,
            "runs": [asdict(run) for run in store.runs] if store else [],
            "recent": self._recent.config() if self._recent else None,
        }

    @property
    def state(self) -> tuple[dict[str, mx.array], str]:
        """Arrays by name, and the configuration as JSON."""
        return self.arrays(), json.dumps(self.config())

    @classmethod
    def from_state(
        cls, state: tuple[dict[str, mx.array], str], meta_state: Any = None
    ) -> H2OKVCache:
        """A cache from another's `state`; `meta_state` is for mlx-lm before 0.32.1, and unused.

        Raises:
            ValueError: The state is not one that `state` gave.
        """
        try:
            arrays, text = state
            return cls._restored(arrays, json.loads(text))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"This is no state of an H2OKVCache: {error!r}.") from error

    @classmethod
    def _restored(cls, arrays: dict[str, mx.array], config: dict[str, Any]) -> H2OKVCache:
        settings = dict(config["policy"])
        cache = cls(
            config["max_size"],
            max_bytes=config["max_bytes"],
            policy=make_policy(settings.pop("name"), **settings),
            remainder=config["remainder"],
            budgets=config["budgets"],
            attending=config["attending"],
            **config["packing"],
        )
        if not config["runs"]:
            return cache
        cache.offset = config["offset"]
        cache._own = config["own"]
        runs = [Run(**run) for run in config["runs"]]
        store = SlotStore([run.budget for run in runs for _ in range(run.heads)])
        store.runs, store.reserved = runs, config["reserved"]
        store.fields = {
            name.removeprefix("slots."): array
            for name, array in arrays.items()
            if name.startswith("slots.")
        }
        slots = sum(run.heads * run.allocated for run in runs)
        for name in ("keys", "values", "positions"):
            if store.fields[name].shape[1] != slots:
                raise ValueError(f"The field {name!r} does not hold {slots} slots.")
        cache._store = store
        if config["recent"]:
            cache._recent = zone = cache._recent_zone(config["recent"]["size"])
            zone.length, zone.oldest = config["recent"]["length"], config["recent"]["oldest"]
            zone.fields = {
                name.removeprefix("recent."): array
                for name, array in arrays.items()
                if name.startswith("recent.")
            }
            if not 0 <= zone.oldest < zone.size or any(
                not zone.length <= field.shape[2] <= zone.size for field in zone.fields.values()
            ):
                raise ValueError(f"The recent zone does not hold {zone.length} tokens.")
        for name in ("keys", "values"):
            held = cache.packing.rows(name, store.fields)
            cache._row_types[name] = (held.shape[0], store.heads, held.shape[2], held.dtype)
        widths = (cache._row_types[name][2] for name in ("keys", "values"))
        cache._remainder = Remainder.empty(cache._row_types["keys"][0], store.heads, *widths)
        if cache._remembers:
            names = ("count", "mean_key", "var_key", "mean_value")
            cache._remainder = Remainder(*(arrays[f"remainder.{name}"] for name in names))
        cache._victims = arrays.get("victims")
        return cache

    @property
    def meta_state(self) -> str:
        """For mlx-lm before 0.32.1; everything is in `state`."""
        return ""

    # -- the steps --------------------------------------------------------------------------------

    @property
    def _remembers(self) -> bool:
        """Whether statistics of the evicted are kept at all."""
        return self.answers or self.policy.uses_evicted_mean

    def _take_back(self) -> None:
        """Have store, remainder and victims here and not with the kernel."""
        if self._decoding is not None:
            assert self._store is not None
            self._remainder, self._victims = self._decoding.end(self._store)
            self._decoding = None

    def _taken_back(self) -> SlotStore:
        self._take_back()
        assert self._store is not None
        return self._store

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OKVCache:
        self._take_back()
        twin = type(self).__new__(type(self))
        for name, value in vars(self).items():
            # dtypes cannot be copied, and need not be.
            kept = name == "_row_types"
            setattr(twin, name, value if kept else copy.deepcopy(value, memo))
        return twin

    def _forget_victims(self) -> None:
        """Have every full run choose anew."""
        assert self._store is not None
        self._victims = None
        for run in self._store.runs:
            run.victims = 0

    def _decode(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """One token in one fused step; arguments as in `attend`."""
        store = self._store
        assert store is not None
        if self._decoding is not None and not on_default_device(self._decoding):
            self._take_back()
        if any(run.length == run.allocated < run.budget for run in store.runs):
            self._take_back()
            store.reserve(1, self._rows(keys, values, self.offset - 1))
        if self._decoding is None:
            if self._victims is None:
                E = self.policy.evict_every
                self._victims = mx.zeros((keys.shape[0], store.heads, E), mx.int32)
            assert self._remainder is not None
            self._decoding = start_decoding(
                store,
                self.packing,
                self._remainder,
                self._victims,
                self.policy,
                self._remembers,
                self.answers,
                self._recent,
            )
            # The kernel may write in place only what nobody else holds.
            self._remainder = self._victims = None
        recent = self._recent.advance() if self._recent is not None else None
        heads = []
        for run in store.runs:
            victim = -1
            if recent is not None and not recent.leaving:
                pass
            elif run.length < run.budget:
                run.length += 1
            else:
                victim = self.policy.evict_every - run.victims
                run.victims -= 1
            choose = self._slots_are_next and run.length == run.budget and run.victims == 0
            if choose:
                run.victims = self.policy.evict_every
            protected, evicted = self._recent_slots(run), self._evicted(run)
            heads += [
                HeadStep(start, run.length, victim, protected, evicted, choose)
                for start in range(run.start, run.start + run.heads * run.allocated, run.allocated)
            ]
        return self._decoding.step(
            q,
            keys,
            values,
            scale=scale,
            sinks=sinks,
            offset=self.offset,
            heads=heads,
            recent=recent,
        )

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        """Raise ValueError unless new rows are like those held."""
        assert self._store is not None
        for name, rows in (("keys", keys), ("values", values)):
            of_rows = (rows.shape[0], rows.shape[1], rows.shape[3], rows.dtype)
            if of_rows != self._row_types[name]:
                raise ValueError(
                    f"This cache holds {name} of (batch, heads, width, dtype) "
                    f"{self._row_types[name]}; {of_rows} came."
                )

    def _start(self, keys: mx.array, values: mx.array) -> SlotStore:
        """The store, made when the first rows tell the widths."""
        if self._store is not None:
            self._check_rows(keys, values)
            return self._taken_back()
        if keys.dtype not in FLOAT_DTYPES or values.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"Keys and values must be float32, float16 or bfloat16; got {keys.dtype} and "
                f"{values.dtype}."
            )
        B, H, _, D = keys.shape
        widths = RowWidths(D, values.shape[-1], keys.dtype.size, values.dtype.size, self.packing)
        if self.budgets is None:
            if self.max_bytes is not None:
                size = slots_for_bytes(self.max_bytes, B * H, widths, self.policy, self._remembers)
            else:
                assert self.max_size is not None
                size = self.max_size - widths.remainder_slots(self._remembers)
            self.budgets = [size] * H
        if len(self.budgets) != H:
            raise ValueError(f"{len(self.budgets)} budgets were given for {H} KV heads.")
        reserved = 0
        budgets = self.budgets
        if not self.attending and self.answers:
            reserved = plain_rows_for(min(budgets))
            budgets = [budget - reserved for budget in budgets]
        self._check_budgets(budgets)
        if self.packing.recent is not None:
            size = self._recent_size(budgets)
            self._recent = self._recent_zone(size)
            budgets = [budget - size for budget in budgets]
        self._remainder = Remainder.empty(B, H, D, values.shape[-1])
        self._row_types = {
            name: (B, H, rows.shape[-1], rows.dtype)
            for name, rows in (("keys", keys), ("values", values))
        }
        self._store = SlotStore(budgets, reserved)
        if self._recent is not None:
            # So that there are fields to look at while all tokens are recent.
            self._store.reserve(1, self._rows(keys[:, :, :1], values[:, :, :1], 0))
        return self._store

    def _rows(self, keys: mx.array, values: mx.array, first: int) -> dict[str, mx.array]:
        """New rows by field, `[B, H, L, ...]`, for the positions from `first` on."""
        B, H, L, _ = keys.shape
        new = mx.arange(first, first + L, dtype=mx.int32)
        rows = {
            **self.packing.fields("keys", keys),
            **self.packing.fields("values", values),
            "positions": mx.broadcast_to(new, (B, H, L)),
        }
        if self.policy.needs_attention:
            rows["scores"] = mx.zeros((B, H, L))
        return rows

    def _take_in(self, store: SlotStore, keys: mx.array, values: mx.array, first: int) -> None:
        """Store new rows `[B, H, L, ...]`, or hold them until attention has seen what must go."""
        if self._recent is None:
            rows = self._rows(keys, values, first)
        else:
            leaving = self._recent.push(keys, values, first)
            if leaving is None:
                return
            rows = leaving
        count = rows["positions"].shape[2]
        if keys.shape[2] == 1:  # for which victims are named already
            self._write_one(store, rows)
        elif all(run.length + count <= run.budget for run in store.runs):
            self._append(store, rows)
        else:
            self._pending = rows

    def _write_one(self, store: SlotStore, rows: dict[str, mx.array]) -> None:
        """Store one row per head: into the next unused slot, or over a victim, which is folded."""
        store.reserve(1, rows)
        B = rows["keys"].shape[0]
        index, overwritten = [], []
        for run in store.runs:
            full = run.length == run.budget
            overwritten += [float(full)] * run.heads
            if full:
                assert self._victims is not None
                next_victim = self.policy.evict_every - run.victims
                slots = self._victims[:, run.first : run.last, next_victim]
                index.append(store.flat_index(run, slots[..., None]).squeeze(-1))
                run.victims -= 1
            else:
                slots = store.next_index(run, 1).squeeze(-1)
                index.append(mx.broadcast_to(slots, (B, run.heads)))
                run.length += 1
        flat = index[0] if len(index) == 1 else mx.concatenate(index, axis=1)
        if any(overwritten) and self._remembers:
            assert self._remainder is not None
            weights = None if all(overwritten) else mx.array(overwritten)[None, :, None]
            overwritten_rows = {name: store.take(flat, name)[:, :, None] for name in rows}
            self._remainder = self._remainder.fold(
                dense(self.packing.rows("keys", overwritten_rows)),
                dense(self.packing.rows("values", overwritten_rows)),
                weights,
            )
            # Read before written: a row still to be read would make the write copy everything.
            flat = mx.depends(flat, list(self._remainder.arrays.values()))
        store.put(flat, {name: row.squeeze(2) for name, row in rows.items()})

    def _append(self, store: SlotStore, rows: dict[str, mx.array]) -> None:
        """Store a chunk's rows in unused slots."""
        L = rows["keys"].shape[2]
        store.reserve(L, rows)
        index = [store.next_index(run, L).reshape(1, -1) for run in store.runs]
        flat = index[0] if len(index) == 1 else mx.concatenate(index, axis=1)
        store.put(flat, {name: row.flatten(1, 2) for name, row in rows.items()})
        for run in store.runs:
            run.length += L

    def _attended(self, store: SlotStore, run: Run) -> dict[str, mx.array]:
        """All fields of the slots that a run attends to, `[B, heads, N, ...]`."""
        if self._pending is None:
            return store.views(run)
        new = {name: row[:, run.first : run.last] for name, row in self._pending.items()}
        if run.length == 0:
            return new
        old = store.views(run)
        return {name: mx.concatenate([old[name], new[name]], axis=2) for name in new}

    def _fetch(
        self, store: SlotStore, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` hands out."""
        if len(store.runs) > 1 or self.packing.packs:
            return keys, values
        run = store.runs[0]
        fields = self._attended(store, run)
        fetched = fields["keys"], fields["values"]
        if not (store.reserved and self._evicted(run)):
            return fetched
        assert self._remainder is not None
        rows = self._remainder.plain_rows(store.reserved)
        named = tuple(zip(("keys", "values"), rows, fetched, strict=True))
        if self._pending is not None:
            return tuple(mx.concatenate([row.astype(f.dtype), f], 2) for _, row, f in named)  # type: ignore[return-value]
        own = mx.arange(store.reserved, dtype=mx.int32)
        index = store.flat_index(run, mx.broadcast_to(own - store.reserved, (run.heads, own.size)))
        store.put(index.reshape(1, -1), {name: row.flatten(1, 2) for name, row, _ in named})
        return store.view(run, "keys", True), store.view(run, "values", True)

    def _settle(
        self,
        store: SlotStore,
        attended: list[dict[str, mx.array]],
        window_masses: list[mx.array | None] | None = None,
    ) -> None:
        """After attention: write scores back or reduce a chunk, then choose the next victims.

        Args:
            store: The slots.
            attended: Per run the fields of all slots attended to, scores brought up to date.
            window_masses: Per run the window's mass of a prompt chunk, None after a decode step.
        """
        window_masses = window_masses or [None] * len(store.runs)
        counts = [fields["positions"].shape[2] for fields in attended]
        if self._pending is not None or any(
            run.budget < N for N, run in zip(counts, store.runs, strict=True)
        ):
            evicted = [self.offset - self._recently_held - N for N in counts]
            self._pending = None
            kept = [
                self._reduced(run, fields, mass, lost)
                for run, fields, mass, lost in zip(
                    store.runs, attended, window_masses, evicted, strict=True
                )
            ]
            store.replace(kept)
            self._forget_victims()
        elif self.policy.needs_attention:
            store.write("scores", [fields["scores"] for fields in attended])
        self._choose_victims(store)

    def _reduced(
        self,
        run: Run,
        fields: dict[str, mx.array],
        window_mass: mx.array | None,
        evicted: int,
    ) -> dict[str, mx.array]:
        """The rows of a run that stay within its budget; the others are folded."""
        N = fields["positions"].shape[2]
        if run.budget >= N:
            return fields
        # Head by head, so that float32 copies are never of more than one head's rows.
        heads = range(run.heads)
        priorities = []
        for i in heads:
            one = replace(run, first=run.first + i, last=run.first + i + 1)
            slots = self._slots(
                one, {n: field[:, i : i + 1] for n, field in fields.items()}, evicted
            )
            mass = None if window_mass is None else window_mass[:, i : i + 1]
            priorities.append(self.policy.prompt_priority(slots, mass)[..., :N])
        positions = fields["positions"]
        kept = selection.select_kept(
            mx.concatenate(priorities, axis=1),
            positions,
            self._evictable(run, positions),
            run.budget,
            self.policy.unit,
        )
        if self._remembers:
            assert self._remainder is not None
            dropped = mx.put_along_axis(
                mx.ones(positions.shape), kept, mx.zeros(kept.shape), axis=-1
            )
            for i in heads:
                keys, values = (
                    dense(self.packing.rows(name, fields)[:, i : i + 1])
                    for name in ("keys", "values")
                )
                head = run.first + i
                folded = self._remainder.heads(head, head + 1).fold(
                    keys, values, dropped[:, i : i + 1]
                )
                self._remainder = self._remainder.with_heads(head, folded)
        return {
            name: mx.take_along_axis(
                field, kept.reshape(*kept.shape, *[1] * (field.ndim - 3)), axis=2
            )
            for name, field in fields.items()
        }

    def _choose_victims(self, store: SlotStore) -> None:
        """For every full run without victims left, choose the next `evict_every`."""
        if not self._slots_are_next:
            return
        due = [run for run in store.runs if run.length == run.budget and not run.victims]
        if not due:
            return
        E = self.policy.evict_every
        chosen = []
        for run in store.runs:
            if run in due:
                slots = self._slots(run, store.views(run), self._evicted(run))
                chosen.append(
                    selection.select_victims(
                        self.policy.priority(slots)[..., : run.length],
                        slots.positions[..., : run.length],
                        slots.evictable[..., : run.length],
                        E,
                        self.policy.unit,
                    )
                )
                run.victims = E
            elif self._victims is not None:
                chosen.append(self._victims[:, run.first : run.last])
            else:
                batch = store.fields["keys"].shape[0]
                chosen.append(mx.zeros((batch, run.heads, E), mx.int32))
        self._victims = chosen[0] if len(chosen) == 1 else mx.concatenate(chosen, axis=1)

    def slots(self, run: Run) -> Slots:
        """What a run of `store.runs` holds, as its policy sees it."""
        return self._slots(run, self._taken_back().views(run), self._evicted(run))

    def _slots(self, run: Run, fields: dict[str, mx.array], evicted: int) -> Slots:
        """A run's slots as policies see them."""
        assert self._remainder is not None
        whole = self._positions_and_scores(run, fields)
        positions, scores = whole["positions"], whole.get("scores")
        keys, values = self._keys_and_values(run, fields)
        return Slots(
            keys=dense(keys),
            values=dense(values),
            positions=positions,
            scores=mx.zeros(positions.shape) if scores is None else scores,
            offset=self.offset,
            evictable=self._evictable(run, positions),
            evicted=evicted,
            evicted_mean_key=self._remainder.mean_key[:, run.first : run.last],
        )

    def _evictable(self, run: Run, positions: mx.array) -> mx.array:
        """Which of a run's slots, by their positions `[B, H, N]`, are not protected."""
        recent = self._recent_slots(run)
        return selection.evictable_slots(positions, self.offset, self.policy.sink, recent)

    def _keys_and_values(self, run: Run, fields: dict[str, mx.array]) -> tuple[AnyRows, AnyRows]:
        """All rows of a run: those of its slots, by field, and the newest tokens'."""
        keys = self.packing.rows("keys", fields)
        values = self.packing.rows("values", fields)
        zone = self._recent
        if zone is None:
            return keys, values
        views = zone.views(run.first, run.last, self.offset)
        return zone.rows("keys", keys, views), zone.rows("values", values, views)

    def _positions_and_scores(self, run: Run, fields: dict[str, mx.array]) -> dict[str, mx.array]:
        """The same of the fields that policies work on."""
        if self._recent is None:
            return fields
        views = self._recent.views(run.first, run.last, self.offset)
        return {
            name: mx.concatenate([fields[name], views[name]], axis=2)
            for name in ("positions", "scores")
            if name in fields
        }

    def _evicted(self, run: Run) -> int:
        """Tokens that each head of a run has lost."""
        pending = self._pending["positions"].shape[2] if self._pending is not None else 0
        return self.offset - run.length - pending - self._recently_held

    @property
    def _recently_held(self) -> int:
        """Tokens in the recent zone."""
        return self._recent.length if self._recent else 0

    @property
    def _slots_are_next(self) -> bool:
        """Whether the next token takes a slot, or makes an older one take it."""
        return self._recent is None or self._recent.full

    def budget_of(self, run: Run) -> int:
        """Tokens that each head of a run may hold, the newest included."""
        return run.budget + (self._recent.size if self._recent else 0)

    def _recent_slots(self, run: Run) -> int:
        """Last positions that a run protects."""
        return self.policy.recent_slots(self.budget_of(run))

    def _recent_size(self, budgets: Sequence[int]) -> int:
        """Tokens that every head protects, for the recent zone."""
        size = min(self.policy.recent_slots(budget) for budget in budgets)
        if size < 1:
            raise ValueError(
                f"recent_bits needs protected tokens: policy {self.policy.name!r} with "
                f"recent={self.policy.recent} protects none in a head of {min(budgets)} slots."
            )
        return size

    def _recent_zone(self, size: int) -> RecentZone:
        return RecentZone(size, self.packing, self.policy.needs_attention)

    def _resize_recent(self, budgets: Sequence[int]) -> list[int]:
        """Fit the recent zone to new budgets of whole heads; the budgets of their other slots."""
        zone = self._recent
        assert zone is not None
        first = self.offset - zone.length
        gone = zone.resize(self._recent_size(budgets))
        if gone is not None:
            shape = gone["keys"].shape[:3]
            positions = mx.arange(first, first + shape[2], dtype=mx.int32)
            self._pending = {**gone, "positions": mx.broadcast_to(positions, shape)}
        return [budget - zone.size for budget in budgets]

    def _evicted_after(self, N: int) -> int:
        """How many tokens plain rows will stand for when N new ones attend."""
        if self._store is None:
            return 0
        run = self._store.runs[0]
        if N == 1:
            return self.offset + 1 - min(run.length + 1, run.budget)
        return self._evicted(run)

    def _plain_rows_mask(self, N: int, kept: int) -> mx.array:
        """log(n / R) on the plain rows' columns, minus infinity on the future."""
        assert self._store is not None
        run, rows = self._store.runs[0], self._store.reserved
        dtype = self._store.fields["keys"].dtype
        kept = min(kept, run.budget - 1) if N == 1 else kept
        bias = mx.log(mx.full((1,), self._evicted_after(N) / rows))
        mask = mx.concatenate([mx.broadcast_to(bias, (rows,)), mx.zeros(kept + N)])
        if N > 1:
            future = mx.arange(kept + N) > mx.arange(kept, kept + N)[:, None]
            lowest = mx.finfo(dtype).min
            future = mx.pad(mx.where(future, lowest, 0.0), [(0, 0), (rows, 0)])
            mask = mx.maximum(mask + future, lowest)
        return mx.broadcast_to(mask, (1, 1, N, rows + kept + N)).astype(dtype)

    def _side_state(self) -> list[mx.array]:
        """Arrays that must be evaluated with the output, or the graph grows from step to step."""
        return [
            array
            for name, array in self.arrays().items()
            if name not in ("slots.keys", "slots.values")
        ]
