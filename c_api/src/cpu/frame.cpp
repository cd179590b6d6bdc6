#include "frame.h"

namespace mlx_h2o {

namespace {

// Calls of(row, head, to) for the rows of B x H heads, one after the other in `to`.
template <class F>
char* each_row(
    const Layer& layer, int H, const void* rows, int64_t batch, int64_t head, Dtype dtype, char* to,
    F of) {
  const int size = size_of(dtype);
  for (int b = 0; b < layer.B; ++b)
    for (int h = 0; h < H; ++h, to += int64_t(layer.D) * size)
      of(static_cast<const char*>(rows) + (b * batch + h * head) * size, h, to);
  return to;
}

}  // namespace

Step in_frame(const Layer& layer, const LayerState& state, Step step, std::vector<char>& room) {
  const Dtype dtype = state.keys.dtype;
  const int64_t D = layer.D, G = layer.Hq / layer.Hk;
  room.resize(layer.B * D * (layer.Hk * size_of(dtype) + layer.Hq * size_of(step.q_dtype)));
  char* const keys = room.data();
  char* const queries = each_row(
      layer, layer.Hk, step.k, step.k_batch, step.k_head, dtype, keys,
      [&](const void* row, int h, void* to) {
        kernels().enter_frame(
            to, row, dtype, layer.frame_centre + h * D, layer.frame_scale + h * D, layer.D);
      });
  each_row(
      layer, layer.Hq, step.q, step.q_batch, step.q_head, step.q_dtype, queries,
      [&](const void* row, int h, void* to) {
        kernels().multiply(to, row, step.q_dtype, layer.frame_scale + h / G * D, layer.D);
      });
  step.k = keys, step.k_batch = layer.Hk * D, step.k_head = D;
  step.q = queries, step.q_batch = layer.Hq * D, step.q_head = D;
  return step;
}

}  // namespace mlx_h2o
