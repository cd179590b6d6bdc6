#include "decoding_layer.h"

#include "primitive.h"
#include "slot_memory.h"
#include "text.h"

namespace mlx_h2o {

namespace {

const char* const kNames[] = {"positions", "scores",     "count",   "mean_key",
                              "var_key",   "mean_value", "victims", "value_lengths"};

void append(std::vector<mx::array>& fields, const std::vector<mx::array>& more) {
  fields.insert(fields.end(), more.begin(), more.end());
}

}  // namespace

DecodingLayer::DecodingLayer(
    const Stored& k, const Stored& v, std::vector<mx::array> others, KernelPolicy policy,
    bool remembers, bool answers, std::vector<float> saturation,
    const std::optional<Recent>& recent, mx::StreamOrDevice s, const std::optional<Frame>& frame)
    : layer_{},
      layout_(layout_of(k, v)),
      row_dtype_(k.arrays.back().dtype()),
      memory_(std::make_shared<SlotMemory>()),
      last_step_(0) {
  check_stored(k);
  check_stored(v);
  measured_ = others.size() > Field::value_lengths;
  if (others.size() != size_t(Field::value_lengths + measured_))
    refuse(
        "A layer has seven fields beside keys and values, and value_lengths, not " +
        std::to_string(others.size()));
  require(
      measured_ || policy.priority != Priority::salience, "Salience needs the lengths of values");
  const mx::array &slots = k.arrays[0], &n = others[Field::count];
  require(
      slots.ndim() == 3 && n.ndim() == 2, "Fields have wrong ranks",
      {{"keys", slots}, {"count", n}});
  layer_.B = slots.shape(0), layer_.S = slots.shape(1), layer_.Hk = n.shape(1);
  layer_.D = k.width(), layer_.Dv = v.width();
  layer_.policy = policy;
  layer_.remembers = remembers;
  layer_.answers = answers;
  if (saturation.size() != size_t(layer_.Hk))
    refuse(
        "There is one saturation for each of " + std::to_string(layer_.Hk) + " KV heads, not " +
        std::to_string(saturation.size()));
  for (const float t : saturation) require(t >= 0, "Saturations are not negative");
  layer_.saturation = std::move(saturation);
  check_fields(k, v, others);
  std::vector<mx::array> fields = k.arrays;
  append(fields, v.arrays);
  append(fields, others);
  others.clear();
  if (recent) {
    check_recent(k, v, *recent);
    recent_layout_ = layout_of(recent->keys, recent->values);
    recent_size_ = recent->keys.arrays[0].shape(2);
    append(fields, recent->keys.arrays);
    append(fields, recent->values.arrays);
    fields.push_back(recent->scores);
    if (measured_) fields.push_back(*recent->value_lengths);
  }
  if (frame) take_frame(*frame, s);
  for (mx::array& field : fields) {
    shapes_.push_back(field.shape());
    dtypes_.push_back(field.dtype());
    field = mx::contiguous(field, false, s);
  }
  last_step_ = open_slots(memory_, std::move(fields), mx::to_stream(s));
}

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
    const bool whole = field == Field::positions || field == Field::victims;
    const bool empty = field == Field::scores && !accumulates;
    if (empty ? a.size() : a.shape() != wanted[field])
      refuse(
          "The policy and the slots want the shape " + text(wanted[field]), {{kNames[field], a}});
    const mx::Dtype dtype = whole       ? mx::int32
        : field == Field::value_lengths ? mx::float16
                                        : mx::float32;
    require(
        a.dtype() == dtype,
        "Positions and victims must be int32, value_lengths float16, scores and the remainder "
        "float32",
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

void DecodingLayer::take_frame(const Frame& frame, mx::StreamOrDevice s) {
  const mx::Shape wanted{layer_.Hk, layer_.D};
  require(
      frame.centre.shape() == wanted && frame.scale.shape() == wanted && layout_.k_bits,
      "A frame has a centre and a scale for each element of packed keys",
      {{"centre", frame.centre}, {"scale", frame.scale}});
  memory_->frame = {float32(frame.centre, s), float32(frame.scale, s)};
  mx::eval(memory_->frame);  // once; every step reads it
  layer_.frame_centre = memory_->frame[0].data<float>();
  layer_.frame_scale = memory_->frame[1].data<float>();
}

void DecodingLayer::check_token(const mx::array& q, const mx::array& k, const mx::array& v) const {
  const int B = layer_.B, Hk = layer_.Hk, D = layer_.D, Dv = layer_.Dv;
  if (q.ndim() != 4 || q.shape(0) != B || q.shape(1) % Hk || q.shape(2) != 1 || q.shape(3) != D)
    refuse(
        "q must be [" + std::to_string(B) + ", Hq, 1, " + std::to_string(D) +
            "] with a multiple of " + std::to_string(Hk) + " heads",
        {{"it is", q}});
  if (q.shape(1) / Hk > kMaxRows)
    refuse(
        "At most " + std::to_string(kMaxRows) + " query heads may share one of " +
            std::to_string(Hk) + " KV heads",
        {{"q", q}});
  const mx::Shape of_k{B, Hk, 1, D}, of_v{B, Hk, 1, Dv};
  if (k.shape() != of_k || v.shape() != of_v)
    refuse("k and v must be " + text(of_k) + " and " + text(of_v), {{"k", k}, {"v", v}});
  require(
      k.dtype() == row_dtype_ && v.dtype() == row_dtype_,
      "k and v have another dtype than the slots", {{"k", k}, {"v", v}});
}

void DecodingLayer::check_plan(
    const std::vector<HeadPlan>& heads, const std::optional<RecentStep>& recent) const {
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
}

mx::array DecodingLayer::step(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::optional<mx::array>& sinks, int offset, std::vector<HeadPlan> heads,
    const std::optional<RecentStep>& recent, mx::StreamOrDevice s, std::vector<mx::array>* before,
    int aged_from) {
  require(memory_ != nullptr, "This layer was closed");
  check_token(q, k, v);
  check_plan(heads, recent);
  PlannedStep planned{layout_, measured_, recent_layout_, layer_, {}, {}};
  planned.step.heads = std::move(heads);
  planned.step.offset = offset;
  planned.step.aged_from = aged_from;
  if (recent) {
    planned.step.recent_slot = recent->slot;
    planned.step.recent_length = recent->length;
    planned.step.leaving = recent->leaving;
  }
  const int Hq = planned.layer.Hq = q.shape(1);
  planned.layer.out_dtype = dtype_of(q);
  planned.layer.scale = scale;
  std::vector<mx::array> inputs{last_step_, q, k, v};
  if (sinks) {
    require(sinks->shape() == mx::Shape{Hq}, "sinks must be [Hq]", {{"sinks", *sinks}, {"q", q}});
    inputs.push_back(float32(*sinks, s));
  }
  std::vector<mx::Shape> shapes{{layer_.B, Hq, 1, layer_.Dv}, {1}};
  std::vector<mx::Dtype> dtypes{q.dtype(), mx::int32};
  if (before) planned.kept = kept_by(planned.step, shapes, dtypes);
  auto outputs = decode_step_on_slots(
      memory_, std::move(planned), std::move(inputs), std::move(shapes), std::move(dtypes),
      mx::to_stream(s));
  last_step_ = outputs[1];
  if (before) before->assign(outputs.begin() + 2, outputs.end());
  return outputs[0];
}

Kept DecodingLayer::kept_by(
    const Step& step, std::vector<mx::Shape>& shapes, std::vector<mx::Dtype>& dtypes) const {
  const int rows = layout_.keys() + layout_.values();
  const int newest = rows + Field::value_lengths + measured_;
  const auto whole = [&](int field) {
    if (shapes_[field] == mx::Shape{0}) return false;  // no scores
    shapes.push_back(shapes_[field]);
    dtypes.push_back(dtypes_[field]);
    return true;
  };
  // One number per head of a field.
  const auto number = [&](int field) {
    shapes.push_back({layer_.B, layer_.Hk});
    dtypes.push_back(dtypes_[field]);
  };
  // One row per head of fields [B, ..., rows, width].
  const auto row = [&](int first, int last) {
    for (int field = first; field < last; ++field) {
      number(field);
      shapes.back().push_back(shapes_[field].back());
    }
  };
  Kept kept;
  bool chooses = false;
  for (const HeadPlan& head : step.heads) {
    kept.overwritten |= head.victim >= 0;
    chooses |= head.choose;
  }
  if (kept.overwritten) {
    shapes.push_back({layer_.B, layer_.Hk});
    dtypes.push_back(mx::int32);
    row(0, rows);
    number(rows + Field::positions);
    if (measured_) number(rows + Field::value_lengths);
  }
  kept.scores = whole(rows + Field::scores);
  kept.statistics = kept.overwritten && layer_.remembers;
  if (kept.statistics)
    for (int field = Field::count; field <= Field::mean_value; ++field) whole(rows + field);
  kept.victims = chooses && whole(rows + Field::victims);
  if (!recent_layout_) return kept;
  const int of_newest = recent_layout_->keys() + recent_layout_->values();
  kept.recent_rows = step.leaving;
  if (kept.recent_rows) {
    row(newest, newest + of_newest);
    if (measured_) number(newest + of_newest + 1);
  }
  kept.recent_scores = whole(newest + of_newest);
  return kept;
}

std::vector<mx::array> DecodingLayer::close(mx::StreamOrDevice s) {
  require(memory_ != nullptr, "This layer was closed");
  auto outputs = close_slots(memory_, last_step_, shapes_, dtypes_, mx::to_stream(s));
  memory_ = nullptr;
  // Costs nothing then, and leaves nothing behind that still wants evaluating.
  if (last_step_.is_available()) mx::eval(outputs);
  return outputs;
}

}  // namespace mlx_h2o
