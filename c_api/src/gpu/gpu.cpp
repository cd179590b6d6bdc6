#include "gpu.h"

#include "../bridge.h"
#include "attention_case.h"
#include "prompt_launches.h"

namespace mlx_h2o {

namespace {

// MLX's own attention of one kind of dense rows.
mx::array fused_by_mlx(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks) {
  std::optional<mx::array> m = mask.array;
  if (m && m->dtype() != mx::bool_) m = mx::astype(*m, q.dtype());
  std::optional<mx::array> columns;
  if (sinks) columns = mx::astype(*sinks, q.dtype());
  const mlx_array none{nullptr};
  const CallStream stream;
  mlx_array res = mlx_array_new();
  const int status = mlx_fast_scaled_dot_product_attention(
      &res, borrowed(q), borrowed(k), borrowed(v), scale,
      m ? "array" : (mask.causal ? "causal" : ""), m ? borrowed(*m) : none,
      columns ? borrowed(*columns) : none, stream.handle());
  if (status) throw std::runtime_error("MLX's attention refused its operands.");
  const mx::array out = of(res);
  mlx_array_free(res);
  return out;
}

Stored one_head(const Stored& rows, int head) {
  Stored one{{}, rows.bits, rows.group_size};
  for (const mx::array& a : rows.arrays) one.arrays.push_back(part(a, 1, head, head + 1));
  return one;
}

mx::array in_own_dtype(const Stored& rows) {
  return rows.bits ? mx::astype(dense(rows), rows.arrays.back().dtype()) : rows.arrays[0];
}

// MLX's attention of many queries; packed rows are unpacked a KV head at a time.
mx::array attention_of_prompt(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks) {
  if (!k.bits && !v.bits) return fused_by_mlx(q, k.arrays[0], v.arrays[0], scale, mask, sinks);
  const int heads = k.arrays[0].shape(1), group = q.shape(1) / heads;
  std::vector<mx::array> outs;
  for (int head = 0; head < heads; ++head) {
    const int first = head * group, last = first + group;
    Masking of_head = mask;
    if (mask.array && mask.array->ndim() > 2 && mask.array->shape(-3) > 1)
      of_head.array = part(*mask.array, -3, first, last);
    std::optional<mx::array> of_sinks;
    if (sinks) of_sinks = part(*sinks, 0, first, last);
    outs.push_back(fused_by_mlx(
        part(q, 1, first, last), in_own_dtype(one_head(k, head)), in_own_dtype(one_head(v, head)),
        scale, of_head, of_sinks));
  }
  return join_along(std::move(outs), 1);
}

void join_seed(AttentionResult& attended, const std::optional<Seed>& seed) {
  if (!seed) return;
  const mx::Dtype dtype = attended.out.dtype();
  std::tie(attended.out, attended.lse) =
      join(attended.out, attended.lse, seed->first, seed->second);
  attended.out = mx::astype(attended.out, dtype);
}

// From so many keys on MLX's attention of few queries takes two passes, and in the MLX that
// mlx-swift ships those were seen to give garbage for grouped queries (mlx#4022).
constexpr int kTwoPassKeys = 1024;

}  // namespace

bool gpu_takes(
    const mx::array& q, const Stored& k, const Stored& v, const Masking& mask,
    const std::optional<mx::array>& sinks, Export wanted) {
  const bool written =
      wanted == Export::logits ? vector_kernel_takes(q, k, v) : prompt_kernels_take(q, k);
  return written && attention_proven(q, k, v, mask, sinks, wanted);
}

AttentionResult gpu_attend(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted,
    const std::string& architecture) {
  const bool few = vector_kernel_takes(q, k, v);
  // Over plain rows, and where no more is asked for, MLX's own attention is the best there is,
  // unless it would take two passes over grouped queries.
  const bool plain = wanted == Export::none && !seed && !k.bits && !v.bits &&
      !(q.shape(1) != k.arrays[0].shape(1) && count(k) >= kTwoPassKeys);
  AttentionResult attended{q, q, std::nullopt, std::nullopt};
  if (few && !plain) {
    VectorCall call{scale, mask, sinks};
    call.wanted = wanted == Export::logits ? VectorExport::logits : VectorExport::lse;
    call.architecture = architecture;
    const VectorResult result = vector_attend(q, k, v, call);
    attended.out = result.out;
    attended.lse = *result.lse;
    attended.logits = result.logits;
  } else {
    attended.out = attention_of_prompt(q, k, v, scale, mask, sinks);
    // Lazy: computed only if it is looked at.
    attended.lse = prompt_lse(q, k, scale, mask);
    // MLX's attention says nothing about rows that see nothing; only an array hides all.
    if (mask.array) {
      const mx::array nothing = mx::expand_dims(attended.lse, -1) == number(-kInfinity);
      attended.out = mx::where(nothing, mx::zeros({}, attended.out.dtype()), attended.out);
    }
    if (sinks) attended.lse = mx::logaddexp(attended.lse, mx::expand_dims(f32(*sinks), 1));
  }
  join_seed(attended, seed);
  if (wanted == Export::mass) attended.mass = prompt_mass(q, k, attended.lse, scale, mask);
  return attended;
}

}  // namespace mlx_h2o
