#include "scratch_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mlx_h2o {

ScratchFile::ScratchFile(const std::string& folder) {
  std::string path = folder + "/.mlx-h2o-XXXXXX";
  descriptor_ = mkstemp(path.data());
  if (descriptor_ < 0) throw FileError(std::strerror(errno));
  unlink(path.c_str());
  fcntl(descriptor_, F_SETFD, FD_CLOEXEC);
}

ScratchFile::~ScratchFile() {
  close(descriptor_);
}

void ScratchFile::write(const void* data, size_t size, size_t at) {
  const char* rest = static_cast<const char*>(data);
  while (size) {
    const ssize_t count = pwrite(descriptor_, rest, size, off_t(at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw FileError(count ? std::strerror(errno) : "nothing could be written");
    rest += count, size -= size_t(count), at += size_t(count);
  }
}

void ScratchFile::read(void* data, size_t size, size_t at) const {
  char* rest = static_cast<char*>(data);
  while (size) {
    const ssize_t count = pread(descriptor_, rest, size, off_t(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(std::strerror(errno));
    if (!count) throw FileError("the file is shorter than what was written");
    rest += count, size -= size_t(count), at += size_t(count);
  }
}

}  // namespace mlx_h2o
