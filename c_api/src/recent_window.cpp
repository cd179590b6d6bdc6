#include "recent_window.h"

#include <utility>

#include "value_lengths.h"

namespace mlx_h2o {

std::optional<Fields> RecentWindow::push(
    const mx::array& keys, const mx::array& values, int offset) {
  const int B = keys.shape(0), H = keys.shape(1), L = keys.shape(2);
  const int leaving = std::max(length_ + L - size_, 0);
  const int first_leaving = offset - length_;
  // Of the new rows, those that are recent only until even newer ones came with them.
  const int passing = std::max(L - size_, 0);
  std::vector<Fields> parts;
  if (leaving > passing) parts.push_back(fields_of_leaving(oldest_first(leaving - passing)));
  if (passing)
    parts.push_back(fields_of_new(kept_, part(keys, 2, 0, passing), part(values, 2, 0, passing)));
  const Fields rows =
      fields_of_new(recent_, part(keys, 2, passing, L), part(values, 2, passing, L));

  const int staying = length_ - (leaving - passing), newest = L - passing;
  Fields old;
  if (staying) {
    for (const auto& [name, field] : oldest_first(length_))
      old.emplace(name, part(field, 2, length_ - staying, length_));
  }
  for (const auto& [name, row] : rows) {
    std::vector<mx::array> pieces;
    if (staying) pieces.push_back(old.at(name));
    pieces.push_back(row);
    mx::Shape unused = row.shape();
    unused[2] = size_ - staying - newest;
    if (unused[2]) pieces.push_back(mx::zeros(unused, row.dtype()));
    fields_.insert_or_assign(name, join_along(std::move(pieces), 2));
  }
  length_ = staying + newest, oldest_ = 0;
  if (parts.empty()) return std::nullopt;

  Fields gone = parts[0];
  if (parts.size() > 1)
    for (auto& [name, field] : gone) field = mx::concatenate({field, parts[1].at(name)}, 2);
  gone.insert_or_assign(
      "positions",
      mx::broadcast_to(range(first_leaving, first_leaving + leaving), {B, H, leaving}));
  return gone;
}

RecentStep RecentWindow::advance() {
  if (length_ == size_) {
    const int slot = oldest_;
    oldest_ = (oldest_ + 1) % size_;
    return {slot, size_, true};
  }
  ++length_;
  return {length_ - 1, length_, false};
}

Fields RecentWindow::lend() {
  for (auto& [name, field] : fields_) {
    mx::Shape missing = field.shape();
    missing[2] = size_ - missing[2];
    if (missing[2]) field = mx::concatenate({field, mx::zeros(missing, field.dtype())}, 2);
  }
  return std::exchange(fields_, {});
}

void RecentWindow::get_back(Fields fields) {
  fields_ = std::move(fields);
}

Fields RecentWindow::views(int first, int last, int offset) const {
  Fields views;
  for (const auto& [name, field] : oldest_first(length_))
    views.emplace(name, part(field, 1, first, last));
  const mx::array& keys = views.at("keys");
  views.emplace(
      "positions",
      mx::broadcast_to(range(offset - length_, offset), {keys.shape(0), last - first, length_}));
  return views;
}

void RecentWindow::write_scores(const mx::array& scores) {
  const mx::array& field = fields_.at("scores");
  std::vector<mx::array> pieces{mx::roll(scores, oldest_, 2)};
  if (field.shape(2) > length_) pieces.push_back(part(field, 2, length_, field.shape(2)));
  fields_.insert_or_assign("scores", join_along(std::move(pieces), 2));
}

RecentWindow::Before RecentWindow::before() const {
  Before before{length_, {}, std::nullopt};
  if (!length_) return before;
  if (length_ == size_)
    for (const auto& [name, field] : fields_)
      if (name != "scores")  // gathered, or one row would hold the whole ring
        before.oldest.emplace(name, mx::take(field, range(oldest_, oldest_ + 1), 2));
  if (scored_) before.scores = oldest_first(length_).at("scores");
  return before;
}

void RecentWindow::restore(const Before& before) {
  const Fields held = oldest_first(length_);
  const int staying = length_ - 1;
  for (const auto& [name, field] : held) {
    std::vector<mx::array> pieces;
    if (name == "scores") {
      if (before.scores) pieces.push_back(*before.scores);
    } else {
      if (!before.oldest.empty()) pieces.push_back(before.oldest.at(name));
      if (staying) pieces.push_back(part(field, 2, 0, staying));
    }
    mx::Shape unused = field.shape();
    unused[2] = size_ - before.length;
    if (unused[2]) pieces.push_back(mx::zeros(unused, field.dtype()));
    fields_.insert_or_assign(name, join_along(std::move(pieces), 2));
  }
  length_ = before.length, oldest_ = 0;
}

std::optional<Fields> RecentWindow::resize(int size, int offset) {
  const int leaving = std::max(length_ - size, 0), first = offset - length_;
  std::optional<Fields> gone;
  if (leaving) {
    gone = fields_of_leaving(oldest_first(leaving));
    const mx::array& keys = gone->at("keys");
    const mx::array positions =
        mx::broadcast_to(range(first, first + leaving), {keys.shape(0), keys.shape(1), leaving});
    gone->insert_or_assign("positions", positions);
  }
  Fields staying = oldest_first(length_);
  for (auto& [name, field] : staying) field = part(field, 2, leaving, length_);
  fields_ = std::move(staying);
  size_ = size, length_ -= leaving, oldest_ = 0;
  return gone;
}

int RecentWindow::trim(int count) {
  count = std::min(count, length_);
  if (!count) return 0;
  fields_ = oldest_first(length_ - count);
  length_ -= count, oldest_ = 0;
  return count;
}

Fields RecentWindow::oldest_first(int wanted) const {
  Fields first;
  const int end = oldest_ + wanted;
  for (const auto& [name, field] : fields_) {
    if (end <= length_)
      first.emplace(name, part(field, 2, oldest_, end));
    else
      first.emplace(
          name,
          mx::concatenate({part(field, 2, oldest_, length_), part(field, 2, 0, end - length_)}, 2));
  }
  return first;
}

Fields RecentWindow::fields_of_new(
    const Packing& packing, const mx::array& keys, const mx::array& values) const {
  Fields rows;
  packing.put(rows, "keys", {{keys}});
  packing.put(rows, "values", {{values}});
  if (scored_) rows.emplace("scores", mx::zeros({keys.shape(0), keys.shape(1), keys.shape(2)}));
  if (measured_) rows.emplace("value_lengths", value_lengths(values));
  return rows;
}

Fields RecentWindow::fields_of_leaving(const Fields& held) const {
  Fields rows;
  for (const char* name : {"keys", "values"}) kept_.put(rows, name, recent_.rows(name, held));
  if (scored_) rows.emplace("scores", held.at("scores"));
  if (measured_) rows.emplace("value_lengths", held.at("value_lengths"));
  return rows;
}

}  // namespace mlx_h2o
