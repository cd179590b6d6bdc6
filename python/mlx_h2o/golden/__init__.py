"""Golden vectors: one behaviour, recorded once, replayed by every implementation.

A group of cases is a file here. Each offers `cases()` (parameters as plain JSON), `inputs` (arrays
that are stored because no few lines would generate them) and `run` (the results); generating and
verifying call the same three. docs/reference/golden.md describes the files for other implementers.
"""
