#ifndef MLX_ERROR_H
#define MLX_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

// Called for every error, before the function that failed returns non-zero. Without a handler (or
// with NULL) the message is printed and the process ends, as in mlx-c.
typedef void (*mlx_error_handler_func)(const char* msg, void* data);
void mlx_set_error_handler(mlx_error_handler_func handler, void* data, void (*dtor)(void*));

void _mlx_error(const char* file, const int line, const char* fmt, ...);
#define mlx_error(...) _mlx_error(__FILE__, __LINE__, __VA_ARGS__)

#ifdef __cplusplus
}
#endif

#endif
