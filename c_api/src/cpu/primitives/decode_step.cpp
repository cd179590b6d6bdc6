#include "primitive.h"
#include "slot_memory.h"

namespace mlx_h2o {

namespace {

class DecodeStepOnSlots : public CpuPrimitive {
 public:
  DecodeStepOnSlots(mx::Stream stream, std::shared_ptr<SlotMemory> memory, PlannedStep planned)
      : CpuPrimitive(stream), memory_(std::move(memory)), planned_(std::move(planned)) {}

  const char* name() const override {
    return "H2ODecodeStep";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) allocate(out);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array q = dense_last(inputs[1], encoder);
    const mx::array k = dense_last(inputs[2], encoder);
    const mx::array v = dense_last(inputs[3], encoder);
    const LayerState state = layer_state();
    Step step = std::move(planned_.step);
    step.q = q.data<void>(), step.q_dtype = dtype_of(q);
    step.q_batch = q.strides(0), step.q_head = q.strides(1);
    step.k = k.data<void>(), step.k_batch = k.strides(0), step.k_head = k.strides(1);
    step.v = v.data<void>(), step.v_batch = v.strides(0), step.v_head = v.strides(1);
    step.sinks = inputs.size() > 4 ? inputs[4].data<float>() : nullptr;
    step.out = outputs[0].data<void>();
    const Before before = before_of(outputs);
    // The arrays ride along: they must live until the task has run.
    encoder.dispatch([layer = planned_.layer, state, step = std::move(step), before,
                      held = memory_->fields, frame = memory_->frame] {
      keep(layer, state, step, before);
      decode_step(layer, state, step);
    });
  }

 private:
  // The fields as the step gets them.
  LayerState layer_state() {
    auto& fields = memory_->fields;
    const int D = planned_.layer.D, Dv = planned_.layer.Dv;
    const SlotLayout& layout = planned_.layout;
    const auto& recent = planned_.recent_layout;
    LayerState state{};
    size_t next = 0;
    state.keys = slot_rows(fields, next, D, layout.k_bits, layout.k_group_size);
    state.values = slot_rows(fields, next, Dv, layout.v_bits, layout.v_group_size);
    const auto field = [&](int f) -> mx::array& { return fields[next + f]; };
    state.positions = field(Field::positions).data<int32_t>();
    state.scores = field(Field::scores).size() ? field(Field::scores).data<float>() : nullptr;
    state.count = field(Field::count).data<float>();
    state.mean_key = field(Field::mean_key).data<float>();
    state.var_key = field(Field::var_key).data<float>();
    state.mean_value = field(Field::mean_value).data<float>();
    state.victims = field(Field::victims).data<int32_t>();
    if (planned_.measured) state.value_lengths = field(Field::value_lengths).data<uint16_t>();
    if (recent) {
      next += Field::value_lengths + planned_.measured;
      state.recent.size = fields[next].shape(2);
      state.recent.keys = slot_rows(fields, next, D, recent->k_bits, recent->k_group_size);
      state.recent.values = slot_rows(fields, next, Dv, recent->v_bits, recent->v_group_size);
      state.recent.scores = fields[next].size() ? fields[next].data<float>() : nullptr;
      if (planned_.measured) state.recent.value_lengths = fields[next + 1].data<uint16_t>();
    }
    return state;
  }

  // The outputs from the third on, in the order of `DecodingLayer::step`.
  Before before_of(std::vector<mx::array>& outputs) const {
    const SlotLayout& layout = planned_.layout;
    const Layer& layer = planned_.layer;
    const Kept& kept = planned_.kept;
    Before before;
    size_t next = 2;
    if (kept.overwritten) {
      before.slots = outputs[next++].data<int32_t>();
      before.keys = slot_rows(outputs, next, layer.D, layout.k_bits, layout.k_group_size);
      before.values = slot_rows(outputs, next, layer.Dv, layout.v_bits, layout.v_group_size);
      before.positions = outputs[next++].data<int32_t>();
      if (planned_.measured) before.value_lengths = outputs[next++].data<uint16_t>();
    }
    if (kept.scores) before.scores = outputs[next++].data<float>();
    if (kept.statistics)
      for (float** statistic :
           {&before.count, &before.mean_key, &before.var_key, &before.mean_value})
        *statistic = outputs[next++].data<float>();
    if (kept.victims) before.victims = outputs[next++].data<int32_t>();
    if (kept.recent_rows) {
      const SlotLayout& recent = *planned_.recent_layout;
      before.recent_keys = slot_rows(outputs, next, layer.D, recent.k_bits, recent.k_group_size);
      before.recent_values = slot_rows(outputs, next, layer.Dv, recent.v_bits, recent.v_group_size);
      if (planned_.measured) before.recent_value_lengths = outputs[next++].data<uint16_t>();
    }
    if (kept.recent_scores) before.recent_scores = outputs[next++].data<float>();
    return before;
  }

  static SlotRows slot_rows(
      std::vector<mx::array>& fields, size_t& next, int width, int bits, int group_size) {
    SlotRows rows{fields[next].data<void>(), dtype_of(fields[next]), width, bits, group_size};
    ++next;
    if (!bits) return rows;
    rows.dtype = dtype_of(fields[next]);
    rows.scales = fields[next++].data<void>();
    rows.biases = fields[next++].data<void>();
    return rows;
  }

  std::shared_ptr<SlotMemory> memory_;
  PlannedStep planned_;
};

}  // namespace

std::vector<mx::array> decode_step_on_slots(
    std::shared_ptr<SlotMemory> memory, PlannedStep planned, std::vector<mx::array> inputs,
    std::vector<mx::Shape> shapes, std::vector<mx::Dtype> dtypes, mx::Stream stream) {
  return mx::array::make_arrays(
      std::move(shapes), dtypes,
      std::make_shared<DecodeStepOnSlots>(stream, std::move(memory), std::move(planned)), inputs);
}

}  // namespace mlx_h2o
