// A range of addresses whose pages take memory when they are first written, and give it back.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace mlx_h2o {

// Anonymous private memory. It is zero wherever nothing was written. Copies share its pages until
// one of them writes (Linux alone): the pages then lie in a file in memory that all of them map.
class ReservedRange {
 public:
  // Null where the system refuses so many addresses.
  static std::shared_ptr<ReservedRange> make(size_t bytes);
  ~ReservedRange();
  ReservedRange(const ReservedRange&) = delete;
  ReservedRange& operator=(const ReservedRange&) = delete;

  char* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }

  // Give `other`, an untouched range of this size, what is in this one. Nobody may write to either
  // meanwhile; reading this one goes on.
  void copy_to(ReservedRange& other);

  // Note that someone is going to write: what copies share is no longer what is here.
  void will_be_written();

  // Free what copies shared, where no copy is left and this range has other pages in its place.
  void drop_overwritten();

  // Give the whole pages between two offsets back to the system; they are zero after.
  void give_back(size_t first, size_t last);

  // Bytes of the pages that hold something of this range's own, and of those that it shares.
  std::pair<size_t, size_t> resident() const;

  // Of all ranges that exist.
  static std::pair<size_t, size_t> resident_in_all();

 private:
  class Image;  // the file in memory

  ReservedRange(char* data, size_t size);
  std::vector<bool> touched() const;  // a superset, by page
  bool map(const std::shared_ptr<Image>& image);
  void write_to(char* other) const;

  char* data_;
  size_t size_;
  std::mutex mutex_;
  std::shared_ptr<Image> image_;  // what is mapped here, or null
  bool image_is_current_ = false;
};

// Bytes of a page.
size_t page_size();

}  // namespace mlx_h2o
