#include "cpu_kernels.h"

#include "primitives/attention.h"
#include "primitives/decoding_layer.h"
#include "primitives/pack.h"

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
class CPUDecoder : public Decoder {
 public:
  CPUDecoder(const Lent& lent, const CacheSettings& settings)
      : packing_(settings.packing),
        scored_(settings.policy.needs_attention()),
        measured_(settings.policy.keeps_value_lengths(settings.packing)),
        keys_(packing_.rows("keys", lent.fields)),
        values_(packing_.rows("values", lent.fields)),
        layer_(
            packing_.rows("keys", lent.fields), packing_.rows("values", lent.fields),
            beside_rows(lent), settings.policy.kernel_policy(), settings.remembers(),
            settings.remainder, settings.saturations, recent_of(lent), stream(), settings.frame) {}

  mx::array step(DecodeStep step) override {
    const AttentionCall& call = step.call;
    return DecodingLayer::step(
        {&layer_}, call.q, step.keys, step.values, call.scale, call.sinks, {{std::move(step.plan)}},
        stream());
  }

  std::vector<mx::array> last() const override {
    return {layer_.last_step()};
  }

  Lent end() override {
    const std::vector<mx::array> arrays = layer_.close(stream());
    Arrays next = arrays.begin();
    Fields fields;
    packing_.put(fields, "keys", keys_.take(next));
    packing_.put(fields, "values", values_.take(next));
    fields.emplace("positions", *next++);
    const mx::array& scores = *next++;
    if (scored_) fields.emplace("scores", scores);
    const mx::array &count = *next++, &mean_key = *next++, &var_key = *next++;
    const mx::array &mean_value = *next++, &victims = *next++;
    if (measured_) fields.emplace("value_lengths", *next++);
    Lent back{std::move(fields), {count, mean_key, var_key, mean_value}, victims, std::nullopt};
    if (recent_) back.window = window_fields(next);
    return back;
  }

 private:
  static mx::Stream stream() {
    return mx::default_stream(mx::Device::cpu);
  }

  static std::vector<mx::array> beside_rows(const Lent& lent) {
    std::vector<mx::array> all{lent.fields.at("positions"), scores_of(lent.fields)};
    for (const mx::array& a : lent.remainder.arrays()) all.push_back(a);
    all.push_back(lent.victims);
    const auto lengths = lent.fields.find("value_lengths");
    if (lengths != lent.fields.end()) all.push_back(lengths->second);
    return all;
  }

  // Of size 0 where there are none.
  static mx::array scores_of(const Fields& fields) {
    const auto it = fields.find("scores");
    return it == fields.end() ? mx::zeros({0}) : it->second;
  }

  std::optional<Recent> recent_of(const Lent& lent) {
    if (!lent.window) return std::nullopt;
    const Packing packing = *packing_.recent();
    const Stored keys = packing.rows("keys", *lent.window);
    const Stored values = packing.rows("values", *lent.window);
    recent_ = std::pair(Kind(keys), Kind(values));
    Recent recent{keys, values, scores_of(*lent.window)};
    if (measured_) recent.value_lengths = lent.window->at("value_lengths");
    return recent;
  }

  Fields window_fields(Arrays& next) const {
    const Packing packing = *packing_.recent();
    Fields fields;
    packing.put(fields, "keys", recent_->first.take(next));
    packing.put(fields, "values", recent_->second.take(next));
    const mx::array& scores = *next++;
    if (scored_) fields.emplace("scores", scores);
    if (measured_) fields.emplace("value_lengths", *next++);
    return fields;
  }

  const Packing packing_;
  const bool scored_, measured_;
  const Kind keys_, values_;
  std::optional<std::pair<Kind, Kind>> recent_;
  DecodingLayer layer_;
};

}  // namespace

bool cpu_kernels_serve() {
  return mx::default_device() == mx::Device::cpu;
}

AttentionResult cpu_attend(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted) {
  const auto arrays = attention(
      q, k, v, scale, mask.causal, mask.array, sinks, seed, std::nullopt, wanted,
      mx::default_stream(mx::default_device()));
  AttentionResult attended{arrays[0], arrays[1], std::nullopt, std::nullopt};
  if (wanted == Export::logits) attended.logits = arrays[2];
  if (wanted == Export::mass) attended.mass = arrays[2];
  return attended;
}

Stored cpu_packed(const mx::array& rows, int bits, int group_size) {
  return {pack(rows, bits, group_size, mx::default_device()), bits, group_size};
}

std::unique_ptr<Decoder> cpu_decoder_for(const Lent& lent, const CacheSettings& settings) {
  return std::make_unique<CPUDecoder>(lent, settings);
}

}  // namespace mlx_h2o
