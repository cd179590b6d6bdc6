"""Experiments, each with a question: README.md lists them with their answers.

They are run from the root of the repository: `python -m research.NAME`.
"""

from mlx_h2o import use_openblas

# As the commands do: MLX's own products on Linux are those of the reference BLAS.
use_openblas()
