#include "launcher.h"

#include <mutex>
#include <set>

#include "../bridge.h"
#include "kernel_text.h"

namespace mlx_h2o {

namespace {

// An owner for a handle of mlx-c.
template <class Handle, auto release>
struct Owned {
  Handle handle;
  explicit Owned(Handle handle) : handle(handle) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    release(handle);
  }
};

using OwnedNames = Owned<mlx_vector_string, mlx_vector_string_free>;
using OwnedArrays = Owned<mlx_vector_array, mlx_vector_array_free>;
using OwnedConfig = Owned<mlx_fast_metal_kernel_config, mlx_fast_metal_kernel_config_free>;
using OwnedDevice = Owned<mlx_device, mlx_device_free>;
using OwnedInfo = Owned<mlx_device_info, mlx_device_info_free>;

void succeed(int status, const std::string& what) {
  if (status) throw std::runtime_error("mlx-c could not " + what + ".");
}

mlx_dtype of(mx::Dtype dtype) {
  if (dtype == mx::float32) return MLX_FLOAT32;
  if (dtype == mx::float16) return MLX_FLOAT16;
  if (dtype == mx::bfloat16) return MLX_BFLOAT16;
  if (dtype == mx::int16) return MLX_INT16;
  check(dtype == mx::int32, "No kernel has arrays of this dtype.");
  return MLX_INT32;
}

mlx_vector_string names_of(const std::vector<std::string>& names) {
  mlx_vector_string all = mlx_vector_string_new();
  for (const std::string& name : names) mlx_vector_string_append_value(all, name.c_str());
  return all;
}

// Kernels by name, for the life of the process: their texts are long, and each step of each layer
// launches some.
mlx_fast_metal_kernel built(
    const std::string& name, const KernelText& text, const std::vector<std::string>& reads,
    const std::vector<std::string>& writes, const std::set<std::string>& passed, int threads) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<std::string, mlx_fast_metal_kernel>;
  const std::lock_guard lock(mutex);
  const auto it = kernels.find(name);
  if (it != kernels.end()) return it->second;
  std::string source;
  for (const auto& [buffer, declaration] : text.buffers.optional)
    if (!passed.contains(buffer)) source += declaration + "\n";
  source += text.body;
  const std::string size = "#define THREADGROUP_SIZE " + std::to_string(threads) + "\n";
  const std::string header = size + text.header;
  const OwnedNames read_names(names_of(reads)), write_names(names_of(writes));
  const mlx_fast_metal_kernel kernel = mlx_fast_metal_kernel_new(
      name.c_str(), read_names.handle, write_names.handle, source.c_str(), header.c_str(), false,
      false);
  succeed(!kernel.ctx, "make the kernel " + name);
  kernels.emplace(name, kernel);
  return kernel;
}

// Raises unless of so many buffers all are declared, and none is missing that must be there.
void check_buffers(
    const std::string& kernel, const Interface& buffers, const std::set<std::string>& passed,
    size_t given) {
  if (passed.size() < given)
    throw std::logic_error("A launch passes buffers that " + kernel + " does not declare.");
  size_t left = buffers.inputs.size() + buffers.outputs.size() - passed.size();
  for (const auto& [buffer, declaration] : buffers.optional)
    if (!passed.contains(buffer)) --left;
  if (left) throw std::logic_error("A launch lacks buffers that " + kernel + " must have.");
}

}  // namespace

Buffers launch(
    const std::string& kernel, const Buffers& inputs, const Outputs& outputs,
    const Template& arguments, std::array<int, 3> threadgroups, int threads) {
  const KernelText& text = kernel_text(kernel);
  std::vector<std::string> reads, writes;
  for (const std::string& name : text.buffers.inputs)
    if (inputs.contains(name)) reads.push_back(name);
  for (const std::string& name : text.buffers.outputs)
    if (outputs.contains(name)) writes.push_back(name);
  std::set<std::string> passed(reads.begin(), reads.end());
  passed.insert(writes.begin(), writes.end());
  check_buffers(kernel, text.buffers, passed, inputs.size() + outputs.size());
  // One name for one text, since MLX keeps compiled kernels by name.
  std::string name = "mlx_h2o_" + kernel;
  for (const auto& [buffer, declaration] : text.buffers.optional)
    if (passed.contains(buffer)) name.append("_").append(buffer);
  name.append("_").append(std::to_string(threads));
  const auto compiled = built(name, text, reads, writes, passed, threads);

  const OwnedConfig config(mlx_fast_metal_kernel_config_new());
  for (const std::string& written : writes) {
    const auto& [shape, dtype] = outputs.at(written);
    mlx_fast_metal_kernel_config_add_output_arg(
        config.handle, shape.data(), shape.size(), of(dtype));
  }
  mlx_fast_metal_kernel_config_set_grid(
      config.handle, threadgroups[0] * threads, threadgroups[1], threadgroups[2]);
  mlx_fast_metal_kernel_config_set_thread_group(config.handle, threads, 1, 1);
  for (const auto& [argument, value] : arguments) {
    const char* name = argument.c_str();
    if (const auto* dtype = std::get_if<mx::Dtype>(&value))
      mlx_fast_metal_kernel_config_add_template_arg_dtype(config.handle, name, of(*dtype));
    else if (const auto* flag = std::get_if<bool>(&value))
      mlx_fast_metal_kernel_config_add_template_arg_bool(config.handle, name, *flag);
    else
      mlx_fast_metal_kernel_config_add_template_arg_int(config.handle, name, std::get<int>(value));
  }
  const OwnedArrays given(mlx_vector_array_new());
  for (const std::string& read : reads)
    mlx_vector_array_append_value(given.handle, borrowed(inputs.at(read)));
  OwnedArrays results(mlx_vector_array_new());
  const CallStream stream;
  succeed(
      mlx_fast_metal_kernel_apply(
          &results.handle, compiled, given.handle, config.handle, stream.handle()),
      "launch the kernel " + name);
  Buffers written;
  for (size_t i = 0; i < writes.size(); ++i) {
    mlx_array result = mlx_array_new();
    succeed(mlx_vector_array_get(&result, results.handle, i), "hand over a kernel's result");
    written.emplace(writes[i], of(result));
    mlx_array_free(result);
  }
  return written;
}

std::optional<std::string> gpu_architecture() {
  const CallStream stream;
  const mlx_device device = stream.device();
  mlx_device_type type;
  bool available = false;
  if (mlx_device_get_type(&type, device) || type != MLX_GPU) return std::nullopt;
  if (mlx_metal_is_available(&available) || !available) return std::nullopt;
  // There is one GPU that is Apple's.
  static const std::string name = [&] {
    OwnedInfo info(mlx_device_info_new());
    const char* text = nullptr;
    const bool known = !mlx_device_info_get(&info.handle, device) &&
        !mlx_device_info_get_string(&text, info.handle, "architecture");
    return std::string(known ? text : "");
  }();
  return name;
}

}  // namespace mlx_h2o
