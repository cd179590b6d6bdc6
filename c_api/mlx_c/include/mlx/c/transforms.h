#ifndef MLX_TRANSFORMS_H
#define MLX_TRANSFORMS_H

#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

int mlx_eval(const mlx_vector_array outputs);
int mlx_async_eval(const mlx_vector_array outputs);

#ifdef __cplusplus
}
#endif

#endif
