// Launches of the attention kernels: a few queries over many slots, reading keys and values once
// (python/mlx_h2o/attention/backends/attention_launches.py).
#pragma once

#include "../attend.h"
#include "../remainder.h"
#include "launcher.h"
#include "work.h"

namespace mlx_h2o {

// Whether the kernels are written for these operands.
bool vector_kernel_takes(const mx::array& q, const Stored& k, const Stored& v);

// What attention_vector writes beside its output, as in its template argument.
enum class VectorExport { nothing, lse, logits };

struct VectorCall {
  float scale;
  Masking mask = {};
  std::optional<mx::array> sinks = std::nullopt;        // [Hq]
  std::optional<Remainder> remainder = std::nullopt;    // one more column
  Saturations saturations = {};                         // of the remainder's term, [Hk]
  std::optional<mx::array> frame_scale = std::nullopt;  // [Hk, D]: of the frame that keys lie in
  std::optional<mx::array> means = std::nullopt;        // [B, Hk, D]: measure keys' distances
  std::optional<Ranges> ranges = std::nullopt;          // for flat keys [B, S, D] and values
  VectorExport wanted = VectorExport::logits;
  std::string architecture = "";
  // What a kernel wrote that changed keys and values in place: read only after it.
  std::optional<mx::array> after = std::nullopt;
};

// What the kernels wrote. What there is per slot lies head after head: with ranges, a head's logits
// are the [G, L, length] after those of the heads before it.
struct VectorResult {
  mx::array out;                       // [B, Hq, L, Dv]
  std::optional<mx::array> lse;        // [B, Hq, L]
  std::optional<mx::array> logits;     // [B, Hq, L, N], or [B, G * L * slots]
  std::optional<mx::array> distances;  // ||k - mean||^2 [B, Hk, N], or [B, slots]
};

VectorResult vector_attend(
    const mx::array& q, const Stored& k, const Stored& v, const VectorCall& call);

// A mask in the kernels' terms: its template argument, how many columns an array has, and the array
// as a view of [B, Hq, L, columns].
struct KernelMask {
  int kind = 0;
  int columns = 0;
  std::optional<mx::array> array = std::nullopt;
};
KernelMask kernel_mask(const Masking& mask, int batch, int query_heads, int queries, int slots);

// A remainder's buffers.
extern const std::vector<std::string> kRemainderBuffers;
void add_remainder(Buffers& buffers, const Remainder& remainder);

}  // namespace mlx_h2o
