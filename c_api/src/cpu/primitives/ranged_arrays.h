// Arrays whose memory is a reserved range, and operations that write to them in place.
//
// MLX never writes in place to memory that it did not allocate (`is_donatable` asks whether the
// data is owned), so rows are put into these arrays by operations of this folder alone.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../../mx.h"
#include "mlx/backend/cpu/encoder.h"
#include "reserved_range.h"

namespace mlx_h2o {

// Whether MLX allocates as its CPU builds do; with a GPU its buffers are the GPU's.
bool ranges_fit_mlx();

// Zeros of these shapes and dtypes in one range. Raises std::runtime_error where the system refuses
// the range or MLX has a GPU.
std::vector<mx::array> reserved_arrays(
    const std::vector<mx::Shape>& shapes, const std::vector<mx::Dtype>& dtypes);

// Whether an array has memory that is no reserved range's.
bool is_elsewhere(const mx::array& a);

// Finds memory to write to for arrays that an operation changes: the array's own where no one else
// holds it, a copy otherwise. Copies of arrays in one range lie in one range.
class Writable {
 public:
  // `outputs` of the operation, each of which holds the inputs once.
  Writable(mx::Stream stream, size_t outputs)
      : stream_(stream),
        encoder_(mx::cpu::get_command_encoder(stream)),
        outputs_(static_cast<long>(outputs)) {}

  // `out`, without data, gets that of `in`, or a copy that is made before what is dispatched next.
  void take(const mx::array& in, mx::array& out);

  // The ranges to be written, which must live as long as the task.
  std::vector<std::shared_ptr<ReservedRange>> ranges;

 private:
  void copy_out(const mx::array& in, mx::array& out);  // into a buffer of MLX's

  mx::Stream stream_;
  mx::cpu::CommandEncoder& encoder_;
  long outputs_;
  std::map<const ReservedRange*, std::shared_ptr<ReservedRange>> copies_;
};

// Slots of every sequence that hold nothing any more: the first, and the one after the last.
using Slots = std::pair<int, int>;

// Fields [B, S, ...] with rows [B, M, ...] of their dtypes at slots `index` [B or 1, M]; then the
// pages of the `unused` slots are given back.
std::vector<mx::array> put_rows(
    const std::vector<mx::array>& fields, const mx::array& index,
    const std::vector<mx::array>& rows, std::vector<Slots> unused, mx::StreamOrDevice s);

}  // namespace mlx_h2o
