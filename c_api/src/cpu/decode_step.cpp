#include "decode_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "frame.h"

namespace mlx_h2o {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// remainder.py: keep x finite whatever the queries and keys.
constexpr float kLargestQuery = 1e15f;
constexpr float kLargestTerm = 1e30f;
// slots/packed.py
constexpr float kLeastSquare = 1e-12f;
// policies/terms.py: fewer evicted keys than this give no mean worth measuring distances from.
constexpr int kFewestForAMean = 16;

// The remainder's second-order term: x at first, sqrt(t x) in the end, and none where t is 0.
float saturated(float x, float t) {
  return t > 0 ? x / std::sqrt(1 + x / t) : 0;
}

class DecodeStep {
 public:
  DecodeStep(const Layer& layer, const LayerState& state, const Step& step)
      : layer_(layer),
        state_(state),
        step_(step),
        recent_(step.recent()),
        G_(layer.Hq / layer.Hk) {}

  void run() {
    const bool choose = step_.plan.chooses();
    for (int b = 0; b < layer_.B; ++b)
      for (int h = 0; h < layer_.Hk; ++h) write(b, h);

    const KernelPolicy& policy = layer_.policy;
    Attention a{};
    a.B = layer_.B, a.Hq = layer_.Hq, a.Hk = layer_.Hk, a.L = 1, a.D = layer_.D, a.Dv = layer_.Dv;
    a.scale = layer_.scale;
    a.q = step_.q, a.q_dtype = step_.q_dtype, a.q_batch = step_.q_batch, a.q_head = step_.q_head;
    a.k = state_.keys.rows();
    a.v = state_.values.rows();
    a.k_batch = layer_.S * a.k.stride;
    a.v_batch = layer_.S * a.v.stride;
    a.k_scale_batch = layer_.S * a.k.scale_stride;
    a.v_scale_batch = layer_.S * a.v.scale_stride;
    for (const HeadPlan& head : step_.plan.heads)
      a.heads.push_back(
          {head.start * a.k.stride, head.start * a.v.stride, head.start, head.length,
           head.start * a.k.scale_stride, head.start * a.v.scale_stride});
    if (state_.recent.size) {
      a.recent_k = state_.recent.keys.rows();
      a.recent_v = state_.recent.values.rows();
      a.recent = recent_.length;
      a.recent_rows = state_.recent.size;
    }
    a.sinks = step_.sinks;
    a.out = step_.out;
    a.out_dtype = layer_.out_dtype;
    if (layer_.answers && step_.plan.evicts()) {
      fill_columns();
      a.seed_logits = columns_.data();
      a.seed_values = state_.mean_value;
    }
    if (choose && policy.measures()) {
      fill_centers();
      a.centers = centers_.data();
    }
    a.keep_logits = policy.score == Score::ema_logits;
    a.keep_weights = policy.score != Score::none && !a.keep_logits;
    const bool observes = policy.score != Score::none || choose;
    if (!observes) return attend(a);
    if (choose && policy.per_layer)
      layer_priorities_.resize(int64_t(layer_.B) * layer_.Hk * step_.plan.heads[0].length);
    attend(a, [this](const AttendedHead& head) { after(head); });
    if (choose && policy.per_layer) choose_for_layer();
  }

 private:
  int64_t of_head(int b, int h) const {
    return int64_t(b) * layer_.Hk + h;
  }
  int64_t slot(int b, int h, int n = 0) const {
    return b * layer_.S + step_.plan.heads[h].start + n;
  }
  int64_t recent_slot(int b, int h, int n) const {
    return of_head(b, h) * state_.recent.size + n;
  }

  // The new row takes the victim's slot, or the next unused one; where the newest tokens are stored
  // apart, the oldest of them does, and the new row follows it there.
  void write(int b, int h) {
    const RecentState& recent = state_.recent;
    const void* key = row_at(step_.k, b * step_.k_batch + h * step_.k_head, state_.keys.dtype);
    const void* value = row_at(step_.v, b * step_.v_batch + h * step_.v_head, state_.values.dtype);
    if (!recent.size) {
      const int64_t where = free_slot(b, h);
      state_.keys.write(where, key);
      state_.values.write(where, value);
      note(where, step_.plan.offset - 1, 0, length_of(value));
      return;
    }
    const int64_t slot = recent_slot(b, h, recent_.slot);
    if (recent_.leaving) {
      const int64_t where = free_slot(b, h);
      state_.keys.take_over(where, recent.keys, slot);
      state_.values.take_over(where, recent.values, slot);
      note(
          where, step_.plan.offset - 1 - recent.size, recent.scores ? recent.scores[slot] : 0,
          recent.value_lengths ? recent.value_lengths[slot] : 0);
    }
    recent.keys.write(slot, key);
    recent.values.write(slot, value);
    if (recent.scores) recent.scores[slot] = 0;
    if (recent.value_lengths) recent.value_lengths[slot] = length_of(value);
  }

  static const void* row_at(const void* rows, int64_t element, Dtype dtype) {
    return static_cast<const char*>(rows) + element * size_of(dtype);
  }

  void note(int64_t slot, int position, float score, uint16_t value_length) {
    state_.positions.set(slot, position);
    if (state_.scores) state_.scores[slot] = score;
    if (state_.value_lengths) state_.value_lengths[slot] = value_length;
  }

  // value_lengths.value_lengths of a new value, as float16; of interest where they are kept.
  uint16_t length_of(const void* value) {
    if (!state_.value_lengths) return 0;
    row_.resize(std::max(layer_.D, layer_.Dv));
    kernels().widen(row_.data(), value, state_.values.dtype, 1, layer_.Dv);
    const float square = kernels().dot(row_.data(), row_.data(), layer_.Dv);
    const float length = std::log(std::max(square, kLeastSquare));
    uint16_t half;
    kernels().narrow(&half, Dtype::float16, &length, 1, 1);
    return half;
  }

  // The victim's slot, its row folded, or the next unused one.
  int64_t free_slot(int b, int h) {
    const int64_t where = slot(b, h, mlx_h2o::free_slot(layer_, state_, step_.plan, b, h));
    if (step_.plan.heads[h].victim >= 0 && layer_.remembers) fold(b, h, where);
    return where;
  }

  // Remainder.fold of one row.
  void fold(int b, int h, int64_t where) {
    const int64_t i = of_head(b, h);
    const float part = 1 / ++state_.count[i];
    row_.resize(std::max(layer_.D, layer_.Dv));
    kernels().read_row(row_.data(), state_.keys.rows(), where, layer_.D);
    float* mean = state_.mean_key + i * layer_.D;
    float* var = state_.var_key + i * layer_.D;
    for (int d = 0; d < layer_.D; ++d) {
      const float step = row_[d] - mean[d];
      mean[d] += part * step;
      var[d] += -part * var[d] + part * (1 - part) * (step * step);
    }
    kernels().read_row(row_.data(), state_.values.rows(), where, layer_.Dv);
    kernels().blend(state_.mean_value + i * layer_.Dv, row_.data(), 1 - part, part, layer_.Dv);
  }

  // Remainder.column
  void fill_columns() {
    columns_.resize(int64_t(layer_.B) * layer_.Hq);
    row_.resize(std::max(layer_.D, layer_.Dv));
    for (int b = 0; b < layer_.B; ++b)
      for (int hq = 0; hq < layer_.Hq; ++hq) {
        const int64_t i = of_head(b, hq / G_);
        float& r = columns_[int64_t(b) * layer_.Hq + hq];
        if (state_.count[i] == 0) {
          r = -kInf;
          continue;
        }
        const char* q = static_cast<const char*>(step_.q) +
            (b * step_.q_batch + hq * step_.q_head) * size_of(step_.q_dtype);
        kernels().widen(row_.data(), q, step_.q_dtype, layer_.scale, layer_.D);
        const float mean = kernels().dot(row_.data(), state_.mean_key + i * layer_.D, layer_.D);
        for (int d = 0; d < layer_.D; ++d) {
          const float size = std::clamp(row_[d], -kLargestQuery, kLargestQuery);
          row_[d] = size * size;
        }
        const float x = std::min(
            0.5f * kernels().dot(row_.data(), state_.var_key + i * layer_.D, layer_.D),
            kLargestTerm);
        r = std::log(state_.count[i]) + mean + saturated(x, layer_.saturation[hq / G_]);
      }
  }

  // The mean evicted key, or that of the kept ones while too few were evicted.
  void fill_centers() {
    centers_.resize(int64_t(layer_.B) * layer_.Hk * layer_.D);
    row_.resize(std::max(layer_.D, layer_.Dv));
    for (int b = 0; b < layer_.B; ++b)
      for (int h = 0; h < layer_.Hk; ++h) {
        float* center = centers_.data() + of_head(b, h) * layer_.D;
        const HeadPlan& head = step_.plan.heads[h];
        if (head.evicted >= kFewestForAMean) {
          std::copy_n(state_.mean_key + of_head(b, h) * layer_.D, layer_.D, center);
          continue;
        }
        std::fill_n(center, layer_.D, 0.0f);
        const float share = 1.0f / (head.length + recent_.length);
        each_key(
            b, h, row_.data(), [&] { kernels().blend(center, row_.data(), 1, share, layer_.D); });
      }
  }

  // Every key of a head, one after the other, in `row`.
  template <class F>
  void each_key(int b, int h, float* row, F use) const {
    for (int n = 0; n < step_.plan.heads[h].length; ++n) {
      kernels().read_row(row, state_.keys.rows(), slot(b, h, n), layer_.D);
      use();
    }
    for (int n = 0; n < recent_.length; ++n) {
      kernels().read_row(row, state_.recent.keys.rows(), recent_slot(b, h, n), layer_.D);
      use();
    }
  }

  // Scores, priorities and victims of one head, on the thread that attended to its last slots.
  void after(const AttendedHead& attended) {
    const int b = attended.batch, h = attended.head;
    const HeadPlan& head = step_.plan.heads[h];
    thread_local std::vector<float> priorities, terms, directions, ranges;
    UpdateHead update{};
    update.slots = head.length;
    update.rows = attended.rows;
    update.weights = attended.weights;
    update.weights_stride = attended.stride;
    update.tile_max = attended.tile_max;
    update.lse = attended.lse;
    update.logits = attended.logits;
    update.positions = state_.positions.from(slot(b, h));
    update.scores = state_.scores ? state_.scores + slot(b, h) : nullptr;
    update.value_lengths = state_.value_lengths ? state_.value_lengths + slot(b, h) : nullptr;
    update.offset = step_.plan.offset;
    update.recent = head.recent;
    update.aged_from = step_.plan.aged_from;
    if (head.choose) {
      if (layer_.policy.per_layer) {
        update.priority = layer_priorities_.data() + of_head(b, h) * head.length;
      } else {
        priorities.resize(head.length);
        update.priority = priorities.data();
      }
      if (layer_.policy.value_weight && state_.values.bits) {
        update.value_groups = state_.values.groups();
        ranges.resize(int64_t(head.length) * update.value_groups);
        state_.values.ranges(slot(b, h), head.length, ranges.data());
        update.value_ranges = ranges.data();
      }
      terms.resize(int64_t(kTerms) * head.length);
      update.terms = terms.data();
      if (layer_.policy.measures()) {
        const float* center = centers_.data() + of_head(b, h) * layer_.D;
        update.least_distance = 1e-6f * kernels().dot(center, center, layer_.D) + 1e-12f;
        update.distance = attended.distance;
      } else if (layer_.policy.priority == Priority::direction) {
        directions.resize(head.length);
        fill_directions(b, h, directions.data());
        update.distance = directions.data();
      }
    }
    kernels().update(update, layer_.policy);
    if (head.choose && !layer_.policy.per_layer)
      kernels().select_victims(update, layer_.policy, victims_of(b, h));
    if (state_.recent.scores) {  // whose slots are never victims
      const int column = recent_column(head.length);
      update.slots = recent_.length;
      if (update.weights) update.weights += column;
      if (update.logits) update.logits += column;
      update.tile_max += column / kTile * attended.rows;
      update.scores = state_.recent.scores + recent_slot(b, h, 0);
      update.priority = nullptr;
      kernels().update(update, layer_.policy);
    }
  }

  // KeyDiff.priority
  void fill_directions(int b, int h, float* out) const {
    const int D = layer_.D, length = step_.plan.heads[h].length;
    thread_local std::vector<float> anchor, row;
    anchor.assign(D, 0);
    row.resize(D);
    const auto over_norm = [&] {
      return 1 / std::sqrt(kernels().dot(row.data(), row.data(), D) + 1e-12f);
    };
    const int all = length + recent_.length;
    each_key(b, h, row.data(), [&] {
      kernels().blend(anchor.data(), row.data(), 1, over_norm() / all, D);
    });
    const float size = 1 / std::sqrt(kernels().dot(anchor.data(), anchor.data(), D) + 1e-12f);
    for (int n = 0; n < length; ++n) {
      kernels().read_row(row.data(), state_.keys.rows(), slot(b, h, n), D);
      out[n] = 1 - kernels().dot(row.data(), anchor.data(), D) * size * over_norm();
    }
  }

  int32_t* victims_of(int b, int h) const {
    return state_.victims + of_head(b, h) * layer_.policy.evict_every;
  }

  // unit="layer": the heads' mean priority decides for all.
  void choose_for_layer() {
    const int length = step_.plan.heads[0].length;
    std::vector<float> mean(length), copy;
    for (int b = 0; b < layer_.B; ++b) {
      std::fill(mean.begin(), mean.end(), 0.0f);
      for (int h = 0; h < layer_.Hk; ++h)
        kernels().blend(
            mean.data(), layer_priorities_.data() + of_head(b, h) * length, 1, 1.0f / layer_.Hk,
            length);
      for (int h = 0; h < layer_.Hk; ++h) {
        copy = mean;
        UpdateHead update{};
        update.slots = length;
        update.positions = state_.positions.from(slot(b, h));
        update.priority = copy.data();
        update.offset = step_.plan.offset;
        update.recent = step_.plan.heads[h].recent;
        kernels().select_victims(update, layer_.policy, victims_of(b, h));
      }
    }
  }

  const Layer& layer_;
  const LayerState& state_;
  const Step& step_;
  const RecentStep recent_;
  const int G_;
  std::vector<float> row_, columns_, centers_, layer_priorities_;
};

}  // namespace

Rows SlotRows::rows() const {
  if (!bits) return {data, width, dtype};
  const int64_t groups = width / group_size;
  return {data, int64_t(width) * bits / 32, dtype, bits, group_size, scales, biases, groups};
}

void SlotRows::write(int64_t slot, const void* row) const {
  const Rows r = rows();
  const int size = size_of(dtype);
  auto* home = static_cast<char*>(data) + slot * r.stride * (bits ? 4 : size);
  if (!bits) {
    std::memcpy(home, row, width * size);
    return;
  }
  thread_local std::vector<float> wide;
  wide.resize(width);
  kernels().widen(wide.data(), row, dtype, 1, width);
  const int64_t scale = slot * r.scale_stride * size;
  kernels().quantize(
      wide.data(), width,
      {home, static_cast<char*>(scales) + scale, static_cast<char*>(biases) + scale, dtype, bits,
       group_size});
}

const void* SlotRows::row(int64_t slot) const {
  const Rows r = rows();
  return static_cast<const char*>(data) + slot * r.stride * (bits ? 4 : size_of(dtype));
}

void SlotRows::ranges(int64_t slot, int count, float* out) const {
  const auto* first = static_cast<const char*>(scales) + slot * groups() * size_of(dtype);
  kernels().widen(out, first, dtype, (1 << bits) - 1, count * groups());
}

void SlotRows::take_over(int64_t slot, const SlotRows& others, int64_t other) const {
  if (!others.bits) return write(slot, others.row(other));
  // PackedRows.with_bits: the levels, without their lowest bits if there are fewer.
  const int dropped = std::max(others.bits - bits, 0);
  const auto* in = static_cast<const uint8_t*>(others.row(other));
  auto* out = static_cast<uint8_t*>(const_cast<void*>(row(slot)));
  uint64_t levels = 0, packed = 0;
  int held = 0, ready = 0;
  for (int d = 0; d < width; ++d) {
    for (; held < others.bits; held += 8) levels |= uint64_t(*in++) << held;
    packed |= ((levels & ((1u << others.bits) - 1)) >> dropped) << ready;
    levels >>= others.bits;
    held -= others.bits;
    for (ready += bits; ready >= 8; ready -= 8, packed >>= 8) *out++ = uint8_t(packed);
  }
  const int groups = width / group_size, size = size_of(dtype);
  const auto at = [&](void* parts, int64_t i) {
    return static_cast<char*>(parts) + i * groups * size;
  };
  std::vector<float> scale(groups), bias(groups);
  kernels().widen(scale.data(), at(others.scales, other), dtype, 1, groups);
  kernels().widen(bias.data(), at(others.biases, other), dtype, 1, groups);
  for (int g = 0; g < groups; ++g) {
    const float middle = ((1 << dropped) - 1) * 0.5f * scale[g];
    bias[g] += middle;
  }
  kernels().narrow(at(scales, slot), dtype, scale.data(), 1 << dropped, groups);
  kernels().narrow(at(biases, slot), dtype, bias.data(), 1, groups);
}

int free_slot(const Layer& layer, const LayerState& state, const TokenPlan& plan, int b, int h) {
  const HeadPlan& head = plan.heads[h];
  if (head.victim < 0) return head.length - 1;
  const int64_t first = (int64_t(b) * layer.Hk + h) * layer.policy.evict_every;
  // Clamped, so that no state, however damaged, makes a step write elsewhere.
  return std::clamp(state.victims[first + head.victim], 0, head.length - 1);
}

void decode_step(const Layer& layer, const LayerState& state, const Step& step) {
  if (!layer.frame_centre) return DecodeStep(layer, state, step).run();
  thread_local std::vector<char> room;
  const Step framed = in_frame(layer, state, step, room);
  DecodeStep(layer, state, framed).run();
}

}  // namespace mlx_h2o
