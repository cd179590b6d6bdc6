// What a model asks of a layer: queries, and how they see the keys
// (python/mlx_h2o/attention_call.py). The mask is causal, aligned at the end.
#pragma once

#include "ops.h"

namespace mlx_h2o {

struct AttentionCall {
  mx::array q;  // [B, Hq, L, D]
  float scale;
  std::optional<mx::array> sinks = std::nullopt;  // [Hq]

  // L, the queries.
  int length() const {
    return q.shape(2);
  }
  // The call of the query heads first to last - 1.
  AttentionCall of_heads(int first, int last) const {
    if (first == 0 && last == q.shape(1)) return *this;
    std::optional<mx::array> of_them;
    if (sinks) of_them = part(*sinks, 0, first, last);
    return {part(q, 1, first, last), scale, of_them};
  }
  // The call of the queries start to end - 1.
  AttentionCall queries(int start, int end) const {
    return {part(q, 2, start, end), scale, sinks};
  }
};

}  // namespace mlx_h2o
