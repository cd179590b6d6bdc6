// Rows of arrays. A simdgroup holds a row, each lane a share of W neighbouring elements.

namespace h2o {

// A four-dimensional array (or a part of one) and its strides in elements.
template <typename Elements>
struct Rows {
  Elements data;
  int64_t batch, head, row, column;
};

#define ROWS_OF(data, strides) h2o::rows_of(data, strides[0], strides[1], strides[2], strides[3])

template <typename Elements>
inline Rows<Elements> rows_of(Elements data, int64_t b, int64_t h, int64_t r, int64_t c) {
  return {data, b, h, r, c};
}

// Contiguous rows of a width.
template <typename Elements>
inline Rows<Elements> dense_rows(Elements data, int width) {
  return {data, 0, 0, width, 1};
}

template <typename Elements>
inline void move(thread Rows<Elements>& rows, int batch, int head, int row) {
  rows.data += batch * rows.batch + head * rows.head + row * rows.row;
}

// The same array from another element on.
template <typename Elements>
inline Rows<Elements> from(Rows<Elements> rows, int batch, int head, int row) {
  move(rows, batch, head, row);
  return rows;
}

// Of a row, the columns from `first` on.
template <typename Elements>
inline Rows<Elements> columns_from(Rows<Elements> rows, int first) {
  rows.data += first * rows.column;
  return rows;
}

// This lane's share of a row. Rows are almost always contiguous, and then loads are wide.
template <int W, typename Elements, typename Share>
inline void load_share(Rows<Elements> rows, int row, int lane, thread Share* share) {
  const Elements at = rows.data + row * rows.row + lane * W * rows.column;
  if (rows.column == 1) {
    UNROLL
    for (int i = 0; i < W; i++) {
      share[i] = Share(at[i]);
    }
  } else {
    for (int i = 0; i < W; i++) {
      share[i] = Share(at[i * rows.column]);
    }
  }
}

// Copies `count` rows of D elements to threadgroup memory, all threads together.
template <int D, typename Elements, typename T>
inline void copy_rows(
    Rows<Elements> rows, int count, Rows<threadgroup T*> to, int thread_index, int threads) {
  for (int e = thread_index; e < count * D; e += threads) {
    to.data[e] = rows.data[e / D * rows.row + e % D * rows.column];
  }
}

template <int W, typename A>
inline float dot(const thread A* a, const thread float* b) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < W; i++) {
    sum += float(a[i]) * b[i];
  }
  return sum;
}

template <int W>
inline float square_distance(const thread float* a, const thread float* b) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < W; i++) {
    const float apart = a[i] - b[i];
    sum += apart * apart;
  }
  return sum;
}

}  // namespace h2o
