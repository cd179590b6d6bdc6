"""mlx-lm's server over bounded caches, with one hard bound for all caches together."""
