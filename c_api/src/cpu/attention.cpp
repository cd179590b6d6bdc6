#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>

#include "thread_pool.h"

namespace mlx_h2o {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Slots of a work item while decoding. Small enough that a long head is shared out evenly, and
// large enough that its partial result (a row per query) costs nothing beside its keys and values.
constexpr int kSlotBlock = 256;
static_assert(kSlotBlock % kTile == 0);

// Below this many bytes of keys and values a second thread costs more than it saves: if it spins,
// and if it sleeps (waking it takes some 100 us; docs/results/data/speed.json).
constexpr int64_t kAloneBytes = 64 << 10;
constexpr int64_t kAloneBytesAsleep = 2 << 20;

int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

const void* at(const void* data, int64_t element, int size) {
  return static_cast<const char*>(data) + element * size;
}

// The rows from an element, and a scale, on.
Rows from(const Rows& rows, int64_t element, int64_t scale) {
  Rows r = rows;
  r.data = at(rows.data, element, rows.bits ? 4 : size_of(rows.dtype));
  if (rows.bits) {
    r.scales = at(rows.scales, scale, size_of(rows.dtype));
    r.biases = at(rows.biases, scale, size_of(rows.dtype));
  }
  return r;
}

// A buffer of floats that starts on a cache line; growing forgets what it held.
class Floats {
 public:
  float* reserve(int64_t count) {
#if defined(MLX_H2O_SANITIZE)
    // As many as were asked for, so that reading behind them is not covered by an earlier use.
    const bool fits = count == 0 || count == size_;
#else
    const bool fits = count <= size_;
#endif
    if (!fits) {
      held_.reset(static_cast<float*>(::operator new(count * sizeof(float), kLine)));
      size_ = count;
    }
    return held_.get();
  }
  int64_t size() const {
    return size_;
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(float* p) const {
      ::operator delete(p, kLine);
    }
  };
  std::unique_ptr<float, Free> held_;
  int64_t size_ = 0;
};

// What belongs to a KV head's query rows from their first block of slots to the merge.
struct Unit {
  Floats weights, logits, tile_max, distance, m, l, acc;
};

// Units stay from call to call: making them anew, filled with zeros, took a few percent of a decode
// step. They are few: a thread finishes the head it works on before the next one, so there are
// never more unfinished heads than threads, and their memory stays in the caches.
class Units {
 public:
  // Never destroyed: MLX's stream threads may still run while the process exits.
  static Units& shared() {
    static Units* units = new Units;
    return *units;
  }

  Unit* take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return new Unit;
    Unit* unit = free_.back();
    free_.pop_back();
    return unit;
  }
  void give_back(Unit* unit) {
    // What a long prompt's queries needed is not kept.
    if (unit->weights.size() + unit->logits.size() > kMostKept) *unit = Unit{};
    std::lock_guard lock(mutex_);
    free_.push_back(unit);
  }

 private:
  static constexpr int64_t kMostKept = 1 << 20;

  std::mutex mutex_;
  std::vector<Unit*> free_;
};

// One call's plan. A unit of work is a (batch, KV head, block of query rows); while decoding its
// slots are cut into blocks as well.
class Plan {
 public:
  Plan(const Attention& a, const std::function<void(const AttendedHead&)>& after_head)
      : a_(a),
        after_head_(after_head),
        G_(a.Hq / a.Hk),
        row_blocks_(ceil_div(G_ * a.L, kMaxRows)),
        keeps_weights_(a.keep_weights || a.mass),
        mass_(a.mass && row_blocks_ > 1 ? row_blocks_ : 0) {
    for (int b = 0; b < a.B; ++b)
      for (int h = 0; h < a.Hk; ++h)
        for (int rb = 0; rb < row_blocks_; ++rb) {
          const int own =
              row_blocks_ > 1 ? 1 : std::max(1, ceil_div(a.heads[h].length, kSlotBlock));
          const int blocks = own + ceil_div(a.recent, kSlotBlock);
          for (int sb = 0; sb < blocks; ++sb)
            items_.push_back({static_cast<int>(states_.size()), sb});
          states_.emplace_back(b, h, rb, blocks, own);
        }
    if (mass_) partial_mass_.resize(states_.size());
  }

  void run() {
    int64_t slots = int64_t(a_.Hk) * a_.recent;
    for (const auto& head : a_.heads) slots += head.length;
    const int64_t work = slots * (a_.D + a_.Dv) * 4 * a_.B * row_blocks_;
    auto& pool = ThreadPool::shared();
    if (work < (pool.awake() ? kAloneBytes : kAloneBytesAsleep)) {
      for (int i = 0; i < static_cast<int>(items_.size()); ++i) item(i);
    } else {
      pool.run(static_cast<int>(items_.size()), [this](int i) { item(i); });
    }
    add_partial_masses();
  }

 private:
  struct State {
    State(int b, int h, int rb, int blocks, int own)
        : b(b), h(h), rb(rb), blocks(blocks), own(own), left(blocks) {}
    State(State&& other) noexcept : State(other.b, other.h, other.rb, other.blocks, other.own) {}
    int b, h, rb, blocks;
    int own;  // of the blocks; the others are of recent rows
    std::atomic<int> left;
    Unit* unit = nullptr;
  };
  struct Item {
    int state, slot_block;
  };

  Unit& unit_of(State& state) {
    std::lock_guard lock(units_mutex_);
    if (!state.unit) state.unit = Units::shared().take();
    return *state.unit;
  }

  int columns_of(const HeadSlots& head) const {
    return a_.recent ? recent_column(head.length) + a_.recent : head.length;
  }

  // Row r of a KV head is query r / G of query head r % G, so that a block's queries are
  // neighbours and a causal block ends early.
  int query(int row) const {
    return row / G_;
  }
  int query_head(const State& s, int row) const {
    return s.h * G_ + row % G_;
  }

  void item(int i) {
    State& s = states_[items_[i].state];
    const int sb = items_[i].slot_block;
    const HeadSlots& head = a_.heads[s.h];
    Unit& unit = unit_of(s);
    const int first_row = s.rb * kMaxRows;
    const int rows = std::min(kMaxRows, G_ * a_.L - first_row);
    const bool recent = sb >= s.own;
    const int length = recent ? a_.recent : head.length;
    const int first_slot = (recent ? sb - s.own : sb) * kSlotBlock;
    const int last_slot = s.blocks == 1 ? length : std::min(length, first_slot + kSlotBlock);
    const int first_column = first_slot + (recent ? recent_column(head.length) : 0);
    const int columns = columns_of(head);
    const int64_t stride = padded(columns);
    const int D = padded(a_.D), Dv = padded(a_.Dv);

    AttentionBlock block{};
    block.rows = rows;
    block.D = a_.D;
    block.Dv = a_.Dv;
    if (recent) {
      const int64_t row = (int64_t(s.b) * a_.Hk + s.h) * a_.recent_rows + first_slot;
      const auto rows_from = [row](const Rows& r) {
        return from(r, row * r.stride, row * r.scale_stride);
      };
      block.k = rows_from(a_.recent_k);
      block.v = rows_from(a_.recent_v);
    } else {
      block.k = from(
          a_.k, s.b * a_.k_batch + head.k_start + first_slot * a_.k.stride,
          s.b * a_.k_scale_batch + head.k_scales + first_slot * a_.k.scale_stride);
      block.v = from(
          a_.v, s.b * a_.v_batch + head.v_start + first_slot * a_.v.stride,
          s.b * a_.v_scale_batch + head.v_scales + first_slot * a_.v.scale_stride);
    }
    block.acc_stride = Dv;
    {
      std::lock_guard lock(units_mutex_);
      block.m = unit.m.reserve(s.blocks * kMaxRows) + sb * rows;
      block.l = unit.l.reserve(s.blocks * kMaxRows) + sb * rows;
      block.acc = unit.acc.reserve(int64_t(s.blocks) * rows * Dv) + int64_t(sb) * rows * Dv;
      if (keeps_weights_) {
        const int tiles = ceil_div(columns, kTile);
        block.weights = unit.weights.reserve(rows * stride) + first_column;
        block.weights_stride = stride;
        block.tile_max = unit.tile_max.reserve(tiles * rows) + first_column / kTile * rows;
      }
      if (a_.keep_logits) {
        block.logits = unit.logits.reserve(rows * stride) + first_column;
        block.logits_stride = stride;
      }
      if (a_.centers && !recent) {
        block.center = a_.centers + (int64_t(s.b) * a_.Hk + s.h) * a_.D;
        block.distance = unit.distance.reserve(head.length) + first_slot;
      }
    }

    thread_local Floats queries, raw_queries, scratch, wide_logits;
    float* q = queries.reserve(int64_t(rows) * D);
    std::fill(q, q + int64_t(rows) * D, 0.0f);
    const bool pairs = kernels().bf16_dot && a_.q_dtype == Dtype::bfloat16 &&
        block.k.dtype == Dtype::bfloat16 && !block.k.bits;
    auto* q16 =
        pairs ? reinterpret_cast<uint16_t*>(raw_queries.reserve(int64_t(rows) * D)) : nullptr;
    RowMask masks[kMaxRows];
    int visible = 0;
    for (int r = 0; r < rows; ++r) {
      const int l = query(first_row + r), hq = query_head(s, first_row + r);
      const int64_t where = s.b * a_.q_batch + hq * a_.q_head + l * a_.q_query;
      const void* row = at(a_.q, where, size_of(a_.q_dtype));
      kernels().widen(q + r * D, row, a_.q_dtype, a_.scale, a_.D);
      if (pairs) std::memcpy(q16 + r * D, row, a_.D * sizeof(uint16_t));
      if (a_.mask.kind == MaskKind::causal) {
        masks[r].visible =
            std::clamp(head.length - a_.L + l + 1 - first_slot, 0, last_slot - first_slot);
        visible = std::max(visible, masks[r].visible);
      } else if (a_.mask.kind != MaskKind::none) {
        const Mask& mask = a_.mask;
        const int64_t entry =
            s.b * mask.batch + hq * mask.head + l * mask.query + first_slot * mask.slot;
        const int size = mask.kind == MaskKind::boolean ? 1 : size_of(mask.dtype);
        masks[r].data = at(mask.data, entry, size);
      }
    }
    block.q = q;
    block.q16 = q16;
    block.scale = a_.scale;
    block.q_stride = D;
    block.mask = a_.mask.kind;
    block.row_masks = masks;
    block.mask_stride = a_.mask.slot;
    block.mask_dtype = a_.mask.dtype;
    block.slots = last_slot - first_slot;
    // Causal: slots that no row sees are not read, unless their logits are wanted.
    const bool wants_all = a_.logits || a_.keep_logits || keeps_weights_ || a_.centers;
    if (block.mask == MaskKind::causal) {
      if (!wants_all) block.slots = visible;
      if (std::all_of(
              masks, masks + rows, [&](const RowMask& m) { return m.visible >= block.slots; }))
        block.mask = MaskKind::none;
    }
    // One query's logits are written where they are wanted: a copy would have to wait for memory.
    const bool direct = a_.logits && a_.L == 1;
    if (a_.logits && !direct) {
      block.logits_stride = padded(block.slots);
      block.logits = wide_logits.reserve(rows * block.logits_stride);
    } else if (direct) {
      block.logits = logits_row(s, first_row) + first_slot;
      block.logits_stride = a_.logits_group;
    }
    block.scratch = scratch.reserve(scratch_floats(a_.D, a_.Dv));
    kernels().attend(block);
    if (a_.logits && !direct)
      for (int r = 0; r < rows; ++r)
        std::copy_n(
            block.logits + r * block.logits_stride, block.slots,
            logits_row(s, first_row + r) + first_slot);

    if (s.left.fetch_sub(1) == 1) finish(s, unit, first_row, rows);
  }

  float* logits_row(const State& s, int row) const {
    return a_.logits + s.b * a_.logits_batch + s.h * a_.logits_head + row % G_ * a_.logits_group +
        query(row) * a_.logits_query + a_.heads[s.h].column;
  }

  // Merges the blocks' partial softmaxes in order of slots, with the columns that have no slot.
  void finish(State& s, Unit& unit, int first_row, int rows) {
    const int Dv = padded(a_.Dv);
    const float* m = unit.m.reserve(0);
    const float* l = unit.l.reserve(0);
    float* acc = unit.acc.reserve(0);
    thread_local Floats sum;
    float* total = sum.reserve(Dv);
    float lse[kMaxRows];
    for (int r = 0; r < rows; ++r) {
      const int hq = query_head(s, first_row + r);
      const int64_t row = (int64_t(s.b) * a_.Hq + hq) * a_.L + query(first_row + r);
      const float sink = a_.sinks ? a_.sinks[hq] : -kInf;
      const float seed = a_.seed_logits ? a_.seed_logits[row] : -kInf;
      float top = std::max(sink, seed);
      for (int sb = 0; sb < s.blocks; ++sb) top = std::max(top, m[sb * rows + r]);
      const float reference = top == -kInf ? 0 : top;
      // Beside an infinite logit all others weigh nothing; an infinite sink alone leaves zeros.
      float norm = (sink == kInf ? 1 : std::exp(sink - reference)) + std::exp(seed - reference);
      std::fill(total, total + Dv, 0.0f);
      if (seed != -kInf)
        kernels().blend(
            total, a_.seed_values + (int64_t(s.b) * a_.Hk + s.h) * a_.Dv, 0,
            std::exp(seed - reference), a_.Dv);
      for (int sb = 0; sb < s.blocks; ++sb) {
        const float share = std::exp(m[sb * rows + r] - reference);
        norm += l[sb * rows + r] * share;
        kernels().blend(total, acc + (int64_t(sb) * rows + r) * Dv, 1, share, a_.Dv);
      }
      lse[r] = norm == 0 ? -kInf : top == kInf ? kInf : reference + std::log(norm);
      if (a_.lse) a_.lse[row] = lse[r];
      const int size = size_of(a_.out_dtype);
      kernels().narrow(
          static_cast<char*>(a_.out) + row * a_.Dv * size, a_.out_dtype, total,
          norm == 0 ? 0 : 1 / norm, a_.Dv);
    }
    const HeadSlots& head = a_.heads[s.h];
    if (a_.mass) {
      UpdateHead update{};
      update.slots = head.length;
      update.rows = rows;
      update.weights = unit.weights.reserve(0);
      update.weights_stride = padded(head.length);
      update.tile_max = unit.tile_max.reserve(0);
      update.lse = lse;
      kernels().add_mass(update, 1.0f / G_, mass_of(s));
    }
    if (after_head_)
      after_head_(
          {s.b, s.h, rows, unit.weights.reserve(0), unit.logits.reserve(0),
           padded(columns_of(head)), unit.tile_max.reserve(0), lse, unit.distance.reserve(0)});
    Units::shared().give_back(&unit);
  }

  // Query blocks of one head may end in any order, so each has a mass of its own until all have.
  float* mass_of(const State& s) {
    if (!mass_) return mass_row(s);
    auto& partial = partial_mass_[&s - states_.data()];
    partial.assign(a_.heads[s.h].length, 0.0f);
    return partial.data();
  }
  float* mass_row(const State& s) const {
    return a_.mass + s.b * a_.mass_batch + s.h * a_.mass_head + a_.heads[s.h].column;
  }
  void add_partial_masses() {
    for (size_t i = 0; i < partial_mass_.size(); ++i)
      kernels().blend(
          mass_row(states_[i]), partial_mass_[i].data(), 1, 1,
          static_cast<int>(partial_mass_[i].size()));
  }

  const Attention& a_;
  const std::function<void(const AttendedHead&)>& after_head_;
  const int G_, row_blocks_;
  const bool keeps_weights_;
  const int mass_;
  std::vector<State> states_;
  std::vector<Item> items_;
  std::vector<std::vector<float>> partial_mass_;
  std::mutex units_mutex_;
};

}  // namespace

void attend(const Attention& a, const std::function<void(const AttendedHead&)>& after_head) {
  Plan(a, after_head).run();
}

}  // namespace mlx_h2o
