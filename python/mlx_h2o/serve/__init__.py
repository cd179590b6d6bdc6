"""The OpenAI-compatible server: from HTTP requests to batches within one bound of memory."""
