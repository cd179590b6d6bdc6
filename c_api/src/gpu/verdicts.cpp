#include "verdicts.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>

#include "launcher.h"
#include "verdict_file.h"

namespace mlx_h2o {

namespace {

struct Known {
  std::mutex mutex;  // of all below
  std::map<std::string, bool> held;
  Json::List verdicts;
  std::optional<std::string> folder;
  void (*notice)(void* context, const char* message) = nullptr;
  void* context = nullptr;
  bool warned = false;

  std::mutex checking;  // one check at a time
};
Known& known = *new Known;
thread_local bool checks_here = false;

// "once" unless MLX_H2O_VERIFY says otherwise.
std::string mode() {
  const char* said = std::getenv("MLX_H2O_VERIFY");
  const std::string mode = said && *said ? said : "once";
  check(
      mode == "always" || mode == "once" || mode == "never",
      "MLX_H2O_VERIFY must be always, once or never; got \"" + mode + "\".", Blame::settings);
  return mode;
}

std::string folder() {
  const std::lock_guard lock(known.mutex);
  return known.folder ? *known.folder : user_cache_folder();
}

Verdict checked(const std::function<Deviation()>& check) {
  Verdict verdict{false, ""};
  const auto start = std::chrono::steady_clock::now();
  checks_here = true;
  try {
    const Deviation found = check();
    verdict = {found.size <= 1, found.where, found.size};  // a NaN is not held
  } catch (const std::exception& raised) {                 // whatever a compiler or a device says
    verdict = {false, std::string("raised: ") + raised.what(), kInfinity};
  }
  checks_here = false;
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  verdict.seconds = taken.count();
  return verdict;
}

// Keeps a verdict in mind; tells of the first bad one.
void keep(const std::string& variant, const Verdict& verdict) {
  void (*notice)(void*, const char*) = nullptr;
  void* context = nullptr;
  {
    const std::lock_guard lock(known.mutex);
    known.held.emplace(variant, verdict.held);
    known.verdicts.push_back(verdict.json(variant));
    if (verdict.held || known.warned || !known.notice) return;
    known.warned = true;
    notice = known.notice, context = known.context;
  }
  const std::string message = "A kernel of mlx-h2o is not used on this device (" +
      *gpu_architecture() + "): " + variant + ": " + verdict.why +
      ". MLX's own operations do its work, which is right and slower. Please report this.";
  notice(context, message.c_str());
}

std::optional<bool> met(const std::string& variant) {
  const std::lock_guard lock(known.mutex);
  const auto found = known.held.find(variant);
  return found == known.held.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

bool usable(
    const std::string& variant, const std::vector<const char*>& kernels,
    const std::function<Deviation()>& check) {
  if (const auto held = met(variant)) return *held;
  if (checks_here) return true;  // the check itself asks
  const std::lock_guard lock(known.checking);
  if (const auto held = met(variant)) return *held;  // by another thread meanwhile
  const std::string when = mode();
  std::optional<Verdict> verdict;
  if (when == "never") {
    verdict = {true, "not checked (MLX_H2O_VERIFY=never)"};
  } else {
    const VerdictFile file(folder(), variant, kernels);
    if (when == "once") verdict = file.read();
    if (!verdict) {
      file.mark();
      verdict = checked(check);
      file.write(verdict->json(variant));
    }
  }
  keep(variant, *verdict);
  return verdict->held;
}

Json::List verdicts() {
  const std::lock_guard lock(known.mutex);
  return known.verdicts;
}

void set_cache_folder(std::optional<std::string> folder) {
  const std::lock_guard lock(known.mutex);
  known.folder = std::move(folder);
}

void set_notice(void (*notice)(void* context, const char* message), void* context) {
  const std::lock_guard lock(known.mutex);
  known.notice = notice, known.context = context;
}

}  // namespace mlx_h2o
