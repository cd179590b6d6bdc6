// Attention with scores over raw memory: work split by slots, partial softmaxes merged in order.
#pragma once

#include <functional>
#include <vector>

#include "kernels/kernels.h"

namespace mlx_h2o {

// Where a KV head's slots lie: `length` rows from these elements of the batch entry on (32-bit
// words of packed rows).
struct HeadSlots {
  int64_t k_start, v_start;
  int64_t column;  // of its first slot in logits and mass
  int length;
  int64_t k_scales = 0, v_scales = 0;  // likewise, of packed rows
};

struct Mask {
  MaskKind kind = MaskKind::none;
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t batch = 0, head = 0, query = 0, slot = 0;  // strides in elements
};

struct Attention {
  int B, Hq, Hk, L, D, Dv;
  float scale;

  const void* q;
  Dtype q_dtype;
  int64_t q_batch, q_head, q_query;

  Rows k, v;  // strides from slot to slot
  int64_t k_batch, v_batch;
  int64_t k_scale_batch = 0, v_scale_batch = 0;
  std::vector<HeadSlots> heads;  // [Hk]

  // More slots of every head, stored apart and attended after its own: rows [B, Hk, recent_rows],
  // `recent` of each head's in use. Only while decoding (one block of query rows a KV head), and
  // their logits and masses are seen by after_head alone.
  Rows recent_k, recent_v;
  int recent = 0;
  int64_t recent_rows = 0;

  Mask mask;
  const float* sinks = nullptr;        // [Hq]
  const float* seed_logits = nullptr;  // [B, Hq, L]: one more column ...
  const float* seed_values = nullptr;  // [B, Hk, Dv]: ... and its value

  void* out;  // [B, Hq, L, Dv]
  Dtype out_dtype;
  float* lse = nullptr;  // [B, Hq, L]

  // Logits [B, Hq, L, columns], or [B, G, L, columns] where heads have columns of their own.
  float* logits = nullptr;
  int64_t logits_batch = 0, logits_head = 0, logits_group = 0, logits_query = 0;
  // Mass [B, Hk, columns] or [B, columns]; must be zero before.
  float* mass = nullptr;
  int64_t mass_batch = 0, mass_head = 0;

  // [B, Hk, D]: points from which every key's squared distance is wanted.
  const float* centers = nullptr;
  // Keep every slot's weight (or logit) until `after_head` has seen them.
  bool keep_weights = false;
  bool keep_logits = false;
};

// What `after_head` may look at: the query rows of one KV head, after the softmax was merged.
// Columns are the head's slots and, from recent_column on, those of the recent rows.
struct AttendedHead {
  int batch, head, rows;
  const float* weights;  // [rows, stride], e^(s - tile_max)
  const float* logits;   // [rows, stride]
  int64_t stride;
  const float* tile_max;  // [tiles, rows]
  const float* lse;       // [rows]
  float* distance;        // [slots]
};

// Where recent rows begin among a head's columns: a tile has one kind of rows.
constexpr int recent_column(int length) {
  return (length + kTile - 1) / kTile * kTile;
}

// Computes all of it on the shared thread pool. How the work is cut depends on shapes alone, and
// partial results are merged in slot order, so every number of threads gives the same bits.
//
// after_head, if given, is called once for each (batch, KV head), on whichever thread finished
// it; only for calls of at most kMaxRows query rows a KV head.
void attend(
    const Attention& a, const std::function<void(const AttendedHead&)>& after_head = nullptr);

}  // namespace mlx_h2o
