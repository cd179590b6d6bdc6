#include "unread.h"

#include <algorithm>

namespace mlx_h2o {

namespace {

// Steps whose shares are added up at once, so that a step costs no operation of its own.
constexpr size_t kSummedAtOnce = 16;

}  // namespace

mx::array unread_share(const mx::array& column, const mx::array& lse, int heads) {
  // A query that sees nothing has an lse of minus infinity, and no share.
  const mx::array finite = mx::maximum(lse, number(std::numeric_limits<float>::lowest()));
  const mx::array shares = mx::exp(column - finite);
  return mx::mean(mx::reshape(shares, {column.shape(0), heads, -1}), -1);
}

void UnreadShares::restart() {
  newest_.clear();
  older_.reset();
  summed_ = 0;
}

std::vector<mx::array> UnreadShares::note(std::optional<UnreadShare> share) {
  newest_.push_back(std::move(share));
  if (newest_.size() < kept_ + kSummedAtOnce) return {};
  older_ = sum(0, kSummedAtOnce, true);
  newest_.erase(newest_.begin(), newest_.begin() + kSummedAtOnce);
  summed_ += kSummedAtOnce;
  return older_ ? std::vector{*older_} : std::vector<mx::array>{};
}

void UnreadShares::take_back(int tokens) {
  newest_.resize(newest_.size() - std::min(newest_.size(), size_t(tokens)));
}

std::optional<mx::array> UnreadShares::newest() const {
  if (newest_.empty()) return std::nullopt;
  return sum(newest_.size() - 1, newest_.size(), false).value_or(mx::zeros({batch_, heads_}));
}

std::optional<mx::array> UnreadShares::mean() const {
  const size_t tokens = summed_ + newest_.size();
  if (!tokens) return std::nullopt;
  const std::optional<mx::array> total = sum(0, newest_.size(), true);
  return total ? *total / number(double(tokens)) : mx::zeros({batch_, heads_});
}

std::vector<mx::array> UnreadShares::arrays() const {
  if (newest_.empty() || !newest_.back()) return {};
  const UnreadShare& share = *newest_.back();
  return share.lse ? std::vector{share.numbers, *share.lse} : std::vector{share.numbers};
}

std::optional<mx::array> UnreadShares::sum(size_t first, size_t last, bool with_older) const {
  std::vector<mx::array> parts;
  if (with_older && older_) parts.push_back(*older_);
  for (size_t i = first; i < last; ++i)
    if (const std::optional<UnreadShare>& share = newest_[i])
      parts.push_back(
          share->lse ? unread_share(share->numbers, *share->lse, heads_) : share->numbers);
  if (parts.empty()) return std::nullopt;
  if (parts.size() == 1) return parts[0];
  for (mx::array& part : parts) part = mx::expand_dims(part, 0);
  return mx::sum(mx::concatenate(parts, 0), 0);
}

}  // namespace mlx_h2o
