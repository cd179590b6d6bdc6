// mlx_h2o.h: attention.
#include "../attend.h"
#include "handles.h"

namespace mlx_h2o {

Masking masking(const char* mode, mlx_array mask) {
  check(mode, "mask_mode is missing: a pointer is null.");
  const std::string text = mode;
  check(
      text == "" || text == "causal" || text == "array",
      "mask_mode must be \"\", \"causal\" or \"array\"; got \"" + text + "\".");
  check(text != "causal" || !mask.ctx, "A causal mask takes no mask array.");
  check(text != "array" || mask.ctx, "mask_mode \"array\" needs a mask array.");
  return {text == "causal", maybe(mask)};
}

namespace {

// Packed rows of the axes B, Hk, N and `width`.
Stored stored(
    Operands& operands, const std::string& name, const mlx_array (&handles)[3], int bits,
    int group_size, int width) {
  const std::string words = name + "_words", groups = name + "_groups";
  const mx::array w = operands.take(name + "_w", handles[0], "B Hk N " + words, Kind::uint32);
  const mx::array scales =
      operands.take(name + "_scales", handles[1], "B Hk N " + groups, Kind::floating);
  const mx::array biases =
      operands.take(name + "_biases", handles[2], "B Hk N " + groups, Kind::floating);
  check(scales.dtype() == biases.dtype(), name + "_scales and _biases must have one dtype.");
  const int64_t packed = int64_t(operands[words]) * 32;
  const int64_t scaled = int64_t(operands[groups]) * group_size;
  check(
      packed % bits == 0 && packed / bits == scaled && (!width || scaled == width),
      name + "_w and " + name + "_scales do not hold rows of one width" +
          (width ? ", " + std::to_string(width) : "") + ".");
  return {{w, scales, biases}, bits, group_size};
}

// The attention functions over plain rows.
AttentionResult attended(
    mlx_array q, mlx_array k, mlx_array v, float scale, const char* mask_mode, mlx_array mask,
    mlx_array sinks, Export wanted) {
  Operands operands;
  const mx::array queries = operands.take("q", q, "B Hq L D", Kind::floating);
  const mx::array keys = operands.take("k", k, "B Hk N D", Kind::floating);
  const mx::array values = operands.take("v", v, "B Hk N Dv", Kind::floating);
  const auto columns = operands.take_if_any("sinks", sinks, "Hq", Kind::floating);
  operands.check_heads();
  check_scale(scale);
  return attend(
      queries, {{{keys}}}, {{{values}}}, scale, masking(mask_mode, mask), columns, std::nullopt,
      wanted);
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

int mlx_h2o_attention_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, const mlx_array q, const mlx_array k,
    const mlx_array v, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(out, scores, lse);
    const AttentionResult result =
        attended(q, k, v, scale, mask_mode, mask_arr, sinks, Export::logits);
    give(out, result.out);
    give(scores, *result.logits);
    give(lse, result.lse);
  });
}

int mlx_h2o_attention_with_mass(
    mlx_array* out, mlx_array* mass, mlx_array* lse, const mlx_array q, const mlx_array k,
    const mlx_array v, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(out, mass, lse);
    const AttentionResult result =
        attended(q, k, v, scale, mask_mode, mask_arr, sinks, Export::mass);
    give(out, result.out);
    give(mass, *result.mass);
    give(lse, result.lse);
  });
}

int mlx_h2o_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, const mlx_array q, const mlx_array k_w,
    const mlx_array k_scales, const mlx_array k_biases, const mlx_array v_w,
    const mlx_array v_scales, const mlx_array v_biases, float scale, int k_bits, int v_bits,
    int group_size, const char* mask_mode, const mlx_array mask_arr, const mlx_array sinks,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(out, scores, lse);
    check(k_bits > 0 && v_bits > 0, "k_bits and v_bits must be 2, 3, 4, 5, 6 or 8.");
    Packing{k_bits, v_bits, group_size}.check_widths();
    Operands operands;
    const mx::array queries = operands.take("q", q, "B Hq L D", Kind::floating);
    const Stored keys =
        stored(operands, "k", {k_w, k_scales, k_biases}, k_bits, group_size, operands["D"]);
    const Stored values = stored(operands, "v", {v_w, v_scales, v_biases}, v_bits, group_size, 0);
    const auto columns = operands.take_if_any("sinks", sinks, "Hq", Kind::floating);
    operands.check_heads();
    check_scale(scale);
    const AttentionResult result = attend(
        queries, {keys}, {values}, scale, masking(mask_mode, mask_arr), columns, std::nullopt,
        Export::logits);
    give(out, result.out);
    give(scores, *result.logits);
    give(lse, result.lse);
  });
}

}  // extern "C"
