"""What every room may use and what knows nothing of caches: checks, files, sizes, progress."""
