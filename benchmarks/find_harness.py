"""The host harness of tests/metal, for benchmarks that count kernels' operations there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "metal"))

import harness

__all__ = ["harness"]
