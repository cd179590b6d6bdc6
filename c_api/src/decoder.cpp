#include "decoder.h"

#include "gpu/gpu_decoder.h"

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
    return layer_.step(
        call.q, step.keys, step.values, call.scale, call.sinks, step.offset, std::move(step.heads),
        step.recent, stream(), nullptr, step.aged_from);
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
    const auto found = fields.find("scores");
    return found == fields.end() ? mx::zeros({0}) : found->second;
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

bool accepts(
    const CacheSettings& settings, const AttentionCall& call, const mx::array& keys,
    const mx::array& values) {
  // With undo a step must be noted, which is done op by op.
  const bool one_token = keys.shape(2) == 1 && !settings.undo;
  if (!one_token || keys.dtype() != values.dtype()) return false;
  if (call.q.shape(1) > kMaxRows * keys.shape(1)) return false;
  switch (backend()) {
    case Backend::plain: return false;
    case Backend::cpu: return !settings.policy.value_weighted;
    // Two kinds of rows in one step are the CPU kernel's alone.
    case Backend::gpu: return !settings.packing.recent_bits && gpu_can_decode(keys, values);
  }
  return false;
}

std::unique_ptr<Decoder> decoder_for(Lent lent, const CacheSettings& settings) {
  if (backend() == Backend::gpu) return gpu_decoder_for(lent, settings);
  return std::make_unique<CPUDecoder>(lent, settings);
}

}  // namespace mlx_h2o
