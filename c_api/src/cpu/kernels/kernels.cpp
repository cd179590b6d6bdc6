// Compiled once per instruction set, with MLX_H2O_ISA naming it; see CMakeLists.txt.
#include "attention_tile.h"
#include "convert.h"
#include "frame.h"
#include "quantize.h"
#include "update.h"

namespace mlx_h2o::MLX_H2O_ISA {

static void blend(float* y, const float* x, float a, float b, int n) {
  each_vector(n, [&](int i, int count) {
    store_some(y + i, a * load_some(y + i, count) + b * load_some(x + i, count), count);
  });
}

static float dot(const float* x, const float* y, int n) {
  vf total{};
  each_vector(
      n, [&](int i, int count) { total += load_some(x + i, count) * load_some(y + i, count); });
  return sum(total);
}

// One row to floats, whatever it is stored as.
static void read_row(float* out, const Rows& rows, int64_t row, int width) {
  float scales[2 * kTile * kMostGroups];
  with_kind(rows, [&](auto kind) {
    widened(decltype(kind)::rows(rows, width, row, 1, scales), width, 1, out);
  });
}

#define MLX_H2O_STRING(x) #x
#define MLX_H2O_NAME(x) MLX_H2O_STRING(x)

extern const Kernels table;
const Kernels table{
    MLX_H2O_NAME(MLX_H2O_ISA),
    MLX_H2O_BF16_DOT,
    attend,
    add_mass,
    update,
    select_victims,
    blend,
    dot,
    widen,
    narrow,
    quantize,
    enter_frame,
    multiply,
    read_row};

}  // namespace mlx_h2o::MLX_H2O_ISA
