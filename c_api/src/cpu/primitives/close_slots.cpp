#include "primitive.h"
#include "slot_memory.h"

namespace mlx_h2o {

namespace {

class CloseSlots : public CpuPrimitive {
 public:
  CloseSlots(mx::Stream stream, std::shared_ptr<SlotMemory> memory)
      : CpuPrimitive(stream), memory_(std::move(memory)) {}

  const char* name() const override {
    return "H2OCloseSlots";
  }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_shared_buffer(memory_->fields[i]);
    memory_->fields.clear();
    memory_->ranges.clear();
  }

 private:
  std::shared_ptr<SlotMemory> memory_;
};

}  // namespace

std::vector<mx::array> close_slots(
    std::shared_ptr<SlotMemory> memory, const mx::array& last_step, std::vector<mx::Shape> shapes,
    std::vector<mx::Dtype> dtypes, mx::Stream stream) {
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<CloseSlots>(stream, std::move(memory)),
      {last_step});
}

}  // namespace mlx_h2o
