// A layer's arrays outside of MLX's graph, and the operations on them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "reserved_range.h"
#include "stored.h"
#include "undo_record.h"

namespace mlx_h2o {

// Arrays that one layer's steps overwrite in place: keys, values, then the fields below; where the
// newest tokens are stored apart, then their keys, values and scores. Value lengths are the last of
// both, where the policy has them kept.
struct SlotMemory {
  std::vector<mx::array> fields;
  std::vector<mx::array> frame;                        // centre and scale, or empty; never changed
  std::vector<std::shared_ptr<ReservedRange>> ranges;  // that fields lie in
  int steps = 0;
};
struct Field {
  enum { positions, scores, count, mean_key, var_key, mean_value, victims, value_lengths };
};

// Takes arrays out of the graph: their buffers where no one else holds them, copies otherwise. The
// array that it returns is ready when it is done; steps and `close_slots` take it.
mx::array open_slots(
    std::shared_ptr<SlotMemory> memory, std::vector<mx::array> fields, mx::Stream stream);

// One token's step as far as it is known before its arrays are; `before`, if it can be taken back.
struct PlannedStep {
  Step step;
  std::shared_ptr<UndoRecord> before;
};

// The steps of a layer's next tokens.
struct LayerSteps {
  std::shared_ptr<SlotMemory> memory;
  SlotLayout layout;
  bool measured;  // value lengths are kept
  std::optional<SlotLayout> recent_layout;
  Layer layer;
  std::vector<PlannedStep> steps;
};

// Out of L tokens, [L, B, Hq, Dv] or of this size, and an array that is ready after them.
// `inputs` are q, k, v [B, ..., L, width], `sinks` if any, and what the steps come after. The
// sequences [B, ...] are those of the layers, one after the other.
std::vector<mx::array> decode_on_slots(
    std::vector<LayerSteps> layers, bool sinks, std::vector<mx::array> inputs, mx::Shape out,
    mx::Stream stream);

// The arrays in the graph again, of these shapes and dtypes.
std::vector<mx::array> close_slots(
    std::shared_ptr<SlotMemory> memory, const mx::array& last_step, std::vector<mx::Shape> shapes,
    std::vector<mx::Dtype> dtypes, mx::Stream stream);

}  // namespace mlx_h2o
