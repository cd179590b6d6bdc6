#include "attend.h"

#include <atomic>

#include "cpu_kernels.h"
#include "gpu/gpu.h"
#include "gpu/launcher.h"
#include "remainder.h"

namespace mlx_h2o {

namespace {

std::atomic<bool> kernels_wanted{true};
thread_local bool kernels_wanted_here = true;

// Queries whose logits are held at a time where only their sum is wanted.
constexpr int kQueryBlock = 256;

void check_operands(
    const mx::array& q, const Parts& k, const Parts& v, const Masking& mask,
    const std::optional<mx::array>& sinks) {
  check(q.ndim() == 4 && is_float(q.dtype()), "q must be [B, Hq, L, D] and floating.");
  check(!k.empty() && k.size() == v.size(), "Keys and values must be joined alike.");
  for (size_t i = 0; i < k.size(); ++i) {
    const mx::array &keys = k[i].arrays[0], &values = v[i].arrays[0];
    check(
        keys.ndim() == 4 && values.ndim() == 4 && is_float(k[i].arrays.back().dtype()) &&
            is_float(v[i].arrays.back().dtype()),
        "k and v must be [B, Hk, N, width] and floating.");
    for (int axis = 0; axis < 3; ++axis)
      check(keys.shape(axis) == values.shape(axis), "k and v must agree in batch, heads, tokens.");
    check(keys.shape(0) == q.shape(0), "q and k must agree in batch.");
    check(k[i].width() == q.shape(3), "q and k must agree in width.");
    check(
        keys.shape(1) > 0 && q.shape(1) % keys.shape(1) == 0,
        "The query heads must be a multiple of the KV heads.");
  }
  const int N = count(k);
  check(!mask.causal || N >= q.shape(2), "A causal mask needs at least as many keys as queries.");
  if (mask.array) {
    const mx::array& m = *mask.array;
    check(m.dtype() == mx::bool_ || is_float(m.dtype()), "A mask must be boolean or floating.");
    const mx::Shape whole{q.shape(0), q.shape(1), q.shape(2), N};
    check(m.ndim() <= whole.size(), "A mask has at most four axes.");
    check(
        broadcasts_to(m.shape(), whole),
        "The mask " + text(m.shape()) + " does not broadcast to " + text(whole) + ".");
  }
  check(!sinks || sinks->shape() == mx::Shape{q.shape(1)}, "Attention sinks must be [Hq].");
}

mx::array masked(const mx::array& logits, const Masking& mask) {
  const int L = logits.shape(2), N = logits.shape(3);
  const mx::array nothing = number(-kInfinity);
  if (mask.causal) {
    const mx::array last = mx::expand_dims(range(N - L, N), 1);
    return mx::where(mx::less_equal(range(0, N), last), logits, nothing);
  }
  if (!mask.array) return logits;
  const mx::array& m = *mask.array;
  if (m.dtype() == mx::bool_) return mx::where(m, logits, nothing);
  // Models write the lowest number of their dtype for "masked"; as a sum it would poison logits.
  const mx::array lowest(mx::finfo(m.dtype()).min, m.dtype());
  return mx::where(mx::less_equal(m, lowest), nothing, logits + f32(m));
}

// The definition (backends/reference.py), over one kind of rows.
AttentionResult plain(
    const mx::array& q, const Stored& rows_k, const Stored& rows_v, float scale,
    const Masking& mask, const std::optional<mx::array>& sinks, const std::optional<Seed>& seed,
    Export wanted) {
  const mx::array k = f32(dense(rows_k)), v = f32(dense(rows_v));
  const int B = q.shape(0), Hq = q.shape(1), L = q.shape(2), D = q.shape(3);
  const int Hk = k.shape(1), N = k.shape(2);
  // The query heads of a KV head are stacked along the queries: one product, no repeated keys.
  const mx::array grouped = mx::reshape(f32(q) * number(scale), {B, Hk, -1, D});
  mx::array logits = mx::reshape(mx::matmul(grouped, mx::swapaxes(k, -1, -2)), {B, Hq, L, N});
  logits = masked(logits, mask);
  mx::array lse = mx::logsumexp(logits, -1);
  if (sinks) lse = mx::logaddexp(lse, mx::expand_dims(f32(*sinks), 1));
  const mx::array weights = mx::reshape(softmax_weights(logits, lse), {B, Hk, -1, N});
  mx::array out = mx::reshape(mx::matmul(weights, v), {B, Hq, L, -1});
  if (seed) std::tie(out, lse) = join(out, lse, seed->first, seed->second);
  AttentionResult attended{mx::astype(out, q.dtype()), lse, std::nullopt, std::nullopt};
  if (wanted == Export::logits) attended.logits = logits;
  if (wanted == Export::mass) attended.mass = attention_mass(logits, lse, Hk);
  return attended;
}

AttentionResult of_one_kind(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted) {
  const Backend who = backend();
  if (who == Backend::gpu && gpu_takes(q, k, v, mask, sinks, wanted))
    return gpu_attend(q, k, v, scale, mask, sinks, seed, wanted, *gpu_architecture());
  if (who == Backend::cpu) return cpu_attend(q, k, v, scale, mask, sinks, seed, wanted);
  return plain(q, k, v, scale, mask, sinks, seed, wanted);
}

// The mask of L queries over the keys start to end - 1 of N.
Masking columns_of(const Masking& mask, int start, int end, int L, int N) {
  if (mask.array) {
    const mx::array& m = *mask.array;
    return {false, m.shape(-1) > 1 ? part(m, -1, start, end) : m};
  }
  if (!mask.causal || end <= N - L + 1) return {};
  return {false, mx::less_equal(range(start, end), mx::expand_dims(range(N - L, N), 1))};
}

AttentionResult joined(
    const mx::array& q, const Parts& k, const Parts& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted) {
  // Masses need the lse of all columns, so every kind is asked for its logits.
  const Export asked = wanted == Export::none ? wanted : Export::logits;
  const int L = q.shape(2), N = count(k);
  std::vector<AttentionResult> kinds;
  for (int i = 0, start = 0; i < static_cast<int>(k.size()); ++i) {
    const int end = start + count(k[i]);
    if (start == end) continue;
    // Sinks and seed are columns of the whole: once.
    const bool first = kinds.empty();
    kinds.push_back(of_one_kind(
        q, k[i], v[i], scale, columns_of(mask, start, end, L, N), first ? sinks : std::nullopt,
        first ? seed : std::nullopt, asked));
    start = end;
  }
  mx::array lse = kinds[0].lse;
  for (size_t i = 1; i < kinds.size(); ++i) lse = mx::logaddexp(lse, kinds[i].lse);
  mx::array out = mx::zeros(kinds[0].out.shape());
  std::vector<mx::array> logits;
  for (const AttentionResult& kind : kinds) {
    out = out + f32(kind.out) * softmax_weights(mx::expand_dims(kind.lse, -1), lse);
    if (kind.logits) logits.push_back(*kind.logits);
  }
  AttentionResult whole{mx::astype(out, q.dtype()), lse, std::nullopt, std::nullopt};
  if (wanted == Export::none) return whole;
  whole.logits = join_along(std::move(logits), -1);
  if (wanted == Export::mass)
    whole.mass = attention_mass(*whole.logits, lse, k[0].arrays[0].shape(1));
  return whole;
}

// Whether kernels attend to many queries without their logits in memory.
bool kernels_take_any_length(
    const mx::array& q, const Stored& k, const Stored& v, const Masking& mask,
    const std::optional<mx::array>& sinks, Export wanted) {
  const Backend who = backend();
  return who == Backend::cpu || (who == Backend::gpu && gpu_takes(q, k, v, mask, sinks, wanted));
}

}  // namespace

Backend backend() {
  if (!kernels_wanted || !kernels_wanted_here) return Backend::plain;
  if (gpu_architecture()) return Backend::gpu;
  return cpu_kernels_serve() ? Backend::cpu : Backend::plain;
}

void use_kernels(bool use) {
  kernels_wanted = use;
}

KernelScope::KernelScope(bool wanted) : outer_(std::exchange(kernels_wanted_here, wanted)) {}

KernelScope::~KernelScope() {
  kernels_wanted_here = outer_;
}

AttentionResult attend(
    const mx::array& q, const Parts& k, const Parts& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted) {
  check_operands(q, k, v, mask, sinks);
  const int L = q.shape(2), N = count(k);
  const bool blocks = L > kQueryBlock && wanted != Export::logits && !mask.array &&
      (k.size() > 1 || !kernels_take_any_length(q, k[0], v[0], mask, sinks, wanted));
  if (!blocks) {
    if (k.size() > 1) return joined(q, k, v, scale, mask, sinks, seed, wanted);
    return of_one_kind(q, k[0], v[0], scale, mask, sinks, seed, wanted);
  }
  std::vector<mx::array> outs, lses;
  std::optional<mx::array> mass;
  for (int start = 0; start < L; start += kQueryBlock) {
    const int end = std::min(start + kQueryBlock, L), keys = mask.causal ? N - L + end : N;
    std::optional<Seed> of_block;
    if (seed) of_block = Seed{part(seed->first, 2, start, end), seed->second};
    const AttentionResult block = attend(
        part(q, 2, start, end), first_rows(k, keys), first_rows(v, keys), scale, mask, sinks,
        of_block, wanted);
    outs.push_back(block.out);
    lses.push_back(block.lse);
    if (!block.mass) continue;
    const mx::array padded = mx::pad(*block.mass, {{0, 0}, {0, 0}, {0, N - keys}}, number(0));
    mass = mass ? *mass + padded : padded;
  }
  return {join_along(outs, 2), join_along(lses, 2), std::nullopt, mass};
}

mx::array softmax_weights(const mx::array& scores, const mx::array& lse) {
  const mx::array finite = mx::where(lse == number(-kInfinity), number(0), lse);
  return mx::exp(scores - mx::expand_dims(finite, -1));
}

mx::array attention_mass(const mx::array& logits, const mx::array& lse, int kv_heads) {
  check(
      logits.ndim() == 4 && lse.ndim() == 3 && lse.shape(0) == logits.shape(0) &&
          lse.shape(1) == logits.shape(1) && lse.shape(2) == logits.shape(2),
      "scores must be [B, Hq, L, N] and lse [B, Hq, L].");
  const int B = logits.shape(0), Hq = logits.shape(1), N = logits.shape(3);
  check(kv_heads > 0 && Hq % kv_heads == 0, "The query heads must be a multiple of the KV heads.");
  const mx::array weights = mx::reshape(softmax_weights(logits, lse), {B, kv_heads, -1, N});
  return mx::sum(weights, 2) * number(double(kv_heads) / Hq);
}

}  // namespace mlx_h2o
