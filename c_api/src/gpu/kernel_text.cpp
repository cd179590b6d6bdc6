#include "kernel_text.h"

#include <set>
#include <stdexcept>

namespace mlx_h2o {

namespace {

std::string file(const std::string& name) {
  const char* text = kernel_file(name);
  if (!text) throw std::logic_error("There is no kernel file " + name + ".");
  return text;
}

// Text with each header in place of its first #include, and no other.
std::string with_includes(const std::string& text, std::set<std::string>& seen) {
  const std::string mark = "#include \"", end = ".h\"\n";
  std::string whole;
  for (size_t at = 0; at < text.size();) {
    const size_t newline = text.find('\n', at);
    const size_t next = newline == std::string::npos ? text.size() : newline + 1;
    const std::string line = text.substr(at, next - at);
    at = next;
    if (!line.starts_with(mark) || !line.ends_with(end)) {
      whole += line;
      continue;
    }
    const std::string name = line.substr(mark.size(), line.size() - mark.size() - 2);
    if (seen.insert(name).second) whole += with_includes(file(name), seen);
  }
  return whole;
}

}  // namespace

KernelText kernel_text(const std::string& name) {
  const std::string text = file(name + ".metal"), mark = "\n//! body\n";
  const size_t at = text.find(mark);
  std::set<std::string> seen;
  const std::string functions = "#include \"prelude_metal.h\"\n" + text.substr(0, at) + "\n";
  return {with_includes(functions, seen), text.substr(at + mark.size())};
}

}  // namespace mlx_h2o
