"""A conversation with a model in bounded memory, and which of its tokens are kept."""
