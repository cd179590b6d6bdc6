// What the engine asks of the CPU kernels (src/cpu). They are operations on MLX's C++ arrays: over
// mlx-c alone there are none (over_mlx_c/cpu_kernels.cpp).
#pragma once

#include "decoder.h"

namespace mlx_h2o {

// Whether the stream of the call is one of theirs. Nothing else here is asked for otherwise.
bool cpu_kernels_serve();

// As `attend`, over rows of one kind.
AttentionResult cpu_attend(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted);

// Rows [..., width], packed.
Stored cpu_packed(const mx::array& rows, int bits, int group_size);

std::unique_ptr<Decoder> cpu_decoder_for(const Lent& lent, const CacheSettings& settings);

}  // namespace mlx_h2o
