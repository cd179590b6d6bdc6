#include <cstring>

#include "primitive.h"
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
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& in : inputs) {
      if (in.is_donatable() || in.size() == 0) {
        memory_->fields.push_back(in);
        continue;
      }
      mx::array copy(in.shape(), in.dtype(), nullptr, {});
      allocate(copy);
      encoder.dispatch([from = in.data<char>(), to = copy.data<char>(), size = in.nbytes()] {
        std::memcpy(to, from, size);
      });
      memory_->fields.push_back(copy);
    }
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
