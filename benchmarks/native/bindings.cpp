// mlx_h2o._machine: the probe of the machine for `python -m benchmarks`. Nothing else loads it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "machine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_h2o;

NB_MODULE(_machine, m) {
  m.doc() = "How fast this machine reads memory and hands out work.";
  m.def(
      "read_bandwidth", &read_bandwidth, "bytes"_a, nb::kw_only(), "threads"_a,
      nb::call_guard<nb::gil_scoped_release>(),
      "Bytes per second at which so many threads read a buffer of so many bytes once.");
  m.def(
      "job_seconds", &job_seconds, nb::kw_only(), "pooled"_a, "threads"_a, "jobs"_a, "items"_a,
      "steps"_a = 0, "gap"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
      "Seconds of each job of `items` times `steps` multiplications, `gap` of them before each.");
}
