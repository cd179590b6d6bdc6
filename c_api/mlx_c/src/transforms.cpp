#include <mutex>

#include "handles.h"

using namespace mlxc;

namespace mlxc {

void evaluate(std::vector<mx::array> arrays, bool async) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (async)
    mx::async_eval(std::move(arrays));
  else
    mx::eval(std::move(arrays));
}

}  // namespace mlxc

extern "C" {

int mlx_eval(const mlx_vector_array outputs) {
  return guard([&] { evaluate(get(outputs)); });
}
int mlx_async_eval(const mlx_vector_array outputs) {
  return guard([&] { evaluate(get(outputs), true); });
}

int mlx_clear_cache(void) {
  return guard([] { mx::clear_cache(); });
}
int mlx_get_active_memory(size_t* res) {
  return guard([&] { *res = mx::get_active_memory(); });
}
int mlx_get_cache_memory(size_t* res) {
  return guard([&] { *res = mx::get_cache_memory(); });
}
int mlx_get_memory_limit(size_t* res) {
  return guard([&] { *res = mx::get_memory_limit(); });
}
int mlx_get_peak_memory(size_t* res) {
  return guard([&] { *res = mx::get_peak_memory(); });
}
int mlx_reset_peak_memory(void) {
  return guard([] { mx::reset_peak_memory(); });
}
int mlx_set_cache_limit(size_t* res, size_t limit) {
  return guard([&] { *res = mx::set_cache_limit(limit); });
}
int mlx_set_memory_limit(size_t* res, size_t limit) {
  return guard([&] { *res = mx::set_memory_limit(limit); });
}
int mlx_set_wired_limit(size_t* res, size_t limit) {
  return guard([&] { *res = mx::set_wired_limit(limit); });
}

int mlx_metal_is_available(bool* res) {
  return guard([&] { *res = mx::metal::is_available(); });
}

int mlx_version(mlx_string* str) {
  return guard([&] { set(str, mx::version()); });
}

}  // extern "C"
