#include "fused_case.h"

#include <algorithm>

#include "evaluation.h"
#include "gpu/self_check.h"
#include "step.h"

namespace mlx_h2o {

namespace {

// Slots of the two heads: fewer than a simdgroup's step, and a threadgroup's step with a rest.
constexpr int kFew = 48, kMany = 555;
// The larger head has so many unused slots when the single tokens begin.
constexpr int kUnused = 4;
constexpr int kSteps = 10;
// A second sequence, which reads with strides of its own.
constexpr int kBatch = 2, kHeads = 2;
constexpr double kMostRecent = 16;
constexpr float kSharpness = 2;
// Sums of the evicted, over some hundred rows.
constexpr Tolerance kOfStatistics{1e-4, 2e-3};

struct Rows {
  mx::array q, k, v;
  std::optional<mx::array> sinks;

  AttentionCall call(int first, int end, float scale) const {
    return {part(q, 2, first, end), scale, sinks};
  }
};

// All that decides which texts a fused step compiles.
struct FusedVariant {
  const CacheSettings& like;
  mx::Dtype dtype;
  int key_width, value_width;
  int group;  // query heads of a KV head
  int heads;  // KV heads where a layer's decide together, else 0
  bool sinks;

  std::string name() const;
  CacheSettings small_settings() const;
  Rows rows(int tokens) const;
  Deviation check() const;
};

// Policies of one form have names of their own all the same.
std::string FusedVariant::name() const {
  const Packing& packing = like.packing;
  std::string words = "a fused step of " + like.policy.name + " in " + text(dtype) + ", keys " +
      std::to_string(key_width) + ", values " + std::to_string(value_width);
  if (packing.packs())
    words += " in " + std::to_string(packing.k_bits) + " and " + std::to_string(packing.v_bits) +
        " bits by " + std::to_string(packing.group_size);
  words += ", " + std::to_string(group) + " query heads a KV head";
  if (heads) words += ", " + std::to_string(heads) + " heads together";
  const std::pair<bool, const char*> more[] = {
      {like.policy.needs_attention(), "scores"},
      {like.policy.age_normalised, "by age"},
      {like.policy.value_weighted, "by values"},
      {like.frame.has_value(), "in a frame"},
      {sinks, "sinks"},
      {like.remainder, "a remainder"},
      {like.remembers(), "statistics of the evicted"}};
  for (const auto& [has, what] : more)
    if (has) words.append(", ").append(what);
  return words;
}

// Those of a small layer whose steps compile what those of a large one do.
CacheSettings FusedVariant::small_settings() const {
  CacheSettings small = like;
  // Many protected tokens would need as many slots; no text knows how many they are.
  Policy& policy = small.policy;
  if (!policy.recent_is_share) policy.recent = std::min(policy.recent, kMostRecent);
  const int least = policy.least_budget(0);
  const int few = std::max(kFew, least + kUnused), many = std::max(kMany, least + 2 * kUnused);
  const int count = heads ? heads : kHeads;
  small.budgets.assign(count, many);
  if (!heads) small.budgets[0] = few;
  small.undo = 0;
  small.saturations.assign(count, kSaturation);
  small.pins.clear();
  small.filling.clear();
  small.reserved.reset();
  if (small.frame) {
    const mx::Shape shape{count, key_width};
    const mx::array spread = mx::exp(normal_numbers(5, shape) * number(0.5));
    small.frame = Frame{sinks ? mx::zeros(shape) : normal_numbers(6, shape), spread};
    evaluate({small.frame->centre, small.frame->scale});
  }
  return small;
}

// Keys lie off the origin, so that the remainder matters.
Rows FusedVariant::rows(int tokens) const {
  const int count = heads ? heads : kHeads;
  const mx::array q = normal_numbers(1, {kBatch, count * group, tokens, key_width});
  const mx::array k = normal_numbers(2, {kBatch, count, tokens, key_width});
  const mx::array v = normal_numbers(3, {kBatch, count, tokens, value_width});
  Rows rows{
      mx::astype(q * number(kSharpness), dtype), mx::astype(k + number(0.5), dtype),
      mx::astype(v, dtype), std::nullopt};
  if (sinks) rows.sinks = mx::astype(normal_numbers(4, {count * group}), dtype);
  return rows;
}

// The outputs of single tokens from `first` on.
std::vector<mx::array> decoded(Core& core, const Rows& rows, int first, float scale) {
  std::vector<mx::array> outs;
  for (int i = first; i < first + kSteps; ++i) {
    outs.push_back(core.update_and_attend(
        rows.call(i, i + 1, scale), part(rows.k, 2, i, i + 1), part(rows.v, 2, i, i + 1)));
    evaluate({outs.back()});
  }
  return outs;
}

Deviation FusedVariant::check() const {
  std::optional<Core> ours, theirs;
  std::optional<Rows> given, exact;
  std::vector<mx::array> expected;
  const float scale = 1 / std::sqrt(float(key_width));
  int tokens = 0;
  {
    const OnCPU cpu;
    const CacheSettings small = small_settings();
    tokens = *std::max_element(small.budgets.begin(), small.budgets.end()) - kUnused;
    given = exact = rows(tokens + kSteps);
    // Of the same rounded rows, but in float32: MLX would else round logits.
    if (!small.packing.packs())
      exact = Rows{f32(given->q), f32(given->k), f32(given->v), given->sinks};
    evaluate({given->q, given->k, given->v, exact->q, exact->k, exact->v});
    ours.emplace(small), theirs.emplace(small);
    for (const auto& [core, x] : {std::pair(&*ours, &*given), std::pair(&*theirs, &*exact)}) {
      core->update_and_attend(
          x->call(0, tokens, scale), part(x->k, 2, 0, tokens), part(x->v, 2, 0, tokens));
      evaluate(core->newest());
    }
    expected = decoded(*theirs, *exact, tokens, scale);
  }
  const std::vector<mx::array> actual = decoded(*ours, *given, tokens, scale);
  const OnCPU cpu;
  std::vector<Comparison> all;
  for (int i = 0; i < kSteps; ++i)
    all.push_back({"output " + std::to_string(i + 1), actual[i], expected[i], tolerance_of(dtype)});
  all.push_back({"what is kept", ours->kept(), theirs->kept(), kExact});
  if (like.policy.needs_attention())
    all.push_back(
        {"scores", ours->scores(), theirs->scores(),
         like.policy.kind == PolicyKind::ema_logits ? tolerance_of(dtype) : kOfMasses});
  if (like.remembers()) {
    const std::vector<mx::array> a = ours->remainder().arrays(), b = theirs->remainder().arrays();
    for (size_t i = 0; i < a.size(); ++i)
      all.push_back({"statistics of the evicted", a[i], b[i], kOfStatistics});
  }
  return worst(all);
}

}  // namespace

bool fused_step_proven(
    const CacheSettings& settings, const AttentionCall& call, const mx::array& keys,
    const mx::array& values) {
  const int H = keys.shape(1);
  const FusedVariant variant{
      settings,
      keys.dtype(),
      keys.shape(3),
      values.shape(3),
      call.q.shape(1) / H,
      settings.policy.per_layer ? H : 0,
      call.sinks.has_value()};
  return usable(variant.name(), [&] { return variant.check(); });
}

}  // namespace mlx_h2o
