"""Benchmarks of this repository; run them from its root, in the environment that `make` sets up.

`python -m benchmarks` measures attention, whole models and matrix products side by side with MLX.
`python -m benchmarks.NAME` runs one of the others; the first lines of each tell its question and
its call. docs/results/data/ holds their figures, with those of benchmarks that are deleted.
"""

from mlx_h2o import use_openblas

# As in the commands: MLX's wheel for Linux brings the reference BLAS.
use_openblas()
