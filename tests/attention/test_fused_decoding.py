"""Decoding in the kernel's hands: what the same cache does op by op, without a copy, unobserved."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from arrays import numpy_of
from concurrently import in_threads
from covering import STEP, Case, covering
from mlx_h2o import H2OKVCache, Policy, install, make_policy, make_prompt_cache
from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.attention.backends.cpu_decoder import CPUDecoder
from mlx_h2o.attention.backends.decoder import DecodeStep
from mlx_h2o.policies import selection
from tiny_models import TinyLayer, prompt_tokens, tiny_model

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16

# Priorities of two tokens that are no further apart than this may be ranked either way.
NEAR = 1e-5


@pytest.fixture(autouse=True)
def _on_the_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def op_by_op(monkeypatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which caches know the reference backend only."""

    def precise(*args: Any, **kwargs: Any) -> mx.array:
        # (Without scores it asks MLX, which sums up 16 bits in 16 bits.)
        return reference.attention_with_scores(*args, **kwargs)[0]

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(choice, "cpu", lambda: None)
            patch.setattr(reference, "attention", precise)
            yield

    return context


@pytest.fixture
def fused_steps(monkeypatch) -> list[int]:
    """The offsets of all fused steps, in order."""
    offsets = []
    step = CPUDecoder.step

    def counted(self: CPUDecoder, of: DecodeStep) -> mx.array:
        offsets.extend(token.offset for token in of.tokens)
        return step(self, of)

    monkeypatch.setattr(CPUDecoder, "step", counted)
    return offsets


@dataclass(frozen=True)
class Talk:
    """Tokens of a layer, as a model asks and stores them."""

    layer: TinyLayer
    sinks: mx.array | None = None
    q_dtype: mx.Dtype | None = None

    def call(self, cache: H2OKVCache, count: int) -> mx.array:
        """The next `count` tokens at once; nothing is evaluated."""
        q, k, v = self.layer.at(cache.offset, count)
        k, v = cache.update_and_fetch(k, v)
        return cache.attend(
            q if self.q_dtype is None else q.astype(self.q_dtype),
            k,
            v,
            scale=self.layer.scale,
            mask="causal" if count > 1 else None,
            sinks=self.sinks,
        )

    def decode(self, cache: H2OKVCache, count: int) -> list[mx.array]:
        """Token by token with one token of look-ahead, as mlx-lm generates; the last one waits."""
        outs: list[mx.array] = []
        for _ in range(count):
            outs.append(self.call(cache, 1))
            mx.async_eval(outs[-1])
            if len(outs) > 1:
                mx.eval(outs[-2])
        return outs


def same_bits(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return list(a) == list(b) and all(mx.array_equal(a[name], b[name]) for name in a)


# -- against the same cache on the reference backend ----------------------------------------------

POLICIES = {
    "distinct": make_policy("distinct"),
    "distinct, keys only": make_policy("distinct", mass_weight=0.0, recent=0.3),
    "distinct, ageless": make_policy("distinct", age_weight=0.0, sink=0),
    "salient": make_policy("salient"),
    "salient, values alone": make_policy(
        "salient", distance_weight=0.0, value_weight=2.0, age_weight=0.0, recent=2
    ),
    "h2o": make_policy("h2o"),
    "h2o, age": make_policy("h2o", age_normalised=True, recent=3),
    "ema": make_policy("ema", decay=0.9),
    "ema, age": make_policy("ema", age_normalised=True, sink=1),
    "ema, no decay": make_policy("ema", decay=0.0, recent=2),
    "ema-logits": make_policy("ema-logits"),
    "tova": make_policy("tova", recent=1),
    "keydiff": make_policy("keydiff", recent=4),
    "streaming": make_policy("streaming"),
    "streaming, recent": make_policy("streaming", recent=5, sink=0),
}

FACTORS = {
    "policy": list(POLICIES),
    "unit": ["head", "layer"],
    "evict_every": [1, 4],
    "remainder": [True, False],
    "saturation": ["usual", "first order", "each head its own"],
    "budgets": [(40, 40), (24, 47, 33), (33,), (17, 17, 64)],
    "group": [1, 3, 8],
    "widths": [(8, 6), (33, 20), (64, 80)],
    "batch": [1, 2],
    "dtype": [F32, F16, BF16],
    "q": [None, F32],
    "sinks": [False, True],
    "chunk": [1, 9, 50],
}


def may_be(case: Case) -> bool:
    return case["unit"] == "head" or len(set(case["budgets"])) == 1


CASES = covering(FACTORS, may_be)


def saturation_of(case: Case) -> float | list[float]:
    """First order too for one of the heads that have their own."""
    own = [(0.0, 4.0, 0.5)[head % 3] for head in range(len(case["budgets"]))]
    return {"usual": 4.0, "first order": 0.0, "each head its own": own}[case["saturation"]]


@pytest.fixture
def ties(monkeypatch) -> list[int]:
    """One entry for each choice of the reference that float32 could have made otherwise."""
    found: list[int] = []
    select = selection.select_victims

    def watched(priority, positions, evictable, count, unit="head"):
        ranked = mx.sort(selection.rankable(priority, evictable, unit), axis=-1)[..., : count + 1]
        low, high = ranked[..., :-1], ranked[..., 1:]
        # Masses may all be small; standardised terms and cosines are near one.
        if mx.any(high - low < NEAR * mx.minimum(mx.abs(low) + mx.abs(high), 1)).item():
            found.append(1)
        return select(priority, positions, evictable, count, unit)

    monkeypatch.setattr(selection, "select_victims", watched)
    return found


def assert_alike(got: H2OKVCache, expected: H2OKVCache, what: str) -> None:
    """Rows, positions and victims are equal; scores and remainder but for rounding."""
    assert got.config() == expected.config(), what
    for name, like in expected.arrays().items():
        array = got.arrays()[name]
        assert array.dtype == like.dtype, f"{name}, {what}"
        exact = name.startswith("slots") and name != "slots.scores"
        tolerance = 0 if exact or name == "victims" else 2e-5
        np.testing.assert_allclose(
            numpy_of(array),
            numpy_of(like),
            rtol=tolerance,
            atol=tolerance / 10,
            err_msg=f"{name}, {what}",
        )


@pytest.mark.parametrize("number", range(0, len(CASES), STEP))
def test_unobserved_decoding_does_what_the_ops_do(number, op_by_op, fused_steps, ties):
    """Outputs, kept rows, scores, remainder and next victims, after many steps at a time."""
    case = CASES[number]
    settings = {"unit": case["unit"], "evict_every": case["evict_every"]}
    policy = make_policy(POLICIES[case["policy"]], **settings)
    heads = len(case["budgets"])
    layer = TinyLayer(
        heads, case["group"], *case["widths"], case["batch"], case["dtype"], seed=number
    )
    sinks = mx.linspace(-1, 2, heads * case["group"]) if case["sinks"] else None
    talk = Talk(layer, sinks, case["q"])
    unit = {F32: 2e-5, F16: 2**-10, BF16: 2**-7}[case["q"] or case["dtype"]]

    cache = H2OKVCache(
        budgets=case["budgets"],
        policy=policy,
        remainder=case["remainder"],
        saturation=saturation_of(case),
    )
    followed = 0
    for chunk, steps in ((30, 60), (case["chunk"], 30)):
        mx.eval(talk.call(cache, chunk))
        twin = H2OKVCache.from_state(cache.state)
        fused_steps.clear()
        ties.clear()
        outs = talk.decode(cache, steps)
        assert len(fused_steps) == steps
        with op_by_op():
            expected = talk.decode(twin, steps)
        assert len(fused_steps) == steps, "the reference took the kernel"
        positions = (held.arrays()["slots.positions"] for held in (cache, twin))
        if ties and not mx.array_equal(*positions):
            followed += 1
            continue
        for i, (out, like) in enumerate(zip(outs, expected, strict=True)):
            assert out.dtype == like.dtype
            np.testing.assert_allclose(
                numpy_of(out), numpy_of(like), rtol=unit, atol=2e-5, err_msg=f"{case}, step {i}"
            )
        assert_alike(cache, twin, str(case))
    assert followed <= 1, "so many near ties that nothing was tested"
    assert cache.evicted > 0


def test_slots_are_added_in_steps_while_decoding(op_by_op, fused_steps):
    """From the first tokens to beyond the larger budget, through two steps of 256 slots."""
    talk = Talk(TinyLayer(length=600, dtype=F16))
    caches = [H2OKVCache(budgets=[300, 540], policy="h2o") for _ in range(2)]
    for cache in caches:
        mx.eval(talk.call(cache, 2))
    outs = talk.decode(caches[0], 560)
    assert len(fused_steps) == 560
    with op_by_op():
        expected = talk.decode(caches[1], 560)
    for out, like in zip(outs, expected, strict=True):
        np.testing.assert_allclose(numpy_of(out), numpy_of(like), rtol=2**-10, atol=2e-5)
    assert_alike(*caches, "")


@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("policy", ["tova", "ema-logits", "keydiff"])
def test_of_equals_the_oldest_goes_first(policy, evict_every):
    """Wherever it lies: by now no slot holds what it held at first."""
    layer = TinyLayer(length=200)
    layer.tokens[0][...] = 0
    layer.tokens[1][...] = 0.5
    cache = H2OKVCache(budgets=[24, 47], policy=make_policy(policy, evict_every=evict_every))
    Talk(layer).call(cache, 10)
    Talk(layer).decode(cache, 150)
    for run in cache.store.runs:
        held = sorted(cache.store.view(run, "positions")[0, 0].tolist())
        assert held == [0, 1, 2, 3, *range(160 - run.budget + 4, 160)]


def test_tokens_may_be_taken_back_between_steps(op_by_op):
    talk = Talk(TinyLayer())
    caches = [H2OKVCache(budgets=[40, 40], policy="distinct") for _ in range(2)]
    outs = []
    for cache, context in zip(caches, (nullcontext, op_by_op), strict=True):
        with context():
            talk.call(cache, 20)
            talk.decode(cache, 20)  # Full now, with victims chosen.
            assert cache.trim(7) == 7
            outs.append(talk.decode(cache, 30))
    for out, like in zip(*outs, strict=True):
        np.testing.assert_allclose(numpy_of(out), numpy_of(like), rtol=2e-5, atol=2e-5)
    assert_alike(*caches, "")


def test_an_infinite_logit_does_as_little_harm_as_in_the_ops(op_by_op):
    """Its token is the next to go, and the scores of all others stay what they were."""
    layer = TinyLayer(group=1)
    layer.tokens[0][..., 41, 0] = 2.0
    layer.tokens[1][:, 0, 40, 0] = mx.inf
    talk = Talk(layer)
    policy = make_policy("h2o", recent=1)
    caches = [H2OKVCache(budgets=[32, 32], policy=policy, remainder=False) for _ in range(2)]
    for cache, context in zip(caches, (nullcontext, op_by_op), strict=True):
        with context():
            talk.call(cache, 35)
            talk.decode(cache, 20)
            scores, positions = (
                cache.arrays()[f"slots.{name}"] for name in ("scores", "positions")
            )
            assert mx.all(mx.isfinite(scores))
            assert not mx.any(positions[:, :32] == 40)
    assert mx.array_equal(*(cache.arrays()["slots.positions"] for cache in caches))


# -- who is asked ---------------------------------------------------------------------------------


class Mine(type(make_policy("h2o"))):  # type: ignore[misc]
    """A user's policy, which must not inherit another one's kernel policy."""

    def accumulate(self, scores: mx.array, seen: Any) -> mx.array:
        return mx.maximum(scores, seen.mass)


@pytest.mark.parametrize(
    ("policy", "group", "dtypes", "fused"),
    [
        (make_policy("h2o"), 32, (F32, F32), True),
        (make_policy("h2o"), 33, (F32, F32), False),
        (make_policy("h2o"), 2, (F16, F32), False),
        (make_policy("h2o", value_weighted=True), 2, (F32, F32), False),
        (Mine(), 2, (F32, F32), False),
    ],
    ids=["whole register of heads", "too many heads", "two dtypes", "values weighed", "own policy"],
)
def test_steps_that_the_kernel_cannot_do_go_op_by_op(policy, group, dtypes, fused, fused_steps):
    q, k, v = TinyLayer(group=group).tokens
    k, v = k.astype(dtypes[0]), v.astype(dtypes[1])
    cache = H2OKVCache(budgets=[20, 20], policy=policy)
    for first, count in [(0, 15), *((i, 1) for i in range(15, 40))]:
        rows = (x[:, :, first : first + count] for x in (q, k, v))
        q_now, *new = rows
        fetched = cache.update_and_fetch(*new)
        out = cache.attend(q_now, *fetched, scale=0.3, mask="causal" if count > 1 else None)
    assert mx.all(mx.isfinite(out))
    assert len(fused_steps) == (25 if fused else 0)
    assert cache.evicted == 20


def test_a_mask_in_between_goes_op_by_op(op_by_op, fused_steps):
    """Some models pass an array even for a single token."""
    layer = TinyLayer()
    caches = [H2OKVCache(budgets=[24, 24], policy="h2o") for _ in range(2)]
    for cache, context in zip(caches, (nullcontext, op_by_op), strict=True):
        with context():
            Talk(layer).call(cache, 20)
            for _ in range(12):
                Talk(layer).decode(cache, 2)
                q, k, v = layer.at(cache.offset)
                k, v = cache.update_and_fetch(k, v)
                mx.eval(cache.attend(q, k, v, scale=layer.scale, mask=mx.zeros((1, 1, 1, 1))))
    assert len(fused_steps) == 24
    assert_alike(*caches, "")


def test_a_model_generates_through_fused_steps(op_by_op, fused_steps):
    """All tokens but the prompt's, in all layers, and the same tokens."""
    install()
    model = tiny_model("llama")
    prompt = mx.array(prompt_tokens(30))

    def tokens() -> list[int]:
        cache = make_prompt_cache(model, 24)
        return [
            token for token, _ in generate_step(prompt, model, max_tokens=60, prompt_cache=cache)
        ]

    fused = tokens()
    # With its look-ahead mlx-lm computes one token more than it gives.
    assert len(fused_steps) in (2 * 60, 2 * 61)
    with op_by_op():
        assert tokens() == fused


# -- in place, and only there ---------------------------------------------------------------------


def test_looking_changes_nothing():
    """The same bits, whether the cache is looked at after each step, saved, copied or let be."""
    talk = Talk(TinyLayer(batch=2))
    plain, looked = (H2OKVCache(budgets=[24, 47], policy="distinct") for _ in range(2))
    talk.call(plain, 40)
    outs = talk.decode(plain, 60)
    talk.call(looked, 40)
    for i in range(60):
        assert mx.array_equal(talk.decode(looked, 1)[0], outs[i])
        if i % 3 == 0:
            mx.eval(looked.arrays())
        elif i % 3 == 1:
            looked = H2OKVCache.from_state(looked.state)
        else:
            looked = copy.deepcopy(looked)
    assert same_bits(looked.arrays(), plain.arrays())


@pytest.mark.parametrize("asked", ["the last one", "the last one first", "the cache"])
def test_steps_run_in_order_whatever_is_asked_for(asked):
    """Many steps of which none was evaluated yet."""
    talk = Talk(TinyLayer())
    plain, lazy = (H2OKVCache(budgets=[24, 47], policy="distinct") for _ in range(2))
    talk.call(plain, 40)
    outs = talk.decode(plain, 20)
    talk.call(lazy, 40)
    later = [talk.call(lazy, 1) for _ in range(20)]
    if asked == "the last one first":
        assert all(mx.array_equal(later[i], outs[i]) for i in reversed(range(20)))
    elif asked == "the last one":
        assert mx.array_equal(later[-1], outs[-1])
    assert same_bits(lazy.arrays(), plain.arrays())


def address(cache: H2OKVCache) -> int:
    """Where its keys lie."""
    keys = cache.arrays()["slots.keys"]
    mx.eval(keys)
    return np.array(keys, copy=False).ctypes.data


@pytest.mark.parametrize("policy", ["distinct", "h2o", "ema-logits", "keydiff", "streaming"])
def test_nothing_is_copied_while_decoding(policy):
    """With a token of look-ahead, when MLX itself cannot write in place."""
    talk = Talk(TinyLayer(heads=1, key_width=64, value_width=64, length=3300))
    cache = H2OKVCache(budgets=[3000], policy=policy)
    mx.eval(talk.call(cache, 3050), cache.arrays())
    before = address(cache)
    mx.eval(talk.decode(cache, 5))
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    outs = talk.decode(cache, 100)
    mx.eval(outs)
    size = 3000 * 64 * 4
    assert mx.get_peak_memory() - held < size / 4
    assert address(cache) == before


HOLDS: dict[str, Callable[[H2OKVCache], Any]] = {
    "the state": lambda cache: cache.state[0],
    "its fields": lambda cache: dict(cache.store.fields),
    "a view": lambda cache: {"keys": cache.arrays()["slots.keys"][:, 3:30, 1:]},
    "a view of numpy's": lambda cache: {"keys": np.array(cache.arrays()["slots.keys"], copy=False)},
    "the remainder": lambda cache: cache.remainder.arrays,
    "a copy": copy.deepcopy,
    "a cache of the state": lambda cache: H2OKVCache.from_state(cache.state),
}


@pytest.mark.parametrize("kind", HOLDS)
def test_arrays_held_elsewhere_never_change(kind):
    """Taken while steps are under way, read after others have run."""
    talk = Talk(TinyLayer(batch=2))

    def contents(hold: Any) -> dict[str, np.ndarray]:
        arrays = hold.arrays() if isinstance(hold, H2OKVCache) else hold
        return {name: np.array(array) for name, array in arrays.items()}

    def story(read_at_once: bool) -> tuple[dict[str, np.ndarray], dict[str, mx.array]]:
        cache = H2OKVCache(budgets=[24, 47], policy="distinct")
        talk.call(cache, 40)
        talk.decode(cache, 20)
        hold = HOLDS[kind](cache)
        if read_at_once:
            hold = contents(hold)
        talk.decode(cache, 40)
        return contents(hold), cache.arrays()

    at_once, end = story(True)
    later, same_end = story(False)
    for name, array in at_once.items():
        np.testing.assert_array_equal(later[name], array, err_msg=name)
    assert same_bits(end, same_end)


def test_twins_go_their_own_ways():
    """A copy and the original, each on tokens of its own, are what two caches would be."""
    ours, theirs = Talk(TinyLayer()), Talk(TinyLayer(seed=5))

    def fresh() -> H2OKVCache:
        cache = H2OKVCache(budgets=[24, 47], policy="h2o")
        ours.call(cache, 40)
        ours.decode(cache, 20)
        return cache

    cache = fresh()
    twin = copy.deepcopy(cache)
    for _ in range(20):  # By turns, so that both are under way at once.
        ours.decode(cache, 1)
        theirs.decode(twin, 1)
    alone = fresh()
    ours.decode(alone, 20)
    assert same_bits(cache.arrays(), alone.arrays())
    alone = fresh()
    theirs.decode(alone, 20)
    assert same_bits(twin.arrays(), alone.arrays())


def test_size_is_the_same_in_whosever_hands():
    talk = Talk(TinyLayer())
    for policy in POLICIES.values():
        for remainder in (True, False):
            cache = H2OKVCache(budgets=[24, 47], policy=policy, remainder=remainder)
            talk.call(cache, 50)
            talk.decode(cache, 3)
            decoding = cache.nbytes
            cache.arrays()
            assert cache.nbytes == decoding


# -- damaged states -------------------------------------------------------------------------------


def saved(policy: Policy | str = "h2o", budgets: tuple[int, ...] = (24, 47)) -> H2OKVCache:
    talk = Talk(TinyLayer(batch=2))
    cache = H2OKVCache(budgets=budgets, policy=policy)
    talk.call(cache, 60)
    talk.decode(cache, 5)
    return cache


@pytest.mark.parametrize("victim", [24, 10**9, 2**31 - 1, -1, -7, -(2**31)])
def test_a_damaged_victim_stays_within_its_head(victim):
    """Whatever slot the first head is told to overwrite, the second one's rows do not change."""
    cache = saved()
    arrays, config = cache.state
    damaged = mx.array(arrays["victims"])
    damaged[:, 0] = victim
    with pytest.raises(ValueError, match="to be overwritten"):
        H2OKVCache.from_state((arrays | {"victims": damaged}, config))
    hurt = H2OKVCache.from_state((arrays, config))
    # Past the check of what is loaded: the kernel clamps all the same.
    hurt.layer.name_victims([], damaged)
    talk = Talk(TinyLayer(batch=2))
    for held in (cache, hurt):
        talk.decode(held, 20)
    for name, array in hurt.arrays().items():
        if name.startswith("slots"):
            assert mx.array_equal(array[:, 24:], cache.arrays()[name][:, 24:]), name
    positions = hurt.arrays()["slots.positions"][:, :24]
    # The damaged slot was one of the head's own.
    assert mx.all(mx.sum(positions == 65, axis=-1) <= 1)
    assert mx.all((positions >= 0) & (positions < 85))


@pytest.mark.parametrize("position", [2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("policy", ["h2o", "distinct", "streaming"])
def test_damaged_positions_are_survived(policy, position):
    cache = saved(policy)
    arrays, config = cache.state
    damaged = mx.full(arrays["slots.positions"].shape, position, mx.int32)
    with pytest.raises(ValueError, match="tokens that never came"):
        H2OKVCache.from_state((arrays | {"slots.positions": damaged}, config))
    hurt = H2OKVCache.from_state((arrays, config))
    hurt.store.fields["positions"] = damaged  # past that check
    mx.eval(Talk(TinyLayer(batch=2)).decode(hurt, 20))
    assert mx.all((hurt.arrays()["victims"] >= 0) & (hurt.arrays()["victims"] < 47))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("victims", mx.int8),
        ("victims", F32),
        ("slots.positions", mx.int8),
        ("slots.scores", F16),
        ("remainder.count", mx.int8),
        ("remainder.mean_key", F16),
        ("remainder.var_key", BF16),
        ("remainder.mean_value", F16),
    ],
)
def test_a_state_of_another_dtype_is_refused(name, dtype):
    """The kernel would read and write beyond its end."""
    arrays, config = saved().state
    with pytest.raises(ValueError, match="must be"):
        H2OKVCache.from_state((arrays | {name: arrays[name].astype(dtype)}, config))


@pytest.mark.parametrize(
    "run", [{"length": 48}, {"start": 25}, {"start": -1}, {"allocated": 2**40}]
)
def test_a_state_whose_heads_leave_the_slots_is_refused(run):
    arrays, text = saved().state
    config = json.loads(text)
    config["runs"][1] |= run
    with pytest.raises(ValueError, match=r"hold what cannot be|must be at"):
        H2OKVCache.from_state((arrays, json.dumps(config)))


def test_heads_that_choose_together_must_be_alike():
    cache = saved(make_policy("h2o", unit="layer"), (40, 40))
    (whole,) = cache.store.runs
    second = replace(whole, first=1, start=40, length=39)
    cache.store.runs = [replace(whole, last=1), second]  # past the check of what is loaded
    with pytest.raises(ValueError, match="alike"):
        Talk(TinyLayer(batch=2)).decode(cache, 2)


# -- threads --------------------------------------------------------------------------------------


def long_talk(policy: str, batch: int = 1) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Outputs and end of a conversation with work for several threads (rows are wide: less than
    two megabytes of them would not wake one)."""
    talk = Talk(TinyLayer(group=5, key_width=576, value_width=512, length=500, batch=batch))
    cache = H2OKVCache(budgets=[400, 150], policy=make_policy(policy, evict_every=3))
    talk.call(cache, 420)
    outs = talk.decode(cache, 40)
    mx.eval(outs, cache.arrays())
    return outs, cache.arrays()


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", ["distinct", "h2o", "ema-logits", "tova", "keydiff"])
def test_any_number_of_threads_gives_the_same_bits(policy, threads):
    """Outputs, scores, remainder and victims."""
    threads(1)
    outs, end = long_talk(policy)
    assert "victims" in end
    for count in (2, 3, 5):
        threads(count)
        others, other_end = long_talk(policy)
        assert all(mx.array_equal(a, b) for a, b in zip(outs, others, strict=True))
        assert same_bits(end, other_end)


def test_conversations_in_several_threads_are_what_each_would_be_alone(threads):
    threads(3)
    policies = ["distinct", "h2o", "keydiff", "tova"]
    alone = [long_talk(policy, batch=2) for policy in policies]
    jobs = [lambda policy=policy: long_talk(policy, batch=2) for policy in policies]
    for (outs, end), (other_outs, other_end) in zip(in_threads(jobs), alone, strict=True):
        assert all(mx.array_equal(a, b) for a, b in zip(outs, other_outs, strict=True))
        assert same_bits(end, other_end)


def test_a_conversation_may_go_on_in_another_thread():
    """MLX's streams belong to the thread that made them; a cache does not."""
    talk = Talk(TinyLayer())
    plain = H2OKVCache(budgets=[24, 47], policy="h2o")
    talk.call(plain, 40)
    outs = talk.decode(plain, 30)
    mx.eval(outs)

    cache = H2OKVCache(budgets=[24, 47], policy="h2o")

    def go_on() -> list[mx.array]:
        if cache.offset == 0:
            talk.call(cache, 40)
        parts = talk.decode(cache, 10)
        mx.eval(parts)
        return parts

    parts = [part for _ in range(3) for part in in_threads([go_on])[0]]
    assert all(mx.array_equal(a, b) for a, b in zip(parts, outs, strict=True))
    assert same_bits(cache.arrays(), plain.arrays())
