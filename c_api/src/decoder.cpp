#include "decoder.h"

#include "cpu_kernels.h"
#include "gpu/gpu_decoder.h"

namespace mlx_h2o {

bool accepts(
    const CacheSettings& settings, const AttentionCall& call, const mx::array& keys,
    const mx::array& values, FusedProof proven) {
  // With undo a step must be noted, which is done op by op.
  const bool one_token = keys.shape(2) == 1 && !settings.undo && !call.mask.array;
  // What a program's own policy does is known to no kernel.
  if (settings.policy.own) return false;
  // The kernels read keys as they are stored.
  if (settings.rope) return false;
  if (!one_token || keys.dtype() != values.dtype()) return false;
  if (call.q.shape(1) > kMaxRows * keys.shape(1)) return false;
  switch (backend()) {
    case Backend::plain: return false;
    case Backend::cpu: return !settings.policy.value_weighted;
    // Two kinds of rows in one step are the CPU kernel's alone.
    case Backend::gpu:
      if (settings.packing.recent_bits) return false;
      return gpu_has_step(keys, values) && proven(settings, call, keys, values) &&
          gpu_writes_in_place();
  }
  return false;
}

std::unique_ptr<Decoder> decoder_for(Lent lent, const CacheSettings& settings) {
  if (backend() == Backend::gpu) return gpu_decoder_for(lent, settings);
  return cpu_decoder_for(lent, settings);
}

}  // namespace mlx_h2o
