"""A bar on standard error for long work."""

from mlx_h2o.progress import progress_bar

__all__ = ["progress_bar"]
