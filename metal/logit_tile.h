// Logits of many queries and keys at a time, for prompts: a threadgroup computes TILE query rows by
// TILE keys from chunks of both that pass through threadgroup memory, each thread a square of
// SQUARE x SQUARE. Row i of a KV head is query i % L of query head i / L of its group.

#include "masks.h"
#include "packed_rows.h"

namespace h2o {

#define TILE 64
#define SQUARE 4
#define SIDE (TILE / SQUARE)  // threads along each side
#define TILE_THREADS (SIDE * SIDE)
#define CHUNK 32
#define PADDED_CHUNK (CHUNK + 1)  // so that lanes of a simdgroup read different banks

// A KV head's operands.
template <typename T, typename Keys, typename Mask>
struct Prompt {
  Rows<const device T*> queries;
  Keys keys;  // dense or packed
  Rows<Mask> mask;
  Launch launch;
  Work work;
  int rows;  // G * L
  float scale;
};

template <int G, typename T, typename Keys, typename Mask>
inline Prompt<T, Keys, Mask> prompt_of(
    const device int* params, Rows<const device T*> queries, Keys keys, Rows<Mask> mask,
    float scale, uint3 at) {
  const Launch launch = launch_of(params);
  const Work work = work_of(params, int(at.y));
  const int batch = int(at.z), first = work.head * G;
  return {
      from(queries, batch, first, 0),
      from(keys, batch, work.memory_head, work.start),
      from(mask, batch, first, 0),
      launch,
      work,
      G * launch.queries,
      scale};
}

// The thread's k-th row of a tile, or its k-th key.
inline int row_of_square(int thread_index, int k) {
  return thread_index / SIDE * SQUARE + k;
}
inline int key_of_square(int thread_index, int k) {
  return thread_index % SIDE + k * SIDE;
}

// Whether a causal mask hides all keys from `first_key` on from all rows of a tile.
template <int MASK, typename T, typename Keys, typename Mask>
inline bool all_hidden(Prompt<T, Keys, Mask> prompt, int first_row, int first_key) {
  if (MASK != CAUSAL) {
    return false;
  }
  const int L = prompt.launch.queries, last_row = min(first_row + TILE, prompt.rows) - 1;
  const int last_query = first_row / L == last_row / L ? last_row % L : L - 1;
  return first_key > prompt.work.length - L + last_query;
}

// The thread's square of logits, minus infinity where masked or outside.
template <int D, int MASK, typename T, typename Keys, typename Mask>
inline void logit_tile(
    Prompt<T, Keys, Mask> prompt, int first_row, int first_key, threadgroup float* query_chunk,
    threadgroup float* key_chunk, int thread_index, thread float* logits) {
  const int L = prompt.launch.queries, length = prompt.work.length;
  UNROLL
  for (int i = 0; i < SQUARE * SQUARE; i++) {
    logits[i] = 0.0f;
  }
  for (int done = 0; done < D; done += CHUNK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A chunk is a simdgroup's width, so a simdgroup reads one row.
    const Rows<const device T*> query_columns = columns_from(prompt.queries, done);
    const Keys key_columns = columns_from(prompt.keys, done);
    for (int e = thread_index; e < TILE * CHUNK; e += TILE_THREADS) {
      const int i = e / CHUNK, lane = e % CHUNK, row = first_row + i, key = first_key + i;
      float query[1] = {0.0f}, held[1] = {0.0f};
      if (row < prompt.rows) {
        load_share<1>(from(query_columns, 0, row / L, row % L), 0, lane, query);
      }
      if (key < length) {
        load_share<1>(key_columns, key, lane, held);
      }
      query_chunk[i * PADDED_CHUNK + lane] = query[0];
      key_chunk[i * PADDED_CHUNK + lane] = held[0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = 0; d < CHUNK; d++) {
      float keys[SQUARE];
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        keys[k] = key_chunk[key_of_square(thread_index, k) * PADDED_CHUNK + d];
      }
      UNROLL
      for (int r = 0; r < SQUARE; r++) {
        const float query = query_chunk[row_of_square(thread_index, r) * PADDED_CHUNK + d];
        UNROLL
        for (int k = 0; k < SQUARE; k++) {
          logits[r * SQUARE + k] += query * keys[k];
        }
      }
    }
  }
  UNROLL
  for (int r = 0; r < SQUARE; r++) {
    const int row = first_row + row_of_square(thread_index, r);
    const Rows<Mask> mask = from(prompt.mask, 0, row / L, row % L);
    UNROLL
    for (int k = 0; k < SQUARE; k++) {
      const int key = first_key + key_of_square(thread_index, k);
      float bias = -INFINITY;
      if (row < prompt.rows && key < length) {
        bias = bias_of<MASK>(key, row % L, prompt.launch, prompt.work, mask.data, mask.column);
      }
      const float logit = prompt.scale * logits[r * SQUARE + k] + bias;
      logits[r * SQUARE + k] = bias == -INFINITY ? -INFINITY : logit;
    }
  }
}

}  // namespace h2o
