"""The published failures of bounded caches, one by one, held off."""

import io
import itertools
import resource
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_h2o import H2OKVCache, make_policy, make_prompt_cache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.slots.remainder import Remainder
from tiny_models import TinyLayer, kept_positions, prefill, prompt_tokens, tiny_model

LAYER = TinyLayer()

# -- the offset confused with the physical length --------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 17])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma2_by_itself"])
def test_positions_count_on_beyond_the_budget(family, chunk):
    """Every kept key carries the rotation of its true position.

    The first layer's keys depend on token and position alone, so a full cache that saw the same
    tokens has the very same keys in its rows.
    """
    model, tokens = tiny_model(family), prompt_tokens(150)
    full, cache = stock_prompt_cache(model), make_prompt_cache(model, max_size=24)
    prefill(model, full, tokens, 50)
    prefill(model, cache, tokens, chunk)
    layer = cache[0]
    assert layer.offset == 150 == full[0].offset
    assert layer.size() <= 24
    expected = np.array(full[0].keys)[0]
    for run in layer.store.runs:
        positions = np.array(layer.store.view(run, "positions"))[0]
        keys = np.array(layer.store.view(run, "keys"))[0]
        for head in range(run.heads):
            assert positions[head].max() == 149  # Beyond any physical row.
            at = expected[run.first + head][positions[head]]
            np.testing.assert_allclose(keys[head], at, atol=2e-5)


# -- the mask after eviction -----------------------------------------------------------------------


def direct_attention(layer: TinyLayer, first: int, count: int, kept: list[list[int]]) -> np.ndarray:
    """Per new query: every kept slot, and of the new rows those up to its own."""
    q, k, v = (np.array(x[0].astype(mx.float32), np.float64) for x in layer.tokens)
    out = np.zeros((layer.heads * layer.group, count, layer.value_width))
    for head in range(layer.heads * layer.group):
        for i in range(count):
            at = kept[head // layer.group] + list(range(first, first + i + 1))
            s = layer.scale * k[head // layer.group][at] @ q[head, first + i]
            w = np.exp(s - s.max())
            out[head, i] = w / w.sum() @ v[head // layer.group][at]
    return out


@pytest.mark.pairwise
@pytest.mark.parametrize("budgets", [[24, 24], [12, 40]], ids=["uniform", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "array", "additive", "new rows"])
@pytest.mark.parametrize("policy", ["h2o", "streaming", "distinct"])
@pytest.mark.parametrize("count", [2, 5, 30])
def test_a_chunk_after_eviction_sees_every_kept_slot(policy, mask, budgets, count):
    """A mask by position over physical slots would hide kept tokens, or show the future."""
    cache = H2OKVCache(budgets=budgets, policy=policy, remainder=False)
    LAYER.feed(cache, 60, chunk=25)
    LAYER.feed(cache, 7)
    assert all(len(head) == n for head, n in zip(kept_positions(cache), budgets, strict=True))
    expected = direct_attention(LAYER, 67, count, kept_positions(cache))

    given = cache.make_mask(count, return_array=mask != "causal")
    if mask == "additive":  # As phi3 or gpt-oss would make of it.
        given = mx.where(given, 0.0, mx.finfo(mx.float32).min)
    elif mask == "new rows":  # Heads and layers differ in how many they keep: no mask fits all.
        given = given[:, -count:]
    q, k, v = LAYER.at(67, count)
    k, v = cache.update_and_fetch(k, v)
    out = cache.attend(q, k, v, scale=LAYER.scale, mask=given)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)
    assert all(len(head) == n for head, n in zip(kept_positions(cache), budgets, strict=True))


@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("count", [2, 5, 30])
def test_a_chunk_after_eviction_sees_every_kept_slot_in_stock_attention(count, return_array):
    """Where the model attends by itself, the mask must say it all."""
    cache = PlainRowsKVCache(24, policy="streaming", remainder=False)
    LAYER.feed(cache, 67, chunk=25)
    expected = direct_attention(LAYER, 67, count, kept_positions(cache))
    mask = cache.make_mask(count, return_array=return_array)
    assert isinstance(mask, mx.array) == return_array
    q, k, v = LAYER.at(67, count)
    k, v = cache.update_and_fetch(k, v)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=LAYER.scale, mask=mask)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_plain_rows_are_the_evicted_and_everything_kept_is_seen(count):
    """With one plain row: log n + q.mean as its logit, the mean value as its value."""
    layer = TinyLayer()
    cache = PlainRowsKVCache(24, policy="streaming")
    layer.feed(cache, 67, chunk=25)
    assert cache.store.reserved == 1
    kept, evicted = kept_positions(cache), 67 - cache.size()
    # One more row: a decode step has overwritten its victim before it attends.
    if count == 1:
        kept = [[*head[:4], *head[5:]] for head in kept]
        evicted += 1
    gone = [sorted(set(range(67)) - set(head)) for head in kept]
    q, keys, values = layer.tokens
    mean_k = mx.stack([keys[0, h][mx.array(gone[h])].mean(0) for h in range(2)])
    mean_v = mx.stack([values[0, h][mx.array(gone[h])].mean(0) for h in range(2)])
    # Append the mean as an ordinary token that the definition's softmax can be given.
    rows = [[*head, *range(67, 67 + count)] for head in kept]
    k = mx.stack([mx.concatenate([mean_k[h][None], keys[0, h][mx.array(rows[h])]]) for h in (0, 1)])
    v = mx.stack(
        [mx.concatenate([mean_v[h][None], values[0, h][mx.array(rows[h])]]) for h in (0, 1)]
    )
    n = len(rows[0])
    visible = mx.arange(n) <= mx.arange(n - count, n)[:, None]
    bias = mx.where(visible, 0.0, -mx.inf)
    bias = mx.concatenate([mx.full((count, 1), float(np.log(evicted))), bias], axis=1)
    expected = mx.fast.scaled_dot_product_attention(
        q[:, :, 67 : 67 + count], k[None], v[None], scale=layer.scale, mask=bias
    )
    out = layer.feed(cache, count, chunk=count)
    np.testing.assert_allclose(out, expected, atol=2e-5)


# -- the newest token always the next victim -------------------------------------------------------


def loyal_layer() -> TinyLayer:
    """A layer whose queries all look at the prompt, so that new tokens receive next to nothing."""
    layer = TinyLayer()
    q, k, _ = layer.tokens
    towards = mx.zeros(8)
    towards[0] = 6.0
    q[...] = 0.1 * q + towards
    k[:, :, :30] = 0.1 * k[:, :, :30] + towards
    k[:, :, 30:] = 0.1 * k[:, :, 30:] - towards
    mx.eval(q, k)
    return layer


@pytest.mark.parametrize("policy", ["h2o", "ema", "tova", "distinct"])
def test_recent_tokens_are_kept_however_little_attention_they_get(policy):
    """200 steps that attend to the prompt alone: the newest are there at every one of them."""
    settings = {"mass_weight": 5.0, "age_weight": 0.0} if policy == "distinct" else {}
    cache = H2OKVCache(24, policy=make_policy(policy, sink=4, recent=8, **settings))
    layer = loyal_layer()
    layer.feed(cache, 30, chunk=30)
    seen = set()
    for position in range(30, 230):
        layer.feed(cache, 1)
        for head in kept_positions(cache):
            assert set(range(position - 7, position + 1)) <= set(head)
            assert {0, 1, 2, 3} <= set(head)
            seen |= set(head)
    assert seen >= set(range(30, 230))


def test_without_a_recent_zone_the_same_input_does_freeze_on_the_prompt():
    """What the recent zone is for: the newest has the least mass, and each step drops it again."""
    cache = H2OKVCache(24, policy=make_policy("h2o", sink=4, recent=0))
    layer = loyal_layer()
    layer.feed(cache, 30, chunk=30)
    layer.feed(cache, 200)
    for head in kept_positions(cache):
        # All but the very newest, whose slot the next token takes.
        assert sum(position >= 30 for position in head) <= 1


@pytest.mark.parametrize("policy", ["h2o", "distinct", "ema", "keydiff"])
def test_the_kept_set_moves(policy):
    """200 steps of an ordinary layer: heavy hitters come and go, in the default settings."""
    cache, layer = H2OKVCache(40, policy=policy), TinyLayer()
    layer.feed(cache, 60, chunk=60)
    sets = []
    for _ in range(4):
        layer.feed(cache, 50)
        sets.append([set(head) for head in kept_positions(cache)])
    recent = cache.policy.recent_slots(cache.budgets[0])
    for head in range(2):
        heavy = [
            {p for p in kept[head] if 4 <= p < 110 + 50 * i - recent} for i, kept in enumerate(sets)
        ]
        assert all(heavy)
        for before, after in itertools.pairwise(heavy):
            assert after - before, "no token has become a heavy hitter in 50 steps"
        assert heavy[-1] - set(range(60)), "frozen on the prompt"


# -- the budget exceeded under chunked prefill -----------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", ["uniform", "ragged", "plain rows"])
@pytest.mark.parametrize("policy", ["distinct", "streaming"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 23, 24, 25, 64, 99, 100])
def test_the_budget_holds_after_every_chunk(chunk, policy, mode):
    """In slots of every head and in bytes, whatever the size of the chunks."""
    mass_weight = {"mass_weight": 0.0} if (policy, mode) == ("distinct", "plain rows") else {}
    chosen = make_policy(policy, **mass_weight)
    if mode == "ragged":
        budgets = [16, 32]
        cache = H2OKVCache(budgets=budgets, policy=chosen)
        slot = 4 * (LAYER.key_width + LAYER.value_width + 3)
        head = Remainder.bytes_per_head(LAYER.key_width, LAYER.value_width) + 4
        allowed = sum(budgets) * slot + 2 * head
    else:
        allowed = 5_000
        kind = PlainRowsKVCache if mode == "plain rows" else H2OKVCache
        cache = kind(max_bytes=allowed, policy=chosen)
    steps = max(4, min(60, -(-200 // chunk)))
    for _ in range(steps):
        LAYER.feed(cache, min(chunk, 512 - cache.offset), chunk)
        assert cache.nbytes <= allowed
        for length, budget in zip(map(len, kept_positions(cache)), cache.budgets, strict=True):
            assert length == min(cache.offset, budget - cache.store.reserved)
    assert cache.offset == steps * chunk


# -- a graph that grows from step to step ----------------------------------------------------------


def resident_bytes() -> int:
    """Memory of this process: now on Linux, its peak elsewhere."""
    if Path("/proc/self/statm").exists():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def decode(cache: H2OKVCache, steps: int) -> tuple[list[int], list[int]]:
    """Active and resident bytes every 500 steps, evaluating outputs only."""
    layer = TinyLayer(heads=1, group=1, key_width=4, value_width=4, length=64)
    rows = [layer.at(i) for i in range(64)]
    mx.eval(rows)
    active, resident = [], []
    for step in range(steps):
        q, k, v = rows[step % 64]
        mask = cache.make_mask(1)
        k, v = cache.update_and_fetch(k, v)
        attend = cache.attend if cache.attending else mx.fast.scaled_dot_product_attention
        mx.eval(attend(q, k, v, scale=0.5, mask=mask))
        if step % 500 == 499:
            mx.clear_cache()
            active.append(mx.get_active_memory())
            resident.append(resident_bytes())
    return active, resident


def unevaluated(cache: H2OKVCache) -> set[str]:
    """Names of the arrays held that still await operations, and so hold a graph alive."""
    waiting = set()
    for name, array in cache.arrays().items():
        graph = io.StringIO()
        mx.export_to_dot(graph, array)
        if "shape=rectangle" in graph.getvalue():
            waiting.add(name)
    return waiting


@pytest.mark.parametrize(
    ("policy", "mode"),
    [(p, m) for p in ("distinct", "h2o", "ema", "keydiff") for m in ("uniform", "ragged")]
    + [(p, "plain rows") for p in ("distinct", "streaming", "keydiff")],
)
def test_evaluating_the_output_evaluates_everything_held(policy, mode):
    """The cause itself, after every step: before eviction and after, and between choices."""
    mass_weight = {"mass_weight": 0.0} if (policy, mode) == ("distinct", "plain rows") else {}
    chosen = make_policy(policy, evict_every=3, **mass_weight)
    budgets = [20, 32] if mode == "ragged" else [24, 24]
    kind = PlainRowsKVCache if mode == "plain rows" else H2OKVCache
    cache = kind(budgets=budgets, policy=chosen)
    for step in range(50):
        LAYER.feed(cache, 1)
        assert unevaluated(cache) == set(), step
    # The rows that a chunk leaves are gathered with the next step; nothing is left after that.
    LAYER.feed(cache, 30, chunk=30)
    assert unevaluated(cache) <= {"slots.keys", "slots.values"}
    LAYER.feed(cache, 1)
    assert unevaluated(cache) == set()


def test_ten_thousand_steps_take_no_more_memory_than_the_first():
    """A side state that only later steps read (scores, remainder) must not pile up unevaluated."""
    active, resident = decode(H2OKVCache(16, policy="h2o"), 10_000)
    assert max(active[1:]) - min(active[1:]) < 16_384
    assert resident[-1] - resident[1] < 8 * 2**20


@pytest.mark.parametrize("policy", ["h2o", "distinct"])
def test_nothing_piles_up_before_eviction_starts_either(policy):
    """A budget that is not reached: only the rows themselves may take memory."""
    cache = H2OKVCache(5_000, policy=policy)
    active, resident = decode(cache, 2_000)
    assert cache.evicted == 0
    # In steps of 256 slots, of 44 bytes each; a graph kept alive is hundreds of bytes a step.
    assert active[-1] - active[0] < 1_536 * 44 + 65_536
    assert resident[-1] - resident[0] < 16 * 2**20


# -- what mlx-lm would take for another kind of cache ----------------------------------------------


@pytest.mark.parametrize("name", ["bits", "group_size", "__len__"])
def test_nothing_invites_mlx_lm_to_do_the_wrong_thing(name):
    """`bits` would make a quantized cache of it, `__len__` none at all."""
    cache = H2OKVCache(24)
    assert not hasattr(cache, name)
    TinyLayer().feed(cache, 40)
    assert not hasattr(cache, name)
    assert cache


def test_the_rest_of_the_protocol_is_there():
    cache = H2OKVCache(24)
    assert cache.empty()
    assert (cache.offset, cache.size(), cache.nbytes) == (0, 0, 0)
    TinyLayer().feed(cache, 40, chunk=40)
    assert not cache.empty()
    assert (cache.offset, cache.size()) == (40, cache.budgets[0])
    assert cache.nbytes > 0


@pytest.mark.parametrize("budgets", [[1024] * 4, [1600, 448, 1600, 448]], ids=["uniform", "ragged"])
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_a_decode_step_writes_in_place(policy, budgets):
    """One row is overwritten: no copy of the keys is made, of a head's range neither."""
    cache = H2OKVCache(budgets=budgets, policy=policy)
    mx.random.seed(0)

    def step(L):
        q, k = mx.random.normal((2, 1, 4, L, 128))
        keys, values = cache.update_and_fetch(k, k)
        mask = "causal" if L > 1 else None
        mx.eval(cache.attend(q, keys, values, scale=0.1, mask=mask))

    step(1700)
    for _ in range(3):
        step(1)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    step(1)
    assert mx.get_peak_memory() - held < cache.store.fields["keys"].nbytes / 4
