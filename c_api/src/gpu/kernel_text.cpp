#include "kernel_text.h"

#include <map>
#include <mutex>
#include <set>
#include <sstream>
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

// What stands in for a buffer that a launch does without.
std::string stand_in(const std::string& way, const std::string& buffer, std::istream& kind) {
  std::string element, strided;
  if (!(kind >> element)) return "";
  const std::string read_only = way == "in" ? "const " : "";
  std::string line = read_only + "device " + element + "* " + buffer + " = nullptr;";
  if (kind >> strided) line += "\nconst int64_t " + buffer + "_strides[4] = {0};";
  return line;
}

Interface interface_of(const std::string& declarations) {
  Interface interface;
  std::istringstream lines(declarations);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string mark, way, buffer, optional;
    words >> mark >> way >> buffer >> optional;
    if (mark != "//!" || (way != "in" && way != "out") || buffer.empty() ||
        (!optional.empty() && optional != "optional"))
      throw std::logic_error("No buffer is declared by " + line);
    (way == "in" ? interface.inputs : interface.outputs).push_back(buffer);
    if (!optional.empty()) interface.optional.emplace_back(buffer, stand_in(way, buffer, words));
  }
  return interface;
}

KernelText read_kernel(const std::string& name) {
  const std::string text = file(name + ".metal");
  const std::string of_buffers = "\n//! buffers\n", of_body = "\n//! body\n";
  const size_t buffers = text.find(of_buffers), body = text.find(of_body);
  if (buffers == std::string::npos || body == std::string::npos)
    throw std::logic_error(name + ".metal declares no buffers, or has no body.");
  const std::string functions = "#include \"prelude_metal.h\"\n" + text.substr(0, buffers) + "\n";
  const size_t declared = buffers + of_buffers.size();
  std::set<std::string> seen;
  return {
      with_includes(functions, seen), interface_of(text.substr(declared, body - declared)),
      text.substr(body + of_body.size())};
}

}  // namespace

const KernelText& kernel_text(const std::string& name) {
  static std::mutex mutex;
  static auto& texts = *new std::map<std::string, KernelText>;
  const std::lock_guard lock(mutex);
  const auto it = texts.find(name);
  return it != texts.end() ? it->second : texts.emplace(name, read_kernel(name)).first->second;
}

}  // namespace mlx_h2o
