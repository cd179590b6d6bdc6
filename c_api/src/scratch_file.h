// A file without a name: no other process can open it, and the system removes it with this object
// or with the process, in whatever way that ends.
#pragma once

#include <stddef.h>

#include <stdexcept>
#include <string>

namespace mlx_h2o {

// A file cannot be made, written or read.
struct FileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// All of its functions raise FileError. Threads may read and write at once.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& folder);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;

  void write(const void* data, size_t size, size_t at);
  void read(void* data, size_t size, size_t at) const;

 private:
  int descriptor_;
};

}  // namespace mlx_h2o
