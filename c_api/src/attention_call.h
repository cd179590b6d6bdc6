// What a model asks of a layer: queries, and how they see the keys
// (python/mlx_h2o/attention/call.py, slots/softmax.py).
#pragma once

#include "attend.h"

namespace mlx_h2o {

struct AttentionCall {
  mx::array q;  // [B, Hq, L, D]
  float scale;
  std::optional<mx::array> sinks = std::nullopt;  // [Hq]
  // Causal, aligned at the end; or an array that broadcasts to [B, Hq, L, M], of which the last L
  // columns are for the new rows (one column: for all rows); or neither.
  Masking mask = {true, std::nullopt};

  // L, the queries.
  int length() const {
    return q.shape(2);
  }
  // The call of the query heads first to last - 1.
  AttentionCall of_heads(int first, int last) const {
    if (first == 0 && last == q.shape(1)) return *this;
    std::optional<mx::array> of_them;
    if (sinks) of_them = part(*sinks, 0, first, last);
    Masking seen = mask;
    if (seen.array && seen.array->ndim() > 2 && seen.array->shape(-3) > 1)
      seen.array = part(*seen.array, -3, first, last);
    return {part(q, 1, first, last), scale, of_them, seen};
  }
  // The call of the queries start to end - 1.
  AttentionCall queries(int start, int end) const {
    Masking seen = mask;
    if (seen.array && seen.array->ndim() > 1 && seen.array->shape(-2) > 1)
      seen.array = part(*seen.array, -2, start, end);
    return {part(q, 2, start, end), scale, sinks, seen};
  }
  // The call of its first queries, as if there were no others.
  AttentionCall first(int count) const {
    AttentionCall shorter = queries(0, count);
    const int columns = mask.array ? mask.array->shape(-1) : 1;
    if (columns > 1)
      shorter.mask.array = part(*shorter.mask.array, -1, 0, columns - (length() - count));
    return shorter;
  }
  // How the queries of this call, of whose chunk M rows are new, see N rows: older ones are
  // visible.
  Masking over(int N, int M) const {
    if (!mask.array || mask.array->shape(-1) == 1) return mask;
    const int given = mask.array->shape(-1);
    mx::array own = part(*mask.array, -1, given - M, given);
    if (N > M) {
      mx::Shape older = own.shape();
      older.back() = N - M;
      const bool marks = own.dtype() == mx::bool_;
      own = mx::concatenate(
          {marks ? mx::ones(older, own.dtype()) : mx::zeros(older, own.dtype()), own}, -1);
    }
    return {false, own};
  }
  // The call of one of the queries, when they come one by one to a layer that is `empty` before.
  AttentionCall single(int i, bool empty) const {
    AttentionCall one = queries(i, i + 1);
    if (!mask.array || mask.array->shape(-1) == 1) return one;
    const int column = mask.array->shape(-1) - length() + i;
    one.mask.array = part(*one.mask.array, -1, column, column + 1);
    // A single column would be every row's.
    if (i || !empty) one.mask = one.over(2, 1);
    return one;
  }
};

}  // namespace mlx_h2o
