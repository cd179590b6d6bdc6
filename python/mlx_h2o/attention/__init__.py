"""Attention that returns its scores, and the backends that compute it."""
