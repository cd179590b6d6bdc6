#include "attention.h"

#include <algorithm>
#include <limits>

#include "../attention.h"
#include "primitive.h"
#include "text.h"

namespace mlx_h2o {

namespace {

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

class AttentionWithScores : public CpuPrimitive {
 public:
  AttentionWithScores(
      mx::Stream stream, float scale, MaskKind mask, bool sinks, bool seed, Export wanted,
      std::optional<Ranges> ranges, SlotLayout layout, int value_width)
      : CpuPrimitive(stream),
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
    Attention a{};
    size_t next = 0;
    take_queries(a, dense_last(inputs[next++], encoder));
    a.Hk = ranges_ ? static_cast<int>(ranges_->size()) : inputs[next].shape(1);
    const int slots = inputs[next].shape(-2);
    const OpenedRows k = open_rows(inputs, next, layout_.k_bits, layout_.k_group_size, encoder);
    const OpenedRows v = open_rows(inputs, next, layout_.v_bits, layout_.v_group_size, encoder);
    take_rows(a, k, v, slots);
    take_columns(a, inputs, next);
    a.out = outputs[0].data<void>(), a.out_dtype = dtype_of(outputs[0]);
    a.lse = outputs[1].data<float>();
    if (wanted_ == Export::none) {
      encoder.dispatch([a = std::move(a)] { attend(a); });
      return;
    }
    float* fill = outputs[2].data<float>();
    give_slots(a, fill, outputs[2].shape(-1));
    const bool logits = wanted_ == Export::logits;
    const float filler = logits ? -std::numeric_limits<float>::infinity() : 0.0f;
    // Dense logits are all written; mass is summed up, and unused flat slots must say so.
    const size_t count = !logits || ranges_ ? outputs[2].size() : 0;
    encoder.dispatch([a = std::move(a), fill, filler, count] {
      std::fill(fill, fill + count, filler);
      attend(a);
    });
  }

 private:
  void take_queries(Attention& a, const mx::array& q) const {
    a.B = q.shape(0), a.Hq = q.shape(1), a.L = q.shape(2), a.D = q.shape(3);
    a.Dv = value_width_;
    a.scale = scale_;
    a.q = q.data<void>(), a.q_dtype = dtype_of(q);
    a.q_batch = q.strides(0), a.q_head = q.strides(1), a.q_query = q.strides(2);
  }

  // Keys and values of `slots` slots, or of the heads' ranges.
  void take_rows(Attention& a, const OpenedRows& k, const OpenedRows& v, int slots) const {
    a.k = k.rows, a.v = v.rows;
    a.k_batch = k.batch, a.v_batch = v.batch;
    a.k_scale_batch = k.scale_batch, a.v_scale_batch = v.scale_batch;
    for (int h = 0; h < a.Hk; ++h) {
      const auto [start, length] = ranges_ ? (*ranges_)[h] : std::pair{int64_t(0), slots};
      a.heads.push_back(
          {h * k.head + start * k.rows.stride, h * v.head + start * v.rows.stride, start, length,
           h * k.scale_head + start * k.rows.scale_stride,
           h * v.scale_head + start * v.rows.scale_stride});
    }
  }

  // Mask, sinks and seed, from the input `next` on.
  void take_columns(Attention& a, const std::vector<mx::array>& inputs, size_t next) const {
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
  }

  // Where logits or masses go, with so many columns.
  void give_slots(Attention& a, float* where, int64_t columns) const {
    if (wanted_ == Export::logits) {
      const int G = a.Hq / a.Hk;
      a.logits = where;
      a.logits_query = columns;
      a.logits_group = a.L * columns;
      a.logits_head = ranges_ ? 0 : G * a.logits_group;
      a.logits_batch = (ranges_ ? G : a.Hq) * a.logits_group;
    } else {
      a.mass = where;
      a.mass_head = ranges_ ? 0 : columns;
      a.mass_batch = (ranges_ ? 1 : a.Hk) * columns;
    }
  }

  float scale_;
  MaskKind mask_;
  bool sinks_, seed_;
  Export wanted_;
  std::optional<Ranges> ranges_;
  SlotLayout layout_;
  int value_width_;
};

// Raises unless the operands fit together.
void check_operands(
    const mx::array& q, const Stored& stored_k, const Stored& stored_v,
    const std::optional<mx::array>& mask, const std::optional<Ranges>& ranges) {
  check_stored(stored_k);
  check_stored(stored_v);
  const mx::array &k = stored_k.arrays[0], &v = stored_v.arrays[0];
  const size_t rank = ranges ? 3 : 4;
  require(
      q.ndim() == 4 && k.ndim() == rank && v.ndim() == rank,
      ranges ? "q must have 4 axes, k and v 3" : "q, k and v must have 4 axes",
      {{"q", q}, {"k", k}, {"v", v}});
  require(
      k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0), "Batches differ",
      {{"q", q}, {"k", k}, {"v", v}});
  if (stored_k.width() != q.shape(-1))
    refuse(
        "Keys of width " + std::to_string(stored_k.width()) + " do not fit the queries",
        {{"q", q}});
  require(
      k.shape(-2) == v.shape(-2) && (ranges || k.shape(1) == v.shape(1)), "k and v differ",
      {{"k", k}, {"v", v}});
  const int Hk = ranges ? static_cast<int>(ranges->size()) : k.shape(1);
  if (Hk <= 0 || q.shape(1) % Hk)
    refuse("Query heads are no multiple of " + std::to_string(Hk) + " KV heads", {{"q", q}});
  require(!(ranges && mask), "Ranges and an array mask exclude each other");
  if (!ranges) return;
  for (const auto& [start, length] : *ranges)
    if (start < 0 || length < 0 || start + length > k.shape(1))
      refuse(
          "A range of " + std::to_string(length) + " from " + std::to_string(start) +
              " on leaves the slots",
          {{"k", k}});
}

}  // namespace

std::vector<mx::array> attention(
    const mx::array& q, const Stored& stored_k, const Stored& stored_v, float scale, bool causal,
    const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const std::optional<Seed>& seed, const std::optional<Ranges>& ranges, Export wanted,
    mx::StreamOrDevice s) {
  check_operands(q, stored_k, stored_v, mask, ranges);
  const mx::array& k = stored_k.arrays[0];
  const int Hk = ranges ? static_cast<int>(ranges->size()) : k.shape(1), Dv = stored_v.width();
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
    require(sinks->shape() == mx::Shape{Hq}, "sinks must be [Hq]", {{"sinks", *sinks}, {"q", q}});
    inputs.push_back(float32(*sinks, s));
  }
  if (seed) {
    const auto& [logits, values] = *seed;
    require(
        logits.shape() == mx::Shape{B, Hq, L}, "A seed's logits must be [B, Hq, L]",
        {{"logits", logits}, {"q", q}});
    if (values.shape() != mx::Shape{B, Hk, Dv})
      refuse("A seed's values must be " + text(mx::Shape{B, Hk, Dv}), {{"they are", values}});
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

}  // namespace mlx_h2o
