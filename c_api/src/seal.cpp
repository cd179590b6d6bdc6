#include "seal.h"

#include <cstring>
#include <random>

#include "row_layout.h"

namespace mlx_h2o {

namespace {

constexpr char kCheck[] = "mlx-h2o rows";
constexpr size_t kCheckBytes = sizeof kCheck - 1;
static_assert(sizeof(SealedPlace) == 16);

// A nonce of this writing, and the segment's index.
std::array<uint8_t, kNonceBytes + 4> whole_nonce(const Nonce& nonce, uint32_t segment) {
  std::array<uint8_t, kNonceBytes + 4> whole;
  std::memcpy(whole.data(), nonce.data(), kNonceBytes);
  std::memcpy(whole.data() + kNonceBytes, &segment, 4);
  return whole;
}

int digit(char letter) {
  if (letter >= '0' && letter <= '9') return letter - '0';
  if (letter >= 'a' && letter <= 'f') return letter - 'a' + 10;
  throw FileError("The header of this file of rows is damaged.");
}

}  // namespace

std::vector<uint8_t> random_bytes(size_t count) {
  std::random_device random;  // of the system, which is fit for keys
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = uint8_t(random());
  return bytes;
}

Nonce new_nonce() {
  Nonce nonce;
  const std::vector<uint8_t> bytes = random_bytes(kNonceBytes);
  std::memcpy(nonce.data(), bytes.data(), kNonceBytes);
  return nonce;
}

Seal::Seal(std::shared_ptr<const Cipher> cipher, const std::vector<uint8_t>& salt)
    : cipher_(std::move(cipher)),
      of_file_(cipher_->open(cipher_->context, salt.data(), salt.size())) {
  if (!of_file_) throw FileError("the cipher for sealed rows could not be made");
}

Seal::~Seal() {
  cipher_->close(of_file_);
}

std::array<uint8_t, kTagBytes> Seal::encrypt(
    uint8_t* data, size_t size, const Nonce& nonce, const SealedPlace& place,
    uint32_t segment) const {
  std::array<uint8_t, kTagBytes> tag;
  if (cipher_->encrypt(
          of_file_, whole_nonce(nonce, segment).data(), reinterpret_cast<const uint8_t*>(&place),
          sizeof place, data, size, tag.data()))
    throw FileError("rows could not be sealed");
  return tag;
}

void Seal::decrypt(
    uint8_t* data, size_t size, const uint8_t* tag, const Nonce& nonce, const SealedPlace& place,
    uint32_t segment) const {
  if (cipher_->decrypt(
          of_file_, whole_nonce(nonce, segment).data(), reinterpret_cast<const uint8_t*>(&place),
          sizeof place, data, size, tag))
    throw FileError("A sealed block does not open: another key, or damage.");
}

std::string Seal::check() const {
  const Nonce nonce = new_nonce();
  std::vector<uint8_t> all(kNonceBytes + kCheckBytes + kTagBytes);
  std::memcpy(all.data(), nonce.data(), kNonceBytes);
  std::memcpy(all.data() + kNonceBytes, kCheck, kCheckBytes);
  if (cipher_->encrypt(
          of_file_, whole_nonce(nonce, 0).data(), nullptr, 0, all.data() + kNonceBytes, kCheckBytes,
          all.data() + kNonceBytes + kCheckBytes))
    throw FileError("rows could not be sealed");
  return hex_of(all);
}

void Seal::require(const std::string& check) const {
  std::vector<uint8_t> all = bytes_of_hex(check);
  bool fits = all.size() == kNonceBytes + kCheckBytes + kTagBytes;
  if (fits) {
    Nonce nonce;
    std::memcpy(nonce.data(), all.data(), kNonceBytes);
    uint8_t* const text = all.data() + kNonceBytes;
    fits = !cipher_->decrypt(
               of_file_, whole_nonce(nonce, 0).data(), nullptr, 0, text, kCheckBytes,
               text + kCheckBytes) &&
        !std::memcmp(text, kCheck, kCheckBytes);
  }
  if (!fits) throw FileError("This file of rows was sealed with another key.");
}

std::string hex_of(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::vector<uint8_t> bytes_of_hex(const std::string& text) {
  if (text.size() % 2) throw FileError("The header of this file of rows is damaged.");
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(uint8_t(digit(text[i]) << 4 | digit(text[i + 1])));
  return bytes;
}

}  // namespace mlx_h2o
