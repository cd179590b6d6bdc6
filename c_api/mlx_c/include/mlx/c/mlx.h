// A subset of mlx-c's public interface (github.com/ml-explore/mlx-c, 0.6.0), implemented over the
// installed MLX wheel. Same names, same signatures: what compiles against this compiles against
// mlx-c. What is not declared in these headers does not exist here.
#ifndef MLX_ALL_H
#define MLX_ALL_H

#include "mlx/c/array.h"
#include "mlx/c/device.h"
#include "mlx/c/error.h"
#include "mlx/c/fast.h"
#include "mlx/c/io.h"
#include "mlx/c/map.h"
#include "mlx/c/memory.h"
#include "mlx/c/metal.h"
#include "mlx/c/ops.h"
#include "mlx/c/optional.h"
#include "mlx/c/random.h"
#include "mlx/c/stream.h"
#include "mlx/c/string.h"
#include "mlx/c/transforms.h"
#include "mlx/c/vector.h"
#include "mlx/c/version.h"

#endif
