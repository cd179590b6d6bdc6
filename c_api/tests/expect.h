// A check that is counted and told with the library's last error; the program goes on. PROGRAM is
// defined before.
#pragma once

#include <stdbool.h>
#include <stdio.h>

#include "mlx_h2o.h"

static int failures = 0;

static void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, PROGRAM ": %s (%s)\n", what, mlx_h2o_last_error());
  ++failures;
}
