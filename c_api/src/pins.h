// Positions whose tokens no policy evicts (python/mlx_h2o/slots/pins.py, budgets/allocation.py).
//
// A slot's position p is stored as -1 - p while its token is pinned: below every sink, so whatever
// spares sinks spares pinned tokens too.
#pragma once

#include <utility>

#include "policy.h"

namespace mlx_h2o {

// First position and the one past the last.
using Span = std::pair<int, int>;
using Spans = std::vector<Span>;

// The same positions in as few spans as can be, in order.
Spans joined(Spans spans);
// The positions of some spans that are in none of the others, which are in order.
Spans without(const Spans& spans, const Spans& others);
// How many positions are pinned that are no sinks.
int pinned_from(const Spans& spans, int sink);
bool is_pinned(const Spans& spans, int position);

// Positions as slots store them; `positions` are true or stored.
mx::array stored_positions(const mx::array& positions, const Spans& spans);
// Positions without the marks of pins.
mx::array true_positions(const mx::array& stored);

// A layer's budgets, shared out so that every head holds its pins and can still evict: a head that
// is too small gets what it lacks from the others. Raises if all together have too few.
std::vector<int> room_for_pins(
    const std::vector<int>& budgets, const Policy& policy, const Spans& pins);

}  // namespace mlx_h2o
