#include <mutex>
#include <sstream>

#include "handles.h"

using namespace mlxc;

namespace {

std::mutex mutex;

mx::Stream& default_of(mx::Device device) {
  if (device == mx::Device::gpu) {
    static auto gpu = mx::new_thread_unsafe_stream(mx::Device::gpu);
    return gpu;
  }
  static auto cpu = mx::new_thread_unsafe_stream(mx::Device::cpu);
  return cpu;
}

mlx_device_type type(mx::Device device) {
  return device == mx::Device::gpu ? MLX_GPU : MLX_CPU;
}

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

}  // namespace

mx::Stream mlxc::shared_stream(mx::Device device) {
  std::lock_guard lock(mutex);
  return default_of(device);
}

extern "C" {

mlx_device mlx_device_new(void) {
  return {nullptr};
}
mlx_device mlx_device_new_type(mlx_device_type type, int index) {
  return make<mlx_device>({type == MLX_GPU ? mx::Device::gpu : mx::Device::cpu, index});
}
int mlx_device_free(mlx_device dev) {
  release(dev);
  return 0;
}
int mlx_device_set(mlx_device* dev, const mlx_device src) {
  return guard([&] { set(dev, get(src)); });
}
int mlx_device_tostring(mlx_string* str, mlx_device dev) {
  return guard([&] { set(str, text(get(dev))); });
}
bool mlx_device_equal(mlx_device lhs, mlx_device rhs) {
  return guarded(false, [&] { return get(lhs) == get(rhs); });
}
int mlx_device_get_index(int* index, mlx_device dev) {
  return guard([&] { *index = get(dev).index; });
}
int mlx_device_get_type(mlx_device_type* res, mlx_device dev) {
  return guard([&] { *res = type(get(dev)); });
}
int mlx_get_default_device(mlx_device* dev) {
  return guard([&] { set(dev, mx::default_device()); });
}
int mlx_set_default_device(mlx_device dev) {
  return guard([&] { mx::set_default_device(get(dev)); });
}
int mlx_device_is_available(bool* avail, mlx_device dev) {
  return guard([&] { *avail = mx::is_available(get(dev)); });
}

mlx_device_info mlx_device_info_new(void) {
  return {nullptr};
}
int mlx_device_info_get(mlx_device_info* info, mlx_device dev) {
  return guard([&] { set(info, mx::device_info(get(dev))); });
}
int mlx_device_info_free(mlx_device_info info) {
  release(info);
  return 0;
}
int mlx_device_info_get_string(const char** value, mlx_device_info info, const char* key) {
  return guarded(1, [&] {
    const auto it = get(info).find(key);
    if (it == get(info).end() || !std::holds_alternative<std::string>(it->second)) return 2;
    *value = std::get<std::string>(it->second).c_str();
    return 0;
  });
}

mlx_stream mlx_stream_new(void) {
  return {nullptr};
}
mlx_stream mlx_stream_new_device(mlx_device dev) {
  return guarded<mlx_stream>(
      {nullptr}, [&] { return make<mlx_stream>(mx::new_thread_unsafe_stream(get(dev))); });
}
int mlx_stream_set(mlx_stream* stream, const mlx_stream src) {
  return guard([&] { set(stream, get(src)); });
}
int mlx_stream_free(mlx_stream stream) {
  release(stream);
  return 0;
}
int mlx_stream_tostring(mlx_string* str, mlx_stream stream) {
  return guard([&] { set(str, text(get(stream))); });
}
bool mlx_stream_equal(mlx_stream lhs, mlx_stream rhs) {
  return guarded(false, [&] { return get(lhs) == get(rhs); });
}
int mlx_stream_get_device(mlx_device* dev, mlx_stream stream) {
  return guard([&] { set(dev, get(stream).device); });
}
int mlx_stream_get_index(int* index, mlx_stream stream) {
  return guard([&] { *index = get(stream).index; });
}
int mlx_synchronize(mlx_stream stream) {
  return guard([&] { mx::synchronize(get(stream)); });
}
int mlx_get_default_stream(mlx_stream* stream, mlx_device dev) {
  return guard([&] { set(stream, shared_stream(get(dev))); });
}
int mlx_set_default_stream(mlx_stream stream) {
  return guard([&] {
    std::lock_guard lock(mutex);
    default_of(get(stream).device) = get(stream);
  });
}
mlx_stream mlx_default_cpu_stream_new(void) {
  return guarded<mlx_stream>(
      {nullptr}, [] { return make<mlx_stream>(shared_stream(mx::Device::cpu)); });
}
mlx_stream mlx_default_gpu_stream_new(void) {
  return guarded<mlx_stream>(
      {nullptr}, [] { return make<mlx_stream>(shared_stream(mx::Device::gpu)); });
}

}  // extern "C"
