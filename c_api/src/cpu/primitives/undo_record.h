// What a step overwrites, kept so that the step can be taken back in place
// (python/mlx_h2o/slots/journal.py).
#pragma once

#include <vector>

#include "../../mx.h"
#include "decode_step.h"

namespace mlx_h2o {

// How a step changes a field.
enum class Change { slot_row, ring_row, whole };

// A field's part that a step overwrites, as it was.
struct UndoPart {
  int field;  // its place among the layer's fields
  Change change;
  mx::array before;  // the row of each head [B, Hk, ...], or the whole field
};

// All such parts of one step.
class UndoRecord {
 public:
  // Of a step of a layer of B sequences and Hk heads; no part yet.
  UndoRecord(int B, int Hk, const TokenPlan& plan);

  // Also keeps what the step changes of a field of this shape.
  void add(int field, Change change, const mx::Shape& shape, mx::Dtype dtype);

  // Memory for all of it.
  void allocate();
  // Copies the fields' parts before the step changes them.
  void keep(
      const Layer& layer, const LayerState& state, const Step& step,
      const std::vector<mx::array>& fields);
  // Writes them back.
  void put_back(const std::vector<mx::array>& fields) const;

  size_t nbytes() const;
  // The slot of each head that takes the new row, [B, Hk] int32; only if rows of slots are kept.
  const mx::array& slots() const {
    return slots_;
  }
  bool has_slots() const {
    return has_slots_;
  }
  const std::vector<UndoPart>& parts() const {
    return parts_;
  }

 private:
  template <class Copy>
  void each_part(const UndoPart& part, const mx::array& field, Copy copy) const;

  const int B_, Hk_, ring_slot_;
  std::vector<int64_t> starts_;  // of the heads, in the flat buffers
  bool has_slots_ = false;
  mx::array slots_;
  std::vector<UndoPart> parts_;
};

}  // namespace mlx_h2o
