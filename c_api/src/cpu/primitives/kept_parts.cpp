#include "kept_parts.h"

#include <cstring>

#include "primitive.h"

namespace mlx_h2o {

KeptParts::KeptParts(int B, int Hk, const Step& step)
    : B_(B), Hk_(Hk), ring_slot_(step.recent_slot), slots_({B, Hk}, mx::int32, nullptr, {}) {
  starts_.reserve(Hk);
  for (const HeadPlan& head : step.heads) starts_.push_back(head.start);
}

void KeptParts::add(int field, Change change, const mx::Shape& shape, mx::Dtype dtype) {
  mx::Shape of_part = shape;
  if (change != Change::whole) {
    of_part = {B_, Hk_};
    const int rows = change == Change::slot_row ? 2 : 3;  // [B, S, ...] and [B, Hk, size, ...]
    of_part.insert(of_part.end(), shape.begin() + rows, shape.end());
  }
  has_slots_ |= change == Change::slot_row;
  parts_.push_back({field, change, mx::array(std::move(of_part), dtype, nullptr, {})});
}

void KeptParts::allocate() {
  const auto available = [](mx::array& a) {
    mlx_h2o::allocate(a);
    a.set_status(mx::array::Status::available);
  };
  if (has_slots_) available(slots_);
  for (KeptPart& kept : parts_) available(kept.before);
}

// Calls copy(kept, field, bytes) for each part that lies in one piece.
template <class Copy>
void KeptParts::each_part(const KeptPart& kept, const mx::array& field, Copy copy) const {
  char* before = const_cast<char*>(kept.before.data<char>());
  char* now = const_cast<char*>(field.data<char>());
  if (kept.change == Change::whole) return copy(before, now, kept.before.nbytes());
  const bool ring = kept.change == Change::ring_row;
  const int64_t heads = int64_t(B_) * Hk_, rows = field.shape(ring ? 2 : 1);
  const size_t bytes = kept.before.nbytes() / heads;
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t row = ring ? i * rows + ring_slot_
                             : i / Hk_ * rows + starts_[i % Hk_] + slots_.data<int32_t>()[i];
    copy(before + i * bytes, now + row * bytes, bytes);
  }
}

void KeptParts::keep(
    const Layer& layer, const LayerState& state, const Step& step,
    const std::vector<mx::array>& fields) {
  if (has_slots_)
    for (int i = 0; i < B_ * Hk_; ++i)
      slots_.data<int32_t>()[i] = free_slot(layer, state, step, i / Hk_, i % Hk_);
  for (const KeptPart& kept : parts_)
    each_part(kept, fields[kept.field], [](char* before, const char* now, size_t bytes) {
      std::memcpy(before, now, bytes);
    });
}

void KeptParts::put_back(const std::vector<mx::array>& fields) const {
  for (const KeptPart& kept : parts_)
    each_part(kept, fields[kept.field], [](const char* before, char* now, size_t bytes) {
      std::memcpy(now, before, bytes);
    });
}

size_t KeptParts::nbytes() const {
  size_t bytes = has_slots_ ? slots_.nbytes() : 0;
  for (const KeptPart& kept : parts_) bytes += kept.before.nbytes();
  return bytes;
}

}  // namespace mlx_h2o
