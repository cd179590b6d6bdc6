"""Where mlx-lm is patched, and what is found out about its models."""
