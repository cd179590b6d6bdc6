"""The bounded caches that models use, one a file."""
