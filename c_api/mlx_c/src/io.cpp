#include "handles.h"

using namespace mlxc;

extern "C" {

int mlx_load_safetensors(
    mlx_map_string_to_array* arrays, mlx_map_string_to_string* metadata, const char* file,
    const mlx_stream s) {
  return guard([&] {
    auto [loaded, described] = mx::load_safetensors(file, get(s));
    set(arrays, std::move(loaded));
    set(metadata, std::move(described));
  });
}
int mlx_save_safetensors(
    const char* file, const mlx_map_string_to_array arrays,
    const mlx_map_string_to_string metadata) {
  return guard([&] {
    std::vector<mx::array> values;
    for (auto& [name, value] : get(arrays)) values.push_back(value);
    evaluate(std::move(values));
    mx::save_safetensors(file, get(arrays), get(metadata));
  });
}

}  // extern "C"
