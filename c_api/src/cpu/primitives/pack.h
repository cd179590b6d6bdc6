// Rows as they are stored.
#pragma once

#include <vector>

#include "../../mx.h"

namespace mlx_h2o {

// Words, scales and biases of rows [..., width], packed as fused steps pack them (PackedRows.of in
// Python). Raises std::invalid_argument unless they are floats, and the bits (2, 3, 4, 5, 6 or 8)
// and groups (of 32, 64 or 128) suit the width.
std::vector<mx::array> pack(
    const mx::array& rows, int bits, int group_size, mx::StreamOrDevice s = {});

}  // namespace mlx_h2o
