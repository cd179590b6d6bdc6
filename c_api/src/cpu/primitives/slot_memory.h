// A layer's arrays outside of MLX's graph, and the operations on them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "before.h"
#include "reserved_range.h"
#include "stored.h"

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

// What a step hands out beside its output: which of a layer's fields, as they were before.
struct Kept {
  bool overwritten = false;  // rows of slots, with their slots, positions and value lengths
  bool scores = false;
  bool statistics = false;
  bool victims = false;
  bool recent_rows = false;
  bool recent_scores = false;
};

// Takes arrays out of the graph: their buffers where no one else holds them, copies otherwise. The
// array that it returns is ready when it is done; steps and `close_slots` take it.
mx::array open_slots(
    std::shared_ptr<SlotMemory> memory, std::vector<mx::array> fields, mx::Stream stream);

// One step as far as it is known before its arrays are.
struct PlannedStep {
  SlotLayout layout;
  bool measured;  // value lengths are kept
  std::optional<SlotLayout> recent_layout;
  Layer layer;
  Step step;
  Kept kept;
};

// A layer's part in a step.
struct LayerStep {
  std::shared_ptr<SlotMemory> memory;
  PlannedStep planned;
};

// Out [B, Hq, 1, Dv], an array that is ready after the step, and what it changed, as it was, of
// these shapes and dtypes; the latter of one layer alone. `inputs` are q, k, v, `sinks` if any, and
// what the step comes after. The sequences [B, ...] are those of the layers, one after the other.
std::vector<mx::array> decode_step_on_slots(
    std::vector<LayerStep> layers, bool sinks, std::vector<mx::array> inputs,
    std::vector<mx::Shape> shapes, std::vector<mx::Dtype> dtypes, mx::Stream stream);

// The arrays in the graph again, of these shapes and dtypes.
std::vector<mx::array> close_slots(
    std::shared_ptr<SlotMemory> memory, const mx::array& last_step, std::vector<mx::Shape> shapes,
    std::vector<mx::Dtype> dtypes, mx::Stream stream);

}  // namespace mlx_h2o
