"""The text that calibration reads: prose in which stretches come again."""

import mlx.core as mx
import pytest

from mlx_h2o import calibration
from mlx_h2o.echoes import ECHO, PERIOD, with_echoes
from tiny_models import tiny_model


@pytest.mark.parametrize("length", [256, 1000, 1024])
def test_pages_are_prose_with_stretches_said_again(length):
    """Every period ends in what the page had before; the rest is the text, in order."""
    text = list(range(4 * length + 17))
    out = with_echoes(text, length)
    assert len(out) == 4 * length
    prose, distances = [], []
    for first in range(0, len(out), length):
        page = out[first : first + length]
        for at in range(0, length, PERIOD):
            prose += page[at : min(at + PERIOD - ECHO, length)]
            echo = page[at + PERIOD - ECHO : at + PERIOD]
            if echo:
                before = page[: at + PERIOD - ECHO]
                starts = range(len(before) - len(echo) + 1)
                source = next(i for i in starts if before[i : i + len(echo)] == echo)
                distances.append(at + PERIOD - ECHO - source)
    assert prose == text[: len(prose)]
    if length > 1000:  # from near and far
        assert min(distances) < length // 4
        assert max(distances) > length // 2


def test_a_short_text_is_one_page():
    assert len(with_echoes(list(range(100)), 1024)) == 100
    assert with_echoes([], 1024) == []


def test_calibration_reads_echoes_when_told_to():
    tokens = mx.random.randint(0, 100, (512,), key=mx.random.key(5)).tolist()
    model = tiny_model("llama")
    with_them, without = (
        calibration.calibrate(model, tokens, length=256, echoes=echoes) for echoes in (True, False)
    )
    assert with_them.details["echoes"] is True
    assert without.details["echoes"] is False
    assert with_them.losses != without.losses
    assert with_them.grid == without.grid
