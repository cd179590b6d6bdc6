#include <type_traits>

#include "primitive.h"
#include "slot_memory.h"
#include "thread_pool.h"

namespace mlx_h2o {

namespace {

// Keys or values among a layer's arrays; `next` moves behind them.
SlotRows slot_rows(
    std::vector<mx::array>& fields, size_t& next, int width, int bits, int group_size) {
  SlotRows rows{fields[next].data<void>(), dtype_of(fields[next]), width, bits, group_size};
  ++next;
  if (!bits) return rows;
  rows.dtype = dtype_of(fields[next]);
  rows.scales = fields[next++].data<void>();
  rows.biases = fields[next++].data<void>();
  return rows;
}

Positions positions_in(mx::array& field) {
  return {field.data<void>(), field.dtype() == mx::int16};
}

// The fields as the step gets them.
LayerState layer_state(SlotMemory& memory, const PlannedStep& planned) {
  auto& fields = memory.fields;
  const int D = planned.layer.D, Dv = planned.layer.Dv;
  const SlotLayout& layout = planned.layout;
  const auto& recent = planned.recent_layout;
  LayerState state{};
  size_t next = 0;
  state.keys = slot_rows(fields, next, D, layout.k_bits, layout.k_group_size);
  state.values = slot_rows(fields, next, Dv, layout.v_bits, layout.v_group_size);
  const auto field = [&](int f) -> mx::array& { return fields[next + f]; };
  state.positions = positions_in(field(Field::positions));
  state.scores = field(Field::scores).size() ? field(Field::scores).data<float>() : nullptr;
  state.count = field(Field::count).data<float>();
  state.mean_key = field(Field::mean_key).data<float>();
  state.var_key = field(Field::var_key).data<float>();
  state.mean_value = field(Field::mean_value).data<float>();
  state.victims = field(Field::victims).data<int32_t>();
  if (planned.measured) state.value_lengths = field(Field::value_lengths).data<uint16_t>();
  if (recent) {
    next += Field::value_lengths + planned.measured;
    state.recent.size = fields[next].shape(2);
    state.recent.keys = slot_rows(fields, next, D, recent->k_bits, recent->k_group_size);
    state.recent.values = slot_rows(fields, next, Dv, recent->v_bits, recent->v_group_size);
    state.recent.scores = fields[next].size() ? fields[next].data<float>() : nullptr;
    if (planned.measured) state.recent.value_lengths = fields[next + 1].data<uint16_t>();
  }
  return state;
}

// Steps after which memory that copies shared is looked through.
constexpr int kStepsToTidy = 64;

// A layer's part with everything that it needs to run. The arrays ride along: they must live until
// the task has run.
struct Ready {
  Layer layer;
  LayerState state;
  Step step;
  Before before;
  std::vector<mx::array> held, frame;
  std::vector<std::shared_ptr<ReservedRange>> ranges;  // to be tidied after this step

  void run() const {
    keep(layer, state, step, before);
    decode_step(layer, state, step);
    for (const auto& range : ranges) range->drop_overwritten();
  }
};

// `count` elements after `data`.
template <class T>
T* after(T* data, int64_t count, Dtype dtype) {
  using Bytes = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Bytes*>(data) + count * size_of(dtype);
}

class DecodeStepOnSlots : public CpuPrimitive {
 public:
  DecodeStepOnSlots(mx::Stream stream, std::vector<LayerStep> layers, bool sinks)
      : CpuPrimitive(stream), layers_(std::move(layers)), sinks_(sinks) {}

  const char* name() const override {
    return "H2ODecodeStep";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) allocate(out);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array q = dense_last(inputs[0], encoder);
    const mx::array k = dense_last(inputs[1], encoder);
    const mx::array v = dense_last(inputs[2], encoder);
    std::vector<Ready> ready;
    ready.reserve(layers_.size());
    int first = 0;
    for (LayerStep& part : layers_) {
      const Layer& layer = part.planned.layer;
      Step step = std::move(part.planned.step);
      step.q_dtype = dtype_of(q);
      step.q_batch = q.strides(0), step.q_head = q.strides(1);
      step.q = after(q.data<void>(), first * step.q_batch, step.q_dtype);
      step.k_batch = k.strides(0), step.k_head = k.strides(1);
      step.k = after(k.data<void>(), first * step.k_batch, dtype_of(k));
      step.v_batch = v.strides(0), step.v_head = v.strides(1);
      step.v = after(v.data<void>(), first * step.v_batch, dtype_of(v));
      step.sinks = sinks_ ? inputs[3].data<float>() : nullptr;
      const int64_t row = int64_t(layer.Hq) * layer.Dv;
      step.out = after(outputs[0].data<void>(), first * row, layer.out_dtype);
      ready.push_back(
          {layer,
           layer_state(*part.memory, part.planned),
           std::move(step),
           before_of(outputs, part.planned),
           part.memory->fields,
           part.memory->frame,
           {}});
      if (++part.memory->steps % kStepsToTidy == 0) ready.back().ranges = part.memory->ranges;
      first += layer.B;
    }
    encoder.dispatch([ready = std::move(ready)] {
      ThreadPool::shared().run(ready.size(), [&](int i) { ready[i].run(); });
    });
  }

 private:
  // The outputs from the third on, in the order of `DecodingLayer::step`.
  static Before before_of(std::vector<mx::array>& outputs, const PlannedStep& planned) {
    const SlotLayout& layout = planned.layout;
    const Layer& layer = planned.layer;
    const Kept& kept = planned.kept;
    Before before;
    size_t next = 2;
    if (kept.overwritten) {
      before.slots = outputs[next++].data<int32_t>();
      before.keys = slot_rows(outputs, next, layer.D, layout.k_bits, layout.k_group_size);
      before.values = slot_rows(outputs, next, layer.Dv, layout.v_bits, layout.v_group_size);
      before.positions = positions_in(outputs[next++]);
      if (planned.measured) before.value_lengths = outputs[next++].data<uint16_t>();
    }
    if (kept.scores) before.scores = outputs[next++].data<float>();
    if (kept.statistics)
      for (float** statistic :
           {&before.count, &before.mean_key, &before.var_key, &before.mean_value})
        *statistic = outputs[next++].data<float>();
    if (kept.victims) before.victims = outputs[next++].data<int32_t>();
    if (kept.recent_rows) {
      const SlotLayout& recent = *planned.recent_layout;
      before.recent_keys = slot_rows(outputs, next, layer.D, recent.k_bits, recent.k_group_size);
      before.recent_values = slot_rows(outputs, next, layer.Dv, recent.v_bits, recent.v_group_size);
      if (planned.measured) before.recent_value_lengths = outputs[next++].data<uint16_t>();
    }
    if (kept.recent_scores) before.recent_scores = outputs[next++].data<float>();
    return before;
  }

  std::vector<LayerStep> layers_;
  const bool sinks_;
};

}  // namespace

std::vector<mx::array> decode_step_on_slots(
    std::vector<LayerStep> layers, bool sinks, std::vector<mx::array> inputs,
    std::vector<mx::Shape> shapes, std::vector<mx::Dtype> dtypes, mx::Stream stream) {
  return mx::array::make_arrays(
      std::move(shapes), dtypes,
      std::make_shared<DecodeStepOnSlots>(stream, std::move(layers), sinks), inputs);
}

}  // namespace mlx_h2o
