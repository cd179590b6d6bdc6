import MLX
