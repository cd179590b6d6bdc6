// The query rows of a KV head: row i is query i % QUERIES of query head i / QUERIES of its group.
// QUERIES is at least the number of queries; rows without a query or a head are dead.

#include "online_softmax.h"
#include "rows.h"

namespace h2o {

struct QueryRow {
  int head, query;
  bool live;
};

template <int G, int QUERIES>
inline QueryRow query_row(int index, int queries) {
  const int head = index / QUERIES, query = index % QUERIES;
  return {head, query, head < G && query < queries};
}

// The ROWS rows that a simdgroup works for: its lanes' shares of queries and sums. Queries stay
// narrow, without attention's scale, since so they take half the registers.
template <typename T, int W, int WV, int ROWS>
struct QueryRows {
  int first;
  T queries[ROWS][W];
  OnlineSoftmax<WV> sums[ROWS];
};

// Loads a block's rows. They pass through threadgroup memory, so that simdgroups that share rows
// read them from the device once; dead rows are zero.
template <int G, int QUERIES, int BLOCK_ROWS, int SCRATCH, typename T, int W, int WV, int ROWS>
inline void load_queries(
    Rows<const device T*> queries,
    int count,
    int block_first,
    threadgroup float* scratch,
    int thread_index,
    int threads,
    thread QueryRows<T, W, WV, ROWS>& rows) {
  constexpr int D = 32 * W;
  constexpr int AT_ONCE = SCRATCH / D;
  const int first = rows.first - block_first;
  for (int done = 0; done < BLOCK_ROWS; done += AT_ONCE) {
    const int here = min(AT_ONCE, BLOCK_ROWS - done);
    for (int e = thread_index; e < here * D; e += threads) {
      const QueryRow row = query_row<G, QUERIES>(block_first + done + e / D, count);
      const Rows<const device T*> query = from(queries, 0, row.head, row.query);
      scratch[e] = row.live ? float(query.data[e % D * query.column]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const int staged = first + r - done;
      if (staged >= 0 && staged < here) {
        load_share<W>(dense_rows(scratch, D), staged, thread_index % 32, rows.queries[r]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Brings loaded rows into the frame of the keys that they meet (python/mlx_h2o/slots/key_scaling.py): q' = q
// scale, rounded to the queries' type. What they meet later, the remainder too, lies in it.
template <int D, typename T, int W, int WV, int ROWS>
inline void enter_frame(
    const device float* scale,  // [D], of the KV head
    threadgroup float* scratch,
    int thread_index,
    int threads,
    thread QueryRows<T, W, WV, ROWS>& rows) {
  float share[W];
  copy_rows<D>(dense_rows(scale, D), 1, dense_rows(scratch, D), thread_index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_share<W>(dense_rows(scratch, D), 0, thread_index % 32, share);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int i = 0; i < W; i++) {
      rows.queries[r][i] = T(float(rows.queries[r][i]) * share[i]);
    }
  }
}

}  // namespace h2o
