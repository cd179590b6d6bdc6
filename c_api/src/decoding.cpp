#include "decoding.h"

#include "attend.h"
#include "gpu/gpu_decoding.h"
#include "remainder.h"

namespace mlx_h2o {

namespace {

class CpuDecoding : public Decoding {
 public:
  explicit CpuDecoding(DecodingArguments a)
      : layer_(
            a.keys, a.values, std::move(a.fields), a.policy, a.remembers, a.answers, kSaturation,
            a.recent, stream()) {}

  mx::array step(
      const mx::array& q, const mx::array& k, const mx::array& v, float scale,
      const std::optional<mx::array>& sinks, int offset, std::vector<StepHead> heads,
      const std::optional<RecentStep>& recent) override {
    return layer_.step(q, k, v, scale, sinks, offset, std::move(heads), recent, stream());
  }

  std::vector<mx::array> close() override {
    return layer_.close(stream());
  }

 private:
  static mx::Stream stream() {
    return mx::default_stream(mx::Device::cpu);
  }

  DecodingLayer layer_;
};

}  // namespace

bool can_decode(const mx::array& keys, const mx::array& values, bool value_weighted, bool mixed) {
  switch (backend()) {
    case Backend::plain: return false;
    case Backend::cpu: return !value_weighted;
    // Two kinds of rows in one step are the CPU kernel's alone.
    case Backend::gpu: return !mixed && gpu_can_decode(keys, values);
  }
  return false;
}

std::unique_ptr<Decoding> start_decoding(DecodingArguments arguments) {
  if (backend() == Backend::gpu) return start_gpu_decoding(std::move(arguments));
  return std::make_unique<CpuDecoding>(std::move(arguments));
}

}  // namespace mlx_h2o
