#include "prompt_launches.h"

#include "row_buffers.h"
#include "tiling.h"

namespace mlx_h2o {

namespace {

// Rows and keys of a threadgroup, and its threads, as in metal/logit_tile.h.
constexpr int kTile = 64;
constexpr int kThreads = 256;

// One threadgroup per tile of what is counted along x.
mx::array run(
    const std::string& kernel, const std::string& output, const mx::array& q, const Stored& k,
    float scale, const Masking& masking, const Buffers& more, const mx::Shape& shape, int along_x) {
  const int B = q.shape(0), Hq = q.shape(1), L = q.shape(2);
  const int Hk = k.arrays[0].shape(1), N = k.arrays[0].shape(2);
  const KernelMask mask = kernel_mask(masking, B, Hq, L, N);
  const Work work(std::vector<int>(Hk, N), std::nullopt, std::nullopt);
  Buffers inputs{
      {"params", work.params(L, mask.columns)}, {"factors", mx::array({scale})}, {"queries", q}};
  add_buffers(inputs, "keys", k);
  if (mask.array) inputs.emplace("mask", *mask.array);
  inputs.insert(more.begin(), more.end());
  return launch(
             kernel, inputs, {{output, {shape, mx::float32}}},
             joined_lists<Template::value_type>(
                 {{{"D", q.shape(3)}},
                  packing_of("keys", k),
                  {{"G", Hq / Hk}, {"MASK", mask.kind}}}),
             {(along_x + kTile - 1) / kTile, Hk, B}, kThreads)
      .at(output);
}

}  // namespace

bool prompt_kernels_take(const mx::array& q, const Stored& k) {
  return is_kernel_width(k.width()) && k.arrays[0].shape(2) > 0 && q.dtype() == row_dtype(k);
}

mx::array prompt_lse(const mx::array& q, const Stored& k, float scale, const Masking& mask) {
  const int rows = q.shape(1) / k.arrays[0].shape(1) * q.shape(2);
  return run(
      "prompt_lse", "lse", q, k, scale, mask, {}, {q.shape(0), q.shape(1), q.shape(2)}, rows);
}

mx::array prompt_mass(
    const mx::array& q, const Stored& k, const mx::array& lse, float scale, const Masking& mask) {
  const mx::Shape slots{k.arrays[0].shape(0), k.arrays[0].shape(1), k.arrays[0].shape(2)};
  return run(
      "prompt_mass", "mass", q, k, scale, mask, {{"lse", mx::contiguous(lse)}}, slots, slots[2]);
}

}  // namespace mlx_h2o
