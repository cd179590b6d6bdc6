"""Experiments, each with a question: docs/results/experiments.md has the answers.

They are run from the root of the repository: `python -m research.NAME`.
"""

from mlx_h2o import use_openblas

# As the commands do: MLX's own products on Linux are those of the reference BLAS.
use_openblas()
