// The checksum of zlib and PNG, of 8 bytes at a time.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <array>

namespace mlx_h2o {

// The checksum of some bytes that follow others, which had `before` (zlib's crc32).
inline uint32_t crc32(const void* data, size_t size, uint32_t before = 0) {
  using Tables = std::array<std::array<uint32_t, 256>, 8>;
  static const Tables tables = [] {
    Tables made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
      made[0][byte] = crc;
    }
    for (int i = 1; i < 8; ++i)
      for (int byte = 0; byte < 256; ++byte)
        made[i][byte] = made[i - 1][byte] >> 8 ^ made[0][made[i - 1][byte] & 255];
    return made;
  }();
  const uint8_t* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, at += 8) {
    uint32_t next = 0;
    for (int i = 0; i < 4; ++i) next ^= tables[7 - i][(crc >> 8 * i & 255) ^ at[i]];
    for (int i = 4; i < 8; ++i) next ^= tables[7 - i][at[i]];
    crc = next;
  }
  for (; size; --size, ++at) crc = crc >> 8 ^ tables[0][(crc & 255) ^ *at];
  return ~crc;
}

}  // namespace mlx_h2o
