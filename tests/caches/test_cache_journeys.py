"""Caches saved, copied, looked at and resized in any order, against ones that never are."""

import copy
import pickle
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from mlx_h2o import H2OKVCache, load_prompt_cache, make_policy, save_prompt_cache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.caches.kinds import restored
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.layer.saved_state import used_only
from mlx_h2o.policies import policy_names
from mlx_h2o.slots.key_scaling import Frame
from tiny_models import TinyLayer

LAYER = TinyLayer(heads=2, group=2, key_width=32, value_width=32, batch=2, length=600)

FRAME = Frame.of(LAYER.tokens[1][:, :, :50])
STORES: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"bits": 4, "group_size": 32},
    "packed keys": {"k_bits": 8, "group_size": 32},
    "mixed": {"k_bits": 4, "v_bits": 8, "group_size": 32, "recent_bits": 6},
    "framed": {"bits": 5, "group_size": 32, "frame": FRAME},
    "mixed and framed": {"bits": 4, "group_size": 32, "recent_bits": 8, "frame": FRAME},
    "newest unpacked": {"bits": 4, "group_size": 32, "recent_bits": 16},
    "plain rows": {},
}
SIZES = (14, 19, 32)


def reordered(state: tuple[dict[str, mx.array], str], backwards: bool) -> Any:
    """The same state with its arrays by name in another order, as a file may return them."""
    arrays, text = state
    names = sorted(arrays, reverse=backwards)
    return {name: arrays[name] for name in names}, text


class Journey(RuleBasedStateMachine):
    """Two caches that take the same tokens; only one of them travels."""

    policy: str

    @initialize(
        store=st.sampled_from(list(STORES)),
        remainder=st.booleans(),
        ragged=st.booleans(),
        evict_every=st.sampled_from([1, 3]),
        prompt=st.sampled_from([3, 30]),
    )
    def start(self, store, remainder, ragged, evict_every, prompt) -> None:
        policy = make_policy(self.policy, sink=2, recent=0.3, evict_every=evict_every)
        attending = store != "plain rows"
        if not attending and policy.needs_attention:
            policy, store = make_policy("keydiff", sink=2, evict_every=evict_every), "plain rows"
        self.alike = not attending or policy.unit == "layer"
        budgets = [19, 32] if ragged and not self.alike else [19, 19]
        cls = H2OKVCache if attending else PlainRowsKVCache
        self.stayed, self.travelled = (
            cls(budgets=budgets, policy=policy, remainder=remainder, **STORES[store])
            for _ in range(2)
        )
        self.feed(prompt, prompt)

    def feed(self, count: int, chunk: int) -> None:
        expected = LAYER.feed(self.stayed, count, chunk)
        assert mx.array_equal(LAYER.feed(self.travelled, count, chunk), expected)

    # -- what happens to both ---------------------------------------------------------------------

    @rule(count=st.integers(1, 4))
    def steps(self, count) -> None:
        self.feed(count, 1)

    @rule(count=st.sampled_from([2, 5, 25]))
    def chunk(self, count) -> None:
        self.feed(count, count)

    @rule(n=st.integers(1, 6))
    def trim(self, n) -> None:
        assert self.travelled.is_trimmable() == self.stayed.is_trimmable()
        if self.stayed.is_trimmable():
            assert self.travelled.trim(n) == self.stayed.trim(n)

    @rule(sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)))
    def resize(self, sizes) -> None:
        for cache in (self.stayed, self.travelled):
            cache.resize(sizes[0] if self.alike else list(sizes))

    @property
    def both(self) -> tuple[H2OKVCache, H2OKVCache]:
        return self.stayed, self.travelled

    @rule()
    def read_both(self) -> None:
        # Files hold used slots only, so one of the two may have allocated more.
        expected, arrays = (used_only(c.arrays(), c.config())[0] for c in self.both)
        assert set(arrays) == set(expected)
        for name, array in expected.items():
            assert array.dtype == arrays[name].dtype, name
            assert mx.array_equal(arrays[name], array), name

    # -- what happens to one ----------------------------------------------------------------------

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            save_prompt_cache(path, [self.travelled])
            (self.travelled,) = load_prompt_cache(path)

    @rule(backwards=st.booleans())
    def go_through_state(self, backwards) -> None:
        self.travelled = restored(reordered(self.travelled.state, backwards))

    @rule()
    def copy_deeply(self) -> None:
        self.travelled = copy.deepcopy(self.travelled)

    @rule(shallow=st.booleans())
    def pickle_or_copy(self, shallow) -> None:
        twin = copy.copy if shallow else lambda cache: pickle.loads(pickle.dumps(cache))
        self.travelled = twin(self.travelled)

    @rule()
    def leave_a_copy_behind(self) -> None:
        """What the copy then does is its own affair."""
        twin = copy.deepcopy(self.travelled)
        LAYER.feed(twin, 3, first=100)

    @rule()
    def leave_a_state_behind(self) -> None:
        LAYER.feed(restored(self.travelled.state), 3, first=100)

    @rule()
    def look(self) -> None:
        store = self.travelled.store
        assert store is not None
        mx.eval(store.fields)

    @invariant()
    def both_say_the_same(self) -> None:
        if hasattr(self, "stayed"):
            stayed, travelled = (used_only(c.arrays(), c.config())[1] for c in self.both)
            assert travelled == stayed

    def teardown(self) -> None:
        if hasattr(self, "stayed"):
            self.read_both()


def run(policy: str, reference: bool, examples: int, steps: int) -> None:
    with only_reference() if reference else nullcontext():
        run_state_machine_as_test(
            type("Journey", (Journey,), {"policy": policy}),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=True,
                deadline=None,
                phases=[Phase.generate],  # what fails is short; to shorten it takes minutes
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.few(7)
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
def test_nothing_that_happens_between_steps_changes_a_cache(policy, reference):
    run(policy, reference, examples=12, steps=15)


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
def test_nothing_that_happens_between_steps_changes_a_cache_at_length(policy, reference):
    run(policy, reference, examples=50, steps=40)
