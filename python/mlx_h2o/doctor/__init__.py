"""`mlx_h2o doctor`: what works on this machine, and how fast."""
