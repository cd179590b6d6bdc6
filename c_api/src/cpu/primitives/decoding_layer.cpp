#include "decoding_layer.h"

#include "primitive.h"
#include "slot_memory.h"
#include "text.h"

namespace mlx_h2o {

namespace {

void append(std::vector<mx::array>& fields, const std::vector<mx::array>& more) {
  fields.insert(fields.end(), more.begin(), more.end());
}

// Attention-sink logits [Hq] in float32.
mx::array checked_sinks(const mx::array& sinks, const mx::array& q, mx::StreamOrDevice s) {
  require(
      sinks.shape() == mx::Shape{q.shape(1)}, "sinks must be [Hq]", {{"sinks", sinks}, {"q", q}});
  return float32(sinks, s);
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
      measured_ || v.bits || policy.priority != Priority::salience,
      "Salience needs the lengths of dense values");
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

PlannedStep DecodingLayer::planned(const mx::array& q, float scale, PlannedToken token) const {
  require(memory_ != nullptr, "This layer was closed");
  check_plan(token.heads, token.recent);
  const mx::Dtype positions = dtypes_[layout_.keys() + layout_.values() + Field::positions];
  if (positions == mx::int16 && token.offset > kFewTokens)
    refuse(
        "Positions of " + std::to_string(token.offset) +
        " tokens do not fit into the 16 bits that "
        "these slots have for them");
  PlannedStep planned{layout_, measured_, recent_layout_, layer_, {}, {}};
  planned.step.heads = std::move(token.heads);
  planned.step.offset = token.offset;
  planned.step.aged_from = token.aged_from;
  if (token.recent) {
    planned.step.recent_slot = token.recent->slot;
    planned.step.recent_length = token.recent->length;
    planned.step.leaving = token.recent->leaving;
  }
  planned.layer.Hq = q.shape(1);
  planned.layer.out_dtype = dtype_of(q);
  planned.layer.scale = scale;
  return planned;
}

mx::array DecodingLayer::step(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::optional<mx::array>& sinks, int offset, std::vector<HeadPlan> heads,
    const std::optional<RecentStep>& recent, mx::StreamOrDevice s, std::vector<mx::array>* before,
    int aged_from) {
  check_token(layer_.B, q, k, v);
  PlannedStep planned = this->planned(q, scale, {offset, std::move(heads), recent, aged_from});
  std::vector<mx::array> inputs{q, k, v};
  if (sinks) inputs.push_back(checked_sinks(*sinks, q, s));
  inputs.push_back(last_step_);
  std::vector<mx::Shape> shapes{{layer_.B, q.shape(1), 1, layer_.Dv}, {1}};
  std::vector<mx::Dtype> dtypes{q.dtype(), mx::int32};
  if (before) planned.kept = kept_by(planned.step, shapes, dtypes);
  auto outputs = decode_step_on_slots(
      {{memory_, std::move(planned)}}, sinks.has_value(), std::move(inputs), std::move(shapes),
      std::move(dtypes), mx::to_stream(s));
  last_step_ = outputs[1];
  if (before) before->assign(outputs.begin() + 2, outputs.end());
  return outputs[0];
}

mx::array DecodingLayer::step_together(
    const std::vector<DecodingLayer*>& layers, const mx::array& q, const mx::array& k,
    const mx::array& v, float scale, const std::optional<mx::array>& sinks,
    std::vector<PlannedToken> tokens, mx::StreamOrDevice s) {
  if (layers.empty() || tokens.size() != layers.size())
    refuse(
        "There is one token for each of " + std::to_string(layers.size()) + " layers, not " +
        std::to_string(tokens.size()));
  int B = 0;
  for (const DecodingLayer* layer : layers) B += layer->layer_.B;
  std::vector<mx::array> inputs{q, k, v};
  std::vector<LayerStep> steps;
  for (size_t i = 0; i < layers.size(); ++i) {
    // One that came twice would be written by two threads at once.
    for (size_t j = 0; j < i; ++j) require(layers[i] != layers[j], "A layer came twice");
    layers[i]->check_token(B, q, k, v);
    steps.push_back({layers[i]->memory_, layers[i]->planned(q, scale, std::move(tokens[i]))});
  }
  if (sinks) inputs.push_back(checked_sinks(*sinks, q, s));
  for (const DecodingLayer* layer : layers) inputs.push_back(layer->last_step_);
  std::vector<mx::Shape> shapes{{B, q.shape(1), 1, layers[0]->layer_.Dv}, {1}};
  auto outputs = decode_step_on_slots(
      std::move(steps), sinks.has_value(), std::move(inputs), std::move(shapes),
      {q.dtype(), mx::int32}, mx::to_stream(s));
  for (DecodingLayer* layer : layers) layer->last_step_ = outputs[1];
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
