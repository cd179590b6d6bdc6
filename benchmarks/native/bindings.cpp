// mlx_h2o._machine: the probe of the machine for `python -m benchmarks`. Nothing else loads it.
#include <nanobind/nanobind.h>

#include "machine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_h2o;

NB_MODULE(_machine, m) {
  m.doc() = "How fast this machine reads memory.";
  m.def(
      "read_bandwidth", &read_bandwidth, "bytes"_a, nb::kw_only(), "threads"_a,
      nb::call_guard<nb::gil_scoped_release>(),
      "Bytes per second at which so many threads read a buffer of so many bytes once.");
}
