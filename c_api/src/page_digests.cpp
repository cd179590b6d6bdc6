#include "page_digests.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace mlx_h2o {

namespace {

// The greatest of a digest's whole numbers.
constexpr float kGreatest = 127;

// Bytes of a digest: its scale, and its keys.
size_t bytes_of(int width) {
  return sizeof(float) + size_t(kPage) * width;
}

// Writes the digest of a page: the nearest whole numbers of its keys, divided by a scale.
void put_digest(uint8_t* to, const float* keys, size_t count) {
  float most = 0;
  for (size_t i = 0; i < count; ++i) most = std::max(most, std::abs(keys[i]));
  const float scale = most / kGreatest, divisor = scale > 0 ? scale : 1;
  std::memcpy(to, &scale, sizeof scale);
  for (size_t i = 0; i < count; ++i)
    to[sizeof scale + i] = uint8_t(int8_t(std::nearbyint(keys[i] / divisor)));
}

}  // namespace

float Digests::scale(int page) const {
  float scale;
  std::memcpy(&scale, bytes.data() + page * bytes_of(width), sizeof scale);
  return scale;
}

const int8_t* Digests::keys(int page) const {
  const uint8_t* const digest = bytes.data() + page * bytes_of(width);
  return reinterpret_cast<const int8_t*>(digest + sizeof(float));
}

void PageDigests::close() {
  file_.reset();
  end_ = 0;
  tracts_.clear(), counts_.clear(), forms_.clear();
}

int PageDigests::count(int layer) const {
  const auto it = counts_.find(layer);
  return it == counts_.end() ? 0 : it->second;
}

void PageDigests::append(int layer, int heads, int width, const std::vector<float>& keys) {
  const size_t of_page = size_t(kPage) * width, size = bytes_of(width);
  const int pages = int(keys.size() / of_page / heads), first = count(layer);
  forms_[layer] = {heads, width};
  for (int page = 0; page < pages;) {
    // As many as lie together.
    const int at = (first + page) % kTract, some = std::min(pages - page, kTract - at);
    const size_t start = place(layer, (first + page) / kTract);
    std::vector<uint8_t> digests(some * size);
    for (int head = 0; head < heads; ++head) {
      for (int i = 0; i < some; ++i)
        put_digest(
            digests.data() + i * size, keys.data() + (size_t(head) * pages + page + i) * of_page,
            of_page);
      file_->write(digests.data(), digests.size(), start + size_t(head * kTract + at) * size);
    }
    page += some;
    counts_[layer] = first + page;
  }
}

Digests PageDigests::read(int layer, int head, int tract, int pages) const {
  const int width = forms_.at(layer).width;
  const size_t size = bytes_of(width);
  Digests digests{width, std::vector<uint8_t>(pages * size)};
  const size_t start = tracts_.at({layer, tract}) + size_t(head) * kTract * size;
  file_->read(digests.bytes.data(), digests.bytes.size(), start);
  return digests;
}

void PageDigests::truncate(int layer, int position) {
  if (const auto it = counts_.find(layer); it != counts_.end())
    it->second = std::min(it->second, position / kPage);
}

// Where a tract begins; a new one is at the end.
size_t PageDigests::place(int layer, int tract) {
  const auto [it, is_new] = tracts_.try_emplace({layer, tract}, end_);
  if (!is_new) return it->second;
  if (!file_) file_.emplace(folder_);
  const Form form = forms_.at(layer);
  end_ += size_t(form.heads) * kTract * bytes_of(form.width);
  return it->second;
}

}  // namespace mlx_h2o
