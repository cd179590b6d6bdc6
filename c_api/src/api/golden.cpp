// mlx_h2o_golden.h: the steps one by one.
#include "mlx_h2o_golden.h"

#include "handles.h"
#include "selection.h"

namespace mlx_h2o {

namespace {

// Operations that may work in place: the values of these handles, each taken out of the result's
// handle if it is there.
std::vector<mx::array> taken(
    const std::vector<mlx_array*>& results, const std::vector<mlx_array>& given) {
  std::vector<mx::array> values;
  for (const mlx_array& handle : given) values.push_back(of(handle));
  for (size_t i = 0; i < given.size(); ++i)
    if (results[i]->ctx == given[i].ctx) give(results[i], mx::array(0));
  return values;
}

// select_victims or select_kept.
template <class Choose>
mx::array chosen(
    Choose choose, mlx_array priority, mlx_array positions, mlx_array evictable, int count,
    bool per_layer) {
  Operands operands;
  const mx::array worth = operands.take("priority", priority, "B Hk N", Kind::float32);
  const mx::array places = operands.take("positions", positions, "B Hk N", Kind::int32);
  const mx::array may_go = operands.take("evictable", evictable, "B Hk N", Kind::boolean);
  return choose(worth, places, may_go, count, per_layer);
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

int mlx_h2o_attention_mass(
    mlx_array* res, const mlx_array scores, const mlx_array lse, int n_kv_heads,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const mx::array logits = operands.take("scores", scores, "B Hq L N", Kind::float32);
    give(
        res,
        attention_mass(logits, operands.take("lse", lse, "B Hq L", Kind::float32), n_kv_heads));
  });
}

int mlx_h2o_remainder_empty(
    mlx_h2o_remainder* res, int batch, int n_kv_heads, int key_width, int value_width,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    check(
        batch > 0 && n_kv_heads > 0 && key_width > 0 && value_width > 0,
        "A remainder's batch, heads and widths must be at least 1.");
    // Elements of an array are counted in 64 bits, which three such numbers can leave.
    const double size = double(batch) * n_kv_heads * std::max(key_width, value_width);
    check(size <= std::numeric_limits<int>::max(), "A remainder of this size is too large.");
    give(res, Remainder::empty(batch, n_kv_heads, key_width, value_width));
  });
}

int mlx_h2o_remainder_fold(
    mlx_h2o_remainder* res, const mlx_h2o_remainder remainder, const mlx_array keys,
    const mlx_array values, const mlx_array weights, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const Remainder before = of(remainder, operands);
    const mx::array rows_k = operands.take("keys", keys, "B Hk M D", Kind::floating);
    const mx::array rows_v = operands.take("values", values, "B Hk M Dv", Kind::floating);
    const auto counts = maybe(weights);
    if (counts) {
      const mx::Shape rows{operands["B"], operands["Hk"], operands["M"]};
      check(counts->dtype() == mx::float32, "weights must be float32.");
      check(
          broadcasts_to(counts->shape(), rows),
          "weights " + text(counts->shape()) + " do not broadcast to " + text(rows) + ".");
    }
    give(res, before.fold(rows_k, rows_v, counts));
  });
}

int mlx_h2o_remainder_column(
    mlx_array* res, const mlx_h2o_remainder remainder, const mlx_array q, float scale,
    const float* saturation, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const Remainder answering = of(remainder, operands);
    const mx::array queries = operands.take("q", q, "B Hq L D", Kind::floating);
    operands.check_heads();
    check_scale(scale);
    give(res, answering.column(queries, scale, saturations_of(saturation, operands["Hk"])));
  });
}

int mlx_h2o_remainder_join(
    mlx_array* res_out, mlx_array* res_lse, const mlx_array out, const mlx_array lse,
    const mlx_array logits, const mlx_array values, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res_out, res_lse);
    Operands operands;
    const mx::array attended = operands.take("out", out, "B Hq L Dv", Kind::floating);
    const mx::array of_rows = operands.take("lse", lse, "B Hq L", Kind::float32);
    const mx::array column = operands.take("logits", logits, "B Hq L", Kind::float32);
    const mx::array means = operands.take("values", values, "B Hk Dv", Kind::float32);
    operands.check_heads();
    const auto [joint_out, joint_lse] = join(attended, of_rows, column, means);
    give(res_out, joint_out);
    give(res_lse, joint_lse);
  });
}

int mlx_h2o_remainder_rows(
    mlx_array* keys, mlx_array* values, const mlx_h2o_remainder remainder, int rows,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(keys, values);
    Operands operands;
    const auto [plain_keys, plain_values] = of(remainder, operands).plain_rows(rows);
    give(keys, plain_keys);
    give(values, plain_values);
  });
}

int mlx_h2o_priority(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots* slots, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    give(res, of(policy).priority(of(slots, of(policy), operands)));
  });
}

int mlx_h2o_prompt_priority(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots* slots,
    const mlx_array window_mass, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    Operands operands;
    const Slots seen = of(slots, of(policy), operands);
    give(res, prompt_priority(of(policy), seen, window_mass, operands));
  });
}

int mlx_h2o_select_victims(
    mlx_array* res, const mlx_array priority, const mlx_array positions, const mlx_array evictable,
    int count, bool per_layer, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    give(res, chosen(select_victims, priority, positions, evictable, count, per_layer));
  });
}

int mlx_h2o_select_kept(
    mlx_array* res, const mlx_array priority, const mlx_array positions, const mlx_array evictable,
    int count, bool per_layer, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    give(res, chosen(select_kept, priority, positions, evictable, count, per_layer));
  });
}

int mlx_h2o_write_rows(
    mlx_array* res, const mlx_array buffer, const mlx_array index, const mlx_array rows,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    check_rows_fit(of(buffer), of(index), of(rows));
    check_index(of(index), of(buffer).shape(1));
    const mx::array at = of(index), fresh = of(rows);
    give(res, with_rows(taken({res}, {buffer})[0], at, fresh));
  });
}

int mlx_h2o_quantize_append(
    mlx_array* res_w, mlx_array* res_scales, mlx_array* res_biases, const mlx_array w,
    const mlx_array scales, const mlx_array biases, const mlx_array index, const mlx_array rows,
    int bits, int group_size, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res_w, res_scales, res_biases);
    Operands operands;
    const mx::array at = operands.take("index", index, "I M", Kind::int32);
    const mx::array plain = operands.take("rows", rows, "B M width", Kind::floating);
    operands.take("w", w, "B S words", Kind::uint32);
    operands.take("scales", scales, "B S groups", Kind::floating);
    operands.take("biases", biases, "B S groups", Kind::floating);
    const Stored fresh = packed(plain, bits, group_size);
    const std::vector<mlx_array> given{w, scales, biases};
    for (int i = 0; i < 3; ++i) check_rows_fit(of(given[i]), at, fresh.arrays[i]);
    check_index(at, operands["S"]);
    const std::vector<mlx_array*> results{res_w, res_scales, res_biases};
    const std::vector<mx::array> buffers = taken(results, given);
    for (int i = 0; i < 3; ++i) give(results[i], with_rows(buffers[i], at, fresh.arrays[i]));
  });
}

}  // extern "C"
