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
    const std::optional<Recent>& recent, mx::StreamOrDevice s, const std::optional<Frame>& frame,
    int undo)
    : layer_{},
      layout_(layout_of(k, v)),
      undo_(undo),
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

LayerSteps DecodingLayer::planned(
    const mx::array& q, float scale, std::vector<TokenPlan> tokens) const {
  require(memory_ != nullptr, "This layer was closed");
  LayerSteps planned{memory_, layout_, measured_, recent_layout_, layer_, {}};
  planned.layer.Hq = q.shape(1);
  planned.layer.out_dtype = dtype_of(q);
  planned.layer.scale = scale;
  for (TokenPlan& token : tokens) {
    check_plan(token);
    Step step{};
    step.plan = std::move(token);
    std::shared_ptr<UndoRecord> record = undo_ ? before(step.plan) : nullptr;
    planned.steps.push_back({std::move(step), std::move(record)});
  }
  return planned;
}

mx::array DecodingLayer::step(
    const std::vector<DecodingLayer*>& layers, const mx::array& q, const mx::array& k,
    const mx::array& v, float scale, const std::optional<mx::array>& sinks,
    std::vector<std::vector<TokenPlan>> tokens, mx::StreamOrDevice s) {
  if (layers.empty() || tokens.size() != layers.size())
    refuse(
        "There are tokens for each of " + std::to_string(layers.size()) + " layers, not " +
        std::to_string(tokens.size()));
  const int L = tokens[0].size();
  require(L > 0, "There is no token");
  int B = 0;
  for (const DecodingLayer* layer : layers) B += layer->layer_.B;
  std::vector<LayerSteps> steps;
  for (size_t i = 0; i < layers.size(); ++i) {
    // One that came twice would be written by two threads at once.
    for (size_t j = 0; j < i; ++j) require(layers[i] != layers[j], "A layer came twice");
    require(tokens[i].size() == size_t(L), "Layers differ in their number of tokens");
    layers[i]->check_tokens(B, L, q, k, v);
    steps.push_back(layers[i]->planned(q, scale, std::move(tokens[i])));
  }
  std::vector<mx::array> inputs{q, k, v};
  if (sinks) inputs.push_back(checked_sinks(*sinks, q, s));
  for (size_t i = 0; i < layers.size(); ++i) {
    inputs.push_back(layers[i]->last_step_);
    for (const PlannedStep& step : steps[i].steps)
      if (step.before) layers[i]->note(step.before);
  }
  const int Hq = q.shape(1), Dv = layers[0]->layer_.Dv;
  auto outputs = decode_on_slots(
      std::move(steps), sinks.has_value(), std::move(inputs),
      L == 1 ? mx::Shape{B, Hq, 1, Dv} : mx::Shape{L, B, Hq, Dv}, mx::to_stream(s));
  for (DecodingLayer* layer : layers) layer->last_step_ = outputs[1];
  return L == 1 ? outputs[0] : mx::transpose(outputs[0], {1, 2, 0, 3}, s);
}

void DecodingLayer::note(std::shared_ptr<UndoRecord> step) {
  if (journal_.size() == size_t(undo_)) journal_.pop_front();
  journal_.push_back(std::move(step));
}

// What a step will change.
std::shared_ptr<UndoRecord> DecodingLayer::before(const TokenPlan& plan) const {
  const int rows = layout_.keys() + layout_.values();
  auto record = std::make_shared<UndoRecord>(layer_.B, layer_.Hk, plan);
  const auto add = [&](int field, Change change) {
    if (shapes_[field] != mx::Shape{0})  // no scores
      record->add(field, change, shapes_[field], dtypes_[field]);
  };
  const bool overwrites = std::any_of(
      plan.heads.begin(), plan.heads.end(), [](const HeadPlan& head) { return head.victim >= 0; });
  if (overwrites) {
    for (int field = 0; field <= rows + Field::positions; ++field) add(field, Change::slot_row);
    if (measured_) add(rows + Field::value_lengths, Change::slot_row);
    if (layer_.remembers)
      for (int field = Field::count; field <= Field::mean_value; ++field)
        add(rows + field, Change::whole);
  }
  add(rows + Field::scores, Change::whole);
  if (plan.chooses()) add(rows + Field::victims, Change::whole);
  if (!recent_layout_) return record;
  const int newest = rows + Field::value_lengths + measured_;
  const int scores = newest + recent_layout_->keys() + recent_layout_->values();
  if (plan.recent->leaving) {
    for (int field = newest; field < scores; ++field) add(field, Change::ring_row);
    if (measured_) add(scores + 1, Change::ring_row);
  }
  add(scores, Change::whole);
  return record;
}

void DecodingLayer::take_back(int count) {
  require(memory_ != nullptr, "This layer was closed");
  if (count < 0 || size_t(count) > journal_.size())
    refuse(
        "Of this layer's steps " + std::to_string(journal_.size()) + " can be taken back, not " +
        std::to_string(count));
  mx::eval(last_step_);
  for (; count; --count, journal_.pop_back()) journal_.back()->put_back(memory_->fields);
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
