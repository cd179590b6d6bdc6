"""Helpers that know nothing of caches: checks, files, sizes in bytes, progress, OpenBLAS."""
