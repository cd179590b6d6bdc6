"""The kernels around attention in a decode step, against the reference's own methods."""

import mlx.core as mx
import numpy as np
import pytest
from harness import recorded
from launched_on import OFFSET, SINK, plan_of

from conftest import HOST
from mlx_h2o import make_policy
from mlx_h2o.attention.backends import step_launches
from mlx_h2o.attention.backends.attention_launches import VectorResult
from mlx_h2o.attention.backends.decoder import HeadPlan
from mlx_h2o.attention.backends.step_launches import SlotArrays, StepPlan
from mlx_h2o.policies import KernelPolicy, Observation, Slots, selection
from mlx_h2o.policies.base import kernel_policy_of

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def slots_of(plan, B, D, Dv, dtype):
    """Slots of random tokens; what no head uses is NaN."""
    S = plan.slots
    used = np.zeros(S, bool)
    positions = np.full((B, S), -1, np.int32)
    rng = np.random.default_rng(0)
    order = rng.permutation(OFFSET - 1)[: max(head.length for head in plan.heads)]
    for head in plan.heads:
        used[head.start : head.start + head.length] = True
        positions[:, head.start : head.start + head.length] = order[: head.length]
    poison = mx.array(np.where(used, 0, np.nan))[None, :]
    return SlotArrays(
        (mx.random.normal((B, S, D)) + poison[..., None]).astype(dtype),
        (mx.random.normal((B, S, Dv)) + poison[..., None]).astype(dtype),
        mx.array(positions),
        mx.random.uniform(shape=(B, S)) + poison,
        norms := mx.random.uniform(shape=(B, S)) + poison,
        mx.log(mx.square(norms)).astype(mx.float16),
    )


def of_head(array, head):
    """A head's slots `[B, 1, length, ...]` of a flat array."""
    return array[:, None, head.start : head.start + head.length]


def copied(slots):
    """The same slots in other memory."""
    arrays = {name: mx.array(np.array(a.astype(mx.float32))) for name, a in vars(slots).items()}
    return SlotArrays(**{name: a.astype(vars(slots)[name].dtype) for name, a in arrays.items()})


POLICIES = {
    "h2o": {},
    "h2o by age": {"age_normalised": True},
    "h2o by value": {"value_weighted": True},
    "ema": {"decay": 0.9},
    "ema by age and value": {"age_normalised": True, "value_weighted": True},
    "ema-logits": {},
    "tova": {},
    "streaming": {},
    "keydiff": {},
    "distinct": {},
    "distinct keys only": {"mass_weight": 0.0},
    "distinct by value": {"value_weighted": True},
    "salient": {},
}

# B, G, lengths: one head and many, fewer slots than lanes and more than a threadgroup has.
SHAPES = [(1, 1, (12,)), (2, 4, (70, 70)), (1, 2, (600, 600, 600)), (2, 2, (20, 700, 65))]


def expected_update(policy, plan, slots, logits, lse, written, means):
    """Scores and victims per head, `[B, 1, ...]`, by the policy's own methods."""
    G = lse.shape[1] // len(plan.heads)
    fields, priorities = [], []
    for h, head in enumerate(plan.heads):
        scores = of_head(slots.scores, head)
        fresh = mx.arange(head.length) == written[:, h, None, None]
        scores = mx.where(fresh, 0.0, scores)
        if policy.needs_attention:
            seen = Observation(logits[h], lse[:, h * G : (h + 1) * G], 1)
            scores = policy.accumulate(scores, seen)
        positions = of_head(slots.positions, head)
        # Values whose norms are those given.
        values = of_head(slots.norms, head)[..., None]
        of_head_slots = Slots(
            keys=of_head(slots.keys, head),
            values=values,
            positions=positions,
            scores=scores,
            offset=OFFSET,
            evictable=selection.evictable_slots(positions, OFFSET, SINK, head.recent),
            evicted=16,
            evicted_mean_key=means[:, h : h + 1],
            value_lengths=of_head(slots.value_lengths, head),
        )
        fields.append(of_head_slots)
        priorities.append(policy.priority(of_head_slots))
    if policy.unit == "layer":
        mean = sum(priorities) / len(priorities)
        priorities = [mean] * len(priorities)
    victims = [
        selection.select_victims(priority, s.positions, s.evictable, plan.evict_every)
        for priority, s in zip(priorities, fields, strict=True)
    ]
    return [s.scores for s in fields], mx.concatenate(victims, axis=1)


def launch_update(policy, plan, slots, logits, lse, written, means, victims):
    """Victims; the scores change in place."""
    ranking = kernel_policy_of(policy, weigh_values=True)
    B = lse.shape[0]
    if not policy.value_weighted:
        slots.norms = None
    if policy.name != "salient":
        slots.value_lengths = None
    flat = mx.concatenate([of_head.reshape(B, -1) for of_head in logits], axis=1)
    attended = VectorResult(out=None, lse=lse, logits=flat)
    worth = None
    if ranking.priority in ("distance", "salience"):
        apart = [
            of_head(slots.keys, head).astype(mx.float32) - means[:, h, None, None]
            for h, head in enumerate(plan.heads)
        ]
        attended.distances = mx.concatenate(
            [mx.square(x).sum(axis=-1)[:, 0] for x in apart], axis=1
        )
    if ranking.priority == "direction":
        worth = step_launches.unlike_directions(HOST, plan, slots.keys, written)
    return step_launches.update(
        HOST, plan, slots, ranking, attended, victims, written, means, worth
    )


@pytest.mark.few(11)
@pytest.mark.pairwise
@pytest.mark.parametrize("evict_every", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("unit", ["head", "layer"])
@pytest.mark.parametrize("name", POLICIES)
def test_update(name, unit, shape, evict_every):
    B, G, lengths = shape
    if unit == "layer" and len(set(lengths)) > 1:
        pytest.skip("a layer chooses among heads of one length")
    H, D = len(lengths), 32
    plan = plan_of(lengths, evict_every=evict_every)
    policy = make_policy(name.split()[0], sink=SINK, unit=unit, **POLICIES[name])
    slots = slots_of(plan, B, D, D, mx.float32)
    logits = [3 * mx.random.normal((B, G, 1, length)) for length in lengths]
    logits = [mx.where(mx.random.uniform(shape=x.shape) < 0.1, -mx.inf, x) for x in logits]
    lse = mx.concatenate([mx.logsumexp(x, axis=-1) + 0.1 for x in logits], axis=1)
    written = mx.array(np.random.default_rng(2).integers(0, min(lengths), (B, H)), mx.int32)
    means = mx.random.normal((B, H, D))
    old = copied(slots)
    scores, victims = expected_update(policy, plan, old, logits, lse, written, means)
    ours = launch_update(
        policy, plan, slots, logits, lse, written, means, mx.zeros((B, H, evict_every), mx.int32)
    )
    assert mx.array_equal(ours, victims)
    if policy.needs_attention:
        for head, expected in zip(plan.heads, scores, strict=True):
            np.testing.assert_allclose(of_head(slots.scores, head), expected, rtol=2e-5, atol=1e-7)


def update_by_score(scores, positions, sink=0, evict_every=1, choose=True):
    """Victims of one head whose scores are given and that attends to nothing."""
    N = len(scores)
    head = HeadPlan(0, N, 0, 0, 16, choose)
    plan = StepPlan(OFFSET, N, sink, evict_every, (head,))
    slots = SlotArrays(mx.zeros((1, N, 32)), mx.zeros((1, N, 32)), mx.array([positions]))
    slots.scores = mx.array([scores])
    attended = VectorResult(None, mx.zeros((1, 1, 1)), mx.full((1, N), -mx.inf))
    victims = mx.full((1, 1, evict_every), 7, mx.int32)
    written = mx.full((1, 1), -1, mx.int32)
    ranking = KernelPolicy("sum", "score")
    chosen = step_launches.update(HOST, plan, slots, ranking, attended, victims, written)
    return chosen[0, 0].tolist()


def test_nan_goes_first_and_ties_to_the_oldest():
    nan, inf = float("nan"), float("inf")
    positions = [9, 3, 5, 1, 8, 7, 2, 4]
    scores = [1.0, nan, 1.0, 1.0, nan, inf, 0.5, -inf]
    # Both NaN and minus infinity are lowest; after them by score, then by position.
    assert update_by_score(scores, positions, evict_every=8) == [1, 7, 4, 6, 3, 2, 0, 5]
    # The protected never go, however low.
    assert update_by_score(scores, positions, sink=4) == [7]


def test_a_head_that_does_not_choose_keeps_its_victims():
    assert update_by_score([1.0] * 8, list(range(8)), evict_every=2, choose=False) == [7, 7]


# Over what cannot be avoided: logits, lse, positions, distances and scores once, scores written.
@pytest.mark.parametrize(
    ("name", "most"), [("h2o", 1.15), ("distinct", 1.35), ("salient", 1.35), ("streaming", 1.01)]
)
def test_device_bytes(name, most):
    B, G, lengths = 1, 4, (800,) * 4
    H, N, D = len(lengths), sum(lengths), 128
    policy = make_policy(name, sink=SINK)
    plan = plan_of(lengths)
    slots = slots_of(plan, B, D, D, mx.float16)
    logits = [mx.random.normal((B, G, 1, length)) for length in lengths]
    lse = mx.full((B, H * G, 1), 7.0)
    written, victims = mx.zeros((B, H), mx.int32), mx.zeros((B, H, 1), mx.int32)
    means = mx.random.normal((B, H, D))
    with recorded() as launches:
        launch_update(policy, plan, slots, logits, lse, written, means, victims)
    least = 4 * N
    if policy.needs_attention:
        least += 4 * (N * (G + 2) + H * G)
    if name in ("distinct", "salient"):
        least += 4 * (N + H * D)
    if name == "salient":
        # Two bytes a slot for the values' lengths.
        least += 2 * N
    counts = launches[-1]
    # The plan, a line per head, is read by every simdgroup and does not grow with the slots.
    moved = counts.device_bytes - counts.bytes_read["plan"]
    assert moved <= most * least, moved / least
