"""The seam to mlx-lm and mlx-vlm: patches, and probes that find out how models use their caches."""
