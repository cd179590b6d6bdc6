"""Golden vectors: one behaviour, recorded once, replayed by every implementation.

Each group of cases is a file here, with `cases()` (parameters as plain JSON), `inputs` (arrays that
are stored because no few lines would generate them) and `run` (the results). golden/verify.py calls
them, and so does golden/generate.py, which writes the vectors. docs/reference/golden.md describes
the files for other implementers.
"""
