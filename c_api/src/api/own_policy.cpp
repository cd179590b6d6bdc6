// mlx_h2o.h: policies of a program's own.
#include "handles.h"
#include "sized.h"

namespace mlx_h2o {

namespace {

// Of the first version, which every program knows; functions behind it may be missing.
constexpr size_t kLeastFunctions = offsetof(mlx_h2o_policy_functions, priority) + sizeof(void*);

// A handle that a function of the program fills.
struct Result {
  mlx_array handle = mlx_array_new();
  ~Result() {
    mlx_array_free(handle);
  }
};

class OwnFunctions : public OwnPolicy {
 public:
  explicit OwnFunctions(const mlx_h2o_policy_functions& functions) : functions_(functions) {}
  OwnFunctions(const OwnFunctions&) = delete;
  ~OwnFunctions() override {
    if (functions_.destroy) functions_.destroy(functions_.context);
  }

  bool needs_attention() const override {
    return functions_.needs_attention;
  }
  bool accumulates() const override {
    return functions_.accumulate;
  }

  mx::array accumulate(const mx::array& scores, const Observation& seen) const override {
    const mx::array mass = seen.total_mass();
    const mlx_h2o_observation given = {
        sizeof given, borrowed(*seen.logits), borrowed(*seen.lse), borrowed(mass),
        seen.stands_for ? borrowed(*seen.stands_for) : mlx_array_new()};
    return checked(scores.shape(), "accumulate", [&](mlx_array* res, mlx_stream s) {
      return functions_.accumulate(functions_.context, res, borrowed(scores), &given, s);
    });
  }

  mx::array priority(const Slots& slots) const override {
    const mlx_h2o_slots given = {
        sizeof given,
        borrowed(slots.keys),
        borrowed(slots.values),
        borrowed(slots.positions),
        borrowed(slots.scores),
        borrowed(slots.evictable),
        borrowed(slots.evicted_mean_key),
        slots.offset,
        slots.evicted};
    return checked(slots.positions.shape(), "priority", [&](mlx_array* res, mlx_stream s) {
      return functions_.priority(functions_.context, res, &given, s);
    });
  }

 private:
  template <class F>
  static mx::array checked(const mx::Shape& shape, const std::string& name, F call) {
    Result result;
    const CallStream stream;
    const std::string of = "The program's function " + name;
    check(!call(&result.handle, stream.handle()), of + " failed.", Blame::program);
    check(result.handle.ctx, of + " gave no array.", Blame::program);
    const mx::array array = shared(result.handle);
    check(
        array.shape() == shape && array.dtype() == mx::float32,
        of + " must give " + text(shape) + " float32; it gave " + text(array.shape()) + ".",
        Blame::program);
    return array;
  }

  const mlx_h2o_policy_functions functions_;
};

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

int mlx_h2o_policy_own(
    mlx_h2o_policy* res, const char* name, const mlx_h2o_policy_functions* given) {
  return guarded([&] {
    wants(res);
    check(name && *name && given, "A policy of your own has a name and functions.");
    check(
        !Policy::is_built_in(name),
        std::string("Policy ") + name +
            " is one of the library's, and saved caches would go on with that: choose another "
            "name.",
        Blame::settings);
    const auto functions =
        complete(*given, mlx_h2o_policy_functions{}, kLeastFunctions, "functions");
    check(functions.priority, "A policy of your own needs the function priority.");
    check(
        functions.needs_attention || !functions.accumulate,
        "A policy that accumulates scores needs attention.");
    Policy policy{name, PolicyKind::own};
    policy.windowed = functions.needs_attention;
    policy.own = std::make_shared<OwnFunctions>(functions);
    give(res, std::move(policy));
  });
}

}  // extern "C"
