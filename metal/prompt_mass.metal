// The attention that many queries give each key: their weights' sum over queries, mean over the
// query heads. A threadgroup per TILE keys of a KV head, over all rows, whose lse is known.

#include "logit_tile.h"

namespace h2o {

// Threadgroup (tile of keys, KV head, batch) of a launch.
template <int D, int G, int MASK, typename T, typename Keys, typename Mask, typename Lse>
inline void prompt_mass(
    Prompt<T, Keys, Mask> prompt,
    Lse lse,             // [B, H * G, L]
    device float* mass,  // [B, slots], head after head
    threadgroup float* query_chunk, threadgroup float* key_chunk, uint3 at, int thread_index) {
  const int first_key = int(at.x) * TILE, length = prompt.work.length;
  if (first_key >= length) {
    return;
  }
  lse += (int64_t(at.z) * prompt.launch.kv_heads + prompt.work.head) * prompt.rows;
  mass += int64_t(at.z) * prompt.launch.slots + prompt.work.prefix;
  float sums[SQUARE] = {0.0f};
  for (int first_row = 0; first_row < prompt.rows; first_row += TILE) {
    if (all_hidden<MASK>(prompt, first_row, first_key)) {
      continue;
    }
    float logits[SQUARE * SQUARE];
    logit_tile<D, MASK>(prompt, first_row, first_key, query_chunk, key_chunk, thread_index, logits);
    UNROLL
    for (int r = 0; r < SQUARE; r++) {
      const int row = first_row + row_of_square(thread_index, r);
      const float of_row = row < prompt.rows ? float(lse[row]) : -INFINITY;
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        const float logit = logits[r * SQUARE + k];
        const bool seen = logit != -INFINITY && of_row != -INFINITY;
        sums[k] += seen ? fast::exp(logit - of_row) : 0.0f;
      }
    }
  }
  // Added up in one order, so that the same prompt always gives the same masses.
  threadgroup float* const partial = query_chunk;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int k = 0; k < SQUARE; k++) {
    partial[thread_index / SIDE * TILE + key_of_square(thread_index, k)] = sums[k];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < TILE && first_key + thread_index < length) {
    float sum = 0.0f;
    for (int i = 0; i < SIDE; i++) {
      sum += partial[i * TILE + thread_index];
    }
    mass[first_key + thread_index] = sum / float(G);
  }
}

}  // namespace h2o

//! buffers
//! in params
//! in factors
//! in queries
//! in keys
//! in key_scales optional float strided
//! in key_biases optional float strided
//! in mask optional bool strided
//! in lse
//! out mass
//! body

  THREADGROUP_ARRAY(float, query_chunk, TILE * PADDED_CHUNK);
  THREADGROUP_ARRAY(float, key_chunk, TILE * PADDED_CHUNK);
  h2o::prompt_mass<D, G, MASK>(
      h2o::prompt_of<G>(
          params, ROWS_OF(queries, queries_strides),
          h2o::stored_rows(
              h2o::Packing<K_BITS, K_GROUP>(), ROWS_OF(keys, keys_strides),
              ROWS_OF(key_scales, key_scales_strides), ROWS_OF(key_biases, key_biases_strides)),
          ROWS_OF(mask, mask_strides), factors[0], threadgroup_position_in_grid),
      lse, mass, query_chunk, key_chunk, threadgroup_position_in_grid,
      int(thread_index_in_threadgroup));
