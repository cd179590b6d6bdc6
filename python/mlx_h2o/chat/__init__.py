"""A conversation with a model in bounded memory: what it will take, and which tokens are kept."""
