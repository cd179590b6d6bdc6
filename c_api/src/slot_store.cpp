#include "slot_store.h"

#include <algorithm>
#include <utility>

namespace mlx_h2o {

namespace {

// Slots allocated at a time until the budget is reached.
constexpr int kGrowthStep = 256;

mx::Shape with_tail(mx::Shape head, const mx::Shape& like, size_t from) {
  head.insert(head.end(), like.begin() + from, like.end());
  return head;
}

// A layer's heads, by budget and slots in use, as runs.
std::vector<Run> grouped(const std::vector<int>& budgets, const std::vector<int>& lengths) {
  std::vector<Run> runs;
  for (int head = 0; head < static_cast<int>(budgets.size()); ++head) {
    if (!runs.empty() && runs.back().budget == budgets[head] && runs.back().length == lengths[head])
      runs.back().last = head + 1;
    else
      runs.push_back({head, head + 1, budgets[head], lengths[head]});
  }
  return runs;
}

}  // namespace

void check_rows_fit(const mx::array& buffer, const mx::array& index, const mx::array& rows) {
  bool fits = rows.ndim() >= 2 && buffer.ndim() == rows.ndim() && index.ndim() == 2 &&
      buffer.shape(0) == rows.shape(0) && index.shape(1) == rows.shape(1) &&
      (index.shape(0) == 1 || index.shape(0) == rows.shape(0));
  for (size_t axis = 2; fits && axis < rows.ndim(); ++axis)
    fits = buffer.shape(axis) == rows.shape(axis);
  check(
      fits,
      "A buffer " + text(buffer.shape()) + " cannot take rows " + text(rows.shape()) +
          " at an index " + text(index.shape()) + ".");
  check(index.dtype() == mx::int32, "An index must be int32.");
  check(
      rows.dtype() == buffer.dtype() ||
          (mx::issubdtype(rows.dtype(), mx::floating) &&
           mx::issubdtype(buffer.dtype(), mx::floating)),
      "Rows must have the buffer's dtype, or both be floating.");
}

mx::array spread(const mx::array& index, const mx::Shape& rows) {
  mx::Shape shape = index.shape();
  shape.resize(rows.size(), 1);
  return mx::broadcast_to(mx::reshape(index, shape), rows);
}

mx::array with_rows(const mx::array& buffer, const mx::array& index, const mx::array& rows) {
  return mx::put_along_axis(
      buffer, spread(index, rows.shape()), mx::astype(rows, buffer.dtype()), 1);
}

SlotStore::SlotStore(const std::vector<int>& budgets, int reserved)
    : runs_(grouped(budgets, std::vector<int>(budgets.size()))), reserved_(reserved) {}

SlotStore::SlotStore(std::vector<Run> runs, int reserved, Fields fields)
    : runs_(std::move(runs)),
      reserved_(reserved),
      fields_(std::move(fields)),
      wide_(fields_.at("positions").dtype() == mx::int32) {}

bool SlotStore::needs_room() const {
  return std::any_of(runs_.begin(), runs_.end(), [&](const Run& run) {
    return reserved_ + run.length == run.allocated && !run.is_full();
  });
}

mx::array SlotStore::range_of(const mx::array& field, const Run& run) const {
  const int end = run.start + run.heads() * run.allocated;
  const mx::array range = runs_.size() > 1 ? part(field, 1, run.start, end) : field;
  return mx::reshape(
      range, with_tail({field.shape(0), run.heads(), run.allocated}, field.shape(), 2));
}

mx::array SlotStore::view(const Run& run, const mx::array& field) const {
  return part(range_of(field, run), 2, reserved_, reserved_ + run.length);
}

mx::array SlotStore::with_reserved(const Run& run, const std::string& name) const {
  return part(range_of(fields_.at(name), run), 2, 0, reserved_ + run.length);
}

mx::array SlotStore::view(const Run& run, const std::string& name) const {
  const mx::array rows = view(run, fields_.at(name));
  return name == "positions" ? mx::astype(rows, mx::int32) : rows;
}

Fields SlotStore::views(const Run& run) const {
  Fields of_run;
  for (const auto& [name, field] : fields_) of_run.emplace(name, view(run, name));
  return of_run;
}

mx::array SlotStore::kept(const std::string& name, const mx::array& rows) const {
  return name == "positions" ? mx::astype(rows, wide_ ? mx::int32 : mx::int16) : rows;
}

void SlotStore::fit_positions(int tokens) {
  wide_ = tokens > kFewTokens;
  const auto held = fields_.find("positions");
  if (held != fields_.end()) held->second = kept("positions", held->second);
}

mx::array SlotStore::flat_index(const Run& run, const mx::array& slots) const {
  const mx::array starts =
      mx::array(run.start + reserved_) + mx::array(run.allocated) * range(0, run.heads());
  return slots + mx::expand_dims(starts, 1);
}

mx::array SlotStore::flat_index_of_heads(const std::vector<mx::array>& slots) const {
  std::vector<mx::array> index;
  for (size_t i = 0; i < runs_.size(); ++i)
    index.push_back(mx::squeeze(flat_index(runs_[i], mx::expand_dims(slots[i], -1)), -1));
  return join_along(std::move(index), 1);
}

void SlotStore::reserve(int extra, const Fields& like) {
  std::vector<int> room;
  bool fits = !fields_.empty();
  for (const Run& run : runs_) {
    const int steps = (run.length + extra + kGrowthStep - 1) / kGrowthStep * kGrowthStep;
    room.push_back(std::max(reserved_ + std::min(run.budget, steps), run.allocated));
    fits = fits && room.back() == run.allocated;
  }
  if (fits) return;
  Fields grown;
  for (const auto& [name, of_field] : like) {
    const mx::array row = kept(name, of_field);
    std::vector<mx::array> parts;
    for (size_t i = 0; i < runs_.size(); ++i) {
      const Run& run = runs_[i];
      const mx::Shape missing =
          with_tail({row.shape(0), run.heads(), room[i] - run.allocated}, row.shape(), 3);
      mx::array more = mx::zeros(missing, row.dtype());
      if (run.allocated) more = mx::concatenate({range_of(fields_.at(name), run), more}, 2);
      parts.push_back(more);
    }
    grown.emplace(name, flattened(std::move(parts)));
  }
  set(std::move(grown), room);
}

void SlotStore::append(const Fields& rows) {
  const int L = rows.at("positions").shape(2);
  reserve(L, rows);
  std::vector<mx::array> index;
  for (const Run& run : runs_) {
    const mx::array next = range(run.length, run.length + L);
    index.push_back(
        mx::reshape(flat_index(run, mx::broadcast_to(next, {run.heads(), L})), {1, -1}));
  }
  Fields flat;
  for (const auto& [name, row] : rows) flat.emplace(name, mx::flatten(row, 1, 2));
  put(join_along(std::move(index), 1), flat);
  for (Run& run : runs_) run.length += L;
}

void SlotStore::put(const mx::array& index, const Fields& rows) {
  for (const auto& [name, row] : rows) {
    // Taken out, so that the write finds the only reference to a buffer.
    mx::array field = std::move(fields_.at(name));
    fields_.erase(name);
    fields_.emplace(name, with_rows(field, index, row));
  }
}

void SlotStore::put_reserved(const Fields& rows) {
  const Run& run = runs_[0];
  const mx::array own = mx::broadcast_to(range(-reserved_, 0), {run.heads(), reserved_});
  Fields flat;
  for (const auto& [name, row] : rows) flat.emplace(name, mx::flatten(row, 1, 2));
  put(mx::reshape(flat_index(run, own), {1, -1}), flat);
}

mx::array SlotStore::take(const mx::array& index, const std::string& name) const {
  const mx::array& field = fields_.at(name);
  const mx::Shape rows = with_tail({field.shape(0), index.shape(1)}, field.shape(), 2);
  return mx::take_along_axis(field, spread(index, rows), 1);
}

void SlotStore::replace(const std::vector<Fields>& rows) {
  std::vector<int> lengths, allocated;
  for (const Fields& of_run : rows) {
    lengths.push_back(of_run.begin()->second.shape(2));
    allocated.push_back(reserved_ + lengths.back());
  }
  Fields replaced;
  for (const auto& [name, row] : rows[0]) {
    std::vector<mx::array> parts;
    for (const Fields& of_run : rows) parts.push_back(padded(kept(name, of_run.at(name)), 0));
    replaced.emplace(name, flattened(std::move(parts)));
  }
  set(std::move(replaced), allocated);
  for (size_t i = 0; i < runs_.size(); ++i) runs_[i].length = lengths[i];
}

mx::array SlotStore::padded(const mx::array& rows, int tail) const {
  if (!tail && !reserved_) return rows;
  std::vector<std::pair<int, int>> widths(rows.ndim(), {0, 0});
  widths[2] = {reserved_, tail};
  return mx::pad(rows, widths, mx::zeros({}, rows.dtype()));
}

void SlotStore::regroup(const std::vector<int>& budgets, int reserved) {
  std::vector<Fields> heads;
  std::vector<int> lengths;
  for (const Run& run : runs_) {
    const Fields rows = views(run);
    for (int i = 0; i < run.heads(); ++i) {
      heads.push_back(heads_of(rows, i, i + 1));
      lengths.push_back(run.length);
    }
  }
  runs_ = grouped(budgets, lengths);
  reserved_ = reserved;
  std::vector<Fields> of_runs;
  for (const Run& run : runs_) {
    Fields rows;
    for (const auto& [name, field] : heads[run.first]) {
      std::vector<mx::array> parts;
      for (int head = run.first; head < run.last; ++head) parts.push_back(heads[head].at(name));
      rows.emplace(name, join_along(std::move(parts), 1));
    }
    of_runs.push_back(std::move(rows));
  }
  replace(of_runs);
}

void SlotStore::write(const std::string& name, const std::vector<mx::array>& parts) {
  std::vector<mx::array> whole;
  for (size_t i = 0; i < runs_.size(); ++i) {
    const int tail = runs_[i].allocated - reserved_ - runs_[i].length;
    whole.push_back(padded(kept(name, parts[i]), tail));
  }
  fields_.insert_or_assign(name, flattened(std::move(whole)));
}

int SlotStore::advance(size_t index, int named) {
  Run& run = runs_[index];
  if (run.is_full()) return named - run.victims--;
  ++run.length;
  return -1;
}

SlotStore::NextSlots SlotStore::take_slots(const std::optional<mx::array>& victims, int batch) {
  NextSlots next;
  for (size_t i = 0; i < runs_.size(); ++i) {
    const Run& run = runs_[i];
    const int unused = run.length, victim = advance(i, victims ? victims->shape(2) : 0);
    next.overwritten.insert(next.overwritten.end(), run.heads(), victim < 0 ? 0.0f : 1.0f);
    if (victim < 0) {
      next.slots.push_back(mx::full({batch, run.heads()}, mx::array(unused)));
    } else {
      const mx::array of_run = part(*victims, 1, run.first, run.last);
      next.slots.push_back(mx::squeeze(part(of_run, 2, victim, victim + 1), -1));
    }
  }
  return next;
}

void SlotStore::forget_victims() {
  for (Run& run : runs_) run.victims = 0;
}

void SlotStore::shorten(int count) {
  for (Run& run : runs_) run.length -= count;
}

void SlotStore::return_to(const std::vector<Run>& runs) {
  for (size_t i = 0; i < runs_.size(); ++i) {
    runs_[i].length = runs[i].length;
    runs_[i].victims = runs[i].victims;
  }
}

Fields SlotStore::lend() {
  return std::exchange(fields_, {});
}

void SlotStore::get_back(Fields fields) {
  fields_ = std::move(fields);
}

mx::array SlotStore::flattened(std::vector<mx::array> parts) {
  for (mx::array& x : parts)
    x = mx::reshape(x, with_tail({x.shape(0), x.shape(1) * x.shape(2)}, x.shape(), 3));
  return join_along(std::move(parts), 1);
}

void SlotStore::set(Fields replaced, const std::vector<int>& allocated) {
  fields_ = std::move(replaced);
  int start = 0;
  for (size_t i = 0; i < runs_.size(); ++i) {
    runs_[i].start = start;
    runs_[i].allocated = allocated[i];
    start += runs_[i].heads() * allocated[i];
  }
}

}  // namespace mlx_h2o
