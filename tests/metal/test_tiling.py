"""How work is shared out: what any launcher of the kernels relies on."""

import itertools

import pytest

from mlx_h2o.attention.backends.tiling import WIDTHS, slots_per_block, tiling
from mlx_h2o.attention.backends.work import Ranges, work_of

SIZES = list(
    itertools.product(WIDTHS, WIDTHS, (1, 2, 3, 4, 5, 7, 8, 16, 40, 128), (1, 3, 8), (2, 4))
)


def test_every_row_has_a_place():
    for D, Dv, G, L, itemsize in SIZES:
        tiles = tiling(D, Dv, G, L, itemsize)
        assert L <= tiles.queries < 2 * L
        assert tiles.rows * tiles.row_groups * tiles.row_blocks >= G * tiles.queries
        assert tiles.splits >= 1
        assert tiles.simdgroups == tiles.splits * tiles.row_groups <= 32
        assert 1 <= tiles.keys <= 32


def test_threadgroup_memory_suffices():
    for D, Dv, G, L, itemsize in SIZES:
        tiles = tiling(D, Dv, G, L, itemsize)
        staged = tiles.splits * tiles.keys if tiles.row_groups > 1 else 0
        floats = 2112 + 2 * tiles.simdgroups * tiles.rows
        assert 4 * floats + (staged * (D + Dv) + 2) * itemsize <= 32768


def test_common_models_need_no_staging():
    """Up to eight query heads of width 128 per KV head fit one simdgroup's registers."""
    for G in (1, 2, 4, 5, 8):
        assert tiling(128, 128, G, 1, 2).row_groups == 1


@pytest.mark.parametrize(
    ("lengths", "group", "architecture", "expected"),
    [
        ((1023,) * 8, 1, "applegpu_g13s", None),
        ((1024,) * 8, 1, "applegpu_g13s", 512),
        ((1024,) * 8, 1, "applegpu_g13g", None),
        ((4095,) * 8, 4, "applegpu_g13g", None),
        ((4096,) * 8, 4, "applegpu_g13g", 768),
        ((4096,) * 8, 1, "applegpu_g13g", None),
        ((65536,) * 8, 4, "applegpu_g14d", 6144),
        ((64, 64, 8192, 64), 4, "applegpu_g13g", 1536),
        ((1024,) * 8, 4, "sm_90", None),
        ((1025,) * 8, 1, "sm_90", 512),
        ((4096,) * 8, 4, "sm_90", 192),
        ((65536,) * 8, 4, "sm_90", 3072),
    ],
)
def test_when_two_passes_pay(lengths, group, architecture, expected):
    assert slots_per_block(lengths, group, 1, 128, 128, 2, architecture) == expected


def test_a_long_head_has_more_blocks():
    work = work_of((64, 1000, 0), Ranges((1000, 0, 1064), (64, 1000, 0)), 300)
    blocks = [(line[0], line[2], line[5], line[6]) for line in work.lines()]
    assert blocks == [
        (0, 1000, 0, 64),
        (1, 0, 0, 300),
        (1, 0, 300, 300),
        (1, 0, 600, 300),
        (1, 0, 900, 100),
        (2, 1064, 0, 0),
    ]
    assert work.firsts() == [0, 1, 5, 6]
    assert work.slots == 1064
