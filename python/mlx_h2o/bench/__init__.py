"""The benchmark: attention, whole models and the thread pool, measured side by side."""
