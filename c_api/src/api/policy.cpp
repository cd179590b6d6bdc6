// mlx_h2o.h: policies and prompts.
#include "handles.h"
#include "selection.h"

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
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots* slots,
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
