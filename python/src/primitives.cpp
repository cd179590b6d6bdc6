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

class AttentionWithScores : public NoGradients {
 public:
  AttentionWithScores(
      mx::Stream stream, float scale, MaskKind mask, bool sinks, bool seed, Export wanted,
      std::optional<Ranges> ranges)
      : NoGradients(stream),
        scale_(scale),
        mask_(mask),
        sinks_(sinks),
        seed_(seed),
        wanted_(wanted),
        ranges_(std::move(ranges)) {}

  const char* name() const override {
    return "H2OAttention";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) allocate(out);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array q = dense_last(inputs[0], encoder);
    const mx::array k = dense_last(inputs[1], encoder);
    const mx::array v = dense_last(inputs[2], encoder);

    Attention a{};
    a.B = q.shape(0), a.Hq = q.shape(1), a.L = q.shape(2), a.D = q.shape(3);
    a.Dv = v.shape(-1);
    a.Hk = ranges_ ? static_cast<int>(ranges_->size()) : k.shape(1);
    a.scale = scale_;
    a.q = q.data<void>(), a.q_dtype = dtype_of(q);
    a.q_batch = q.strides(0), a.q_head = q.strides(1), a.q_query = q.strides(2);
    a.k = {k.data<void>(), k.strides(-2), dtype_of(k)};
    a.v = {v.data<void>(), v.strides(-2), dtype_of(v)};
    a.k_batch = k.strides(0), a.v_batch = v.strides(0);
    for (int h = 0; h < a.Hk; ++h) {
      if (ranges_) {
        const auto [start, length] = (*ranges_)[h];
        a.heads.push_back({start * a.k.stride, start * a.v.stride, start, length});
      } else {
        a.heads.push_back({h * k.strides(1), h * v.strides(1), 0, k.shape(2)});
      }
    }
    size_t next = 3;
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
};

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("[mlx_h2o] ") + what);
}

mx::array float32(const mx::array& a, mx::StreamOrDevice s) {
  return mx::contiguous(mx::astype(a, mx::float32, s), false, s);
}

}  // namespace

std::vector<mx::array> attention(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal,
    const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const std::optional<Seed>& seed, const std::optional<Ranges>& ranges, Export wanted,
    mx::StreamOrDevice s) {
  const int rank = ranges ? 3 : 4;
  require(
      q.ndim() == 4 && int(k.ndim()) == rank && int(v.ndim()) == rank,
      "q, k and v have wrong ranks.");
  const int Hk = ranges ? static_cast<int>(ranges->size()) : k.shape(1);
  require(k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0), "Batches differ.");
  require(k.shape(-1) == q.shape(-1), "Widths of q and k differ.");
  require(k.shape(-2) == v.shape(-2) && (ranges || k.shape(1) == v.shape(1)), "k and v differ.");
  require(Hk > 0 && q.shape(1) % Hk == 0, "Query heads are no multiple of KV heads.");
  require(!(ranges && mask), "Ranges and an array mask exclude each other.");
  if (ranges)
    for (const auto& [start, length] : *ranges)
      require(
          start >= 0 && length >= 0 && start + length <= k.shape(1), "A range leaves the slots.");
  const int B = q.shape(0), Hq = q.shape(1), L = q.shape(2), N = k.shape(-2);
  std::vector<mx::array> inputs{q, k, v};
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
    require(
        seed->second.shape() == mx::Shape{B, Hk, v.shape(-1)},
        "A seed's values must be [B, Hk, Dv].");
    inputs.push_back(float32(seed->first, s));
    inputs.push_back(float32(seed->second, s));
  }
  std::vector<mx::Shape> shapes{{B, Hq, L, v.shape(-1)}, {B, Hq, L}};
  std::vector<mx::Dtype> dtypes{q.dtype(), mx::float32};
  if (wanted == Export::logits) shapes.push_back({B, ranges ? Hq / Hk : Hq, L, N});
  if (wanted == Export::mass) shapes.push_back(ranges ? mx::Shape{B, N} : mx::Shape{B, Hk, N});
  if (wanted != Export::none) dtypes.push_back(mx::float32);
  return mx::array::make_arrays(
      std::move(shapes), dtypes,
      std::make_shared<AttentionWithScores>(
          mx::to_stream(s), scale, kind, sinks.has_value(), seed.has_value(), wanted, ranges),
      inputs);
}

namespace {

enum Field { keys, values, positions, scores, count, mean_key, var_key, mean_value, victims };

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
      mx::Stream stream, std::shared_ptr<SlotMemory> memory, Layer layer, int offset,
      std::vector<StepHead> heads)
      : NoGradients(stream),
        memory_(std::move(memory)),
        layer_(layer),
        offset_(offset),
        heads_(std::move(heads)) {}

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
    state.keys = fields[keys].data<void>();
    state.values = fields[values].data<void>();
    state.positions = fields[positions].data<int32_t>();
    state.scores = fields[scores].size() ? fields[scores].data<float>() : nullptr;
    state.count = fields[count].data<float>();
    state.mean_key = fields[mean_key].data<float>();
    state.var_key = fields[var_key].data<float>();
    state.mean_value = fields[mean_value].data<float>();
    state.victims = fields[victims].data<int32_t>();
    Step step{};
    step.heads = std::move(heads_);
    step.offset = offset_;
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
  std::shared_ptr<SlotMemory> memory_;
  Layer layer_;
  int offset_;
  std::vector<StepHead> heads_;
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
    std::vector<mx::array> fields, PolicyForm policy, bool remembers, bool answers,
    float saturation, mx::StreamOrDevice s)
    : layer_{}, memory_(std::make_shared<SlotMemory>()), last_step_(0) {
  require(fields.size() == 9, "A layer has nine fields.");
  const mx::Shape& k = fields[keys].shape();
  const mx::Shape& v = fields[values].shape();
  const mx::Shape& n = fields[count].shape();
  require(k.size() == 3 && v.size() == 3 && n.size() == 2, "Fields have wrong ranks.");
  layer_.B = k[0], layer_.S = k[1], layer_.D = k[2], layer_.Dv = v[2], layer_.Hk = n[1];
  const int B = layer_.B, Hk = layer_.Hk, S = k[1], D = layer_.D, Dv = layer_.Dv;
  const bool accumulates = policy.score != Score::none;
  require(
      v == mx::Shape{B, S, Dv} && fields[positions].shape() == mx::Shape{B, S}, "Slots differ.");
  require(
      fields[scores].size() == (accumulates ? size_t(B) * S : 0), "Scores do not fit the policy.");
  require(
      n == mx::Shape{B, Hk} && fields[mean_key].shape() == mx::Shape{B, Hk, D} &&
          fields[var_key].shape() == mx::Shape{B, Hk, D} &&
          fields[mean_value].shape() == mx::Shape{B, Hk, Dv} &&
          fields[victims].shape() == mx::Shape{B, Hk, policy.evict_every},
      "The remainder or the victims do not fit.");
  require(fields[keys].dtype() == fields[values].dtype(), "Keys and values differ in dtype.");
  require(is_float(fields[keys]), "Keys and values must be float32, float16 or bfloat16.");
  for (int field = positions; field <= victims; ++field)
    require(
        fields[field].dtype() == (field == positions || field == victims ? mx::int32 : mx::float32),
        "Positions and victims must be int32, scores and the remainder float32.");
  layer_.kv_dtype = dtype_of(fields[keys]);
  layer_.policy = policy;
  layer_.remembers = remembers;
  layer_.answers = answers;
  layer_.saturation = saturation;
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
    mx::StreamOrDevice s) {
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
  require(
      k.dtype() == dtypes_[keys] && v.dtype() == dtypes_[values], "k and v have another dtype.");
  require(int(heads.size()) == Hk, "One plan for each KV head.");
  for (const StepHead& head : heads)
    require(
        head.start >= 0 && head.length > 0 && head.start + head.length <= layer_.S &&
            head.victim < layer_.policy.evict_every,
        "A head leaves its slots.");
  for (const StepHead& head : heads)
    require(
        !layer_.policy.per_layer ||
            (head.length == heads[0].length && head.choose == heads[0].choose),
        "Heads that choose together must be alike.");
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
          mx::to_stream(s), memory_, layer, offset, std::move(heads)),
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
