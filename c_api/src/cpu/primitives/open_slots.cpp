#include "primitive.h"
#include "ranged_arrays.h"
#include "slot_memory.h"

namespace mlx_h2o {

namespace {

class OpenSlots : public CpuPrimitive {
 public:
  OpenSlots(mx::Stream stream, std::shared_ptr<SlotMemory> memory)
      : CpuPrimitive(stream), memory_(std::move(memory)) {}

  const char* name() const override {
    return "H2OOpenSlots";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    Writable writable(stream(), outputs.size());
    for (const mx::array& in : inputs) {
      mx::array field(in.shape(), in.dtype(), nullptr, {});
      writable.take(in, field);
      memory_->fields.push_back(std::move(field));
    }
    memory_->ranges = std::move(writable.ranges);
  }

 private:
  std::shared_ptr<SlotMemory> memory_;
};

}  // namespace

mx::array open_slots(
    std::shared_ptr<SlotMemory> memory, std::vector<mx::array> fields, mx::Stream stream) {
  return mx::array(
      {1}, mx::int32, std::make_shared<OpenSlots>(stream, std::move(memory)), std::move(fields));
}

}  // namespace mlx_h2o
