"""One file per backend, all with the functions of `reference`, which defines what is right."""
