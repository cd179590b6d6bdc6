#include "returning.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "evaluation.h"
#include "eviction.h"
#include "key_scaling.h"
#include "policy_view.h"
#include "rope.h"
#include "value_lengths.h"

namespace mlx_h2o {

namespace {

// A wanted row makes the rows behind it wanted, each by this factor less than the one before.
constexpr double kFading = 0.9;
// A row is wanted if some query gives it this part of its attention. How much it is wanted is the
// mean over all queries, as in scores.
constexpr float kLeastWanted = 0.1f;

// The queries that say what is wanted.
struct Probe {
  mx::array queries;  // [H, G * W, D] float32, times the attention's scale
  mx::array logsums;  // their log-sum-exp over all that is held, [H, G * W, 1]
};

// What a return changes in a run of heads.
struct Change {
  std::optional<Fields> rows;  // that come back, [1, heads, M, ...]
  mx::array scores;            // of the rows in the slots, [1, heads, N]
  std::map<int, Credit> credits;
};

float log_of_sum(float a, float b) {
  if (a == -kInfinity) return b;
  if (b == -kInfinity) return a;
  return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

// How much one head of a run wants its absent rows, and those that had a lease until now: of the
// positions that are on whole pages.
class HeadWants {
 public:
  // `held` are the positions in the head's slots; `absent` says of each position whether its row
  // was evicted, `may_come` whether it was, or had a lease. At least `most` absent rows are read.
  HeadWants(
      BoundedLayer& layer, const Returns& settings, int head, const Probe& probe,
      const std::vector<int>& held, const std::vector<bool>& absent,
      const std::vector<bool>& may_come, int most)
      : layer_(layer),
        settings_(settings),
        head_(head),
        probe_(probe),
        held_(held),
        absent_(absent),
        may_come_(may_come) {
    std::sort(held_.begin(), held_.end());
    read_ = pages_to_read(most);
    // Others than those that ask get rows for their neighbours' sake, and any will do.
    if (!layer.back->heads[head]) return;
    for (const auto& [position, mass] : own_masses()) {
      if (mass.most < kLeastWanted) continue;
      for (int i = 0; i <= settings_.ahead && read_.contains((position + i) / kPage); ++i) {
        float& of_row = wanted_[position + i];
        of_row = std::max(of_row, mass.mean * float(std::pow(kFading, i)));
      }
    }
  }

  // How much a row is wanted; 0 where none was read.
  float of(int position) const {
    const auto it = wanted_.find(position);
    return it == wanted_.end() ? 0 : it->second;
  }
  // The rows that get a lease, in order of position.
  std::vector<int> leased(int most) const {
    std::vector<int> rows;
    for (const auto& [position, wanted] : wanted_)
      if (may_come_[position]) rows.push_back(position);
    return most_wanted(std::move(rows), most);
  }
  // So many absent rows that are wanted most, in order of position.
  std::vector<int> coming(int count) const {
    std::vector<int> rows;
    for (const int page : read_)
      for (int position = page * kPage; position < (page + 1) * kPage; ++position)
        if (absent_[position]) rows.push_back(position);
    return most_wanted(std::move(rows), count);
  }

 private:
  std::vector<int> most_wanted(std::vector<int> rows, int most) const {
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return of(a) > of(b); });
    rows.resize(std::min<size_t>(most, rows.size()));
    std::sort(rows.begin(), rows.end());
    return rows;
  }

  // The greatest and the mean part of the softmax that queries give a row.
  struct Mass {
    float most = 0, mean = 0;
  };

  mx::array of_head(const mx::array& all) const {
    return mx::squeeze(part(all, 0, head_, head_ + 1), 0);
  }

  // Keys [1, 1, M, D] at some positions as queries would see them, were their rows held: with
  // rolling positions each is turned by the tokens after it that the head has forgotten.
  mx::array seen(const mx::array& keys, const std::vector<int64_t>& positions) const {
    const std::optional<Rope>& rope = layer_.settings.rope;
    if (!rope) return keys;
    std::vector<int> forgotten;
    for (const int64_t position : positions) {
      const auto after = held_.end() - std::upper_bound(held_.begin(), held_.end(), position);
      forgotten.push_back(int(layer_.offset() - 1 - position - after));
    }
    const mx::Shape shape{1, 1, int(positions.size())};
    return rope->turned(keys, mx::array(forgotten.begin(), shape, mx::int32));
  }
  // The keys of a tract's pages by their digests, [pages * kPage, width], as `seen`.
  std::vector<float> digested(const Digests& digests, int first, int pages) const {
    const int width = digests.width;
    std::vector<float> keys;
    keys.reserve(size_t(pages) * kPage * width);
    std::vector<int64_t> at;
    for (int page = 0; page < pages; ++page) {
      for (int i = 0; i < kPage; ++i) at.push_back((first + page) * kPage + i);
      const int8_t* const stored = digests.keys(page);
      const float scale = digests.scale(page);
      for (int i = 0; i < kPage * width; ++i) keys.push_back(scale * stored[i]);
    }
    if (!layer_.settings.rope) return keys;
    const mx::Shape shape{1, 1, int(at.size()), width};
    return floats_of(seen(mx::array(keys.begin(), shape, mx::float32), at));
  }

  // The logarithm of the largest estimated mass of each page's rows that may come.
  std::vector<float> estimated(int pages) const {
    const std::vector<bool>& asking = layer_.back->heads;
    std::vector<float> estimates(pages, -kInfinity);
    if (!asking[head_]) {
      for (size_t i = 0; i < may_come_.size(); ++i)
        if (may_come_[i]) estimates[i / kPage] = 0;
      return estimates;
    }
    const int place = int(std::count(asking.begin(), asking.begin() + head_, true));
    const int queries = probe_.queries.shape(1), width = probe_.queries.shape(2);
    // One behind another, so that a key is compared with all of them at once.
    const std::vector<float> q = floats_of(mx::swapaxes(of_head(probe_.queries), 0, 1));
    const std::vector<float> sums = floats_of(of_head(probe_.logsums));
    std::vector<float> products(queries);
    for (int first = 0; first < pages; first += kTract) {
      const int some = std::min(pages - first, kTract);
      const std::vector<float> keys =
          digested(layer_.spill->digests(place, first / kTract, some), first, some);
      for (int row = 0; row < some * kPage; ++row) {
        if (!may_come_[first * kPage + row]) continue;
        const float* const key = keys.data() + row * width;
        float& estimate = estimates[first + row / kPage];
        std::fill(products.begin(), products.end(), 0.0f);
        for (int d = 0; d < width; ++d)
          for (int i = 0; i < queries; ++i) products[i] += key[d] * q[d * queries + i];
        for (int i = 0; i < queries; ++i) estimate = std::max(estimate, products[i] - sums[i]);
      }
    }
    return estimates;
  }

  // The pages of the rows with the largest estimated mass, and those behind them: a fact may end
  // there.
  std::set<int> pages_to_read(int most) const {
    const int pages = int(absent_.size()) / kPage;
    std::vector<int> lost(pages), order(pages);
    for (size_t i = 0; i < absent_.size(); ++i) lost[i / kPage] += absent_[i];
    const std::vector<float> estimates = estimated(pages);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(
        order.begin(), order.end(), [&](int a, int b) { return estimates[a] > estimates[b]; });
    std::set<int> read;
    int absent = 0;
    for (const int page : order) {
      if (int(read.size()) >= 2 * settings_.pages && absent >= most) break;
      for (const int one : {page, std::min(page + 1, pages - 1)})
        if (read.insert(one).second) absent += lost[one];
    }
    return read;
  }

  // The part of the softmax that queries give each row read. Absent rows would have their part of
  // it, as those that are held have.
  std::map<int, Mass> own_masses() const {
    std::vector<int64_t> at;
    for (const int page : read_)
      for (int i = 0; i < kPage; ++i) at.push_back(page * kPage + i);
    const Fields rows = layer_.spill->in_mlx({layer_.spill->rows(head_, at)});
    const mx::array keys = f32(dense(layer_.settings.packing.rows("keys", rows)));
    const mx::array of_keys = mx::squeeze(mx::squeeze(seen(keys, at), 0), 0);
    const mx::array logits = mx::matmul(of_head(probe_.queries), mx::swapaxes(of_keys, 0, 1));
    const std::vector<float> values = floats_of(logits);
    const std::vector<float> sums = floats_of(of_head(probe_.logsums));
    const size_t M = at.size();
    std::map<int, Mass> own;
    for (size_t query = 0; query < sums.size(); ++query) {
      const float* of_query = values.data() + query * M;
      float greatest = -kInfinity, sum = 0;
      for (size_t i = 0; i < M; ++i)
        if (absent_[at[i]]) greatest = std::max(greatest, of_query[i]);
      for (size_t i = 0; i < M; ++i)
        if (absent_[at[i]]) sum += std::exp(of_query[i] - greatest);
      const float lse = log_of_sum(sums[query], sum > 0 ? greatest + std::log(sum) : -kInfinity);
      for (size_t i = 0; i < M; ++i) {
        const float given = std::exp(std::min(of_query[i] - lse, 0.0f));
        Mass& mass = own[int(at[i])];
        mass = {std::max(mass.most, given), mass.mean + given};
      }
    }
    for (auto& [position, mass] : own) mass.mean /= float(sums.size());
    return own;
  }

  BoundedLayer& layer_;
  const Returns& settings_;
  const int head_;
  const Probe& probe_;
  std::vector<int> held_;  // ascending
  const std::vector<bool>&absent_, &may_come_;
  std::set<int> read_;  // pages
  std::map<int, float> wanted_;
};

// The score of a row that always had the mass `wanted`.
float as_score(const BoundedLayer& layer, int position, float wanted) {
  if (!layer.settings.policy.sums_mass()) return wanted;
  const int begun = std::max(position, layer.aged_from());
  return float(double(wanted) * std::max(layer.offset() - begun, 1));
}

// Takes the credit of a head's leased rows back from the scores of its slots, which hold these
// positions. Returns the slots of those that are still held.
std::vector<size_t> end_leases(
    const BoundedLayer& layer, const Credit& old, const std::vector<int>& held, float* scores) {
  std::vector<size_t> leased;
  for (size_t i = 0; i < old.positions.size(); ++i) {
    const auto slot = std::find(held.begin(), held.end(), old.positions[i]);
    if (slot == held.end()) continue;
    leased.push_back(slot - held.begin());
    float& score = scores[leased.back()];
    // Others than sums forget by themselves.
    if (layer.settings.policy.sums_mass()) score = std::max(score - old.scores[i], 0.0f);
  }
  return leased;
}

// Gives leases to the rows that a head wants most. Returns what their scores are raised by; those
// of absent rows are 0 before.
Credit lease(
    const BoundedLayer& layer, const HeadWants& wants, int most, const std::vector<int>& held,
    float* scores) {
  Credit credit;
  for (const int position : wants.leased(most)) {
    float raised = as_score(layer, position, wants.of(position));
    const auto slot = std::find(held.begin(), held.end(), position);
    if (slot != held.end()) {
      float& score = scores[slot - held.begin()];
      raised = std::max(raised - score, 0.0f);
      score += raised;
    }
    credit.positions.push_back(position), credit.scores.push_back(raised);
  }
  return credit;
}

// The fields of rows that come back to the heads of a run, [1, heads, M, ...].
Fields rows_coming(
    BoundedLayer& layer, const Run& run, const Fields& fields,
    const std::vector<std::vector<int>>& coming, const std::map<int, Credit>& credits) {
  std::vector<RowBytes> of_heads;
  std::vector<int> positions;
  std::vector<float> scores;
  for (int i = 0; i < run.heads(); ++i) {
    of_heads.push_back(layer.spill->rows(run.first + i, {coming[i].begin(), coming[i].end()}));
    positions.insert(positions.end(), coming[i].begin(), coming[i].end());
    const auto& [leased, raised] = credits.at(run.first + i);
    for (const int position : coming[i]) {
      const auto it = std::lower_bound(leased.begin(), leased.end(), position);
      const bool has = it != leased.end() && *it == position;
      scores.push_back(has ? raised[it - leased.begin()] : 0);
    }
  }
  const mx::Shape shape{1, run.heads(), int(coming[0].size())};
  Fields rows = layer.spill->in_mlx(of_heads);
  const mx::array places(positions.begin(), shape, mx::int32);
  rows.insert_or_assign(
      "positions",
      layer.settings.pins.empty() ? places : stored_positions(places, layer.settings.pins));
  rows.insert_or_assign("scores", mx::array(scores.begin(), shape, mx::float32));
  if (fields.contains("value_lengths"))
    rows.insert_or_assign(
        "value_lengths", value_lengths(dense(layer.settings.packing.rows("values", rows))));
  return rows;
}

// What a return changes in a run of heads; none: nothing. It is not changed yet.
std::optional<Change> change_of(
    BoundedLayer& layer, const Returning& back, const Run& run, const Fields& fields,
    const Probe& probe) {
  const int pages = int(layer.spill->available()) / kPage, count = pages * kPage;
  const std::vector<int> all = ints_of(true_positions(fields.at("positions")));
  const size_t N = all.size() / run.heads();
  std::vector<std::vector<int>> held;
  std::vector<std::vector<bool>> absent(run.heads(), std::vector<bool>(count, true));
  int most = std::min(
      back.settings.rows,
      int(back.settings.room *
          (run.budget - layer.settings.policy.sink - layer.protected_recent(run))));
  const RecentWindow* const window = layer.window();
  for (int i = 0; i < run.heads(); ++i) {
    held.emplace_back(all.begin() + i * N, all.begin() + (i + 1) * N);
    for (const int position : held[i])
      if (position < count) absent[i][position] = false;
    if (window)
      for (int p = layer.offset() - window->length(); p < count; ++p) absent[i][p] = false;
    most = std::min(most, int(std::count(absent[i].begin(), absent[i].end(), true)));
  }
  if (most < 1) return std::nullopt;
  std::vector<float> scores = floats_of(fields.at("scores"));
  std::vector<std::vector<bool>> may_come = absent;
  std::vector<HeadWants> wants;
  std::map<int, Credit> credits;
  bool had = false;
  size_t coming = 0;
  wants.reserve(run.heads());
  for (int i = 0; i < run.heads(); ++i) {
    const int head = run.first + i;
    float* const of_head = scores.data() + i * N;
    if (const auto old = back.credits.find(head); old != back.credits.end()) {
      had = had || !old->second.positions.empty();
      for (const size_t slot : end_leases(layer, old->second, held[i], of_head))
        if (held[i][slot] < count) may_come[i][held[i][slot]] = true;
    }
    wants.emplace_back(layer, back.settings, head, probe, held[i], absent[i], may_come[i], most);
    const Credit& credit =
        credits.emplace(head, lease(layer, wants[i], most, held[i], of_head)).first->second;
    const size_t come = std::count_if(
        credit.positions.begin(), credit.positions.end(), [&](int p) { return absent[i][p]; });
    coming = std::max(coming, come);
  }
  if (!coming && !had) return std::nullopt;
  const mx::array changed(scores.begin(), mx::Shape{1, run.heads(), int(N)}, mx::float32);
  if (!coming) return Change{std::nullopt, changed, std::move(credits)};
  // Each head of a run gets as many rows: those that it wants, and others without a lease.
  std::vector<std::vector<int>> chosen;
  for (const HeadWants& of_head : wants) chosen.push_back(of_head.coming(int(coming)));
  Fields rows = rows_coming(layer, run, fields, chosen, credits);
  return Change{std::move(rows), changed, std::move(credits)};
}

// The queries [1, Hq, W, D], times the scale, and their log-sum-exp over slots, remainder, new keys
// [1, H, L, D] and attention sinks.
Probe probe_of(
    BoundedLayer& layer, const mx::array& q, const std::vector<Fields>& held,
    const std::optional<mx::array>& own, const std::optional<mx::array>& sinks) {
  const int H = layer.settings.heads(), W = q.shape(2), D = q.shape(3), G = q.shape(1) / H;
  const mx::array grouped = mx::reshape(q, {H, G, W, D});
  const auto against = [&](const mx::array& queries, const mx::array& keys) {
    const mx::array of_heads = mx::expand_dims(mx::squeeze(f32(keys), 0), 1);
    return mx::matmul(queries, mx::swapaxes(of_heads, -1, -2));
  };
  std::vector<mx::array> sums;
  for (size_t i = 0; i < held.size(); ++i) {
    const Run& run = layer.runs()[i];
    mx::array keys = dense(rows_of(layer, run, held[i]).first);
    if (const std::optional<Rope>& rope = layer.settings.rope)
      keys = without_gaps(keys, true_positions(held[i].at("positions")), layer.offset(), *rope);
    sums.push_back(mx::logsumexp(against(part(grouped, 0, run.first, run.last), keys), -1));
  }
  mx::array total = join_along(std::move(sums), 0);
  if (layer.settings.remainder) {
    const mx::array column = layer.evictions().remainder.column(q, 1, layer.settings.saturations);
    total = mx::logaddexp(total, mx::reshape(column, {H, G, W}));
  }
  if (own) {
    const int L = own->shape(2);
    const mx::array sees = mx::less_equal(range(0, L), mx::expand_dims(range(L - W, L), 1));
    const mx::array logits = mx::where(sees, against(grouped, *own), number(-kInfinity));
    total = mx::logaddexp(total, mx::logsumexp(logits, -1));
  }
  if (sinks) total = mx::logaddexp(total, mx::reshape(f32(*sinks), {H, G, 1}));
  return {mx::reshape(grouped, {H, G * W, D}), mx::reshape(total, {H, G * W, 1})};
}

// Makes the digests of pages that were completed since the last time.
void digest_new_pages(BoundedLayer& layer) {
  LayerRows& spill = *layer.spill;
  const int first = spill.digested(), last = int(spill.available()) / kPage;
  if (last <= first) return;
  std::vector<int64_t> positions((last - first) * kPage);
  std::iota(positions.begin(), positions.end(), first * kPage);
  std::vector<float> all;
  int asking = 0, width = 0;
  for (int head = 0; head < layer.settings.heads(); ++head) {
    if (!layer.back->heads[head]) continue;
    const Fields rows = spill.in_mlx({spill.rows(head, positions)});
    const mx::array keys = dense(layer.settings.packing.rows("keys", rows));
    const std::vector<float> of_head = floats_of(keys);
    all.insert(all.end(), of_head.begin(), of_head.end());
    ++asking, width = keys.shape(3);
  }
  spill.digest(asking, width, all);
}

// Gives slots to the rows that come back; the policy evicts as many others.
void take_in(
    BoundedLayer& layer, Returning& back, std::vector<Fields> held,
    std::vector<std::optional<Change>> changes) {
  layer.forget_steps();
  bool over = false;
  for (size_t i = 0; i < held.size(); ++i) {
    const Run run = layer.runs()[i];
    if (changes[i]) {
      for (auto& [head, credit] : changes[i]->credits)
        back.credits.insert_or_assign(head, std::move(credit));
      held[i].insert_or_assign("scores", changes[i]->scores);
    }
    if (changes[i] && changes[i]->rows) {
      const Fields& rows = *changes[i]->rows;
      back.returned += int64_t(rows.at("positions").size());
      layer.unfold(rows, run.first);
      for (auto& [name, field] : held[i])
        field = mx::concatenate({field, mx::astype(rows.at(name), field.dtype())}, 2);
    }
    over = over || run.budget < held[i].at("positions").shape(2);
  }
  if (over) return settle(layer, held, std::vector<std::optional<mx::array>>(held.size()));
  layer.keep(held);
  choose_victims(layer);
}

}  // namespace

size_t Returning::nbytes() const {
  size_t bytes = 0;
  for (const mx::array& q : queries) bytes += q.nbytes();
  for (const auto& [head, credit] : credits)
    bytes += credit.positions.size() * (sizeof(int) + sizeof(float));
  return bytes;
}

mx::array Returning::newest(const mx::array& q) const {
  const int L = q.shape(2), W = std::min(L, settings.window), H = int(heads.size());
  const mx::array last = W < L ? part(q, 2, L - W, L) : q;
  std::vector<int> at;  // of the query heads
  for (int head = 0, G = q.shape(1) / H; head < H; ++head)
    for (int i = 0; heads[head] && i < G; ++i) at.push_back(head * G + i);
  // A copy, since a slice would keep all queries of its chunk in memory.
  const mx::array kept = int(at.size()) == q.shape(1)
      ? mx::contiguous(last)
      : mx::take(last, mx::array(at.begin(), mx::Shape{int(at.size())}, mx::int32), 1);
  return q.dtype() == mx::bfloat16 ? kept : mx::astype(kept, mx::float16);
}

mx::array Returning::of_all(const mx::array& kept) const {
  const int H = int(heads.size()), asking = int(std::count(heads.begin(), heads.end(), true));
  const int G = kept.shape(1) / asking;
  const mx::array none = mx::zeros({1, G, kept.shape(2), kept.shape(3)});
  std::vector<mx::array> of_heads;
  for (int head = 0, at = 0; head < H; ++head) {
    of_heads.push_back(heads[head] ? part(f32(kept), 1, at, at + G) : none);
    if (heads[head]) at += G;
  }
  return join_along(std::move(of_heads), 1);
}

void Returning::note(const mx::array& q) {
  if (!any_asks()) return;
  queries.push_back(newest(q));
  int spare = -settings.window;
  for (const mx::array& kept : queries) spare += kept.shape(2);
  while (spare >= queries[0].shape(2)) {
    spare -= queries[0].shape(2);
    queries.erase(queries.begin());
  }
  if (spare > 0) queries[0] = mx::contiguous(part(queries[0], 2, spare, queries[0].shape(2)));
}

bool Returning::is_due(const BoundedLayer& layer, int length) const {
  if (!any_asks() || !layer.spill || layer.spill->available() < kPage) return false;
  // Without attention a policy has no use for a lease.
  if (!layer.settings.policy.needs_attention()) return false;
  if (length == 1 && (layer.offset() % settings.every || !layer.settled())) return false;
  const std::vector<Run>& runs = layer.runs();
  return std::any_of(runs.begin(), runs.end(), [&](const Run& run) { return layer.lost(run) > 0; });
}

bool Returning::any_asks() const {
  return std::find(heads.begin(), heads.end(), true) != heads.end();
}

bool Returning::has(const Run& run) const {
  return std::find(heads.begin() + run.first, heads.begin() + run.last, true) !=
      heads.begin() + run.last;
}

void bring_back(BoundedLayer& layer, const AttentionCall& call, const mx::array& new_keys) {
  Returning& back = *layer.back;
  const int window = back.settings.window, L = call.length();
  std::vector<mx::array> queries = back.queries;
  std::optional<mx::array> own;
  // A single token's query asks for nothing, since reading it would wait for this step.
  if (L > 1) {
    queries.push_back(back.newest(call.q));
    own = new_keys;
  }
  if (queries.empty()) return;
  mx::array q = join_along(std::move(queries), 2);
  const int W = q.shape(2);
  if (W > window) q = part(q, 2, W - window, W);
  q = back.of_all(q);
  if (layer.settings.frame) q = enter_queries(*layer.settings.frame, q);
  std::vector<Fields> held = layer.attended(std::nullopt);
  const Probe lazy = probe_of(layer, q * number(call.scale), held, own, call.sinks);
  const Probe probe{mx::contiguous(lazy.queries), mx::contiguous(lazy.logsums)};
  evaluate({probe.queries, probe.logsums});
  std::vector<std::optional<Change>> changes;
  try {
    digest_new_pages(layer);
    for (size_t i = 0; i < held.size(); ++i)
      changes.push_back(
          back.has(layer.runs()[i]) ? change_of(layer, back, layer.runs()[i], held[i], probe)
                                    : std::nullopt);
  } catch (const FileError& error) {
    layer.spill->conversation().fail(
        std::string("rows cannot be read from the file: ") + error.what());
    return;
  }
  if (std::any_of(changes.begin(), changes.end(), [](const auto& one) { return one.has_value(); }))
    take_in(layer, back, std::move(held), std::move(changes));
}

}  // namespace mlx_h2o
