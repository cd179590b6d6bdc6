// Attention with scores over rows of one or several kinds, by kernels or by plain MLX.
#pragma once

#include "packed.h"

namespace mlx_h2o {

// Who computes on the stream of the call: the kernels for its device, or plain MLX where there are
// none or they were switched off.
enum class Backend { plain, cpu, gpu };
Backend backend();
void use_kernels(bool use);

// Has plain MLX compute in this thread meanwhile, unless kernels are wanted.
class KernelScope {
 public:
  explicit KernelScope(bool wanted);
  KernelScope(const KernelScope&) = delete;
  ~KernelScope();

 private:
  const bool outer_;
};

struct Masking {
  bool causal = false;  // aligned at the end
  std::optional<mx::array> array;
};

struct AttentionResult {
  mx::array out;                    // [B, Hq, L, Dv]
  mx::array lse;                    // [B, Hq, L]
  std::optional<mx::array> logits;  // [B, Hq, L, N], of Export::logits
  std::optional<mx::array> mass;    // [B, Hk, N], of Export::mass
};

// q [B, Hq, L, D] over keys and values joined alike; sinks [Hq]. Raises for what does not fit.
AttentionResult attend(
    const mx::array& q, const Parts& k, const Parts& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted);

// exp(scores - lse), zero in rows that see nothing.
mx::array softmax_weights(const mx::array& scores, const mx::array& lse);

// The attention that each key received, [B, Hk, N], of logits [B, Hq, L, N] and lse [B, Hq, L].
mx::array attention_mass(const mx::array& logits, const mx::array& lse, int kv_heads);

}  // namespace mlx_h2o
