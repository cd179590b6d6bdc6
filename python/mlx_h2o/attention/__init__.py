"""Attention that hands out its scores, and the backends that compute it."""
