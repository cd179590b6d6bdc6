#include <mlx/c/mlx.h>
