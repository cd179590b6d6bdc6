"""Which build of the extension is tested: the installed one, or MLX_H2O_EXTENSION's."""

from __future__ import annotations

import importlib.util
import os
import sys

# First: it loads the library that the extension is linked against.
import mlx.core as mx

if path := os.environ.get("MLX_H2O_EXTENSION"):
    spec = importlib.util.spec_from_file_location("mlx_h2o._ext", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mlx_h2o._ext"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["mlx_h2o._ext"])
    # Buffers of exactly the size that was asked for, so that a sanitizer sees reads behind them.
    mx.set_cache_limit(0)
