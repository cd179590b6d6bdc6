"""Frames: what they promise."""

import mlx.core as mx
import pytest

from mlx_h2o.calibration.row_format import RowFormat
from mlx_h2o.calibration.scaling_build import frames_of
from mlx_h2o.slots.key_scaling import LEAST_SCALE, Frame
from mlx_h2o.slots.packed import PackedRows, Packing
from tiny_models import tiny_model

HEADS, WIDTH = 2, 64


def rows_with_offsets(count=200):
    """Keys `[1, 2, count, 64]`, two channels of each head far off and hardly moving."""
    keys = mx.random.normal((1, HEADS, count, WIDTH), key=mx.random.key(0))
    channels = mx.arange(WIDTH)
    return keys + 30 * (channels == 3) - 12 * (channels == 40)


def test_a_frame_moves_every_logit_of_a_query_alike():
    keys = rows_with_offsets()
    frame = Frame.of(keys)
    framed = frame.enter(keys)
    assert mx.abs(framed).max().item() == pytest.approx(1, abs=1e-5)
    assert mx.allclose(frame.leave(framed), keys, atol=1e-4)
    q = mx.random.normal((1, HEADS, 7, WIDTH), key=mx.random.key(2))
    shift = q @ keys.swapaxes(-1, -2) - (q * frame.scale[:, None]) @ framed.swapaxes(-1, -2)
    expected = (q * frame.centre[:, None]).sum(axis=-1, keepdims=True)
    assert mx.allclose(shift, mx.broadcast_to(expected, shift.shape), atol=1e-2)


def test_a_channel_that_never_moves_can_be_framed():
    frame = Frame.of(mx.ones((1, 1, 4, WIDTH)))
    assert (frame.scale == LEAST_SCALE).all()
    assert (frame.leave(frame.enter(mx.ones((1, 1, 1, WIDTH)))) == 1).all()


def test_in_the_frame_four_bits_lose_a_fraction():
    keys = rows_with_offsets()
    frame = Frame.of(keys)

    def error(row_format):
        return mx.square(row_format.keys(keys) - keys).mean().item()

    plain = error(RowFormat(k_bits=4, by_range=False))
    assert error(RowFormat(k_bits=4, frame=frame)) < 0.1 * plain
    values = mx.random.normal((1, HEADS, 9, WIDTH), key=mx.random.key(3))
    assert (RowFormat(k_bits=4).values(values) == values).all()


def test_bytes_of_a_row_are_those_it_is_packed_in():
    rows = mx.zeros((1, 1, 1, WIDTH), mx.float16)
    for k_bits, v_bits in ((6, 5), (4, None), (None, 8)):
        held = sum(
            rows.nbytes if bits is None else PackedRows.of(rows, bits, 64).nbytes
            for bits in (k_bits, v_bits)
        )
        packing = Packing(k_bits, v_bits)
        assert sum(packing.row_bytes(name, WIDTH, 2) for name in ("keys", "values")) == held


def test_frames_are_made_of_what_a_model_caches():
    model = tiny_model("llama")
    tokens = mx.random.randint(0, 100, (1, 30), key=mx.random.key(4))
    frames = frames_of(model, tokens.reshape(2, 15))
    assert len(frames) == len(model.layers)
    assert frames[0].centre.shape == (2, 12)
    assert (frames[0].scale > 10 * LEAST_SCALE).all()
