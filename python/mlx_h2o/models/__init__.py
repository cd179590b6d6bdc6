"""Caches for a whole model: planned, made, installed, resized, compressed."""
