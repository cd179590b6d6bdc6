// Rows that are written as they are stored. A simdgroup holds a row by columns: lane j has elements
// j, j + 32, ..., so that 32 lanes have a whole group's elements, or a part of one.

#include "packed_rows.h"

namespace h2o {

// Writes a row; `columns` become what a reader will find.
template <int W, typename T>
inline void store_columns(Rows<device T*> row, int lane, thread float* columns) {
  UNROLL
  for (int i = 0; i < W; i++) {
    row.data[32 * i + lane] = T(columns[i]);
  }
}

// Packs it by each group's least and greatest element (python/mlx_h2o/slots/packed.py), bit for bit: the
// levels count from scale and bias as they are stored, rounded to the row's dtype. A group of equal
// elements has scale 0 and levels 0; one with an infinity or a NaN is read as NaNs.
template <int W, int BITS, int GROUP, typename T>
inline void store_columns(
    PackedRows<BITS, GROUP, device uint*, device T*> row, int lane, thread float* columns) {
  constexpr int COLUMNS = GROUP / 32;
  const float top = float((1 << BITS) - 1);
  UNROLL
  for (int first = 0; first < W; first += COLUMNS) {
    float low = INFINITY, high = -INFINITY;
    bool broken = false;
    UNROLL
    for (int i = first; i < first + COLUMNS; i++) {
      low = min(low, columns[i]);
      high = max(high, columns[i]);
      broken = broken || isnan(columns[i]);
    }
    low = simd_min(low);
    high = simd_max(high);
    if (simd_any(broken)) {
      low = high = INFINITY - INFINITY;
    }
    const T scale_stored = T((high - low) / top), bias_stored = T(low);
    const float scale = float(scale_stored), bias = float(bias_stored);
    if (lane == 0) {
      row.scales.data[first / COLUMNS] = scale_stored;
      row.biases.data[first / COLUMNS] = bias_stored;
    }
    UNROLL
    for (int i = first; i < first + COLUMNS; i++) {
      const float nearest = scale > 0.0f ? rint((columns[i] - bias) / scale) : 0.0f;
      const float level = nearest > 0.0f ? min(nearest, top) : 0.0f;
      columns[i] = level * scale + bias;
      // Levels share no bit, so their sum is their union.
      uint word = 0;
      UNROLL
      for (int w = 0; w < BITS; w++) {
        const int shift = lane * BITS - 32 * w;
        const uint part = shift >= 32 || shift <= -BITS ? 0
            : shift >= 0                               ? uint(level) << shift
                                                       : uint(level) >> -shift;
        const uint whole = simd_sum(part);
        word = lane == w ? whole : word;
      }
      if (lane < BITS) {
        row.words.data[BITS * i + lane] = word;
      }
    }
  }
}

}  // namespace h2o
