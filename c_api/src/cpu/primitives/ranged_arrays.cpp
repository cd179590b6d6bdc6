#include "ranged_arrays.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "mlx/backend/cuda/cuda.h"
#include "mlx/backend/metal/metal.h"
#include "primitive.h"

namespace mlx_h2o {

// MLX does not tell how many hold an array, unless it allocated the array's memory. An explicit
// instantiation may name a private member, and takes its address.
template <auto Description>
struct Reveal {
  friend long holders_of(const mx::array& a) {
    return (a.*Description).use_count();
  }
};
template struct Reveal<&mx::array::array_desc_>;
long holders_of(const mx::array& a);

namespace {

// The parts of a range begin at pages, behind the number in front of every buffer of MLX's CPU
// allocator: its size.
constexpr size_t kInFront = 64;

struct Part {
  std::weak_ptr<ReservedRange> range;
  size_t offset;
};

std::mutex parts_mutex;
std::unordered_map<const void*, Part>& parts() {
  static auto* const parts = new std::unordered_map<const void*, Part>();
  return *parts;
}

// The range of an array, or null, and where in it the array begins.
std::pair<std::shared_ptr<ReservedRange>, size_t> part_of(const mx::array& a) {
  if (a.size() == 0) return {nullptr, 0};
  std::lock_guard lock(parts_mutex);
  const auto it = parts().find(a.buffer().ptr());
  if (it == parts().end()) return {nullptr, 0};
  return {it->second.range.lock(), it->second.offset};
}

// Data at an offset of a range; the range lives as long as it.
mx::allocator::Data data_in(std::shared_ptr<ReservedRange> range, size_t offset, size_t bytes) {
  char* const at = range->data() + offset;
  std::memcpy(at - sizeof(size_t), &bytes, sizeof(size_t));
  mx::allocator::Buffer buffer(at - sizeof(size_t));
  {
    std::lock_guard lock(parts_mutex);
    parts()[buffer.ptr()] = {range, offset};
  }
  return mx::allocator::Data(buffer, [range](mx::allocator::Buffer gone) {
    std::lock_guard lock(parts_mutex);
    parts().erase(gone.ptr());
  });
}

size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (const auto count : shape) bytes *= static_cast<size_t>(count);
  return bytes;
}

}  // namespace

bool ranges_fit_mlx() {
  static const bool fit = [] {
    if (mx::metal::is_available() || mx::cu::is_available()) return false;
    size_t two[2] = {};
    return mx::allocator::Buffer(two).raw_ptr() == two + 1;
  }();
  return fit;
}

std::vector<mx::array> reserved_arrays(
    const std::vector<mx::Shape>& shapes, const std::vector<mx::Dtype>& dtypes) {
  if (!ranges_fit_mlx()) throw std::runtime_error("[mlx_h2o] MLX's buffers are a GPU's.");
  const size_t page = page_size();
  std::vector<size_t> offsets;
  size_t size = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    offsets.push_back(size + kInFront);
    size += (kInFront + bytes_of(shapes[i], dtypes[i]) + page - 1) / page * page;
  }
  const auto range = ReservedRange::make(size);
  if (!range)
    throw std::runtime_error(
        "[mlx_h2o] The system refuses to reserve " + std::to_string(size) + " bytes of addresses.");
  std::vector<mx::array> arrays;
  for (size_t i = 0; i < shapes.size(); ++i)
    arrays.emplace_back(
        data_in(range, offsets[i], bytes_of(shapes[i], dtypes[i])), shapes[i], dtypes[i]);
  return arrays;
}

bool is_elsewhere(const mx::array& a) {
  return a.status() != mx::array::unscheduled && a.size() && !part_of(a).first;
}

void Writable::copy_out(const mx::array& in, mx::array& out) {
  allocate(out);
  encoder_.dispatch([from = in.data<char>(), to = out.data<char>(), size = in.nbytes()] {
    std::memcpy(to, from, size);
  });
}

void Writable::take(const mx::array& in, mx::array& out) {
  const auto [range, offset] = part_of(in);
  if (!range) {
    if (in.is_donatable() || in.size() == 0) return out.copy_shared_buffer(in);
    return copy_out(in, out);
  }
  const auto unread = [&in] { return in.data_shared_ptr().use_count() == 1; };
  const bool ours = holders_of(in) == outputs_;
  // What was dispatched holds what it reads until it has run.
  if (ours && !unread()) mx::synchronize(stream_);
  if (ours && unread()) {
    // Not before what was dispatched has run: a copy is made then.
    if (std::find(ranges.begin(), ranges.end(), range) == ranges.end()) {
      encoder_.dispatch([range] { range->will_be_written(); });
      ranges.push_back(range);
    }
    return out.copy_shared_buffer(in);
  }
  auto& copy = copies_[range.get()];
  if (!copy) {
    copy = ReservedRange::make(range->size());
    if (!copy) return copy_out(in, out);  // no more addresses
    encoder_.dispatch([range, copy] { range->copy_to(*copy); });
    ranges.push_back(copy);
  }
  out.set_data(data_in(copy, offset, in.nbytes()));
}

namespace {

class PutRows : public CpuPrimitive {
 public:
  PutRows(mx::Stream stream, std::vector<Slots> unused)
      : CpuPrimitive(stream), unused_(std::move(unused)) {}

  const char* name() const override {
    return "H2OPutRows";
  }

  // The inputs are the fields, the index, and each field's rows.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const size_t fields = outputs.size();
    const mx::array& index = inputs[fields];
    Writable writable(stream(), fields);
    std::vector<Put> puts;
    for (size_t i = 0; i < fields; ++i) {
      writable.take(inputs[i], outputs[i]);
      const mx::array &field = inputs[i], &rows = inputs[fields + 1 + i];
      const size_t row = field.nbytes() / (size_t(field.shape(0)) * field.shape(1));
      const auto range = part_of(outputs[i]);
      puts.push_back(
          {outputs[i].data<char>(), rows.data<char>(), row, size_t(field.shape(1)), range.first,
           range.second});
    }
    encoder.dispatch([puts = std::move(puts), ranges = std::move(writable.ranges), unused = unused_,
                      index = index.data<int32_t>(), batch = size_t(inputs[0].shape(0)),
                      count = size_t(index.shape(1)), per_sequence = index.shape(0) > 1] {
      for (const Put& put : puts) {
        for (size_t b = 0; b < batch; ++b)
          put.into(b, index + (per_sequence ? b * count : 0), count);
        for (size_t b = 0; put.range && b < batch; ++b) put.give_back(b, unused);
      }
    });
  }

 private:
  // One field's part.
  struct Put {
    char* to;
    const char* rows;
    size_t row, slots;  // bytes of a row, slots of a sequence
    std::shared_ptr<ReservedRange> range;
    size_t offset;

    void into(size_t sequence, const int32_t* index, size_t count) const {
      const char* from = rows + sequence * count * row;
      char* const field = to + sequence * slots * row;
      for (size_t i = 0; i < count; ++i, from += row)
        std::memcpy(field + index[i] * row, from, row);
    }

    void give_back(size_t sequence, const std::vector<Slots>& unused) const {
      const size_t start = offset + sequence * slots * row;
      for (const auto& [first, last] : unused)
        range->give_back(start + first * row, start + last * row);
    }
  };

  std::vector<Slots> unused_;
};

void check(
    const std::vector<mx::array>& fields, const mx::array& index,
    const std::vector<mx::array>& rows, const std::vector<Slots>& unused) {
  require(!fields.empty() && fields.size() == rows.size(), "There are rows for each field");
  const int B = fields[0].ndim() > 1 ? fields[0].shape(0) : 0;
  const int S = B ? fields[0].shape(1) : 0;
  require(
      B > 0 && S > 0 && index.ndim() == 2 && (index.shape(0) == 1 || index.shape(0) == B),
      "The index must be [B or 1, M]", {{"field", fields[0]}, {"index", index}});
  for (size_t i = 0; i < fields.size(); ++i) {
    mx::Shape wanted = fields[i].shape();
    require(
        wanted.size() > 1 && wanted[0] == B && wanted[1] == S, "Fields must be [B, S, ...]",
        {{"field", fields[i]}});
    wanted[1] = index.shape(1);
    require(
        rows[i].shape() == wanted && rows[i].dtype() == fields[i].dtype(),
        "Rows must be [B, M, ...] of the field's dtype", {{"field", fields[i]}, {"rows", rows[i]}});
  }
  for (const auto& [first, last] : unused)
    require(0 <= first && first <= last && last <= S, "Unused slots must be slots");
}

}  // namespace

std::vector<mx::array> put_rows(
    const std::vector<mx::array>& fields, const mx::array& index,
    const std::vector<mx::array>& rows, std::vector<Slots> unused, mx::StreamOrDevice s) {
  check(fields, index, rows, unused);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& field : fields) {
    shapes.push_back(field.shape());
    dtypes.push_back(field.dtype());
  }
  std::vector<mx::array> inputs = fields;
  inputs.push_back(mx::contiguous(mx::astype(index, mx::int32, s), false, s));
  for (const mx::array& of_field : rows) inputs.push_back(mx::contiguous(of_field, false, s));
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<PutRows>(mx::to_stream(s), std::move(unused)),
      inputs);
}

}  // namespace mlx_h2o
