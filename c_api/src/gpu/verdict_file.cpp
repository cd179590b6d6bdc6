#include "verdict_file.h"

#include <signal.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "../bridge.h"
#include "kernel_text.h"
#include "launcher.h"

namespace mlx_h2o {

namespace {

// The device, the system and MLX.
std::string machine() {
  utsname names{};
  uname(&names);
  mlx_string version = mlx_string_new();
  mlx_version(&version);
  const std::string mlx = version.ctx ? mlx_string_data(version) : "";
  mlx_string_free(version);
  return *gpu_architecture() + '\n' + names.sysname + names.release + names.machine + '\n' + mlx;
}

// FNV-1a of 64 bits: names differ by it, nothing is protected.
uint64_t digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

}  // namespace

Json::Object Verdict::json(const std::string& variant) const {
  return {
      {"variant", variant},
      {"held", held},
      {"why", why},
      {"error", std::isfinite(error) ? Json(error) : Json()},
      {"seconds", seconds}};
}

VerdictFile::VerdictFile(
    const std::string& folder, const std::string& variant,
    const std::vector<const char*>& kernels) {
  if (folder.empty()) return;
  std::string all = machine() + '\n' + variant;
  for (const char* kernel : kernels) {
    const KernelText& text = kernel_text(kernel);
    all += '\n' + text.header + text.body;
  }
  path_ = folder + "/c-" + std::to_string(digest(all)) + ".json";
}

std::optional<Verdict> VerdictFile::read() const {
  std::ostringstream text;
  text << std::ifstream(path_).rdbuf();
  try {
    const Json json = Json::parsed(text.str());
    const Json::Object& kept = json.object("A verdict");
    const Json& process = member(kept, "checking", true);
    if (!process.is_null()) {
      // Of another process of this user, which may be about to say what comes out.
      const int number = process.whole("checking", 1, INT32_MAX);
      if (number != getpid() && !kill(number, 0)) return std::nullopt;
      return Verdict{false, "a process ended while it was checked"};
    }
    const Json& error = member(kept, "error");
    return Verdict{
        member(kept, "held").truth("held"), member(kept, "why").words("why"),
        error.is_null() ? kInfinity : error.number("error"),
        member(kept, "seconds").number("seconds")};
  } catch (const std::exception&) {  // no file, or no verdict
    return std::nullopt;
  }
}

void VerdictFile::write(const Json::Object& content) const {
  if (path_.empty()) return;
  std::error_code ignored;
  const std::filesystem::path path(path_);
  const std::string temporary = path_ + "." + std::to_string(getpid());
  std::filesystem::create_directories(path.parent_path(), ignored);
  std::ofstream(temporary) << Json(content).text();
  std::filesystem::rename(temporary, path, ignored);
}

void VerdictFile::mark() const {
  write({{"checking", int(getpid())}});
}

std::string user_cache_folder() {
  const char *root = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (root && *root) return std::string(root) + "/mlx-h2o/kernels";
  return home && *home ? std::string(home) + "/.cache/mlx-h2o/kernels" : "";
}

}  // namespace mlx_h2o
