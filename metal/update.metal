// After attention: scores, priorities and the next victims, in one launch.
//
// A threadgroup chooses for HEADS KV heads together: one, or all of a layer when their mean
// priority decides (unit="layer"). Its lanes share out the slots and keep theirs from pass to pass:
// the first accumulates and measures the terms' mean and deviation, the others rank, one per
// victim, so that no priority is ever stored.

#include "priority.h"
#include "threadgroup_reduce.h"

namespace h2o {

// Of a KV head, in threadgroup memory: mean and weight of each term, then the least distance.
#define LEAST_DISTANCE (2 * TERMS)
#define STANDARDS (LEAST_DISTANCE + 1)

// A layer's slots, all heads' in one buffer.
template <int RANGES, int LEVELS, typename Positions, typename Scales>
struct LayerSlots {
  const device int* plan;
  const device float* logits;
  const device float* distances;
  Positions positions;
  device float* scores;
  const device float* norms;
  const device half* value_lengths;
  Scales value_scales;
  DecodeStep step;
  int batch, queries;  // which of the batch; query heads of a KV head
};

// Of one head, but for its least distance.
template <int RANGES, int LEVELS, typename Positions, typename Scales>
inline HeadSlots<RANGES, LEVELS, Positions, Scales> head_slots_of(
    LayerSlots<RANGES, LEVELS, Positions, Scales> layer, int head) {
  const HeadPlan line = head_plan_of(layer.plan, head);
  const int64_t first = int64_t(layer.batch) * layer.step.buffer_slots + line.start;
  const int64_t attended = int64_t(layer.batch) * layer.step.attended_slots + line.prefix;
  return {
      layer.logits + attended * layer.queries,
      layer.distances + attended,
      layer.positions + first,
      layer.scores + first,
      layer.norms + first,
      layer.value_lengths + first,
      layer.value_scales + first * RANGES,
      line.length,
      layer.step.offset,
      layer.step.aged_from,
      layer.step.sink,
      layer.step.offset - line.recent,
      0.0f};
}

// Running mean and sum of squares around it (Welford).
struct Moments {
  float count, mean, squares;
};

inline void add(thread Moments& moments, float x) {
  const float step = x - moments.mean;
  moments.count += 1.0f;
  moments.mean += step / moments.count;
  moments.squares += step * (x - moments.mean);
}

// base.standardised over all lanes' slots, times a weight.
template <int SIMDS>
inline void standardise(
    Moments own, float weight, threadgroup float* standard, threadgroup float* scratch, int simd,
    int lane) {
  const float total = sum_of_threadgroup<SIMDS>(own.count, scratch, simd, lane);
  const float share = 1.0f / max(total, 1.0f);
  const float mean = sum_of_threadgroup<SIMDS>(own.count * own.mean, scratch, simd, lane) * share;
  const float apart = own.mean - mean;
  const float squares =
      sum_of_threadgroup<SIMDS>(own.squares + own.count * apart * apart, scratch, simd, lane);
  if (simd == 0 && lane == 0) {
    standard[0] = mean;
    standard[1] = weight / (sqrt(squares * share) + 1e-6f);
  }
}

template <int D, int SIMDS>
inline float square_norm(const device float* x, threadgroup float* scratch, int simd, int lane) {
  float sum = 0.0f;
  for (int d = simd * 32 + lane; d < D; d += 32 * SIMDS) {
    sum += x[d] * x[d];
  }
  return sum_of_threadgroup<SIMDS>(sum, scratch, simd, lane);
}

// Threadgroup (0, KV head or 0, batch) of a launch.
template <
    int D, int G, int SCORE, int PRIORITY, bool AGE, bool VALUES, int RANGES, int LEVELS, int HEADS,
    int SIMDS, typename Weights, typename Victims, typename Written, typename Lse,
    typename Positions, typename Scales>
inline void update(
    const device int* plan,
    Weights weights,                   // decay; of the terms: distance, mass, value, age
    Victims victims,                   // [B, H, evict_every]
    const device float* logits,        // [B, attended slots * G]: head after head [G, length]
    Lse lse,                           // [B, H * G, 1]
    const device float* distances,     // [B, attended slots], from ...
    const device float* means,         // ... [B, H, D]; or what else ranks the slots
    Positions positions,               // [B, S]
    device float* scores,              // [B, S]
    const device float* norms,         // [B, S]
    const device half* value_lengths,  // [B, S] of dense values
    Scales value_scales,               // [B, S, RANGES] of packed ones
    Written slots,                     // [B, H]: those just written, counted in their heads
    device int* victims_out,           // [B, H, evict_every]
    threadgroup float* standards, threadgroup float* scratch, threadgroup int* places, uint3 at,
    int thread_index) {
  constexpr int THREADS = 32 * SIMDS;
  constexpr bool RANKS_TERMS = PRIORITY == BY_DISTANCE || PRIORITY == BY_SALIENCE;
  const int simd = thread_index / 32, lane = thread_index % 32;
  const DecodeStep step = decode_step_of(plan);
  const int first_head = int(at.y);
  const float decay = weights[0];
  const int64_t heads_before = int64_t(at.z) * step.kv_heads;
  const HeadPlan lead = head_plan_of(plan, first_head);

  const LayerSlots<RANGES, LEVELS, Positions, Scales> layer = {
      plan,  logits,        distances,    positions, scores,
      norms, value_lengths, value_scales, step,      int(at.z),
      G};

  for (int h = 0; h < HEADS; h++) {
    const HeadPlan line = head_plan_of(plan, first_head + h);
    const int64_t kv_head = heads_before + first_head + h;
    auto head = head_slots_of(layer, first_head + h);
    const int fresh = slots[kv_head];
    float lses[G];
    UNROLL
    for (int g = 0; g < G; g++) {
      lses[g] = lse[kv_head * G + g];
    }
    threadgroup float* standard = standards + h * STANDARDS;
    if (RANKS_TERMS) {
      // A key at the mean itself must not stretch the scale for all others (terms.py).
      const float square = square_norm<D, SIMDS>(means + kv_head * D, scratch, simd, lane);
      head.least_distance = 1e-6f * square + 1e-12f;
      if (thread_index == 0) {
        standard[LEAST_DISTANCE] = head.least_distance;
      }
    }

    Moments moments[TERMS] = {};
    for (int n = thread_index; n < line.length; n += THREADS) {
      if (SCORE != SCORE_NONE) {
        const float held = n == fresh ? 0.0f : head.scores[n];
        head.scores[n] = accumulated<SCORE, G>(held, head, n, lses, decay);
      }
      if (RANKS_TERMS && line.choose && may_go(head, head.positions[n])) {
        float terms[TERMS];
        terms_of<PRIORITY, SCORE != SCORE_NONE, VALUES>(head, n, head.positions[n], terms);
        UNROLL
        for (int i = 0; i < TERMS; i++) {
          if (has_term<PRIORITY>(i)) {
            add(moments[i], terms[i]);
          }
        }
      }
    }
    if (RANKS_TERMS && line.choose) {
      UNROLL
      for (int i = 0; i < TERMS; i++) {
        if (has_term<PRIORITY>(i)) {
          standardise<SIMDS>(
              moments[i], weights[1 + i], standard + 2 * i, scratch, simd, lane);
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // An array of the heads' slots would lie in memory: the others' are made anew where they are read.
  auto first = head_slots_of(layer, first_head);
  if (RANKS_TERMS) {
    first.least_distance = standards[LEAST_DISTANCE];
  }

  // selection.select_victims: each pass finds the first slot after the last one.
  Candidate last = {-INFINITY, -1, 0};
  for (int e = 0; e < step.evict_every; e++) {
    if (lead.choose) {
      Candidate own = {INFINITY, LARGEST_INT, LARGEST_INT};
      for (int n = thread_index; n < lead.length; n += THREADS) {
        const int position = first.positions[n];
        if (!may_go(first, position)) {
          continue;
        }
        float worth = 0.0f;
        for (int h = 0; h < HEADS; h++) {
          threadgroup float* standard = standards + h * STANDARDS;
          auto head = first;
          if (h > 0) {
            head = head_slots_of(layer, first_head + h);
            if (RANKS_TERMS) {
              head.least_distance = standard[LEAST_DISTANCE];
            }
          }
          worth += priority_of<SCORE, PRIORITY, AGE, VALUES>(head, n, position, standard);
        }
        worth = HEADS > 1 ? worth / float(HEADS) : worth;
        // A NaN goes first; whatever may go is finite, and so before what may not.
        const float rank = isnan(worth) ? -INFINITY : min(worth, LARGEST_FLOAT);
        const Candidate candidate = {rank, position, n};
        own = before(last, candidate) && before(candidate, own) ? candidate : own;
      }
      last = first_of_threadgroup<SIMDS>(own, scratch, places, simd, lane);
    }
    for (int h = thread_index; h < HEADS; h += THREADS) {
      const int64_t written = (heads_before + first_head + h) * step.evict_every + e;
      victims_out[written] = lead.choose ? last.slot : int(victims[written]);
    }
  }
}

}  // namespace h2o

//! buffers
//! in plan
//! in weights
//! in victims
//! in logits optional float
//! in lse
//! in distances optional float
//! in means optional float
//! in positions
//! in scores optional float
//! in norms optional float
//! in value_lengths optional half
//! in value_scales optional half
//! in slots
//! out victims_out
//! body

  THREADGROUP_ARRAY(float, standards, HEADS * STANDARDS);
  THREADGROUP_ARRAY(float, scratch, SIMDS);
  THREADGROUP_ARRAY(int, places, 2 * SIMDS);
  h2o::update<D, G, SCORE, PRIORITY, AGE, VALUES, RANGES, LEVELS, HEADS, SIMDS>(
      plan, weights, victims, logits, lse, distances, means, positions,
      IN_PLACE(float, scores), norms, value_lengths, value_scales, slots, victims_out, standards,
      scratch, places, threadgroup_position_in_grid, int(thread_index_in_threadgroup));
