// Log-sum-exp of many queries' logits, none of which is written. A threadgroup per TILE query rows
// of a KV head, over all keys.

#include "logit_tile.h"
#include "online_softmax.h"

namespace h2o {

// Threadgroup (tile of rows, KV head, batch) of a launch.
template <int D, int G, int MASK, typename T, typename Keys, typename Mask>
inline void prompt_lse(
    Prompt<T, Keys, Mask> prompt,
    device float* lse,  // [B, H * G, L]
    threadgroup float* query_chunk, threadgroup float* key_chunk, uint3 at, int thread_index) {
  const int first_row = int(at.x) * TILE;
  lse += (int64_t(at.z) * prompt.launch.kv_heads + prompt.work.head) * prompt.rows;
  float tops[SQUARE], sums[SQUARE];
  UNROLL
  for (int r = 0; r < SQUARE; r++) {
    tops[r] = LOWEST_LOGIT;
    sums[r] = 0.0f;
  }
  for (int first_key = 0; first_key < prompt.work.length; first_key += TILE) {
    if (all_hidden<MASK>(prompt, first_row, first_key)) {
      break;
    }
    float logits[SQUARE * SQUARE];
    logit_tile<D, MASK>(prompt, first_row, first_key, query_chunk, key_chunk, thread_index, logits);
    UNROLL
    for (int r = 0; r < SQUARE; r++) {
      float top = tops[r];
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        top = max(top, logits[r * SQUARE + k]);
      }
      sums[r] *= fast::exp(tops[r] - top);
      tops[r] = top;
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        sums[r] += weight_of(logits[r * SQUARE + k], top);
      }
    }
  }
  // The SIDE threads with the same rows are neighbours in one simdgroup.
  UNROLL
  for (int r = 0; r < SQUARE; r++) {
    float top = tops[r];
    for (int apart = 1; apart < SIDE; apart *= 2) {
      top = max(top, simd_shuffle_xor(top, ushort(apart)));
    }
    float sum = sums[r] * fast::exp(tops[r] - top);
    for (int apart = 1; apart < SIDE; apart *= 2) {
      sum += simd_shuffle_xor(sum, ushort(apart));
    }
    const int row = first_row + row_of_square(thread_index, r);
    if (row < prompt.rows && thread_index % SIDE == 0) {
      lse[row] = sum == 0.0f ? -INFINITY : top + log(sum);
    }
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
//! out lse
//! body

  THREADGROUP_ARRAY(float, query_chunk, TILE * PADDED_CHUNK);
  THREADGROUP_ARRAY(float, key_chunk, TILE * PADDED_CHUNK);
  h2o::prompt_lse<D, G, MASK>(
      h2o::prompt_of<G>(
          params, ROWS_OF(queries, queries_strides),
          h2o::stored_rows(
              h2o::Packing<K_BITS, K_GROUP>(), ROWS_OF(keys, keys_strides),
              ROWS_OF(key_scales, key_scales_strides), ROWS_OF(key_biases, key_biases_strides)),
          ROWS_OF(mask, mask_strides), factors[0], threadgroup_position_in_grid),
      lse, query_chunk, key_chunk, threadgroup_position_in_grid,
      int(thread_index_in_threadgroup));
