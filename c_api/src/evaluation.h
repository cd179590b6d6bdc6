// Where arrays are evaluated whose numbers the engine looks at, or whose kernels it waits for:
// nothing else evaluates.
#pragma once

#include "bridge.h"

namespace mlx_h2o {

// Evaluates them, by the evaluator that the program has set, or by MLX's own. Raises if it fails.
void evaluate(const std::vector<mx::array>& arrays);

// The numbers of an array, row after row, evaluated.
std::vector<float> floats_of(const mx::array& a);
std::vector<int> ints_of(const mx::array& a);

// Null: MLX's own.
void set_evaluator(mlx_h2o_evaluator evaluator, void* context);

}  // namespace mlx_h2o
