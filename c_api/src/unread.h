// How much of a token's attention went to evicted tokens: what the remainder's column received
// (python/mlx_h2o/storage/unread.py).
#pragma once

#include "ops.h"

namespace mlx_h2o {

// Of one token: the shares [B, H] float32; or, where there is an lse, the column's logits and that,
// [B, Hq, 1] float32 each.
struct UnreadShare {
  mx::array numbers;
  std::optional<mx::array> lse = std::nullopt;
};

// The share of each KV head, a mean over its query heads, [B, H], of one query's column [B, Hq, 1]
// and the lse of all columns.
mx::array unread_share(const mx::array& column, const mx::array& lse, int heads);

// The shares of a layer's newest tokens, and their sum since an answer began.
class UnreadShares {
 public:
  // `undo`: how many of the newest tokens can be taken back after evictions.
  UnreadShares(int batch, int heads, int undo) : batch_(batch), heads_(heads), kept_(undo + 1) {}

  // Begins an answer: the mean is over the tokens from here on.
  void restart();
  // The newest token's share, none while nothing was evicted. What it returns is to be evaluated
  // with the step; most often nothing.
  std::vector<mx::array> note(std::optional<UnreadShare> share);
  void take_back(int tokens);
  // [B, H] float32, none before the first token.
  std::optional<mx::array> newest() const;
  std::optional<mx::array> mean() const;
  // What is to be evaluated with a step that went op by op.
  std::vector<mx::array> arrays() const;

 private:
  // The sum of the first `count` of the newest, and of the older ones if there are any.
  std::optional<mx::array> sum(size_t first, size_t last, bool with_older) const;

  int batch_, heads_;
  size_t kept_;
  std::vector<std::optional<UnreadShare>> newest_;
  std::optional<mx::array> older_;  // a sum
  int summed_ = 0;                  // tokens in it
};

}  // namespace mlx_h2o
