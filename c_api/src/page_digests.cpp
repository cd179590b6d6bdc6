#include "page_digests.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "evaluation.h"
#include "row_layout.h"

namespace mlx_h2o {

namespace {

// Pages of one head that lie together.
constexpr int kTract = 256;
constexpr int kBytes = 2;  // of a float16

// A new file without a name.
int nameless(const std::string& folder) {
  std::string path = folder + "/.digests-XXXXXX";
  const int descriptor = mkstemp(path.data());
  if (descriptor < 0) throw FileError(std::strerror(errno));
  unlink(path.c_str());
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
}

}  // namespace

void PageDigests::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1, end_ = 0;
  tracts_.clear(), counts_.clear(), forms_.clear();
}

int PageDigests::count(int layer) const {
  const auto found = counts_.find(layer);
  return found == counts_.end() ? 0 : found->second;
}

void PageDigests::append(int layer, const mx::array& means) {
  const int H = means.shape(0), pages = means.shape(1), D = means.shape(2), first = count(layer);
  forms_[layer] = {H, D};
  const mx::array bytes = mx::contiguous(mx::view(mx::astype(means, mx::float16), mx::uint8));
  evaluate({bytes});
  const size_t size = size_t(D) * kBytes;
  for (int page = 0; page < pages;) {
    // As many as lie together.
    const int at = (first + page) % kTract, some = std::min(pages - page, kTract - at);
    const int64_t start = place(layer, (first + page) / kTract);
    for (int head = 0; head < H; ++head) {
      const uint8_t* from = bytes.data<uint8_t>() + (size_t(head) * pages + page) * size;
      const int64_t to = start + int64_t(head * kTract + at) * int64_t(size);
      if (pwrite(descriptor_, from, some * size, to) != ssize_t(some * size))
        throw FileError("digests of pages could not be written");
    }
    page += some;
    counts_[layer] = first + page;
  }
}

mx::array PageDigests::read(int layer, int head, int pages) const {
  const Form form = forms_.at(layer);
  const size_t size = size_t(form.width) * kBytes;
  std::vector<uint8_t> bytes(pages * size);
  for (int page = 0; page < pages; page += kTract) {
    const size_t some = std::min(pages - page, kTract) * size;
    const int64_t start = tracts_.at({layer, page / kTract}) + int64_t(head) * kTract * size;
    if (pread(descriptor_, bytes.data() + page * size, some, start) != ssize_t(some))
      throw FileError("digests of pages could not be read");
  }
  const mx::array read(bytes.data(), mx::Shape{pages, int(size)}, mx::uint8);
  return mx::view(read, mx::float16);
}

void PageDigests::truncate(int layer, int position) {
  if (const auto found = counts_.find(layer); found != counts_.end())
    found->second = std::min(found->second, position / kPage);
}

// Where a tract begins; a new one is at the end.
int64_t PageDigests::place(int layer, int tract) {
  const auto [found, is_new] = tracts_.try_emplace({layer, tract}, end_);
  if (!is_new) return found->second;
  if (descriptor_ < 0) descriptor_ = nameless(folder_);
  const Form form = forms_.at(layer);
  end_ += int64_t(form.heads) * kTract * form.width * kBytes;
  return found->second;
}

}  // namespace mlx_h2o
