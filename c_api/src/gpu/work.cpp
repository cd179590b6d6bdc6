#include "work.h"

#include <algorithm>

namespace mlx_h2o {

Work::Work(std::vector<int> lengths, const std::optional<Ranges>& ranges, std::optional<int> block)
    : heads_(static_cast<int>(lengths.size())) {
  for (int head = 0; head < heads_; ++head) {
    const int length = lengths[head], step = block.value_or(std::max(length, 1));
    firsts_.push_back(items);
    for (int offset = 0; offset < std::max(length, 1); offset += step, ++items) {
      const int memory_head = ranges ? 0 : head;
      const int start = ranges ? static_cast<int>((*ranges)[head].first) : 0;
      const int count = std::min(step, length - offset);
      lines_.insert(lines_.end(), {head, memory_head, start, length, slots, offset, count, 0});
    }
    slots += length;
  }
  firsts_.push_back(items);
}

mx::array Work::params(int queries, int mask_columns) const {
  std::vector<int> all{queries, slots, mask_columns, heads_, items, 0, 0, 0};
  all.insert(all.end(), lines_.begin(), lines_.end());
  all.insert(all.end(), firsts_.begin(), firsts_.end());
  return mx::array(all.begin(), {static_cast<int>(all.size())}, mx::int32);
}

}  // namespace mlx_h2o
