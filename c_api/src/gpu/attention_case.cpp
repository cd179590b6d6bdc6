#include "attention_case.h"

#include <bit>

#include "../evaluation.h"
#include "gpu.h"
#include "launcher.h"
#include "row_buffers.h"
#include "self_check.h"
#include "tiling.h"

namespace mlx_h2o {

namespace {

// A full step of the largest threadgroup (32 simdgroups of 16 slots) and an uneven rest.
constexpr int kSlots = 555;
// From here on a large GPU takes two passes.
constexpr int kSlotsOfTwoPasses = 1100;
constexpr const char* kLargeGPU = "applegpu_g13s";
// Tiles of 64 rows and 64 keys, the last ones not full.
constexpr int kPrompt = 70, kSlotsOfPrompt = 150;
// A second sequence and a second head, which read with the strides of theirs.
constexpr int kBatch = 2, kHeads = 2;
// So that few slots have most of the weight, and a wrong logit shows in the output. A prompt's
// output is MLX's own, which rounds logits to the model's dtype: large ones cost it much.
constexpr float kSharpness = 3, kSharpnessOfPrompt = 1;
// What MLX's attention of a prompt may be off, over what ours may.
constexpr double kMLXOverOurs = 4;

Stored stored(const mx::array& rows, int bits, int group_size) {
  return bits ? packed(rows, bits, group_size) : Stored{{rows}};
}

// A mask that hides a third of the slots, and everything from one row of many.
Masking mask_of(mx::Dtype dtype, const mx::Shape& shape) {
  const mx::array numbers = normal_numbers(5, shape);
  const int L = shape[2];
  mx::array visible = mx::greater(numbers, number(-0.43));
  if (L > 1)
    visible = mx::logical_and(visible, mx::expand_dims(mx::less(range(0, L), mx::array(L - 1)), 1));
  if (dtype == mx::bool_) return {false, visible};
  const mx::array lowest(mx::finfo(dtype).min, dtype);
  return {false, mx::where(visible, mx::astype(normal_numbers(6, shape), dtype), lowest)};
}

struct Operands {
  mx::array q;
  Stored k, v;
  Masking mask;
  std::optional<mx::array> sinks;
};

// All that decides which texts of the attention kernels a call compiles.
struct AttentionVariant {
  Export wanted;
  mx::Dtype dtype;
  int key_width, value_width;
  int k_bits, k_group, v_bits, v_group;
  int group;    // query heads of a KV head
  int queries;  // L rounded up to a power of two, or 0 for a prompt's
  bool causal;
  std::optional<mx::Dtype> mask;  // of an array
  bool sinks;

  std::string name() const;
  Operands operands(int slots) const;
  Deviation check_with(int slots, const std::string& architecture) const;
  Deviation check() const;
};

std::string AttentionVariant::name() const {
  const auto rows = [](int width, int bits, int group_size) {
    return std::to_string(width) +
        (bits ? " in " + std::to_string(bits) + " bits by " + std::to_string(group_size) : "");
  };
  static constexpr const char* kExports[] = {
      "attention", "attention with scores", "attention with mass"};
  return kExports[int(wanted)] + (" of " + text(dtype)) + ", keys " +
      rows(key_width, k_bits, k_group) + ", values " + rows(value_width, v_bits, v_group) + ", " +
      std::to_string(group) + " query heads a KV head, " +
      (queries ? std::to_string(queries) + " queries" : "a prompt") +
      (causal ? ", mask causal" : "") + (mask ? ", mask " + text(*mask) : "") +
      (sinks ? ", sinks" : "");
}

Operands AttentionVariant::operands(int slots) const {
  const OnCPU cpu;
  const int L = queries ? queries : kPrompt, Hq = kHeads * group;
  const auto numbers = [&](unsigned seed, const mx::Shape& shape) {
    return mx::astype(normal_numbers(seed, shape), dtype);
  };
  const mx::array sharpness(queries ? kSharpness : kSharpnessOfPrompt, dtype);
  Operands all{
      numbers(1, {kBatch, Hq, L, key_width}) * sharpness,
      stored(numbers(2, {kBatch, kHeads, slots, key_width}), k_bits, k_group),
      stored(numbers(3, {kBatch, kHeads, slots, value_width}), v_bits, v_group),
      {causal, std::nullopt},
      std::nullopt};
  if (mask) all.mask = mask_of(*mask, {kBatch, Hq, L, slots});
  if (sinks) all.sinks = numbers(4, {Hq});
  std::vector<mx::array> given{all.q};
  for (const Stored* one : {&all.k, &all.v})
    given.insert(given.end(), one->arrays.begin(), one->arrays.end());
  if (mask) given.push_back(*all.mask.array);
  if (sinks) given.push_back(*all.sinks);
  evaluate(given);
  return all;
}

// Over so many slots, the work shared out as on a GPU of this name.
Deviation AttentionVariant::check_with(int slots, const std::string& architecture) const {
  const Operands x = operands(slots);
  const float scale = 1 / std::sqrt(float(key_width));
  const AttentionResult actual =
      gpu_attend(x.q, x.k, x.v, scale, x.mask, x.sinks, std::nullopt, wanted, architecture);
  const std::optional<mx::array>& more = actual.logits ? actual.logits : actual.mass;
  evaluate(more ? std::vector{actual.out, actual.lse, *more} : std::vector{actual.out, actual.lse});
  const OnCPU cpu;
  const AttentionResult expected = attend(
      f32(x.q), {{{f32(dense(x.k))}}}, {{{f32(dense(x.v))}}}, scale, x.mask, x.sinks, std::nullopt,
      wanted);
  Tolerance of_out = tolerance_of(dtype);
  if (!queries) of_out = {kMLXOverOurs * of_out.absolute, kMLXOverOurs * of_out.relative};
  std::vector<Comparison> all{
      {"output", actual.out, expected.out, of_out},
      {"log-sum-exp", actual.lse, expected.lse, kOfLogits}};
  if (actual.logits) all.push_back({"logits", *actual.logits, *expected.logits, kOfLogits});
  if (actual.mass) all.push_back({"masses", *actual.mass, *expected.mass, kOfMasses});
  return worst(all);
}

Deviation AttentionVariant::check() const {
  const std::string here = *gpu_architecture();
  if (!queries) return check_with(kSlotsOfPrompt, here);
  const Deviation one_pass = check_with(kSlots, here);
  if (!(one_pass.size <= 1)) return one_pass;
  const Deviation two_passes = check_with(kSlotsOfTwoPasses, kLargeGPU);
  return one_pass.size > two_passes.size ? one_pass : two_passes;
}

}  // namespace

bool attention_proven(
    const mx::array& q, const Stored& k, const Stored& v, const Masking& mask,
    const std::optional<mx::array>& sinks, Export wanted) {
  const int L = q.shape(2);
  AttentionVariant variant{
      wanted,
      row_dtype(k),
      k.width(),
      v.width(),
      k.bits,
      k.group_size,
      v.bits,
      v.group_size,
      q.shape(1) / k.arrays[0].shape(1),
      L > kMostQueries ? 0 : int(std::bit_ceil(unsigned(L))),
      mask.causal && !mask.array && L > 1,
      std::nullopt,
      sinks.has_value()};
  if (mask.array) variant.mask = mask.array->dtype();
  return usable(variant.name(), [&] { return variant.check(); });
}

}  // namespace mlx_h2o
