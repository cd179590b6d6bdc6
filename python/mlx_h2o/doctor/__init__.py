"""`mlx_h2o doctor`: what works on this machine, for a report of a problem."""
