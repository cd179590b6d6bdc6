"""Measuring what a cache costs a model: perplexity, recall of planted facts, speed, bytes."""
