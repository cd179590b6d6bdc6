"""Keys that lie in a frame: new ones enter it as they are written, queries as they are read."""

from functools import partial

import mlx.core as mx
import pytest
from harness import recorded
from launched_on import assert_close, evicted, plan_of

from conftest import HOST
from mlx_h2o.attention.backends import attention_launches, step_launches
from mlx_h2o.attention.backends.gpu import METAL
from mlx_h2o.attention.backends.step_launches import SlotArrays
from mlx_h2o.attention.backends.work import Ranges
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows
from mlx_h2o.slots.remainder import Remainder

DTYPES = [mx.float32, mx.float16, mx.bfloat16]

# B, Hq, Hk, L, N, D, Dv: rows of one simdgroup and, staged, of several; a block of rows and more.
SHAPES = [
    (1, 4, 2, 1, 70, 64, 64),
    (2, 6, 2, 3, 40, 96, 64),
    (1, 8, 1, 8, 53, 128, 128),
    (1, 32, 1, 1, 35, 576, 512),
]


def frame_of(heads, width):
    """A frame with large centres and scales of very different sizes."""
    centre = 5 * mx.random.normal((heads, width))
    return Frame(centre, mx.exp(mx.random.normal((heads, width))))


def operands(shape, dtype):
    """Unit-normal q, and k and v packed in 6 bits."""
    B, Hq, Hk, L, N, D, Dv = shape
    q = mx.random.normal((B, L, Hq, D)).transpose(0, 2, 1, 3).astype(dtype)
    rows = [mx.random.normal((B, Hk, N, width)).astype(dtype) for width in (D, Dv)]
    return q, *(PackedRows.of(x, 6, 32) for x in rows)


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("with_remainder", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_enter(monkeypatch, dtype, shape, with_remainder, two_passes):
    """Slots and the remainder's column meet q', to the last bit."""
    if two_passes:
        monkeypatch.setattr(attention_launches, "slots_per_block", lambda *_: 33)
    frame = frame_of(shape[2], shape[5])
    q, k, v = operands(shape, dtype)
    options = {"scale": shape[5] ** -0.5, "mask": "causal"}
    if with_remainder:
        options |= {"remainder": evicted(shape), "means": mx.zeros((shape[0], shape[2], shape[5]))}
    ours = METAL.attend(q, k, v, frame_scale=frame.scale, **options)
    expected = METAL.attend(frame.enter_queries(q), k, v, **options)
    for name in ("out", "lse", "logits"):
        assert mx.array_equal(getattr(ours, name), getattr(expected, name))
    if with_remainder:
        assert mx.array_equal(ours.distances, expected.distances)


def test_heads_of_different_lengths_have_their_own_frames():
    B, G, D = 2, 2, 64
    ranges = Ranges(starts=(2, 70, 18), lengths=(16, 20, 50))
    frame = frame_of(3, D)
    q = mx.random.normal((B, 3 * G, 1, D))
    k, v = (PackedRows.of(mx.random.normal((B, 100, D)), 8, 32) for _ in range(2))
    attend = partial(METAL.attend, k=k, v=v, scale=0.1, ranges=ranges)
    ours, expected = attend(q, frame_scale=frame.scale), attend(frame.enter_queries(q))
    assert mx.array_equal(ours.out, expected.out)
    assert mx.array_equal(ours.logits, expected.logits)


def test_the_softmax_never_sees_the_centre():
    """Attention over keys in their frame, and what was evicted with it, is that of plain keys."""
    shape = B, Hq, Hk, L, N, D, Dv = 1, 4, 2, 2, 60, 64, 32
    frame = frame_of(Hk, D)
    q, k, gone = (mx.random.normal((B, h, n, D)) for h, n in ((Hq, L), (Hk, N), (Hk, 9)))
    v, values = (mx.random.normal((B, Hk, n, Dv)) for n in (N, 9))
    plain, framed = (
        Remainder.empty(B, Hk, D, Dv).fold(rows, values) for rows in (gone, frame.enter(gone))
    )
    ours = METAL.attend(q, frame.enter(k), v, scale=0.1, remainder=framed, frame_scale=frame.scale)
    expected = METAL.attend(q, k, v, scale=0.1, remainder=plain)
    assert shape[1] == Hq
    assert_close(ours.out, expected.out, 2e-5)


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("bits", [None, 4, 6])
@pytest.mark.parametrize("widths", [(64, 64), (128, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_keys_enter(dtype, widths, bits):
    """What is written is what the reference packs of k', bit for bit; values stay as they are."""
    B, H = 2, 3
    plan, frame = plan_of((9, 5, 7)), frame_of(H, widths[0])
    new = [mx.random.normal((B, H, 1, width)).astype(dtype) for width in widths]

    def stored(rows):
        return rows if bits is None else PackedRows.of(rows, bits, 32)

    held = [stored(mx.zeros((B, plan.slots, width), dtype)) for width in widths]
    slots = SlotArrays(*held, mx.zeros((B, plan.slots), mx.int32))
    victims = mx.zeros((B, H, 1), mx.int32)
    written, _ = step_launches.overwrite(HOST, plan, slots, victims, *new, None, frame)
    mx.eval(written)
    for rows, came in zip(held, (frame.enter(new[0]), new[1]), strict=True):
        ours, theirs = (x.arrays if bits else [x] for x in (rows, stored(came)))
        for a, b in zip(ours, theirs, strict=True):
            for h, head in enumerate(plan.heads):
                assert mx.array_equal(a[:, head.start], b[:, h, 0])


@pytest.mark.parametrize("groups", [1, 4])
def test_saturation_of_each_head(groups):
    """A head's own t, and first order where it is 0."""
    ts = (0.0, 0.5, 4.0)
    shape = B, Hq, Hk, _, N, D, Dv = 2, 3 * groups, 3, 1, 20, 64, 32
    q, k, v = (mx.random.normal(size) for size in ((B, Hq, 1, D), (B, Hk, N, D), (B, Hk, N, Dv)))
    remainder = evicted(shape)
    # A head without variance has no term, whatever its t.
    remainder.var_key[1] = 0
    ours = METAL.attend(q, k, v, scale=0.3, remainder=remainder, saturation=ts)
    for h, t in enumerate(ts):
        head, queries = slice(h, h + 1), q[:, h * groups : (h + 1) * groups]
        r = remainder.heads(h, h + 1).column(queries, 0.3, t)
        slots = mx.logsumexp(0.3 * queries @ k[:, head].swapaxes(-1, -2), axis=-1)
        assert_close(ours.lse[:, h * groups : (h + 1) * groups], mx.logaddexp(slots, r), 1e-5)


def test_bytes_of_a_frame():
    """A frame costs a step its centre once and its scale once for each reader, nothing per slot."""
    shape = B, Hq, Hk, _, N, D, Dv = 1, 32, 8, 1, 1024, 128, 128
    frame = frame_of(Hk, D)
    q, k, v = operands(shape, mx.float16)
    moved = {}
    for framed in (False, True):
        with recorded() as launches:
            scale = frame.scale if framed else None
            mx.eval(METAL.attend(q, k, v, scale=0.1, frame_scale=scale).out)
        moved[framed] = sum(counts.device_bytes for counts in launches)
    assert moved[True] - moved[False] == frame.scale.nbytes
    # ... beside a step's rows: less than a hundredth, with what the append reads of it.
    assert frame.centre.nbytes + 2 * frame.scale.nbytes < 0.01 * (k.nbytes + v.nbytes)
