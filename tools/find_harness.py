"""Imported for its effect: the host harness of tests/metal can be imported after it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "metal"))
