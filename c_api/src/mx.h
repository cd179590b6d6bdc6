// MLX: its C++ API, or with MLX_H2O_OVER_MLX_C the few names of it that the engine needs, over
// mlx-c alone (over_mlx_c/), where MLX's C++ headers cannot be had.
#pragma once

#ifdef MLX_H2O_OVER_MLX_C

#include "over_mlx_c/operations.h"

#else

#include "mlx/mlx.h"

namespace mlx_h2o {

namespace mx = mlx::core;

}  // namespace mlx_h2o

#endif
