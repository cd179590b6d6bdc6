#include "pack.h"

#include <algorithm>

#include "decode_step.h"
#include "primitive.h"
#include "stored.h"
#include "thread_pool.h"

namespace mlx_h2o {

namespace {

// Rows that a thread packs at a time: enough that handing them out costs nothing beside it.
constexpr int64_t kRowsOfATask = 64;

// Rows of an array whose last axis is dense, numbered along the others.
struct StridedRows {
  const char* data;
  mx::Shape shape;
  mx::Strides strides;
  int size;

  const void* row(int64_t number) const {
    int64_t element = 0;
    for (int axis = static_cast<int>(shape.size()) - 2; axis >= 0; --axis) {
      element += number % shape[axis] * strides[axis];
      number /= shape[axis];
    }
    return data + element * size;
  }
};

class Pack : public CpuPrimitive {
 public:
  Pack(mx::Stream stream, int bits, int group_size)
      : CpuPrimitive(stream), bits_(bits), group_size_(group_size) {}

  const char* name() const override {
    return "H2OPack";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) allocate(out);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array from = dense_last(inputs[0], encoder);
    const int width = from.shape(-1);
    const SlotRows to{outputs[0].data<void>(), dtype_of(from),         width, bits_, group_size_,
                      outputs[1].data<void>(), outputs[2].data<void>()};
    const int64_t count = from.size() / width;
    StridedRows rows{
        from.data<char>(), from.shape(), from.strides(), static_cast<int>(from.itemsize())};
    encoder.dispatch([rows = std::move(rows), to, count] {
      const auto task = [&](int64_t first) {
        const int64_t last = std::min(first + kRowsOfATask, count);
        for (int64_t row = first; row < last; ++row) to.write(row, rows.row(row));
      };
      if (count <= kRowsOfATask) return task(0);
      const int64_t tasks = (count + kRowsOfATask - 1) / kRowsOfATask;
      ThreadPool::shared().run(static_cast<int>(tasks), [&](int i) { task(i * kRowsOfATask); });
    });
  }

 private:
  int bits_, group_size_;
};

}  // namespace

std::vector<mx::array> pack(const mx::array& rows, int bits, int group_size, mx::StreamOrDevice s) {
  require(is_float(rows), "Rows must be float32, float16 or bfloat16", {{"rows", rows}});
  require(rows.ndim() > 0 && rows.shape(-1) > 0, "Rows have a width", {{"rows", rows}});
  check_packing(bits, group_size);
  require(rows.shape(-1) % group_size == 0, "The group size divides the width", {{"rows", rows}});
  mx::Shape words = rows.shape(), groups = rows.shape();
  words.back() = words.back() / 32 * bits;
  groups.back() /= group_size;
  return mx::array::make_arrays(
      {words, groups, groups}, {mx::uint32, rows.dtype(), rows.dtype()},
      std::make_shared<Pack>(mx::to_stream(s), bits, group_size), {rows});
}

}  // namespace mlx_h2o
