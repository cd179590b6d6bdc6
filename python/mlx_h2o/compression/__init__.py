"""Fewer bytes after the fact: a prompt that is read a second time before rows are evicted."""
