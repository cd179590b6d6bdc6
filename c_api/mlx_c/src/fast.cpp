#include <tuple>

#include "handles.h"

using namespace mlxc;

namespace mlxc {

struct LaunchConfig {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  std::tuple<int, int, int> grid, thread_group;
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> template_arguments;
  std::optional<float> init_value;
  bool verbose = false;
};
template <>
struct Pointee<mlx_fast_metal_kernel_config> {
  using type = LaunchConfig;
};
template <>
struct Pointee<mlx_fast_metal_kernel> {
  using type = mx::fast::CustomKernelFunction;
};

}  // namespace mlxc

extern "C" {

int mlx_fast_rms_norm(
    mlx_array* res, const mlx_array x, const mlx_array weight, float eps, const mlx_stream s) {
  return guard([&] { set(res, mx::fast::rms_norm(get(x), maybe(weight), eps, get(s))); });
}
int mlx_fast_layer_norm(
    mlx_array* res, const mlx_array x, const mlx_array weight, const mlx_array bias, float eps,
    const mlx_stream s) {
  return guard(
      [&] { set(res, mx::fast::layer_norm(get(x), maybe(weight), maybe(bias), eps, get(s))); });
}
int mlx_fast_rope(
    mlx_array* res, const mlx_array x, int dims, bool traditional, mlx_optional_float base,
    float scale, int offset, const mlx_array freqs, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::fast::rope(
            get(x), dims, traditional, maybe(base), scale, offset, maybe(freqs), get(s)));
  });
}
int mlx_fast_rope_dynamic(
    mlx_array* res, const mlx_array x, int dims, bool traditional, mlx_optional_float base,
    float scale, const mlx_array offset, const mlx_array freqs, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::fast::rope(
            get(x), dims, traditional, maybe(base), scale, get(offset), maybe(freqs), get(s)));
  });
}
int mlx_fast_scaled_dot_product_attention(
    mlx_array* res, const mlx_array queries, const mlx_array keys, const mlx_array values,
    float scale, const char* mask_mode, const mlx_array mask_arr, const mlx_array sinks,
    const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::fast::scaled_dot_product_attention(
            get(queries), get(keys), get(values), scale, mask_mode, maybe(mask_arr), maybe(sinks),
            false, get(s)));
  });
}

mlx_fast_metal_kernel_config mlx_fast_metal_kernel_config_new(void) {
  return make<mlx_fast_metal_kernel_config>({});
}
void mlx_fast_metal_kernel_config_free(mlx_fast_metal_kernel_config cls) {
  release(cls);
}
int mlx_fast_metal_kernel_config_add_output_arg(
    mlx_fast_metal_kernel_config cls, const int* sizes, size_t n, mlx_dtype t) {
  return guard([&] {
    get(cls).shapes.push_back(shape(sizes, n));
    get(cls).dtypes.push_back(dtype(t));
  });
}
int mlx_fast_metal_kernel_config_set_grid(
    mlx_fast_metal_kernel_config cls, int grid1, int grid2, int grid3) {
  return guard([&] { get(cls).grid = {grid1, grid2, grid3}; });
}
int mlx_fast_metal_kernel_config_set_thread_group(
    mlx_fast_metal_kernel_config cls, int thread1, int thread2, int thread3) {
  return guard([&] { get(cls).thread_group = {thread1, thread2, thread3}; });
}
int mlx_fast_metal_kernel_config_set_init_value(mlx_fast_metal_kernel_config cls, float value) {
  return guard([&] { get(cls).init_value = value; });
}
int mlx_fast_metal_kernel_config_set_verbose(mlx_fast_metal_kernel_config cls, bool verbose) {
  return guard([&] { get(cls).verbose = verbose; });
}
int mlx_fast_metal_kernel_config_add_template_arg_dtype(
    mlx_fast_metal_kernel_config cls, const char* name, mlx_dtype t) {
  return guard([&] { get(cls).template_arguments.emplace_back(name, dtype(t)); });
}
int mlx_fast_metal_kernel_config_add_template_arg_int(
    mlx_fast_metal_kernel_config cls, const char* name, int value) {
  return guard([&] { get(cls).template_arguments.emplace_back(name, value); });
}
int mlx_fast_metal_kernel_config_add_template_arg_bool(
    mlx_fast_metal_kernel_config cls, const char* name, bool value) {
  return guard([&] { get(cls).template_arguments.emplace_back(name, value); });
}

mlx_fast_metal_kernel mlx_fast_metal_kernel_new(
    const char* name, const mlx_vector_string input_names, const mlx_vector_string output_names,
    const char* source, const char* header, bool ensure_row_contiguous, bool atomic_outputs) {
  return guarded<mlx_fast_metal_kernel>({nullptr}, [&] {
    return make<mlx_fast_metal_kernel>(mx::fast::metal_kernel(
        name, get(input_names), get(output_names), source, header, ensure_row_contiguous,
        atomic_outputs));
  });
}
void mlx_fast_metal_kernel_free(mlx_fast_metal_kernel cls) {
  release(cls);
}
int mlx_fast_metal_kernel_apply(
    mlx_vector_array* outputs, mlx_fast_metal_kernel cls, const mlx_vector_array inputs,
    const mlx_fast_metal_kernel_config config, const mlx_stream stream) {
  return guard([&] {
    auto& c = get(config);
    set(outputs,
        get(cls)(
            get(inputs), c.shapes, c.dtypes, c.grid, c.thread_group, c.template_arguments,
            c.init_value, c.verbose, get(stream)));
  });
}

}  // extern "C"
