// mlx_h2o.h: policies and prompts.
#include <mutex>
#include <set>

#include "handles.h"
#include "selection.h"

namespace mlx_h2o {

namespace {

int set_one(mlx_h2o_policy policy, const char* name, decltype(Setting::value) value) {
  return guarded([&] {
    check(name, "A setting is a name and a value.");
    blaming(Blame::settings, [&] { of(policy).set(Setting{name, std::move(value)}); });
  });
}

// The name of a setting, and the words that some have, as long as the program runs.
const char* lasting(const std::string& word) {
  static std::mutex mutex;
  static std::set<std::string> words;
  const std::lock_guard lock(mutex);
  return words.insert(word).first->c_str();
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

mlx_h2o_policy mlx_h2o_policy_new(void) {
  return {};
}

int mlx_h2o_policy_free(mlx_h2o_policy policy) {
  delete static_cast<Policy*>(policy.ctx);
  return 0;
}

int mlx_h2o_policy_named(mlx_h2o_policy* res, const char* name) {
  return guarded([&] {
    wants(res);
    check(name, "A policy's name is missing.");
    give(res, blaming(Blame::settings, [&] { return Policy::named(name); }));
  });
}

int mlx_h2o_policy_set(mlx_h2o_policy policy, const char* setting, const char* value) {
  return guarded([&] {
    check(setting && value, "A setting is a name and a value.");
    blaming(Blame::settings, [&] { of(policy).set(setting, value); });
  });
}

int mlx_h2o_policy_set_int(mlx_h2o_policy policy, const char* setting, int value) {
  return set_one(policy, setting, value);
}

int mlx_h2o_policy_set_double(mlx_h2o_policy policy, const char* setting, double value) {
  return set_one(policy, setting, value);
}

int mlx_h2o_policy_set_bool(mlx_h2o_policy policy, const char* setting, bool value) {
  return set_one(policy, setting, value);
}

int mlx_h2o_policy_name(const char** res, const mlx_h2o_policy policy) {
  return guarded([&] {
    wants(res);
    *res = of(policy).name.c_str();
  });
}

int mlx_h2o_policy_setting_count(size_t* res, const mlx_h2o_policy policy) {
  return guarded([&] {
    wants(res);
    *res = of(policy).settings().size();
  });
}

int mlx_h2o_policy_setting(mlx_h2o_setting* res, const mlx_h2o_policy policy, size_t index) {
  return guarded([&] {
    wants(res);
    const std::vector<Setting> all = of(policy).settings();
    check(index < all.size(), "This policy has " + std::to_string(all.size()) + " settings.");
    const auto& [name, value] = all[index];
    mlx_h2o_setting found = {};
    found.name = lasting(name);
    // The kinds are in the variant's order.
    found.kind = static_cast<mlx_h2o_kind>(value.index());
    if (const int* number = std::get_if<int>(&value)) found.as_int = *number;
    if (const double* number = std::get_if<double>(&value)) found.as_double = *number;
    if (const bool* truth = std::get_if<bool>(&value)) found.as_bool = *truth;
    if (const std::string* word = std::get_if<std::string>(&value)) found.as_text = lasting(*word);
    *res = found;
  });
}

int mlx_h2o_policy_needs_attention(bool* res, const mlx_h2o_policy policy) {
  return guarded([&] {
    wants(res);
    *res = of(policy).needs_attention();
  });
}

int mlx_h2o_policy_recent_slots(int* res, const mlx_h2o_policy policy, int budget) {
  return guarded([&] {
    wants(res);
    check(budget > 0, "A head's budget must be at least 1 slot.");
    *res = of(policy).recent_slots(budget);
  });
}

int mlx_h2o_accumulate(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_array scores, const mlx_array logits,
    const mlx_array lse, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const mx::array before = operands.take("scores", scores, "B Hk N", Kind::float32);
    const mx::array seen = operands.take("logits", logits, "B Hq L N", Kind::float32);
    const mx::array of_rows = operands.take("lse", lse, "B Hq L", Kind::float32);
    operands.check_heads();
    give(
        res,
        of(policy).accumulate(before, {seen, of_rows, operands["Hk"], std::nullopt, std::nullopt}));
  });
}

int mlx_h2o_evictable(
    mlx_array* res, const mlx_array positions, int offset, int sink, int recent,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const mx::array places = operands.take("positions", positions, "B Hk N", Kind::int32);
    check(offset >= 0 && sink >= 0 && recent >= 0, "offset, sink and recent must be at least 0.");
    give(res, evictable_slots(places, offset, sink, recent));
  });
}

int mlx_h2o_compress_prompt(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots slots,
    const mlx_array window_mass, int count, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const Slots seen = of(slots, of(policy), operands);
    const mx::array priority = prompt_priority(of(policy), seen, window_mass, operands);
    give(res, select_kept(priority, seen.positions, seen.evictable, count, of(policy).per_layer));
  });
}

}  // extern "C"
