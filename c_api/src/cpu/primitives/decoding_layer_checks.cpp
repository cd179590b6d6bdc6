#include "decoding_layer.h"

#include "primitive.h"
#include "slot_memory.h"
#include "text.h"

namespace mlx_h2o {

namespace {

const char* const kNames[] = {"positions", "scores",     "count",   "mean_key",
                              "var_key",   "mean_value", "victims", "value_lengths"};

}  // namespace

void DecodingLayer::check_fields(
    const Stored& k, const Stored& v, const std::vector<mx::array>& fields) const {
  const int B = layer_.B, Hk = layer_.Hk, S = layer_.S, D = layer_.D, Dv = layer_.Dv;
  const mx::array& values = v.arrays[0];
  require(
      values.ndim() == 3 && values.shape(0) == B && values.shape(1) == S, "Slots differ",
      {{"keys", k.arrays[0]}, {"values", values}});
  require(
      v.arrays.back().dtype() == row_dtype_, "Keys and values differ in dtype",
      {{"keys", k.arrays.back()}, {"values", v.arrays.back()}});
  const bool accumulates = layer_.policy.score != Score::none;
  const mx::Shape wanted[] = {
      {B, S},      accumulates ? mx::Shape{B, S} : mx::Shape{0}, {B, Hk}, {B, Hk, D}, {B, Hk, D},
      {B, Hk, Dv}, {B, Hk, layer_.policy.evict_every},           {B, S}};
  for (int field = 0; field < Field::value_lengths + measured_; ++field) {
    const mx::array& a = fields[field];
    const bool empty = field == Field::scores && !accumulates;
    if (empty ? a.size() : a.shape() != wanted[field])
      refuse(
          "The policy and the slots want the shape " + text(wanted[field]), {{kNames[field], a}});
    const bool narrow = field == Field::positions && a.dtype() == mx::int16;
    const mx::Dtype dtype = narrow                             ? mx::int16
        : field == Field::positions || field == Field::victims ? mx::int32
        : field == Field::value_lengths                        ? mx::float16
                                                               : mx::float32;
    require(
        a.dtype() == dtype,
        "Positions must be int16 or int32, victims int32, value_lengths float16, scores and the "
        "remainder float32",
        {{kNames[field], a}});
  }
}

void DecodingLayer::check_recent(const Stored& k, const Stored& v, const Recent& recent) const {
  check_stored(recent.keys);
  check_stored(recent.values);
  const mx::array& first = recent.keys.arrays[0];
  const int size = first.ndim() == 4 ? first.shape(2) : 0;
  const mx::Shape rows{layer_.B, layer_.Hk, size};
  const auto fit = [&](const Stored& kept, const Stored& x) {
    const mx::Shape& shape = x.arrays[0].shape();
    return shape.size() == 4 && mx::Shape(shape.begin(), shape.end() - 1) == rows &&
        x.width() == kept.width() && x.arrays.back().dtype() == row_dtype_ &&
        (!x.bits || (kept.bits && x.group_size == kept.group_size));
  };
  const bool accumulates = layer_.policy.score != Score::none;
  require(
      size > 0 && fit(k, recent.keys) && fit(v, recent.values) &&
          (accumulates ? recent.scores.shape() == rows : recent.scores.size() == 0),
      "The newest tokens do not fit the others",
      {{"newest keys", first},
       {"newest values", recent.values.arrays[0]},
       {"newest scores", recent.scores},
       {"keys", k.arrays[0]},
       {"values", v.arrays[0]}});
  require(
      recent.value_lengths.has_value() == measured_,
      "Lengths of values are of all tokens, or none");
  if (measured_)
    require(
        recent.value_lengths->shape() == rows && recent.value_lengths->dtype() == mx::float16,
        "The lengths of the newest values must be float16, one for each",
        {{"they are", *recent.value_lengths}, {"newest keys", first}});
}

void DecodingLayer::check_tokens(
    int B, int L, const mx::array& q, const mx::array& k, const mx::array& v) const {
  const int Hk = layer_.Hk, D = layer_.D, Dv = layer_.Dv;
  if (q.ndim() != 4 || q.shape(0) != B || q.shape(1) % Hk || q.shape(2) != L || q.shape(3) != D)
    refuse(
        "q must be [" + std::to_string(B) + ", Hq, " + std::to_string(L) + ", " +
            std::to_string(D) + "] with a multiple of " + std::to_string(Hk) + " heads",
        {{"it is", q}});
  if (q.shape(1) / Hk > kMaxRows)
    refuse(
        "At most " + std::to_string(kMaxRows) + " query heads may share one of " +
            std::to_string(Hk) + " KV heads",
        {{"q", q}});
  const mx::Shape of_k{B, Hk, L, D}, of_v{B, Hk, L, Dv};
  if (k.shape() != of_k || v.shape() != of_v)
    refuse("k and v must be " + text(of_k) + " and " + text(of_v), {{"k", k}, {"v", v}});
  require(
      k.dtype() == row_dtype_ && v.dtype() == row_dtype_,
      "k and v have another dtype than the slots", {{"k", k}, {"v", v}});
}

void DecodingLayer::check_plan(const TokenPlan& plan) const {
  const auto& [offset, heads, recent, aged_from] = plan;
  if (heads.size() != size_t(layer_.Hk))
    refuse(
        "A step has a plan for each of " + std::to_string(layer_.Hk) + " KV heads, not " +
        std::to_string(heads.size()));
  require(
      recent.has_value() == recent_layout_.has_value(),
      "A step has a plan for the newest tokens where they are stored apart, and only there");
  if (recent &&
      (recent->slot < 0 || recent->slot >= recent->length || recent->length > recent_size_))
    refuse(
        "The newest token leaves its ring of " + std::to_string(recent_size_) + " rows: slot " +
        std::to_string(recent->slot) + " of " + std::to_string(recent->length));
  const int least = !recent || recent->leaving ? 1 : 0;
  for (const HeadPlan& head : heads) {
    if (head.start < 0 || head.length < least || head.start + head.length > layer_.S ||
        head.victim >= layer_.policy.evict_every)
      refuse(
          "A head leaves its slots: " + std::to_string(head.length) + " from " +
          std::to_string(head.start) + " on, of " + std::to_string(layer_.S) + ", victim " +
          std::to_string(head.victim) + " of " + std::to_string(layer_.policy.evict_every));
    require(
        !layer_.policy.per_layer ||
            (head.length == heads[0].length && head.choose == heads[0].choose),
        "Heads that choose together must be alike");
  }
  const mx::Dtype positions = dtypes_[layout_.keys() + layout_.values() + Field::positions];
  if (positions == mx::int16 && offset > kFewTokens)
    refuse(
        "Positions of " + std::to_string(offset) +
        " tokens do not fit into the 16 bits that these slots have for them");
}

}  // namespace mlx_h2o
