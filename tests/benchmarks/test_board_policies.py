"""`benchmarks/board/policies`: published policies by the public interface."""

import mlx.core as mx
import pytest

import benchmarks.board.policies  # noqa: F401  # registers them
from mlx_h2o import H2OKVCache, Slots, make_policy
from mlx_h2o.policies.base import kernel_policy_of
from mlx_h2o.policies.selection import select_victims
from tiny_models import TinyLayer


def slots(scores, keys=None, positions=None) -> Slots:
    """Slots of one KV head, all of which may go."""
    N = len(scores)
    positions = list(range(N)) if positions is None else positions
    return Slots(
        keys=mx.zeros((1, 1, N, 2)) if keys is None else mx.array(keys, mx.float32)[None, None],
        values=mx.ones((1, 1, N, 2)),
        positions=mx.array(positions)[None, None],
        scores=mx.array(scores)[None, None],
        offset=positions[-1] + 1,
        evictable=mx.ones((1, 1, N), mx.bool_),
        evicted=0,
        evicted_mean_key=mx.zeros((1, 1, 2)),
    )


def order(policy, of: Slots) -> list[int]:
    """The slots in the order in which they would go."""
    worth = policy.priority(of)
    return select_victims(worth, of.positions, of.evictable, worth.shape[-1])[0, 0].tolist()


@pytest.mark.parametrize("name", ["chunkkv", "r-kv"])
def test_they_bound_a_cache(name):
    cache, layer = H2OKVCache(40, policy=name), TinyLayer()
    layer.feed(cache, 100, chunk=50)
    layer.feed(cache, 20)
    assert max(cache.budgets) <= 40
    assert cache.evicted >= 80


def test_chunkkv_keeps_chunks_as_wholes():
    """A chunk is worth its tokens' mean, whatever they are worth alone and however few are left."""
    policy = make_policy("chunkkv", chunk=3)
    mass = mx.array([[[0.0, 0.9, 0.0, 0.4, 0.4, 0.4, 0.5]]])
    of = slots([0.0] * 7, positions=[0, 1, 2, 3, 4, 5, 8])
    worth = policy.prompt_priority(of, mass)[0, 0].tolist()
    assert worth == pytest.approx([0.3, 0.3, 0.3, 0.4, 0.4, 0.4, 0.5])
    assert kernel_policy_of(policy) == kernel_policy_of(make_policy("snapkv"))
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        make_policy("chunkkv", chunk=0)


def test_rkv_drops_what_was_said_again():
    """Of three equal keys the newest stays; importance decides among what is said once."""
    keys = [[1, 0], [1, 0.01], [0, 1], [1, -0.01], [-1, 0]]
    policy = make_policy("r-kv", evict_every=1)
    goes = order(policy, slots([0.2] * 5, keys))
    assert set(goes[:2]) == {0, 1}
    assert order(policy, slots([0.2, 0.2, 0.01, 0.2, 0.3], keys))[2] == 2
    alone = make_policy("r-kv", importance_weight=1.0)
    assert order(alone, slots([0.5, 0.1, 0.4, 0.2, 0.3], keys)) == [1, 3, 4, 2, 0]
    with pytest.raises(ValueError, match="importance_weight must be from 0 to 1"):
        make_policy("r-kv", importance_weight=2)
