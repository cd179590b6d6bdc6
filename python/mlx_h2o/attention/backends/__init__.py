"""One file per backend, all with the functions of `reference`, which is the definition."""
