"""The CUDA backend: the kernels of metal/ through `mx.fast.cuda_kernel`."""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.attention.backends.gpu import Gpu
from mlx_h2o.attention.backends.launcher import Launcher
from mlx_h2o.slots.softmax import attention_mass

__all__ = [
    "attend",
    "attention",
    "attention_mass",
    "attention_with_mass",
    "attention_with_scores",
]

GPU = Gpu(Launcher(mx.fast.cuda_kernel, "cuda"))
attend = GPU.attend
attention = GPU.attention
attention_with_mass = GPU.attention_with_mass
attention_with_scores = GPU.attention_with_scores
