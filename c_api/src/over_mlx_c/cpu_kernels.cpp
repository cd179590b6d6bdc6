// There are no CPU kernels over mlx-c alone.
#include "cpu_kernels.h"

namespace mlx_h2o {

namespace {

[[noreturn]] void refuse() {
  throw std::logic_error("There are no CPU kernels in this library.");
}

}  // namespace

bool cpu_kernels_serve() {
  return false;
}

AttentionResult cpu_attend(
    const mx::array&, const Stored&, const Stored&, float, const Masking&,
    const std::optional<mx::array>&, const std::optional<Seed>&, Export) {
  refuse();
}

Stored cpu_packed(const mx::array&, int, int) {
  refuse();
}

std::unique_ptr<Decoder> cpu_decoder_for(const Lent&, const CacheSettings&) {
  refuse();
}

}  // namespace mlx_h2o
