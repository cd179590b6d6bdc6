#include "self_check.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

#include "../evaluation.h"
#include "launcher.h"

namespace mlx_h2o {

namespace {

// The verdict on a variant.
struct Verdict {
  bool usable;
  std::string why;     // why not, or where the largest error was
  double error = 0;    // the largest, in units of what is tolerated
  double seconds = 0;  // of the check, compiling included

  // With the variant's name; an error that is not finite is null.
  Json::Object json(const std::string& variant) const {
    return {
        {"variant", variant},
        {"usable", usable},
        {"why", why},
        {"error", std::isfinite(error) ? Json(error) : Json()},
        {"seconds", seconds}};
  }
};

struct Process {
  std::mutex mutex;  // of all below
  std::map<std::string, bool> usable;
  Json::List verdicts;
  void (*notice)(void* context, const char* message) = nullptr;
  void* context = nullptr;
  bool warned = false;

  std::mutex checking;  // one check at a time
};
Process& process = *new Process;
thread_local bool checks_here = false;

// Whether kernels are checked: once in a process, unless MLX_H2O_VERIFY says never.
bool checks_kernels() {
  const char* value = std::getenv("MLX_H2O_VERIFY");
  const std::string mode = value && *value ? value : "once";
  check(
      mode == "once" || mode == "never",
      "MLX_H2O_VERIFY must be once or never; got \"" + mode + "\".", Blame::settings);
  return mode == "once";
}

Verdict verdict_of(const std::function<Deviation()>& check) {
  Verdict verdict{false, ""};
  const auto start = std::chrono::steady_clock::now();
  checks_here = true;
  try {
    const Deviation largest = check();
    verdict = {largest.size <= 1, largest.where, largest.size};  // a NaN is not usable
  } catch (const std::exception& raised) {  // whatever a compiler or a device says
    verdict = {false, std::string("raised: ") + raised.what(), kInfinity};
  }
  checks_here = false;
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  verdict.seconds = taken.count();
  return verdict;
}

// Remembers a verdict; gives notice of the first bad one.
void remember(const std::string& variant, const Verdict& verdict) {
  void (*notice)(void*, const char*) = nullptr;
  void* context = nullptr;
  {
    const std::lock_guard lock(process.mutex);
    process.usable.emplace(variant, verdict.usable);
    process.verdicts.push_back(verdict.json(variant));
    if (verdict.usable || process.warned || !process.notice) return;
    process.warned = true;
    notice = process.notice, context = process.context;
  }
  const std::string message = "A kernel of mlx-h2o is not used on this device (" +
      *gpu_architecture() + "): " + variant + ": " + verdict.why +
      ". MLX's own operations do its work, which is right and slower. Please report this.";
  notice(context, message.c_str());
}

std::optional<bool> remembered(const std::string& variant) {
  const std::lock_guard lock(process.mutex);
  const auto verdict = process.usable.find(variant);
  return verdict == process.usable.end() ? std::nullopt : std::optional(verdict->second);
}

// The deviation of one output.
Deviation deviation(const Comparison& output, const mx::array& actual, const mx::array& expected) {
  if (actual.shape() != expected.shape())
    return {
        kInfinity,
        output.name + " has the shape " + text(actual.shape()) + ", not " + text(expected.shape())};
  const float *ours = actual.data<float>(), *theirs = expected.data<float>();
  double largest = 0, apart = 0, tolerated = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(ours[i])) return {kInfinity, output.name + " has a NaN"};
    if (ours[i] == theirs[i]) continue;
    const double off = std::abs(double(ours[i]) - theirs[i]);
    const double may =
        output.tolerance.absolute + output.tolerance.relative * std::abs(double(theirs[i]));
    const double size = std::isfinite(off) ? off / may : kInfinity;
    if (size > largest) largest = size, apart = off, tolerated = may;
  }
  if (!largest) return {};
  std::ostringstream words;
  words.precision(2);
  words << output.name << " differs by " << apart << " where " << tolerated << " is tolerated";
  return {largest, words.str()};
}

}  // namespace

bool usable(const std::string& variant, const std::function<Deviation()>& check) {
  if (const auto before = remembered(variant)) return *before;
  if (checks_here) return true;  // the call comes from the check itself
  const std::lock_guard lock(process.checking);
  if (const auto before = remembered(variant)) return *before;  // by another thread meanwhile
  const Verdict verdict =
      checks_kernels() ? verdict_of(check) : Verdict{true, "not checked (MLX_H2O_VERIFY=never)"};
  remember(variant, verdict);
  return verdict.usable;
}

Json::List verdicts() {
  const std::lock_guard lock(process.mutex);
  return process.verdicts;
}

void set_notice(void (*notice)(void* context, const char* message), void* context) {
  const std::lock_guard lock(process.mutex);
  process.notice = notice, process.context = context;
}

Tolerance tolerance_of(mx::Dtype dtype) {
  if (dtype == mx::float16) return {1e-3, 2e-3};
  if (dtype == mx::bfloat16) return {8e-3, 1.6e-2};
  return {1e-4, 1e-4};
}

Deviation worst(const std::vector<Comparison>& outputs) {
  std::vector<mx::array> all;
  {
    const OnCPU cpu;
    for (const Comparison& output : outputs)
      for (const mx::array* one : {&output.actual, &output.expected})
        all.push_back(mx::contiguous(f32(*one)));
    evaluate(all);
  }
  Deviation largest;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Deviation one = deviation(outputs[i], all[2 * i], all[2 * i + 1]);
    if (one.size > largest.size) largest = one;
  }
  return largest;
}

mx::array normal_numbers(unsigned seed, const mx::Shape& shape) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  size_t count = 1;
  for (const int length : shape) count *= length;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(engine);
  return mx::array(numbers.begin(), shape, mx::float32);
}

}  // namespace mlx_h2o
