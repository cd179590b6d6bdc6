"""`python -m mlx_h2o` is the command `mlx_h2o`."""

import sys

from mlx_h2o.cli import main

sys.exit(main())
