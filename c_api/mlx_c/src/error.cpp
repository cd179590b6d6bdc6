#include "mlx/c/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

namespace {

void print_and_exit(const char* message, void*) {
  std::fprintf(stderr, "MLX error: %s\n", message);
  std::exit(-1);
}

struct Handler {
  mlx_error_handler_func call = print_and_exit;
  std::shared_ptr<void> data;
};
std::mutex mutex;
Handler current;

}  // namespace

extern "C" void mlx_set_error_handler(
    mlx_error_handler_func handler, void* data, void (*dtor)(void*)) {
  Handler next;
  if (handler) next.call = handler;
  next.data = std::shared_ptr<void>(data, [dtor](void* p) {
    if (dtor) dtor(p);
  });
  std::lock_guard lock(mutex);
  std::swap(current, next);
}

extern "C" void _mlx_error(const char* file, const int line, const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  std::string message(std::vsnprintf(nullptr, 0, format, arguments), '\0');
  std::vsnprintf(message.data(), message.size() + 1, format, again);
  va_end(again);
  va_end(arguments);
  message += " at " + std::string(file) + ":" + std::to_string(line);
  Handler handler;
  {
    std::lock_guard lock(mutex);
    handler = current;
  }
  handler.call(message.c_str(), handler.data.get());
}
