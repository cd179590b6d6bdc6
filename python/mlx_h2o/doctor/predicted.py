"""What one token of a layer must cost: bytes and instructions by kernel, over a chip's rates.

The bytes are those that the host harness counts of the kernels' text
(docs/results/data/speed.json), as a formula that `tests/metal/test_predicted.py` holds to the
counts. Instructions are multiply-adds, and beside them what a simdgroup of 32 lanes does for each
slot and query.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.doctor import arms
from mlx_h2o.doctor.arms import ATTENTION, BITS, GROUP_SIZE, KV_HEADS, QUERY_HEADS, STEPS, Size
from mlx_h2o.doctor.chips import Chip
from mlx_h2o.doctor.report import Section

LANES = 32
# Of a slot and a query row, each done by all lanes: sums over a simdgroup and shuffles, counted,
# and what belongs to exponentials. MLX's kernel has a lane for each element do every exponential;
# ours share them out.
OURS, MLXS = 1.25 + 1.0 + 0.25, 1.05 + 4.0
# To make a number of a packed level: shift, mask, convert.
UNPACK = 3
# How often a step reads or writes what it has of a slot in 4 bytes, by the kernels: scores and
# distances are read for the terms' means and for the victims.
_SCORES, _DISTANCES = 3, 3
# Positions, and a dense value's length, have 2 bytes; the length is read twice.
_POSITION, _LENGTH = 2, 2 * 2
# Of the overwritten row, the remainder and the plan, a KV head: what does not grow with the slots.
_FIXED = 12_000


class Work(NamedTuple):
    """Of one call.

    Attributes:
        bytes: Read and written.
        instructions: The instructions of single lanes.
    """

    bytes: int
    instructions: int


def seconds(work: Work, chip: Chip) -> float:
    """The least time that a chip needs by its published figures; a lane's instruction may be a
    multiply-add, which they count twice."""
    return max(work.bytes / chip.bandwidth, 2 * work.instructions / chip.operations)


def work_of(name: str, size: Size) -> Work:
    """Bytes and instructions of an arm's call."""
    N, D, element = size.slots, arms.WIDTH, size.dtype.size
    slots, logits = KV_HEADS * N, 4 * QUERY_HEADS * N
    bits = BITS[name]
    row = D * bits // 8 + 2 * element * (D // GROUP_SIZE) if bits else D * element
    moved = 2 * slots * row + 2 * QUERY_HEADS * D * element
    mlxs = name in (arms.MLX, arms.WINDOW)
    done = QUERY_HEADS * N * (2 * D + LANES * (MLXS if mlxs else OURS))
    if bits:
        done += slots * 2 * D * UNPACK
    if name in ATTENTION and not mlxs:
        moved += logits
    if name in STEPS and not mlxs:
        lengths = 2 * element * (D // GROUP_SIZE) if bits else _LENGTH
        per_slot = 4 * (_SCORES + _DISTANCES) + _POSITION + lengths
        moved += 2 * logits + slots * per_slot + KV_HEADS * _FIXED
        done += slots * D  # distances
    return Work(int(moved), int(done))


def section(chip: Chip, slots: tuple[int, ...]) -> Section:
    """The predictions of every arm on a chip, in half precision."""
    found = Section(
        "predictions",
        f"{chip.name}: the least time of one token of a layer ({QUERY_HEADS} query heads, "
        f"{KV_HEADS} KV heads, width {arms.WIDTH}, float16), predicted",
        ("arm", "slots", "MB", "us", "limited by"),
        data=[],
    )
    for count in slots:
        size = Size(count, mx.float16)
        for name in (*ATTENTION, *STEPS):
            work = work_of(name, size)
            least = seconds(work, chip)
            limit = "memory" if work.bytes / chip.bandwidth >= least else "arithmetic"
            found.rows.append(
                (name, str(count), f"{work.bytes / 1e6:.2f}", f"{1e6 * least:.1f}", limit)
            )
            found.data.append(
                {
                    "arm": name,
                    "slots": count,
                    "bytes": work.bytes,
                    "instructions": work.instructions,
                    "seconds": least,
                }
            )
    found.notes.append(chip.note)
    found.notes.append("No Mac has run these kernels: nothing here is measured.")
    return found
