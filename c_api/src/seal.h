// Sealing of a file of rows by the program's cipher (python/mlx_h2o/spill/sealing.py, which says
// more): each file has a key of its own, each segment a nonce and a tag.
#pragma once

#include <stdint.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace mlx_h2o {

constexpr size_t kTagBytes = 16, kNonceBytes = 8, kSaltBytes = 32;
// The segment by whose index a record of a state is sealed.
constexpr uint32_t kSealedAsRecord = UINT32_MAX;

// The program's functions (`mlx_h2o_seal` in mlx_h2o.h). They are called in the thread of the model
// and in the writer's.
struct Cipher {
  void* context = nullptr;
  void (*release)(void*) = nullptr;
  void* (*open)(void*, const uint8_t* salt, size_t size) = nullptr;
  void (*close)(void*) = nullptr;
  int (*encrypt)(
      void*, const uint8_t* nonce, const uint8_t* associated, size_t n_associated, uint8_t* data,
      size_t size, uint8_t* tag) = nullptr;
  int (*decrypt)(
      void*, const uint8_t* nonce, const uint8_t* associated, size_t n_associated, uint8_t* data,
      size_t size, const uint8_t* tag) = nullptr;

  Cipher() = default;
  Cipher(const Cipher&) = delete;
  ~Cipher() {
    if (release) release(context);
  }
};

using Nonce = std::array<uint8_t, kNonceBytes>;

// As many bytes that nobody can guess.
std::vector<uint8_t> random_bytes(size_t count);
Nonce new_nonce();

// What a segment is sealed with, so that it opens in its own place only.
struct SealedPlace {
  uint64_t block;
  uint32_t checksum;  // of the file's header
  uint32_t rows;      // of the block that are in use
};

// The cipher of one file.
class Seal {
 public:
  // Raises FileError where the program's cipher fails, as all of these do.
  Seal(std::shared_ptr<const Cipher> cipher, const std::vector<uint8_t>& salt);
  ~Seal();
  Seal(const Seal&) = delete;

  // Seals bytes where they lie, and gives their tag.
  std::array<uint8_t, kTagBytes> encrypt(
      uint8_t* data, size_t size, const Nonce& nonce, const SealedPlace& place,
      uint32_t segment) const;
  // Opens them. Raises for what was not sealed with this key, for this place.
  void decrypt(
      uint8_t* data, size_t size, const uint8_t* tag, const Nonce& nonce, const SealedPlace& place,
      uint32_t segment) const;
  // Text for the header that another key does not open; and raises for another's.
  std::string check() const;
  void require(const std::string& check) const;

 private:
  const std::shared_ptr<const Cipher> cipher_;
  void* of_file_;
};

// Bytes as hexadecimal text, and back. Raises FileError for what is none.
std::string hex_of(const std::vector<uint8_t>& bytes);
std::vector<uint8_t> bytes_of_hex(const std::string& text);

}  // namespace mlx_h2o
