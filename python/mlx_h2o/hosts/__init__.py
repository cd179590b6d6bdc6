"""Patches of mlx-lm, and probes that find out how its models use their caches."""
