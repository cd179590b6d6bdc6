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
LayerState layer_state(const LayerSteps& planned) {
  auto& fields = planned.memory->fields;
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
  std::vector<PlannedStep> steps;
  std::vector<mx::array> held, frame;
  std::vector<std::shared_ptr<ReservedRange>> ranges;  // to be tidied after these steps

  void run() const {
    for (const auto& [step, before] : steps) {
      if (before) before->keep(layer, state, step, held);
      decode_step(layer, state, step);
    }
    for (const auto& range : ranges) range->drop_overwritten();
  }
};

class DecodeOnSlots : public CpuPrimitive {
 public:
  DecodeOnSlots(mx::Stream stream, std::vector<LayerSteps> layers, bool sinks)
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
    for (LayerSteps& part : layers_) {
      const Layer& layer = part.layer;
      int token = 0;
      for (auto& [step, before] : part.steps) {
        step.q_dtype = dtype_of(q);
        step.q_batch = q.strides(0), step.q_head = q.strides(1);
        step.q = row(q, first, token);
        step.k_batch = k.strides(0), step.k_head = k.strides(1);
        step.k = row(k, first, token);
        step.v_batch = v.strides(0), step.v_head = v.strides(1);
        step.v = row(v, first, token);
        step.sinks = sinks_ ? inputs[3].data<float>() : nullptr;
        const int64_t sequence = int64_t(token) * q.shape(0) + first;
        step.out =
            outputs[0].data<char>() + sequence * layer.Hq * layer.Dv * size_of(layer.out_dtype);
        if (before) before->allocate();
        ++token;
      }
      ready.push_back(
          {layer,
           layer_state(part),
           std::move(part.steps),
           part.memory->fields,
           part.memory->frame,
           {}});
      const int steps = part.memory->steps;
      part.memory->steps += token;
      if (part.memory->steps / kStepsToTidy > steps / kStepsToTidy)
        ready.back().ranges = part.memory->ranges;
      first += layer.B;
    }
    encoder.dispatch([ready = std::move(ready)] {
      ThreadPool::shared().run(ready.size(), [&](int i) { ready[i].run(); });
    });
  }

 private:
  // The row of a sequence's first head and a token.
  static const void* row(const mx::array& rows, int sequence, int token) {
    return rows.data<char>() +
        (sequence * rows.strides(0) + token * rows.strides(2)) * int64_t(rows.itemsize());
  }

  std::vector<LayerSteps> layers_;
  const bool sinks_;
};

}  // namespace

std::vector<mx::array> decode_on_slots(
    std::vector<LayerSteps> layers, bool sinks, std::vector<mx::array> inputs, mx::Shape out,
    mx::Stream stream) {
  const mx::Dtype dtype = inputs[0].dtype();
  return mx::array::make_arrays(
      {std::move(out), {1}}, {dtype, mx::int32},
      std::make_shared<DecodeOnSlots>(stream, std::move(layers), sinks), inputs);
}

}  // namespace mlx_h2o
