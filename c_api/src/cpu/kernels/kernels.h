// The inner loops, compiled once per instruction set and chosen at run time.
//
// They know nothing of MLX: plain pointers in, plain pointers out, no allocation, no threads.
#pragma once

#include <stdint.h>

#include "../../kernel_terms.h"

namespace mlx_h2o {

enum class Dtype { float32, float16, bfloat16 };

constexpr int size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

enum class MaskKind { none, causal, boolean, additive };

// Rows of a matrix; row i begins i * stride elements after `data`.
struct Rows {
  const void* data;
  int64_t stride;
  Dtype dtype;

  // Packed rows (in the format of mx.quantize): `data` are 32-bit words, and scales and biases have
  // `dtype`, one for each group of a row.
  int bits = 0;  // 0: dense
  int group_size = 0;
  const void* scales = nullptr;
  const void* biases = nullptr;
  int64_t scale_stride = 0;
};

// Where a packed row goes.
struct PackedRow {
  void* data;
  void* scales;
  void* biases;
  Dtype dtype;
  int bits, group_size;
};

// What one query row may see of a block's slots.
struct RowMask {
  int visible;       // causal: the first so many
  const void* data;  // boolean or additive: the first slot's entry
};

// Keys that are worked on while they lie in the nearest cache: 32 rows of 128 floats are 16 KB.
constexpr int kTile = 32;

// Attention of `rows` query rows over `slots` slots of one KV head.
//
// Leaves a partial softmax: with m the largest logit (minus infinity where nothing is visible),
// l = sum e^(s - m) and acc = sum e^(s - m) v.
struct AttentionBlock {
  int rows, slots, D, Dv;
  const float* q;  // [rows, q_stride], scaled, zeros from D to q_stride
  int64_t q_stride;
  // The same as they came, unscaled, where queries and keys are bfloat16 and `bf16_dot`.
  const uint16_t* q16 = nullptr;  // [rows, q_stride]
  float scale = 1;                // that q has and q16 has not
  Rows k, v;

  MaskKind mask = MaskKind::none;
  const RowMask* row_masks = nullptr;  // [rows]
  int64_t mask_stride = 0;             // elements between slots
  Dtype mask_dtype = Dtype::float32;

  float* logits = nullptr;  // [rows, logits_stride], where the caller wants them
  int64_t logits_stride = 0;
  // [rows, weights_stride], e^(s - tile_max), where the caller wants them
  float* weights = nullptr;
  int64_t weights_stride = 0;
  float* tile_max = nullptr;  // [tiles, rows], with weights

  const float* center = nullptr;  // [D]: a point in key space ...
  float* distance = nullptr;      // ... and the squared distance of each key from it, [slots]

  float* m;    // [rows]
  float* l;    // [rows]
  float* acc;  // [rows, acc_stride]
  int64_t acc_stride;
  float* scratch;  // scratch_floats(D, Dv)
};

// Widths are padded to this many floats in scratch memory, whatever the instruction set.
constexpr int kPad = 16;
constexpr int padded(int width) {
  return (width + kPad - 1) / kPad * kPad;
}
// Groups of packed rows.
constexpr int kSmallestGroup = 32;
constexpr int kMostGroups = 576 / kSmallestGroup;
constexpr int64_t scratch_floats(int D, int Dv) {
  // Logits and weights of a tile, its keys and values widened, their scales and biases, the sums
  // of the queries' groups, and four queries in another form.
  return 2 * kMaxRows * kTile + int64_t(kTile) * (padded(D) + padded(Dv)) +
      2 * int64_t(kTile) * (D + Dv) / kSmallestGroup + kMaxRows * D / kSmallestGroup +
      4 * padded(D) + 2 * kPad;
}

// Terms of Priority::distance and salience, at most: distance, mass, value, age.
constexpr int kTerms = 4;

// Positions of slots, in 16 or 32 bits (python/mlx_h2o/slots/slot_store.py); below 0 where a
// token is pinned (python/mlx_h2o/slots/pins.py).
struct Positions {
  void* data;
  bool narrow;

  int operator[](int64_t slot) const {
    return narrow ? static_cast<int16_t*>(data)[slot] : static_cast<int32_t*>(data)[slot];
  }
  void set(int64_t slot, int position) const {
    if (narrow)
      static_cast<int16_t*>(data)[slot] = int16_t(position);
    else
      static_cast<int32_t*>(data)[slot] = position;
  }
  // Those from a slot on.
  Positions from(int64_t slot) const {
    return {static_cast<char*>(data) + slot * (narrow ? 2 : 4), narrow};
  }
};

// One KV head after attention: scores are brought up to date and, if `priority` is wanted, slots
// are ranked.
struct UpdateHead {
  int slots, rows;
  const float* weights;  // [rows, weights_stride] with tile_max, for every Score but ema_logits
  int64_t weights_stride;
  const float* tile_max;          // [tiles, rows]
  const float* lse;               // [rows]
  const float* logits;            // [rows, weights_stride], for ema_logits
  const float* distance;          // [slots], Priority::distance, salience or direction
  float least_distance;           // what a distance counts as at least
  const uint16_t* value_lengths;  // [slots] float16, Priority::salience over dense values
  const float* value_ranges;      // [slots, value_groups], the same over packed ones
  int value_groups;
  Positions positions;
  float* scores;    // [slots] in place
  float* priority;  // [slots] out, or nullptr
  float* terms;     // [kTerms, slots] scratch, with priority
  int offset;       // the next logical position
  int recent;       // last positions that are protected
  int aged_from;    // the position from which ages count
};

struct Kernels {
  const char* name;
  bool bf16_dot;  // products of bfloat16 queries and keys need no conversion
  void (*attend)(const AttentionBlock&);
  // mass[n] += factor * sum over rows of e^(s - lse)
  void (*add_mass)(const UpdateHead&, float factor, float* mass);
  void (*update)(const UpdateHead&, const KernelPolicy&);
  // Names the evict_every slots of lowest priority, which is overwritten; ties to the oldest.
  void (*select_victims)(const UpdateHead&, const KernelPolicy&, int32_t* victims);
  // y = a y + b x
  void (*blend)(float* y, const float* x, float a, float b, int n);
  float (*dot)(const float* x, const float* y, int n);
  // One row of any dtype to floats, times a factor.
  void (*widen)(float* out, const void* row, Dtype dtype, float factor, int n);
  void (*narrow)(void* out, Dtype dtype, const float* row, float factor, int n);
  // A float row packed by its groups' ranges (PackedRows.of).
  void (*quantize)(const float* row, int width, const PackedRow& out);
  // (row - centre) / scale and row * by, in the row's dtype.
  void (*enter_frame)(
      void* out, const void* row, Dtype dtype, const float* centre, const float* scale, int n);
  void (*multiply)(void* out, const void* row, Dtype dtype, const float* by, int n);
  // One row of any kind to `width` floats.
  void (*read_row)(float* out, const Rows& rows, int64_t row, int width);
};

// The best that this machine runs, or the one named by MLX_H2O_ISA in the environment.
const Kernels& kernels();

}  // namespace mlx_h2o
