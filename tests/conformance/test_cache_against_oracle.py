"""The cache does, step for step, what the plain float64 oracle does: outputs, choices, scores."""

from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_h2o import H2OKVCache, Policy, make_policy
from mlx_h2o.layer import scoring
from oracle import KEYS_ONLY, Oracle, Witness

# Float32 against float64, over some hundred accumulated steps.
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Shape:
    """Widths of an attention layer."""

    kv_heads: int
    group: int
    key_width: int = 8
    value_width: int = 6
    batch: int = 1

    @property
    def scale(self) -> float:
        return self.key_width**-0.5


def stream(rng: np.random.Generator, shape: Shape, L: int) -> tuple[np.ndarray, ...]:
    """q, k, v of L tokens. Keys lie off the origin and queries are sharp, so that the mean, the
    variance and the saturation of the remainder all matter."""
    B, H, D = shape.batch, shape.kv_heads, shape.key_width
    q = 1.5 * rng.standard_normal((B, H * shape.group, L, D))
    k = 0.5 + rng.standard_normal((B, H, L, D))
    v = 1 + rng.standard_normal((B, H, L, shape.value_width))
    return tuple(x.astype(np.float32) for x in (q, k, v))


def per_head(cache: H2OKVCache, name: str) -> list[list[np.ndarray]]:
    """A field of the slots in use, `[batch][head]` of `[length, ...]`."""
    views = [np.array(cache.store.view(run, name)) for run in cache.store.runs]
    return [[head for view in views for head in view[b]] for b in range(views[0].shape[0])]


def witness_of(cache: H2OKVCache) -> Witness:
    """What the cache holds and will overwrite, by position."""
    positions = per_head(cache, "positions")
    victims: list[list[list[int]]] = [[] for _ in positions]
    slots = cache.arrays().get("victims")
    for run in cache.store.runs:
        for b, heads in enumerate(positions):
            for head in range(run.first, run.last):
                named = [] if slots is None else np.array(slots)[b, head]
                left = named[len(named) - run.victims :]
                victims[b].append([int(heads[head][slot]) for slot in left])
    for heads in positions:
        assert all(len(set(head.tolist())) == len(head) for head in heads), "a position twice"
    return Witness([[set(head.tolist()) for head in heads] for heads in positions], victims)


def attend(
    cache: H2OKVCache, rows: tuple[np.ndarray, ...], scale: float, sinks: np.ndarray | None = None
) -> np.ndarray:
    """One call of a model's attention on the cache under test."""
    q, k, v = (mx.array(x) for x in rows)
    keys, values = cache.update_and_fetch(k, v)
    out = cache.attend(
        q,
        keys,
        values,
        scale=scale,
        mask="causal" if q.shape[2] > 1 else None,
        sinks=None if sinks is None else mx.array(sinks),
    )
    return np.array(out)


def agree(
    policy: Policy,
    budgets: list[int],
    remainder: bool,
    calls: list[int],
    shape: Shape,
    seed: int,
    sinks: np.ndarray | None = None,
) -> Oracle:
    """Drive cache and oracle by the same tokens in calls of the given lengths; compare each."""
    rng = np.random.default_rng(seed)
    cache = H2OKVCache(budgets=budgets, policy=policy, remainder=remainder)
    oracle = Oracle(policy, budgets, remainder, shape.batch)
    for L in calls:
        rows = stream(rng, shape, L)
        out = attend(cache, rows, shape.scale, sinks)
        witness = witness_of(cache)
        expected = oracle.step(*rows, shape.scale, witness, sinks)
        where = f"call of {L} up to offset {oracle.offset}"
        np.testing.assert_allclose(out, expected, atol=TOLERANCE, rtol=0, err_msg=where)
        assert cache.offset == oracle.offset
        kept = [[set(head.kept) for head in heads] for heads in oracle.heads]
        assert witness.kept == kept, where
        victims = [[head.victims for head in heads] for heads in oracle.heads]
        assert witness.victims == victims, where
        if policy.needs_attention:
            compare_scores(cache, oracle, where)
    return oracle


def compare_scores(cache: H2OKVCache, oracle: Oracle, where: str) -> None:
    """Scores, position by position."""
    positions, scores = per_head(cache, "positions"), per_head(cache, "scores")
    for b, heads in enumerate(oracle.heads):
        for h, head in enumerate(heads):
            expected = [head.scores[p] for p in positions[b][h].tolist()]
            np.testing.assert_allclose(
                scores[b][h], expected, atol=TOLERANCE, rtol=1e-4, err_msg=f"{where}, head {h}"
            )


POLICIES = {
    "distinct": make_policy("distinct", sink=2, recent=0.25, window=6),
    "distinct, keys only": make_policy("distinct", sink=2, recent=0.25, mass_weight=0.0),
    "distinct, full prompt": make_policy("distinct", sink=2, recent=0.25, prompt="full"),
    "salient": make_policy("salient", sink=2, recent=0.25, window=6),
    "salient, full prompt": make_policy("salient", sink=2, value_weight=1.0, prompt="full"),
    "h2o, window": make_policy("h2o", sink=2, recent=3, window=6, pool=3),
    "h2o, full": make_policy("h2o", sink=2, recent=0.5, prompt="full"),
    "h2o, age": make_policy("h2o", sink=1, recent=2, prompt="full", age_normalised=True),
    "h2o, value": make_policy("h2o", sink=1, recent=2, window=4, value_weighted=True),
    "h2o, three at once": make_policy("h2o", sink=1, recent=2, window=6, evict_every=3),
    "keydiff": make_policy("keydiff", sink=2, recent=3),
    "ema": make_policy("ema", sink=2, recent=3, decay=0.8, window=6),
    "ema, full": make_policy("ema", sink=2, recent=3, decay=0.8, prompt="full"),
    "ema-logits": make_policy("ema-logits", sink=2, recent=3, decay=0.8, window=6),
    "tova": make_policy("tova", sink=0, recent=1),
    "snapkv": make_policy("snapkv", sink=2, recent=3, window=6, pool=3),
    "snapkv, full": make_policy("snapkv", sink=2, recent=3, window=6, prompt="full"),
    "streaming": make_policy("streaming", sink=3),
    "streaming, two at once": make_policy("streaming", sink=3, evict_every=2),
}

# A prompt beyond some budgets, decode, a chunk shorter than the windows, decode, a long chunk.
CONVERSATION = [14, *[1] * 14, 4, *[1] * 8, 25, *[1] * 6]


@pytest.mark.few(25)
@pytest.mark.pairwise
@pytest.mark.parametrize("remainder", [True, False], ids=["remainder", "no remainder"])
@pytest.mark.parametrize(
    ("unit", "budgets"),
    [("head", [16, 16]), ("head", [10, 17]), ("layer", [16, 16])],
    ids=["per head", "ragged", "per layer"],
)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_follows_the_oracle(name, unit, budgets, remainder):
    """Outputs, kept positions, next victims and scores agree after every call."""
    policy = make_policy(POLICIES[name], unit=unit)
    shape = Shape(kv_heads=2, group=2)
    oracle = agree(policy, budgets, remainder, CONVERSATION, shape, seed=len(name) + budgets[0])
    assert all(head.evicted for head in oracle.heads[0]), "nothing was evicted: nothing was tested"
    # Following the cache must stay the exception, or the oracle would test nothing.
    assert oracle.near_ties <= 1


@pytest.mark.parametrize("name", ["distinct", "h2o, window", "streaming"])
def test_decode_from_the_first_token(name):
    """A cache that is only ever decoded into fills up and evicts like one that saw a prompt."""
    shape = Shape(kv_heads=3, group=1, batch=2)
    oracle = agree(POLICIES[name], [9, 9, 12], True, [1] * 40, shape, seed=3)
    assert {len(head.evicted) for head in oracle.heads[1]} == {31, 28}


@pytest.mark.parametrize("name", ["h2o, full", "ema, full", "ema-logits", "tova", "distinct"])
@pytest.mark.parametrize("remainder", [True, False], ids=["remainder", "no remainder"])
def test_prompts_in_blocks_of_queries(name, remainder, monkeypatch):
    """A prompt longer than a block of queries scores as if it had been looked at in one."""
    monkeypatch.setattr(scoring, "QUERY_BLOCK", 7)
    calls = [20, 1, 1, 30, 1, 1]
    agree(POLICIES[name], [15, 12], remainder, calls, Shape(kv_heads=2, group=2), seed=4)


@pytest.mark.parametrize("name", ["h2o, window", "distinct"])
def test_windows_longer_than_a_block_of_queries(name, monkeypatch):
    """The window's mass and what it stands for are the same in however many blocks it is read."""
    monkeypatch.setattr(scoring, "QUERY_BLOCK", 7)
    policy = make_policy(POLICIES[name], window=16)
    calls = [14, 20, 1, 1, 12, 30, 1, 1]
    agree(policy, [15, 12], True, calls, Shape(kv_heads=2, group=2), seed=9)


def test_attention_sinks_take_their_share():
    """The learned extra softmax column lowers outputs and masses, next to the remainder too."""
    sinks = np.array([0.5, 3.0, -1.0, 2.0], dtype=np.float32)
    shape = Shape(kv_heads=2, group=2)
    for name in ("distinct", "h2o, full", "h2o, window"):
        agree(POLICIES[name], [11, 14], True, CONVERSATION, shape, seed=5, sinks=sinks)


def test_array_masks_are_read_against_the_new_rows_only():
    """Kept slots stay visible whatever an array mask says of them; new columns obey it."""
    shape = Shape(kv_heads=2, group=2)
    causal = np.tril(np.ones((12, 12), dtype=bool))
    for mask in (mx.array(causal), mx.where(mx.array(causal), 0.0, mx.finfo(mx.float32).min)):
        outs = []
        for given_mask in ("causal", mask):
            rng = np.random.default_rng(6)
            cache = H2OKVCache(budgets=[10, 10], policy=POLICIES["h2o, window"])
            for _ in range(20):
                attend(cache, stream(rng, shape, 1), shape.scale)
            q, k, v = (mx.array(x) for x in stream(rng, shape, 12))
            keys, values = cache.update_and_fetch(k, v)
            if given_mask is mask:
                # What a model builds for kept + new columns, with nonsense over the kept ones.
                kept = keys.shape[2] - 12
                hidden = mx.broadcast_to(mask[0, -1], (12, kept))
                given_mask = mx.concatenate([hidden, mask], axis=1)
            outs.append(cache.attend(q, keys, values, scale=shape.scale, mask=given_mask))
            outs.append(cache.arrays()["slots.positions"])
        assert mx.allclose(outs[0], outs[2], atol=1e-6)
        assert mx.array_equal(outs[1], outs[3])


@pytest.mark.parametrize(
    "name", ["h2o, window", "ema", "distinct", "distinct, keys only", "h2o, full", "streaming"]
)
def test_chunked_prefill_keeps_what_one_shot_prefill_keeps(name):
    """Chunks that fit, then one that does not and holds the window: as if all came at once."""
    policy = make_policy(POLICIES[name], window=16)
    shape = Shape(kv_heads=2, group=2)
    rows = stream(np.random.default_rng(7), shape, 60)
    kept = []
    for cuts in ([0, 60], [0, 13, 30, 60], [0, 1, 2, 31, 60]):
        cache = H2OKVCache(budgets=[32, 32], policy=policy)
        for first, last in pairwise(cuts):
            attend(cache, tuple(x[:, :, first:last] for x in rows), shape.scale)
        kept.append(witness_of(cache).kept)
    assert kept[0] == kept[1] == kept[2]


def test_memory_stops_growing():
    """Once the budget is full, no array grows however long the conversation becomes."""
    shape = Shape(kv_heads=2, group=2)
    rng = np.random.default_rng(8)
    cache = H2OKVCache(budgets=[10, 14], policy=POLICIES["distinct"])
    attend(cache, stream(rng, shape, 30), shape.scale)
    full = cache.nbytes
    assert [len(kept) for kept in witness_of(cache).kept[0]] == [10, 14]
    for L in (*[1] * 30, 9, 40, 1):
        attend(cache, stream(rng, shape, L), shape.scale)
        assert cache.nbytes == full
        assert [len(kept) for kept in witness_of(cache).kept[0]] == [10, 14]
    assert cache.size() == 14
    assert cache.evicted == cache.offset - 12


@st.composite
def layers(draw: st.DrawFn, name: str) -> tuple[Policy, list[int], Shape]:
    """A policy with settings, budgets that leave it room, and the layer's shape."""
    chosen = {
        "sink": draw(st.integers(0, 3)),
        "recent": draw(st.sampled_from([0, 1, 3, 0.25, 0.5])),
        "unit": draw(st.sampled_from(["head", "layer"])),
        "evict_every": draw(st.integers(1, 3)),
        "prompt": draw(st.sampled_from(["window", "full"])),
        "window": draw(st.integers(1, 9)),
        "pool": draw(st.sampled_from([1, 3, 5])),
    }
    if name == "distinct":
        chosen["mass_weight"] = draw(st.sampled_from([0.0, 0.25, 1.0]))
        chosen["age_weight"] = draw(st.sampled_from([0.0, 0.5]))
    elif name == "salient":
        for weight in ("distance_weight", "value_weight", "age_weight"):
            chosen[weight] = draw(st.sampled_from([0.0, 0.3]))
    elif name not in KEYS_ONLY:
        chosen["age_normalised"] = draw(st.booleans())
        chosen["value_weighted"] = draw(st.booleans())
    if name in ("ema", "ema-logits"):  # SnapKV's follows from its window
        chosen["decay"] = draw(st.sampled_from([0.0, 0.5, 0.95]))
    policy = make_policy(name, **chosen)
    shape = Shape(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        key_width=draw(st.sampled_from([4, 6])),
        value_width=draw(st.sampled_from([4, 5])),
        batch=draw(st.integers(1, 2)),
    )
    # 14 slots hold 3 sinks, half of them recent, and 3 to evict.
    sizes = st.integers(14, 20)
    if policy.unit == "layer":
        budgets = [draw(sizes)] * shape.kv_heads
    else:
        budgets = draw(st.lists(sizes, min_size=shape.kv_heads, max_size=shape.kv_heads))
    return policy, budgets, shape


@pytest.mark.parametrize(
    "name", ["distinct", "salient", "h2o", "ema", "ema-logits", "snapkv", "tova", *KEYS_ONLY]
)
@settings(max_examples=16, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layer_follows_the_oracle(name, data):
    """Whatever the layer's shape, the settings and the calls."""
    policy, budgets, shape = data.draw(layers(name), "layer")
    turn = st.one_of(st.integers(2, 30), st.integers(1, 12).map(lambda n: -n))
    turns = data.draw(st.lists(turn, max_size=5), "chunks of n tokens, or n decode steps as -n")
    # However short the story, it ends beyond every budget, and with a few choices after that.
    calls = [L for turn in [*turns, 21, -5] for L in ([turn] if turn > 0 else [1] * -turn)]
    sinks = None
    if data.draw(st.booleans(), "attention sinks"):
        sinks = np.linspace(-1, 2, shape.kv_heads * shape.group, dtype=np.float32)
    remainder = data.draw(st.booleans(), "remainder")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    oracle = agree(policy, budgets, remainder, calls, shape, seed, sinks)
    assert all(head.evicted for heads in oracle.heads for head in heads)
