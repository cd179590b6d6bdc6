"""Benchmarks of this repository; run them from its root, in the environment that `make` sets up.

`python -m benchmarks` measures attention, whole models, batches, the thread pool and matrix
products side by side with MLX. `python -m benchmarks.NAME` runs one of the others; each tells in
its first lines what it asks and how it is called. docs/results/speed.md holds their figures.
"""

from mlx_h2o import use_openblas

# As the commands do: MLX's own products on Linux are those of the reference BLAS.
use_openblas()
