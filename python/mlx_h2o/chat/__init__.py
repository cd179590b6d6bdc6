"""A conversation with a model in bounded memory, and what it keeps of it."""
