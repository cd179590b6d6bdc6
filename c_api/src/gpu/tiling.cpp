#include "tiling.h"

#include <algorithm>

namespace mlx_h2o {

namespace {

// Words per lane that a simdgroup's rows take at most, for so many simdgroups.
constexpr struct {
  int words, simdgroups;
} kSimdgroupsByWords[] = {{12, 32}, {30, 16}, {76, 12}};
constexpr auto kMostWords = kSimdgroupsByWords[2];
constexpr int kWordsBesides = 3;
constexpr int kWordsToUnpack = 6;
constexpr int kKeys = 16;
constexpr int kStagedBytes = 16384;
constexpr double kBlockShare = 0.015;

int ceil(int a, int b) {
  return (a + b - 1) / b;
}

// Over how many simdgroups MLX spreads the keys of a head in its first pass.
int simdgroups_of_mlx(int slots, int rows, char size) {
  if (size == 's') {
    if (slots <= 1024 || rows <= 4) return 64;
    if (slots <= 8192) return 128;
    if (slots <= 32768) return 256;
    return slots <= 65536 ? 512 : 1024;
  }
  if (size == 'd') {
    if (rows <= 2 && slots > 8192) return 256;
    if (rows >= 6 && slots >= 16384) return slots < 65536 ? 512 : 1024;
    return 128;
  }
  return rows >= 4 ? 64 : 32;
}

}  // namespace

bool is_kernel_width(int width) {
  return width >= 32 && width <= 576 && width % 32 == 0;
}

Tiling tiling(int key_width, int value_width, int group, int queries, int itemsize, bool packed) {
  int padded = 1;
  while (padded < queries) padded *= 2;
  const int needed = group * padded;
  const int words = ceil(key_width * itemsize, 32 * 4) + value_width / 32 + kWordsBesides;
  int rows = std::min(needed, kMostWords.words / words);
  const int row_groups = std::min(ceil(needed, rows), kMostWords.simdgroups);
  const int row_blocks = ceil(needed, rows * row_groups);
  rows = ceil(needed, row_groups * row_blocks);
  const int taken = std::min(rows * words + (packed ? kWordsToUnpack : 0), kMostWords.words);
  int simdgroups = 0;
  for (const auto& fits : kSimdgroupsByWords)
    if (!simdgroups && taken <= fits.words) simdgroups = fits.simdgroups;
  if (row_groups == 1) return {padded, rows, 1, row_blocks, simdgroups, kKeys};
  const int slots = std::max(1, kStagedBytes / ((key_width + value_width) * itemsize));
  const int splits = std::min(simdgroups / row_groups, slots);
  return {
      padded, rows, row_groups, row_blocks, splits * row_groups, std::min(kKeys, slots / splits)};
}

std::optional<int> slots_per_block(
    const std::vector<int>& lengths, int group, int queries, int key_width, int value_width,
    int itemsize, const std::string& architecture, std::optional<int> stored) {
  const int longest = *std::max_element(lengths.begin(), lengths.end());
  const Tiling tiles = tiling(key_width, value_width, group, queries, itemsize, stored.has_value());
  const char size = architecture.empty() ? ' ' : architecture.back();
  const bool large = size == 's' || size == 'd';
  if (!(large && longest >= 1024) && !(group > 1 && longest >= 4096)) return std::nullopt;
  const int blocks = ceil(simdgroups_of_mlx(longest, group * queries, size), tiles.splits());
  // Queries are read, partial results and their lse written and read again.
  const int extra = group * queries * (key_width * itemsize + 2 * (value_width * itemsize + 4));
  const int bytes = stored.value_or((key_width + value_width) * itemsize);
  const int fewest = static_cast<int>(extra / (kBlockShare * bytes)) + 1;
  const int step = tiles.splits() * tiles.keys;
  const int slots = ceil(std::max(ceil(longest, blocks), fewest), step) * step;
  if (slots >= longest) return std::nullopt;
  return slots;
}

}  // namespace mlx_h2o
