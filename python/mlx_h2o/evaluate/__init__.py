"""Measuring a cache's cost to a model: perplexity, recall of planted facts, speed, bytes."""
