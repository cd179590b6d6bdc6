"""An environment without MLX's backend."""

from __future__ import annotations


def backend_missing(error: ImportError) -> str | None:
    """What to do about an import that failed for want of MLX's backend; None for another one.

    On Linux MLX's wheel has none: it comes with one of its extras.
    """
    if "libmlx" not in str(error):
        return None
    return (
        "MLX has no backend here: pip install 'mlx[cpu]', or 'mlx[cuda]' for an NVIDIA GPU "
        f"({error})."
    )
