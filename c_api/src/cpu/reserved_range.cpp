#include "reserved_range.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <set>

namespace mlx_h2o {

namespace {

// Below this it is cheaper to copy pages than to map a file.
constexpr size_t kFewestShared = size_t(1) << 18;

// Linux's /proc/self/pagemap has a number for each page, with these bits.
constexpr uint64_t kPresent = uint64_t(1) << 63, kSwapped = uint64_t(1) << 62;
constexpr uint64_t kOfFile = uint64_t(1) << 61;

std::mutex all_mutex;
std::set<const ReservedRange*>& all() {
  static auto* const ranges = new std::set<const ReservedRange*>();
  return *ranges;
}

void* map_anonymous(void* at, size_t size, int flags) {
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* const data = mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | flags, -1, 0);
#ifdef MADV_NOHUGEPAGE
  // Else the first byte written could take 2 MiB.
  if (data != MAP_FAILED) madvise(data, size, MADV_NOHUGEPAGE);
#endif
  return data;
}

bool is_zero(const char* page, size_t size) {
  return page[0] == 0 && std::memcmp(page, page + 1, size - 1) == 0;
}

// The numbers of a range's pages; empty where the system does not tell.
std::vector<uint64_t> page_map(const char* data, size_t size) {
  std::vector<uint64_t> entries;
#ifdef __linux__
  const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (file < 0) return entries;
  entries.resize(size / page_size());
  char* to = reinterpret_cast<char*>(entries.data());
  size_t left = entries.size() * sizeof(uint64_t);
  off_t from = static_cast<off_t>(reinterpret_cast<uintptr_t>(data) / page_size()) * 8;
  while (left > 0) {
    const ssize_t got = pread(file, to, left, from);
    if (got <= 0) break;
    to += got, from += got, left -= got;
  }
  close(file);
  if (left > 0) entries.clear();
#else
  (void)data, (void)size;
#endif
  return entries;
}

}  // namespace

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// A file without a name, which never changes once it is written.
class ReservedRange::Image {
 public:
  // Null where there are no such files, or no memory for one.
  static std::shared_ptr<Image> of(const ReservedRange& range, const std::vector<bool>& touched) {
#ifdef __linux__
    const int file = memfd_create("mlx_h2o", MFD_CLOEXEC);
    if (file < 0) return nullptr;
    std::shared_ptr<Image> image(new Image(file));
    if (ftruncate(file, static_cast<off_t>(range.size()))) return nullptr;
    const size_t page = page_size();
    for (size_t i = 0; i < touched.size(); ++i) {
      const char* const from = range.data() + i * page;
      if (!touched[i] || is_zero(from, page)) continue;
      if (pwrite(file, from, page, static_cast<off_t>(i * page)) != ssize_t(page)) return nullptr;
    }
    return image;
#else
    (void)range, (void)touched;
    return nullptr;
#endif
  }
  ~Image() {
    close(file_);
  }

  bool map_at(char* data, size_t size) const {
    int flags = MAP_PRIVATE | MAP_FIXED;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    return mmap(data, size, PROT_READ | PROT_WRITE, flags, file_, 0) != MAP_FAILED;
  }

  // Free some of its bytes; nobody may read them here any more.
  void drop(size_t first, size_t count) const {
#ifdef FALLOC_FL_PUNCH_HOLE
    const int how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    fallocate(file_, how, static_cast<off_t>(first), static_cast<off_t>(count));
#else
    (void)first, (void)count;
#endif
  }

  // Mark the pages that the file has.
  void mark(std::vector<bool>& touched) const {
#ifdef SEEK_DATA
    const off_t size = static_cast<off_t>(touched.size() * page_size());
    for (off_t at = lseek(file_, 0, SEEK_DATA); at >= 0 && at < size;) {
      const off_t end = lseek(file_, at, SEEK_HOLE);
      for (size_t i = at / page_size(); i < touched.size() && off_t(i * page_size()) < end; ++i)
        touched[i] = true;
      at = lseek(file_, end, SEEK_DATA);
    }
#else
    touched.assign(touched.size(), true);
#endif
  }

 private:
  explicit Image(int file) : file_(file) {}
  int file_;
};

ReservedRange::ReservedRange(char* data, size_t size) : data_(data), size_(size) {
  std::lock_guard lock(all_mutex);
  all().insert(this);
}

std::shared_ptr<ReservedRange> ReservedRange::make(size_t bytes) {
  const size_t page = page_size(), size = (bytes + page - 1) / page * page;
  void* const data = size ? map_anonymous(nullptr, size, 0) : MAP_FAILED;
  if (data == MAP_FAILED) return nullptr;
  return std::shared_ptr<ReservedRange>(new ReservedRange(static_cast<char*>(data), size));
}

ReservedRange::~ReservedRange() {
  {
    std::lock_guard lock(all_mutex);
    all().erase(this);
  }
  munmap(data_, size_);
}

std::vector<bool> ReservedRange::touched() const {
  const auto entries = page_map(data_, size_);
  std::vector<bool> pages(size_ / page_size(), entries.empty());
  for (size_t i = 0; i < entries.size(); ++i) pages[i] = (entries[i] & (kPresent | kSwapped)) != 0;
  if (image_) image_->mark(pages);
  return pages;
}

bool ReservedRange::map(const std::shared_ptr<Image>& image) {
  if (!image->map_at(data_, size_)) return false;
  image_ = image;
  return true;
}

void ReservedRange::copy_to(ReservedRange& other) {
  std::lock_guard lock(mutex_);
  if (!image_is_current_) {
    const std::vector<bool> pages = touched();
    size_t count = 0;
    for (const bool page : pages) count += page;
    if (count * page_size() < kFewestShared) return write_to(other.data_);
    const auto image = Image::of(*this, pages);
    if (!image || !map(image)) return write_to(other.data_);
    image_is_current_ = true;
  }
  // The copy is made to be written, so that its image is not what is in it.
  if (!other.map(image_)) write_to(other.data_);
}

void ReservedRange::write_to(char* other) const {
  const std::vector<bool> pages = touched();
  for (size_t i = 0; i < pages.size(); ++i) {
    const char* const from = data_ + i * page_size();
    if (pages[i] && !is_zero(from, page_size()))
      std::memcpy(other + i * page_size(), from, page_size());
  }
}

void ReservedRange::will_be_written() {
  std::lock_guard lock(mutex_);
  image_is_current_ = false;
}

void ReservedRange::drop_overwritten() {
  std::lock_guard lock(mutex_);
  if (!image_ || image_is_current_ || image_.use_count() > 1) return;
  const auto entries = page_map(data_, size_);
  const auto own = [](uint64_t entry) { return (entry & kPresent) && !(entry & kOfFile); };
  for (size_t i = 0; i < entries.size(); ++i) {
    const size_t first = i;
    while (i < entries.size() && own(entries[i])) ++i;
    if (i > first) image_->drop(first * page_size(), (i - first) * page_size());
  }
}

void ReservedRange::give_back(size_t first, size_t last) {
  const size_t page = page_size();
  first = (first + page - 1) / page * page;
  last = last / page * page;
  if (first >= last) return;
  std::lock_guard lock(mutex_);
  image_is_current_ = false;
#ifdef __linux__
  if (!image_) {
    madvise(data_ + first, last - first, MADV_DONTNEED);
    return;
  }
#endif
  // Advice would bring a file's pages back, and on a Mac leave the numbers there.
  map_anonymous(data_ + first, last - first, MAP_FIXED);
}

std::pair<size_t, size_t> ReservedRange::resident() const {
  size_t own = 0, shared = 0;
  for (const uint64_t entry : page_map(data_, size_)) {
    if (!(entry & kPresent)) continue;
    (entry & kOfFile ? shared : own) += page_size();
  }
  return {own, shared};
}

std::pair<size_t, size_t> ReservedRange::resident_in_all() {
  std::lock_guard lock(all_mutex);
  size_t own = 0, shared = 0;
  for (const ReservedRange* range : all()) {
    const auto [of_own, of_shared] = range->resident();
    own += of_own, shared += of_shared;
  }
  return {own, shared};
}

}  // namespace mlx_h2o
