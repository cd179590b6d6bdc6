"""Arrays as numpy has them."""

import mlx.core as mx
import numpy as np


def numpy_of(x: mx.array) -> np.ndarray:
    """Any array in float64 (numpy knows no bfloat16)."""
    return np.array(x.astype(mx.float32)).astype(np.float64)
