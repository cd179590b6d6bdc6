#include "recent.h"

namespace mlx_h2o {

std::optional<Fields> RecentZone::push(const mx::array& keys, const mx::array& values, int offset) {
  const int B = keys.shape(0), H = keys.shape(1), L = keys.shape(2);
  const int leaving = std::max(length + L - size, 0);
  const int first_leaving = offset - length;
  // Of the new rows, those that are recent only until even newer ones came with them.
  const int passing = std::max(L - size, 0);
  std::vector<Fields> parts;
  if (leaving > passing) {
    const Fields left = oldest_first(leaving - passing);
    std::optional<mx::array> scores;
    if (scored_) scores = left.at("scores");
    parts.push_back(
        packed_rows(kept_, recent_.rows("keys", left), recent_.rows("values", left), scores));
  }
  if (passing)
    parts.push_back(packed_rows(
        kept_, {{part(keys, 2, 0, passing)}}, {{part(values, 2, 0, passing)}}, std::nullopt));
  const Fields rows = packed_rows(
      recent_, {{part(keys, 2, passing, L)}}, {{part(values, 2, passing, L)}}, std::nullopt);

  const int staying = length - (leaving - passing), newest = L - passing;
  Fields old;
  if (staying) {
    for (const auto& [name, field] : oldest_first(length))
      old.emplace(name, part(field, 2, length - staying, length));
  }
  for (const auto& [name, row] : rows) {
    std::vector<mx::array> pieces;
    if (staying) pieces.push_back(old.at(name));
    pieces.push_back(row);
    mx::Shape unused = row.shape();
    unused[2] = size - staying - newest;
    if (unused[2]) pieces.push_back(mx::zeros(unused, row.dtype()));
    fields.insert_or_assign(name, join_along(std::move(pieces), 2));
  }
  length = staying + newest, oldest = 0;
  if (parts.empty()) return std::nullopt;

  Fields gone = parts[0];
  if (parts.size() > 1)
    for (auto& [name, field] : gone) field = mx::concatenate({field, parts[1].at(name)}, 2);
  gone.insert_or_assign(
      "positions",
      mx::broadcast_to(range(first_leaving, first_leaving + leaving), {B, H, leaving}));
  return gone;
}

RecentStep RecentZone::advance() {
  if (length == size) {
    const int slot = oldest;
    oldest = (oldest + 1) % size;
    return {slot, size, true};
  }
  ++length;
  return {length - 1, length, false};
}

void RecentZone::reserve() {
  for (auto& [name, field] : fields) {
    mx::Shape missing = field.shape();
    missing[2] = size - missing[2];
    if (missing[2]) field = mx::concatenate({field, mx::zeros(missing, field.dtype())}, 2);
  }
}

Fields RecentZone::views(int first, int last, int offset) const {
  Fields views;
  for (const auto& [name, field] : oldest_first(length))
    views.emplace(name, part(field, 1, first, last));
  const mx::array& keys = views.at("keys");
  views.emplace(
      "positions",
      mx::broadcast_to(range(offset - length, offset), {keys.shape(0), last - first, length}));
  return views;
}

void RecentZone::write_scores(const mx::array& scores) {
  const mx::array& field = fields.at("scores");
  std::vector<mx::array> pieces{mx::roll(scores, oldest, 2)};
  if (field.shape(2) > length) pieces.push_back(part(field, 2, length, field.shape(2)));
  fields.insert_or_assign("scores", join_along(std::move(pieces), 2));
}

RecentZone::Before RecentZone::before() const {
  Before before{length, {}, std::nullopt};
  if (!length) return before;
  if (length == size)
    for (const auto& [name, field] : fields)
      if (name != "scores")  // gathered, or one row would hold the whole ring
        before.oldest.emplace(name, mx::take(field, range(oldest, oldest + 1), 2));
  if (scored_) before.scores = oldest_first(length).at("scores");
  return before;
}

void RecentZone::restore(const Before& before) {
  const Fields held = oldest_first(length);
  const int staying = length - 1;
  for (const auto& [name, field] : held) {
    std::vector<mx::array> pieces;
    if (name == "scores") {
      if (before.scores) pieces.push_back(*before.scores);
    } else {
      if (!before.oldest.empty()) pieces.push_back(before.oldest.at(name));
      if (staying) pieces.push_back(part(field, 2, 0, staying));
    }
    mx::Shape unused = field.shape();
    unused[2] = size - before.length;
    if (unused[2]) pieces.push_back(mx::zeros(unused, field.dtype()));
    fields.insert_or_assign(name, join_along(std::move(pieces), 2));
  }
  length = before.length, oldest = 0;
}

int RecentZone::trim(int count) {
  count = std::min(count, length);
  if (!count) return 0;
  fields = oldest_first(length - count);
  length -= count, oldest = 0;
  return count;
}

Fields RecentZone::oldest_first(int wanted) const {
  Fields first;
  const int end = oldest + wanted;
  for (const auto& [name, field] : fields) {
    if (end <= length)
      first.emplace(name, part(field, 2, oldest, end));
    else
      first.emplace(
          name,
          mx::concatenate({part(field, 2, oldest, length), part(field, 2, 0, end - length)}, 2));
  }
  return first;
}

Fields RecentZone::packed_rows(
    const Packing& packing, const Stored& keys, const Stored& values,
    const std::optional<mx::array>& scores) const {
  Fields rows;
  packing.put(rows, "keys", keys);
  packing.put(rows, "values", values);
  const mx::Shape& shape = keys.arrays[0].shape();
  if (scored_)
    rows.insert_or_assign("scores", scores ? *scores : mx::zeros({shape[0], shape[1], shape[2]}));
  return rows;
}

}  // namespace mlx_h2o
