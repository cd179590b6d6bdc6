#include "selection.h"

namespace mlx_h2o {

namespace {

// Priorities with plus infinity for the protected; a NaN counts as the lowest.
mx::array rankable(const mx::array& given, const mx::array& evictable, bool per_layer) {
  mx::array priority = f32(given);
  if (per_layer) priority = mx::broadcast_to(mx::mean(priority, 1, true), priority.shape());
  priority = mx::where(mx::isnan(priority), number(-kInfinity), priority);
  // Finite, so that a protected slot never ties with an unprotected one.
  const mx::array most = number(std::numeric_limits<float>::max());
  return mx::where(evictable, mx::minimum(priority, most), number(kInfinity));
}

// Slot indices from the first to go to the last, ties oldest first.
mx::array order_by_worth(const mx::array& ranked, const mx::array& positions) {
  const mx::array by_position = mx::argsort(positions, -1);
  // argsort is stable, so equal priorities stay in order of position.
  const mx::array by_worth = mx::argsort(mx::take_along_axis(ranked, by_position, -1), -1);
  return mx::take_along_axis(by_position, by_worth, -1);
}

void check_choice(
    const mx::array& priority, const mx::array& positions, const mx::array& evictable, int count) {
  check(
      priority.ndim() == 3 && positions.shape() == priority.shape() &&
          evictable.shape() == priority.shape(),
      "priority, positions and evictable must be [B, H, N].");
  check(
      count >= 1 && count <= priority.shape(2),
      "count must be at least 1 and at most the number of slots.");
}

}  // namespace

mx::array evictable_slots(const mx::array& positions, int offset, int sink, int recent) {
  return mx::logical_and(
      mx::greater_equal(positions, mx::array(sink)),
      mx::less(positions, mx::array(offset - recent)));
}

mx::array select_victims(
    const mx::array& priority, const mx::array& positions, const mx::array& evictable, int count,
    bool per_layer) {
  check_choice(priority, positions, evictable, count);
  const mx::array ranked = rankable(priority, evictable, per_layer);
  return mx::astype(part(order_by_worth(ranked, positions), -1, 0, count), mx::int32);
}

mx::array select_kept(
    const mx::array& priority, const mx::array& positions, const mx::array& evictable, int count,
    bool per_layer) {
  check_choice(priority, positions, evictable, count);
  const mx::array order = order_by_worth(rankable(priority, evictable, per_layer), positions);
  const int N = order.shape(-1);
  const mx::array kept = part(order, -1, N - count, N);
  const mx::array by_position = mx::argsort(mx::take_along_axis(positions, kept, -1), -1);
  return mx::astype(mx::take_along_axis(kept, by_position, -1), mx::int32);
}

}  // namespace mlx_h2o
