#include "primitives.h"

#include <cstring>
#include <stdexcept>

#include "attention.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mlx_h2o {

namespace {

bool is_float(const mx::array& a) {
  return a.dtype() == mx::float32 || a.dtype() == mx::float16 || a.dtype() == mx::bfloat16;
}

Dtype dtype_of(const mx::array& a) {
  if (a.dtype() == mx::float16) return Dtype::float16;
  if (a.dtype() == mx::bfloat16) return Dtype::bfloat16;
  return Dtype::float32;
}

void allocate(mx::array& a) {
  a.set_data(mx::allocator::malloc(a.nbytes()));
}

// The array itself if its last axis is dense, else a dense copy that lives as long as the task.
mx::array dense_last(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  if (a.size() == 0 || a.strides().back() == 1 || a.shape().back() == 1) return a;
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  allocate(copy);
  encoder.add_temporary(copy);
  encoder.dispatch([from = a.data<char>(), to = copy.data<char>(), shape = a.shape(),
                    strides = a.strides(), size = a.itemsize(), count = a.size()]() {
    for (size_t i = 0; i < count; ++i) {
      size_t rest = i;
      int64_t where = 0;
      for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
        where += static_cast<int64_t>(rest % shape[axis]) * strides[axis];
        rest /= shape[axis];
      }
      std::memcpy(to + i * size, from + where * static_cast<int64_t>(size), size);
    }
  });
  return copy;
}

class NoGradients : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[mlx_h2o] This is the CPU's kernel; it has no GPU form.");
  }
};

// Rows of the arrays from `next` on, and the strides from batch to batch and from head to head.
struct OpenedRows {
  Rows rows;
  int64_t batch, head, scale_batch, scale_head;
};

OpenedRows open_rows(
    const std::vector<mx::array>& inputs, size_t& next, int bits, int group_size,
    mx::cpu::CommandEncoder& encoder) {
  const mx::array data = dense_last(inputs[next++], encoder);
  const bool flat = data.ndim() == 3;
  OpenedRows opened{};
  opened.rows = {data.data<void>(), data.strides(-2), dtype_of(data)};
  opened.batch = data.strides(0);
  opened.head = flat ? 0 : data.strides(1);
  if (!bits) return opened;
  const mx::array scales = dense_last(inputs[next++], encoder);
  mx::array biases = dense_last(inputs[next++], encoder);
  opened.rows.dtype = dtype_of(scales);
  opened.rows.bits = bits;
  opened.rows.group_size = group_size;
  opened.rows.scales = scales.data<void>();
  opened.rows.biases = biases.data<void>();
  opened.rows.scale_stride = scales.strides(-2);
  opened.scale_batch = scales.strides(0);
  opened.scale_head = flat ? 0 : scales.strides(1);
  return opened;
}

class AttentionWithScores : public NoGradients {
 public:
  AttentionWithScores(
      mx::Stream stream, float scale, MaskKind mask, bool sinks, bool seed, Export wanted,
      std::optional<Ranges> ranges, SlotLayout layout, int value_width)
      : NoGradients(stream),
        scale_(scale),
        mask_(mask),
        sinks_(sinks),
        seed_(seed),
        wanted_(wanted),
        ranges_(std::move(ranges)),
        layout_(layout),
        value_width_(value_width) {}

  const char* name() const override {
    return "H2OAttention";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) allocate(out);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array q = dense_last(inputs[0], encoder);
    size_t next = 1;
    const OpenedRows k = open_rows(inputs, next, layout_.k_bits, layout_.k_group_size, encoder);
    const OpenedRows v = open_rows(inputs, next, layout_.v_bits, layout_.v_group_size, encoder);

    Attention a{};
    a.B = q.shape(0), a.Hq = q.shape(1), a.L = q.shape(2), a.D = q.shape(3);
    a.Dv = value_width_;
    a.Hk = ranges_ ? static_cast<int>(ranges_->size()) : inputs[1].shape(1);
    a.scale = scale_;
    a.q = q.data<void>(), a.q_dtype = dtype_of(q);
    a.q_batch = q.strides(0), a.q_head = q.strides(1), a.q_query = q.strides(2);
    a.k = k.rows, a.v = v.rows;
    a.k_batch = k.batch, a.v_batch = v.batch;
    a.k_scale_batch = k.scale_batch, a.v_scale_batch = v.scale_batch;
    for (int h = 0; h < a.Hk; ++h) {
      const auto [start, length] =
          ranges_ ? (*ranges_)[h] : std::pair{int64_t(0), inputs[1].shape(-2)};
      a.heads.push_back(
          {h * k.head + start * k.rows.stride, h * v.head + start * v.rows.stride, start, length,
           h * k.scale_head + start * k.rows.scale_stride,
           h * v.scale_head + start * v.rows.scale_stride});
    }
    a.mask.kind = mask_;
    if (mask_ == MaskKind::boolean || mask_ == MaskKind::additive) {
      const mx::array& mask = inputs[next++];
      a.mask.data = mask.data<void>();
      a.mask.dtype = dtype_of(mask);
      a.mask.batch = mask.strides(0), a.mask.head = mask.strides(1);
      a.mask.query = mask.strides(2), a.mask.slot = mask.strides(3);
    }
    if (sinks_) a.sinks = inputs[next++].data<float>();
    if (seed_) {
      a.seed_logits = inputs[next++].data<float>();
      a.seed_values = inputs[next++].data<float>();
    }
    a.out = outputs[0].data<void>(), a.out_dtype = dtype_of(outputs[0]);
    a.lse = outputs[1].data<float>();
    float* fill = nullptr;
    float filler = 0;
    if (wanted_ != Export::none) {
      fill = outputs[2].data<float>();
      const int64_t columns = outputs[2].shape(-1);
      const int G = a.Hq / a.Hk;
      if (wanted_ == Export::logits) {
        filler = -std::numeric_limits<float>::infinity();
        a.logits = fill;
        a.logits_query = columns;
        a.logits_group = a.L * columns;
        a.logits_head = ranges_ ? 0 : G * a.logits_group;
        a.logits_batch = (ranges_ ? G : a.Hq) * a.logits_group;
      } else {
        a.mass = fill;
        a.mass_head = ranges_ ? 0 : columns;
        a.mass_batch = (ranges_ ? 1 : a.Hk) * columns;
      }
    }
    // Dense logits are all written; mass is summed up, and unused flat slots must say so.
    const bool fills = wanted_ == Export::mass || (fill && ranges_);
    encoder.dispatch([a = std::move(a), fill, filler, fills, count = fill ? outputs[2].size() : 0] {
      if (fills) std::fill(fill, fill + count, filler);
      attend(a);
    });
  }

 private:
  float scale_;
  MaskKind mask_;
  bool sinks_, seed_;
  Export wanted_;
  std::optional<Ranges> ranges_;
  SlotLayout layout_;
  int value_width_;
};

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("[mlx_h2o] ") + what);
}

mx::array float32(const mx::array& a, mx::StreamOrDevice s) {
  return mx::contiguous(mx::astype(a, mx::float32, s), false, s);
}

}  // namespace

namespace {

// Raises unless the arrays are rows [..., rows, width].
void check_stored(const Stored& x) {
  require(x.arrays.size() == (x.bits ? 3 : 1), "Dense rows are one array, packed rows three.");
  require(is_float(x.arrays.back()), "Keys and values must be float32, float16 or bfloat16.");
  if (!x.bits) return;
  const auto& [words, scales, biases] = std::tie(x.arrays[0], x.arrays[1], x.arrays[2]);
  require(x.bits >= 2 && x.bits <= 8 && x.bits != 7, "bits must be 2, 3, 4, 5, 6 or 8.");
  require(
      x.group_size == 32 || x.group_size == 64 || x.group_size == 128,
      "group_size must be 32, 64 or 128.");
  require(words.dtype() == mx::uint32, "Packed rows are uint32.");
  require(
      x.width() % x.group_size == 0 && scales.shape(-1) == x.width() / x.group_size &&
          scales.shape() == biases.shape() && scales.dtype() == biases.dtype(),
      "Scales and biases do not fit the packed rows.");
  for (size_t axis = 0; axis + 1 < words.ndim(); ++axis)
    require(
        words.ndim() == scales.ndim() && words.shape(axis) == scales.shape(axis),
        "Scales and biases do not fit the packed rows.");
}

SlotLayout layout_of(const Stored& k, const Stored& v) {
  return {k.bits, k.group_size, v.bits, v.group_size};
}

}  // namespace

std::vector<mx::array> attention(
    const mx::array& q, const Stored& stored_k, const Stored& stored_v, float scale, bool causal,
    const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const std::optional<Seed>& seed, const std::optional<Ranges>& ranges, Export wanted,
    mx::StreamOrDevice s) {
  check_stored(stored_k);
  check_stored(stored_v);
  const mx::array &k = stored_k.arrays[0], &v = stored_v.arrays[0];
  const int Dv = stored_v.width();
  const int rank = ranges ? 3 : 4;
  require(
      q.ndim() == 4 && int(k.ndim()) == rank && int(v.ndim()) == rank,
      "q, k and v have wrong ranks.");
  const int Hk = ranges ? static_cast<int>(ranges->size()) : k.shape(1);
  require(k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0), "Batches differ.");
  require(stored_k.width() == q.shape(-1), "Widths of q and k differ.");
  require(k.shape(-2) == v.shape(-2) && (ranges || k.shape(1) == v.shape(1)), "k and v differ.");
  require(Hk > 0 && q.shape(1) % Hk == 0, "Query heads are no multiple of KV heads.");
  require(!(ranges && mask), "Ranges and an array mask exclude each other.");
  if (ranges)
    for (const auto& [start, length] : *ranges)
      require(
          start >= 0 && length >= 0 && start + length <= k.shape(1), "A range leaves the slots.");
  const int B = q.shape(0), Hq = q.shape(1), L = q.shape(2), N = k.shape(-2);
  std::vector<mx::array> inputs{q};
  inputs.insert(inputs.end(), stored_k.arrays.begin(), stored_k.arrays.end());
  inputs.insert(inputs.end(), stored_v.arrays.begin(), stored_v.arrays.end());
  MaskKind kind = causal ? MaskKind::causal : MaskKind::none;
  if (mask) {
    kind = mask->dtype() == mx::bool_ ? MaskKind::boolean : MaskKind::additive;
    inputs.push_back(mx::broadcast_to(*mask, {B, Hq, L, N}, s));
  }
  if (sinks) {
    require(sinks->shape() == mx::Shape{Hq}, "sinks must be [Hq].");
    inputs.push_back(float32(*sinks, s));
  }
  if (seed) {
    require(seed->first.shape() == mx::Shape{B, Hq, L}, "A seed's logits must be [B, Hq, L].");
    require(seed->second.shape() == mx::Shape{B, Hk, Dv}, "A seed's values must be [B, Hk, Dv].");
    inputs.push_back(float32(seed->first, s));
    inputs.push_back(float32(seed->second, s));
  }
  std::vector<mx::Shape> shapes{{B, Hq, L, Dv}, {B, Hq, L}};
  std::vector<mx::Dtype> dtypes{q.dtype(), mx::float32};
  if (wanted == Export::logits) shapes.push_back({B, ranges ? Hq / Hk : Hq, L, N});
  if (wanted == Export::mass) shapes.push_back(ranges ? mx::Shape{B, N} : mx::Shape{B, Hk, N});
  if (wanted != Export::none) dtypes.push_back(mx::float32);
  return mx::array::make_arrays(
      std::move(shapes), dtypes,
      std::make_shared<AttentionWithScores>(
          mx::to_stream(s), scale, kind, sinks.has_value(), seed.has_value(), wanted, ranges,
          layout_of(stored_k, stored_v), Dv),
      inputs);
}

namespace {

// After keys and values.
enum Field { positions, scores, count, mean_key, var_key, mean_value, victims, kFields };

// Takes arrays out of the graph: their buffers where nobody else holds them, copies otherwise.
class OpenSlots : public NoGradients {
 public:
  OpenSlots(mx::Stream stream, std::shared_ptr<SlotMemory> memory)
      : NoGradients(stream), memory_(std::move(memory)) {}

  const char* name() const override {
    return "H2OOpenSlots";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& in : inputs) {
      if (in.is_donatable() || in.size() == 0) {
        memory_->fields.push_back(in);
        continue;
      }
      mx::array copy(in.shape(), in.dtype(), nullptr, {});
      allocate(copy);
      encoder.dispatch([from = in.data<char>(), to = copy.data<char>(), size = in.nbytes()] {
        std::memcpy(to, from, size);
      });
      memory_->fields.push_back(copy);
    }
  }

 private:
  std::shared_ptr<SlotMemory> memory_;
};

class DecodeStepOnSlots : public NoGradients {
 public:
  DecodeStepOnSlots(
      mx::Stream stream, std::shared_ptr<SlotMemory> memory, SlotLayout layout,
      std::optional<SlotLayout> recent_layout, Layer layer, Step step)
      : NoGradients(stream),
        memory_(std::move(memory)),
        layout_(layout),
        recent_layout_(recent_layout),
        layer_(layer),
        step_(std::move(step)) {}

  const char* name() const override {
    return "H2ODecodeStep";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) allocate(out);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array q = dense_last(inputs[1], encoder);
    const mx::array k = dense_last(inputs[2], encoder);
    const mx::array v = dense_last(inputs[3], encoder);
    auto& fields = memory_->fields;
    LayerState state{};
    size_t next = 0;
    state.keys = slot_rows(next, layer_.D, layout_.k_bits, layout_.k_group_size);
    state.values = slot_rows(next, layer_.Dv, layout_.v_bits, layout_.v_group_size);
    const auto field = [&](Field f) -> mx::array& { return fields[next + f]; };
    state.positions = field(positions).data<int32_t>();
    state.scores = field(scores).size() ? field(scores).data<float>() : nullptr;
    state.count = field(count).data<float>();
    state.mean_key = field(mean_key).data<float>();
    state.var_key = field(var_key).data<float>();
    state.mean_value = field(mean_value).data<float>();
    state.victims = field(victims).data<int32_t>();
    if (recent_layout_) {
      next += kFields;
      state.recent.size = fields[next].shape(2);
      state.recent.keys =
          slot_rows(next, layer_.D, recent_layout_->k_bits, recent_layout_->k_group_size);
      state.recent.values =
          slot_rows(next, layer_.Dv, recent_layout_->v_bits, recent_layout_->v_group_size);
      state.recent.scores = fields[next].size() ? fields[next].data<float>() : nullptr;
    }
    Step step = std::move(step_);
    step.q = q.data<void>(), step.q_dtype = dtype_of(q);
    step.q_batch = q.strides(0), step.q_head = q.strides(1);
    step.k = k.data<void>(), step.k_batch = k.strides(0), step.k_head = k.strides(1);
    step.v = v.data<void>(), step.v_batch = v.strides(0), step.v_head = v.strides(1);
    step.sinks = inputs.size() > 4 ? inputs[4].data<float>() : nullptr;
    step.out = outputs[0].data<void>();
    // The arrays ride along: they must live until the task has run.
    encoder.dispatch([layer = layer_, state, step = std::move(step), held = fields] {
      decode_step(layer, state, step);
    });
  }

 private:
  SlotRows slot_rows(size_t& next, int width, int bits, int group_size) const {
    auto& fields = memory_->fields;
    SlotRows rows{fields[next].data<void>(), dtype_of(fields[next]), width, bits, group_size};
    ++next;
    if (!bits) return rows;
    rows.dtype = dtype_of(fields[next]);
    rows.scales = fields[next++].data<void>();
    rows.biases = fields[next++].data<void>();
    return rows;
  }

  std::shared_ptr<SlotMemory> memory_;
  SlotLayout layout_;
  std::optional<SlotLayout> recent_layout_;
  Layer layer_;
  Step step_;  // what is known before the arrays are
};

class CloseSlots : public NoGradients {
 public:
  CloseSlots(mx::Stream stream, std::shared_ptr<SlotMemory> memory)
      : NoGradients(stream), memory_(std::move(memory)) {}

  const char* name() const override {
    return "H2OCloseSlots";
  }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_shared_buffer(memory_->fields[i]);
    memory_->fields.clear();
  }

 private:
  std::shared_ptr<SlotMemory> memory_;
};

}  // namespace

DecodingLayer::DecodingLayer(
    const Stored& k, const Stored& v, std::vector<mx::array> others, PolicyForm policy,
    bool remembers, bool answers, float saturation, const std::optional<Recent>& recent,
    mx::StreamOrDevice s)
    : layer_{},
      layout_(layout_of(k, v)),
      row_dtype_(k.arrays.back().dtype()),
      memory_(std::make_shared<SlotMemory>()),
      last_step_(0) {
  check_stored(k);
  check_stored(v);
  require(others.size() == kFields, "A layer has seven fields beside keys and values.");
  const mx::Shape& slots = k.arrays[0].shape();
  const mx::Shape& n = others[count].shape();
  require(slots.size() == 3 && n.size() == 2, "Fields have wrong ranks.");
  layer_.B = slots[0], layer_.S = slots[1], layer_.Hk = n[1];
  layer_.D = k.width(), layer_.Dv = v.width();
  const int B = layer_.B, Hk = layer_.Hk, S = slots[1], D = layer_.D, Dv = layer_.Dv;
  const bool accumulates = policy.score != Score::none;
  require(
      v.arrays[0].ndim() == 3 && v.arrays[0].shape(0) == B && v.arrays[0].shape(1) == S &&
          others[positions].shape() == mx::Shape{B, S},
      "Slots differ.");
  require(
      others[scores].size() == (accumulates ? size_t(B) * S : 0), "Scores do not fit the policy.");
  require(
      n == mx::Shape{B, Hk} && others[mean_key].shape() == mx::Shape{B, Hk, D} &&
          others[var_key].shape() == mx::Shape{B, Hk, D} &&
          others[mean_value].shape() == mx::Shape{B, Hk, Dv} &&
          others[victims].shape() == mx::Shape{B, Hk, policy.evict_every},
      "The remainder or the victims do not fit.");
  require(v.arrays.back().dtype() == row_dtype_, "Keys and values differ in dtype.");
  for (int field = positions; field < kFields; ++field)
    require(
        others[field].dtype() == (field == positions || field == victims ? mx::int32 : mx::float32),
        "Positions and victims must be int32, scores and the remainder float32.");
  layer_.policy = policy;
  layer_.remembers = remembers;
  layer_.answers = answers;
  layer_.saturation = saturation;
  std::vector<mx::array> fields = k.arrays;
  fields.insert(fields.end(), v.arrays.begin(), v.arrays.end());
  fields.insert(fields.end(), others.begin(), others.end());
  others.clear();
  if (recent) {
    check_stored(recent->keys);
    check_stored(recent->values);
    recent_layout_ = layout_of(recent->keys, recent->values);
    recent_size_ = recent->keys.arrays[0].shape(2);
    const mx::Shape rows{B, Hk, recent_size_};
    const auto fit = [&](const Stored& kept, const Stored& x) {
      const mx::array& first = x.arrays[0];
      return first.ndim() == 4 &&
          mx::Shape(first.shape().begin(), first.shape().end() - 1) == rows &&
          x.width() == kept.width() && x.arrays.back().dtype() == row_dtype_ &&
          (!x.bits || (kept.bits && x.group_size == kept.group_size));
    };
    require(
        recent_size_ > 0 && fit(k, recent->keys) && fit(v, recent->values) &&
            (accumulates ? recent->scores.shape() == rows : recent->scores.size() == 0),
        "The newest tokens do not fit the others.");
    fields.insert(fields.end(), recent->keys.arrays.begin(), recent->keys.arrays.end());
    fields.insert(fields.end(), recent->values.arrays.begin(), recent->values.arrays.end());
    fields.push_back(recent->scores);
  }
  for (mx::array& field : fields) {
    shapes_.push_back(field.shape());
    dtypes_.push_back(field.dtype());
    field = mx::contiguous(field, false, s);
  }
  last_step_ = mx::array(
      {1}, mx::int32, std::make_shared<OpenSlots>(mx::to_stream(s), memory_), std::move(fields));
}

mx::array DecodingLayer::step(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::optional<mx::array>& sinks, int offset, std::vector<StepHead> heads,
    const std::optional<RecentStep>& recent, mx::StreamOrDevice s) {
  const int B = layer_.B, Hk = layer_.Hk, D = layer_.D, Dv = layer_.Dv;
  require(memory_ != nullptr, "This layer was closed.");
  require(
      q.ndim() == 4 && q.shape(0) == B && q.shape(1) % Hk == 0 && q.shape(2) == 1 &&
          q.shape(3) == D,
      "q must be [B, Hq, 1, D].");
  require(q.shape(1) / Hk <= kMaxRows, "Too many query heads share a KV head.");
  require(
      k.shape() == mx::Shape{B, Hk, 1, D} && v.shape() == mx::Shape{B, Hk, 1, Dv},
      "k and v must be [B, Hk, 1, D] and [B, Hk, 1, Dv].");
  require(k.dtype() == row_dtype_ && v.dtype() == row_dtype_, "k and v have another dtype.");
  require(int(heads.size()) == Hk, "One plan for each KV head.");
  require(recent.has_value() == recent_layout_.has_value(), "Newest tokens, or none.");
  require(
      !recent ||
          (recent->slot >= 0 && recent->slot < recent->length && recent->length <= recent_size_),
      "The newest token leaves its ring.");
  const bool writes = !recent || recent->leaving;
  for (const StepHead& head : heads)
    require(
        head.start >= 0 && head.length >= (writes ? 1 : 0) &&
            head.start + head.length <= layer_.S && head.victim < layer_.policy.evict_every,
        "A head leaves its slots.");
  for (const StepHead& head : heads)
    require(
        !layer_.policy.per_layer ||
            (head.length == heads[0].length && head.choose == heads[0].choose),
        "Heads that choose together must be alike.");
  Step step{};
  step.heads = std::move(heads);
  step.offset = offset;
  if (recent) {
    step.recent_slot = recent->slot;
    step.recent_length = recent->length;
    step.leaving = recent->leaving;
  }
  Layer layer = layer_;
  layer.Hq = q.shape(1);
  layer.out_dtype = dtype_of(q);
  layer.scale = scale;
  std::vector<mx::array> inputs{last_step_, q, k, v};
  if (sinks) {
    require(sinks->shape() == mx::Shape{layer.Hq}, "sinks must be [Hq].");
    inputs.push_back(float32(*sinks, s));
  }
  auto outputs = mx::array::make_arrays(
      {{B, layer.Hq, 1, Dv}, {1}}, {q.dtype(), mx::int32},
      std::make_shared<DecodeStepOnSlots>(
          mx::to_stream(s), memory_, layout_, recent_layout_, layer, std::move(step)),
      inputs);
  last_step_ = outputs[1];
  return outputs[0];
}

std::vector<mx::array> DecodingLayer::close(mx::StreamOrDevice s) {
  require(memory_ != nullptr, "This layer was closed.");
  auto outputs = mx::array::make_arrays(
      shapes_, dtypes_, std::make_shared<CloseSlots>(mx::to_stream(s), memory_), {last_step_});
  memory_ = nullptr;
  // Costs nothing then, and leaves nothing behind that still wants evaluating.
  if (last_step_.is_available()) mx::eval(outputs);
  return outputs;
}

}  // namespace mlx_h2o
