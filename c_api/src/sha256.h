// SHA-256 (FIPS 180-4, section 6.2).
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace mlx_h2o {

class Sha256 {
 public:
  void update(const void* data, size_t size);
  void update(const std::string& words) {
    update(words.data(), words.size());
  }
  // Of all that came, in 64 hexadecimal digits. Nothing may come after it.
  std::string hexadecimal();

 private:
  void take_block(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_ = {};
  uint64_t size_ = 0;  // bytes so far
};

}  // namespace mlx_h2o
