#include "undo_record.h"

#include <cstring>

#include "primitive.h"

namespace mlx_h2o {

UndoRecord::UndoRecord(int B, int Hk, const TokenPlan& plan)
    : B_(B),
      Hk_(Hk),
      ring_slot_(plan.recent ? plan.recent->slot : 0),
      slots_({B, Hk}, mx::int32, nullptr, {}) {
  starts_.reserve(Hk);
  for (const HeadPlan& head : plan.heads) starts_.push_back(head.start);
}

void UndoRecord::add(int field, Change change, const mx::Shape& shape, mx::Dtype dtype) {
  mx::Shape row = shape;
  if (change != Change::whole) {
    row = {B_, Hk_};
    const int rows = change == Change::slot_row ? 2 : 3;  // [B, S, ...] and [B, Hk, size, ...]
    row.insert(row.end(), shape.begin() + rows, shape.end());
  }
  has_slots_ |= change == Change::slot_row;
  parts_.push_back({field, change, mx::array(std::move(row), dtype, nullptr, {})});
}

void UndoRecord::allocate() {
  const auto available = [](mx::array& a) {
    mlx_h2o::allocate(a);
    a.set_status(mx::array::Status::available);
  };
  if (has_slots_) available(slots_);
  for (UndoPart& part : parts_) available(part.before);
}

// Calls copy(part, field, bytes) for each part that lies in one piece.
template <class Copy>
void UndoRecord::each_part(const UndoPart& part, const mx::array& field, Copy copy) const {
  char* before = const_cast<char*>(part.before.data<char>());
  char* now = const_cast<char*>(field.data<char>());
  if (part.change == Change::whole) return copy(before, now, part.before.nbytes());
  const bool ring = part.change == Change::ring_row;
  const int64_t heads = int64_t(B_) * Hk_, rows = field.shape(ring ? 2 : 1);
  const size_t bytes = part.before.nbytes() / heads;
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t row = ring ? i * rows + ring_slot_
                             : i / Hk_ * rows + starts_[i % Hk_] + slots_.data<int32_t>()[i];
    copy(before + i * bytes, now + row * bytes, bytes);
  }
}

void UndoRecord::keep(
    const Layer& layer, const LayerState& state, const Step& step,
    const std::vector<mx::array>& fields) {
  if (has_slots_)
    for (int i = 0; i < B_ * Hk_; ++i)
      slots_.data<int32_t>()[i] = free_slot(layer, state, step.plan, i / Hk_, i % Hk_);
  for (const UndoPart& part : parts_)
    each_part(part, fields[part.field], [](char* before, const char* now, size_t bytes) {
      std::memcpy(before, now, bytes);
    });
}

void UndoRecord::put_back(const std::vector<mx::array>& fields) const {
  for (const UndoPart& part : parts_)
    each_part(part, fields[part.field], [](const char* before, char* now, size_t bytes) {
      std::memcpy(now, before, bytes);
    });
}

size_t UndoRecord::nbytes() const {
  size_t bytes = has_slots_ ? slots_.nbytes() : 0;
  for (const UndoPart& part : parts_) bytes += part.before.nbytes();
  return bytes;
}

}  // namespace mlx_h2o
