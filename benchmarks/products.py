"""MLX's float32 matrix products with the BLAS that it was linked with, and with OpenBLAS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from benchmarks.measuring import Arm, Progress, Samples, in_turns, timed
from mlx_h2o import _blas

LINKED, OPENBLAS = "linked", "OpenBLAS"
#: Rows, columns and terms: a step and a prompt of 128 tokens in a layer of 576 (a model of 135M
#: parameters), that model's vocabulary, and a layer of the embedded model.
SHAPES = ((1, 1536, 576), (128, 1536, 576), (1, 49152, 576), (1, 1024, 256), (128, 1024, 256))


@dataclass(frozen=True)
class Product:
    """One shape.

    Attributes:
        shape: The product's rows, columns and terms.
        samples: Seconds of a product, by arm.
    """

    shape: tuple[int, int, int]
    samples: Samples

    def as_json(self) -> dict[str, Any]:
        """Times, and the gain."""
        return {
            "rows_columns_terms": self.shape,
            "arms": self.samples.as_json(),
            "openblas_over_linked": self.samples.speed(OPENBLAS, LINKED),
        }


def can_be_measured() -> bool:
    """Whether there are two BLAS to choose from."""
    return _blas.use_openblas()


def measure(rounds: int, progress: Progress | None = None) -> list[Product]:
    """The products of all shapes, in turns.

    Raises:
        ValueError: OpenBLAS cannot be put in the place of MLX's own BLAS here.
    """
    if not can_be_measured():
        raise ValueError(f"Nothing to compare: MLX uses {_blas.blas()}. {_blas.advice() or ''}")
    arms = {
        f"{name} {shape}": product(shape, name == OPENBLAS)
        for shape in SHAPES
        for name in (LINKED, OPENBLAS)
    }
    try:
        times = in_turns(arms, rounds, progress=progress).seconds
    finally:
        _blas.use_openblas()
    return [
        Product(shape, Samples({name: times[f"{name} {shape}"] for name in (LINKED, OPENBLAS)}))
        for shape in SHAPES
    ]


def product(shape: tuple[int, int, int], openblas: bool) -> Arm:
    """An arm: x [rows, terms] times the transpose of w [columns, terms], as in a layer."""
    rows, columns, terms = shape
    with mx.stream(mx.cpu):
        x, w = mx.random.normal((rows, terms)), mx.random.normal((columns, terms))
        mx.eval(x, w)

    def once() -> None:
        with mx.stream(mx.cpu):
            mx.eval(x @ w.T)

    def arm() -> float:
        (_blas.use_openblas if openblas else _blas.use_linked)()
        return timed(once)()

    return arm
