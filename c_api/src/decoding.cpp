#include "decoding.h"

#include "attend.h"
#include "gpu/gpu_decoding.h"
#include "remainder.h"

namespace mlx_h2o {

namespace {

using Arrays = std::vector<mx::array>::const_iterator;

// How rows are stored, without them.
struct Kind {
  explicit Kind(const Stored& rows) : bits(rows.bits), group_size(rows.group_size) {}

  int bits, group_size;

  // As many of the next arrays as such rows are.
  Stored take(Arrays& next) const {
    const Arrays first = next;
    next += bits ? 3 : 1;
    return {{first, next}, bits, group_size};
  }
};

// The one place that knows DecodingLayer's order of arrays.
class CpuDecoding : public Decoding {
 public:
  CpuDecoding(const DecodingArrays& a, const DecodingRules& rules)
      : keys_(a.keys),
        values_(a.values),
        scored_(a.scores.has_value()),
        layer_(
            a.keys, a.values, beside_rows(a), rules.policy, rules.remembers, rules.answers,
            std::vector<float>(a.remainder.count.shape(1), kSaturation), a.recent, stream()) {
    if (a.recent) recent_ = std::pair(Kind(a.recent->keys), Kind(a.recent->values));
  }

  mx::array step(
      const mx::array& q, const mx::array& k, const mx::array& v, float scale,
      const std::optional<mx::array>& sinks, int offset, std::vector<StepHead> heads,
      const std::optional<RecentStep>& recent) override {
    return layer_.step(q, k, v, scale, sinks, offset, std::move(heads), recent, stream());
  }

  DecodingArrays close() override {
    const std::vector<mx::array> arrays = layer_.close(stream());
    Arrays next = arrays.begin();
    const Stored keys = keys_.take(next), values = values_.take(next);
    const mx::array &positions = *next++, &scores = *next++;
    const mx::array &count = *next++, &mean_key = *next++, &var_key = *next++;
    const mx::array &mean_value = *next++, &victims = *next++;
    DecodingArrays back{
        keys,    values,      positions, std::nullopt, {count, mean_key, var_key, mean_value},
        victims, std::nullopt};
    if (scored_) back.scores = scores;
    if (recent_) {
      const Stored recent_keys = recent_->first.take(next);
      const Stored recent_values = recent_->second.take(next);
      back.recent = Recent{recent_keys, recent_values, *next};
    }
    return back;
  }

 private:
  static mx::Stream stream() {
    return mx::default_stream(mx::Device::cpu);
  }

  static std::vector<mx::array> beside_rows(const DecodingArrays& a) {
    const Remainder& r = a.remainder;
    return {a.positions, a.scores ? *a.scores : mx::zeros({0}),
            r.count,     r.mean_key,
            r.var_key,   r.mean_value,
            a.victims};
  }

  const Kind keys_, values_;
  const bool scored_;
  std::optional<std::pair<Kind, Kind>> recent_;
  DecodingLayer layer_;
};

}  // namespace

bool can_decode(const mx::array& keys, const mx::array& values, bool value_weighted, bool mixed) {
  switch (backend()) {
    case Backend::plain: return false;
    case Backend::cpu: return !value_weighted;
    // Two kinds of rows in one step are the CPU kernel's alone.
    case Backend::gpu: return !mixed && gpu_can_decode(keys, values);
  }
  return false;
}

std::unique_ptr<Decoding> start_decoding(DecodingArrays arrays, const DecodingRules& rules) {
  if (backend() == Backend::gpu) return start_gpu_decoding(arrays, rules);
  return std::make_unique<CpuDecoding>(arrays, rules);
}

}  // namespace mlx_h2o
