// Keys and values as kernels get them: buffers, and template arguments by which to read them
// (python/mlx_h2o/attention/backends/row_buffers.py). A field is "keys" or "values".
#pragma once

#include "../packed.h"
#include "launcher.h"

namespace mlx_h2o {

// Names of a field's buffers.
std::vector<std::string> buffer_names(const std::string& field);
void add_buffers(Buffers& buffers, const std::string& field, const Stored& rows);
// In the terms of metal/packed_rows.h: 0 bits are dense rows.
Template packing_of(const std::string& field, const Stored& rows);
// Bytes of one row.
int row_bytes(const Stored& rows);
// The dtype of dense rows, or of what packs them.
mx::Dtype row_dtype(const Stored& rows);
// Flat rows [B, S, ...] as rows of one head, [B, 1, S, ...].
Stored as_one_head(const Stored& rows);

}  // namespace mlx_h2o
