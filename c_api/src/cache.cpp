#include "cache.h"

namespace mlx_h2o {

namespace {

// How many of a chunk's L queries each of a window's queries stands for, per slot [N].
mx::array stands_for(int L, int N, int window) {
  const mx::array fresh = f32(mx::arange(L, 0, -1));
  const mx::array of_new = fresh / mx::minimum(fresh, number(window));
  if (N == L) return of_new;
  return mx::concatenate({mx::full({N - L}, number(double(L) / window)), of_new}, 0);
}

// How many plain rows a head can afford: 8 of 128 pays, 8 of 64 does not.
int plain_rows_for(int budget) {
  return std::max(1, std::min(8, budget / 16 / 2 * 2));
}

bool is_float(const mx::array& a) {
  return a.dtype() == mx::float32 || a.dtype() == mx::float16 || a.dtype() == mx::bfloat16;
}

Fields heads_of(const Fields& fields, int first, int last) {
  Fields some;
  for (const auto& [name, field] : fields) some.emplace(name, part(field, 1, first, last));
  return some;
}

}  // namespace

Cache::Cache(
    Policy policy, std::vector<int> budgets, bool remainder, bool attending, Packing packing,
    int undo)
    : policy_(std::move(policy)),
      budgets_(std::move(budgets)),
      answers_(remainder),
      attending_(attending),
      packing_(packing),
      undo_(undo) {
  check(!budgets_.empty(), "A cache needs one number of slots per KV head.");
  check(undo >= 0, "undo is a number of steps, or 0.");
  check(
      !undo || attending_,
      "undo needs attention of ours: a model that attends by itself cannot take a chunk token by "
      "token.");
  for (int budget : budgets_) check(budget > 0, "A head's budget must be at least 1 slot.");
  packing_.check_widths();
  if (!attending_) {
    check(
        !policy_.needs_attention(),
        "Policy " + policy_.name + " must see attention: for models that attend by themselves " +
            "choose keydiff, streaming, or distinct with mass_weight 0.");
    check(!packing_.packs(), "A model that attends by itself cannot read packed rows.");
    if (answers_) plain_rows_ = plain_rows_for(budgets_[0]);
  }
  for (int budget : budgets_) {
    policy_.check_budget(budget - plain_rows_);
    check(
        (attending_ && !policy_.per_layer) || budget == budgets_[0],
        "All heads need one budget where the policy's unit is the layer, or the model attends.");
    check(
        !packing_.recent_bits || policy_.recent_slots(budget) >= 1,
        "recent_bits needs protected tokens: this policy protects none.");
  }
}

mx::array Cache::update_and_attend(
    const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
    const std::optional<mx::array>& sinks) {
  check(attending_, "This cache is for a model that attends by itself: update_and_fetch.");
  check_rows(keys, values);
  check(
      q.ndim() == 4 && q.shape(0) == keys.shape(0) && q.shape(2) == keys.shape(2) &&
          q.shape(3) == keys.shape(3) && q.shape(1) % keys.shape(1) == 0 && is_float(q),
      "q " + text(q.shape()) + " must be floating and fit the keys " + text(keys.shape()) + ".");
  check(
      !sinks || (sinks->shape() == mx::Shape{q.shape(1)} && is_float(*sinks)),
      "Attention sinks must be [Hq] and floating.");
  const int L = keys.shape(2);
  if (!steps_singly(L)) return attend_now(q, keys, values, scale, sinks);
  std::vector<mx::array> outs;
  for (int i = 0; i < L; ++i)
    outs.push_back(attend_now(
        part(q, 2, i, i + 1), part(keys, 2, i, i + 1), part(values, 2, i, i + 1), scale, sinks));
  return join_along(std::move(outs), 2);
}

mx::array Cache::attend_now(
    const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
    const std::optional<mx::array>& sinks) {
  const bool fused = store_ && fuses(q, keys, values);
  if (!store_) start(keys, values);
  if (fused) {
    ++offset_;
    return decode(q, keys, values, scale, sinks);
  }
  take_back();
  take_in(keys, values);
  offset_ += keys.shape(2);

  const int group = q.shape(1) / store_->heads();
  std::vector<mx::array> outs, recent_scores;
  std::vector<Fields> seen;
  std::vector<std::optional<mx::array>> window_masses;
  for (const Run& run : store_->runs) {
    Fields fields = attended(run);
    const int kept = fields.at("positions").shape(2);
    const int first = run.first * group, last = run.last * group;
    std::optional<mx::array> of_run;
    if (sinks) of_run = part(*sinks, 0, first, last);
    OfRun found = attend_run(run, fields, part(q, 1, first, last), scale, of_run);
    if (found.scores) {
      const int all = found.scores->shape(2);
      fields.insert_or_assign("scores", part(*found.scores, 2, 0, kept));
      recent_scores.push_back(part(*found.scores, 2, kept, all));
    }
    outs.push_back(found.out);
    seen.push_back(std::move(fields));
    window_masses.push_back(found.window_mass);
  }
  if (recent_ && !recent_scores.empty()) recent_->write_scores(join_along(recent_scores, 1));
  settle(seen, window_masses);
  // Evaluated with the output, or the graph would grow from step to step.
  return mx::depends({join_along(std::move(outs), 1)}, changed())[0];
}

Cache::Fetched Cache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  check(!attending_, "This cache attends: update_and_attend.");
  check_rows(keys, values);
  if (!store_) start(keys, values);
  take_in(keys, values);
  const int L = keys.shape(2);
  offset_ += L;
  const Run& run = store_->runs[0];
  const Fields fields = attended(run);
  Fetched fetched{fields.at("keys"), fields.at("values"), std::nullopt};
  if (const int lost = evicted_of(run); plain_rows_ && lost) {
    const int R = plain_rows_, N = fetched.keys.shape(2);
    const auto [plain_keys, plain_values] = remainder_->plain_rows(R);
    fetched.keys = mx::concatenate({mx::astype(plain_keys, k_dtype_), fetched.keys}, 2);
    fetched.values = mx::concatenate({mx::astype(plain_values, v_dtype_), fetched.values}, 2);
    const mx::array bias = mx::log(number(double(lost) / R));
    mx::array mask = mx::concatenate({mx::broadcast_to(bias, {R}), mx::zeros({N})}, 0);
    const mx::array visible = mx::less_equal(range(-R, N), mx::expand_dims(range(N - L, N), 1));
    mask = mx::where(visible, mask, number(mx::finfo(k_dtype_).min));
    fetched.mask = mx::astype(mx::reshape(mask, {1, 1, L, R + N}), k_dtype_);
  }
  settle({fields}, {std::nullopt});
  fetched.keys = mx::depends({fetched.keys}, changed())[0];
  return fetched;
}

// -- what is held ---------------------------------------------------------------------------------

int Cache::size() const {
  int longest = 0;
  if (store_)
    for (const Run& run : store_->runs) longest = std::max(longest, run.length);
  return longest + recently_held();
}

int64_t Cache::evicted() const {
  if (!store_) return 0;
  int64_t lost = 0;
  for (const Run& run : store_->runs) lost += int64_t(run.heads()) * evicted_of(run);
  return lost / store_->heads();
}

size_t Cache::nbytes() const {
  if (decoding_) return decoding_bytes_;
  size_t bytes = undo_.nbytes();
  for (const mx::array& a : arrays()) bytes += a.nbytes();
  return bytes;
}

std::vector<mx::array> Cache::arrays() const {
  std::vector<mx::array> all;
  if (!store_) return all;
  for (const auto& [name, field] : store_->fields) all.push_back(field);
  if (recent_)
    for (const auto& [name, field] : recent_->fields) all.push_back(field);
  if (remembers()) {
    const Remainder& r = *remainder_;
    all.insert(all.end(), {r.count, r.mean_key, r.var_key, r.mean_value});
  }
  if (victims_) all.push_back(*victims_);
  return all;
}

// What a call leaves to be evaluated: all arrays, and what the last step noted of them.
std::vector<mx::array> Cache::changed() const {
  std::vector<mx::array> all = arrays();
  if (undo_.count()) {
    const std::vector<mx::array> noted = undo_.steps.back().arrays();
    all.insert(all.end(), noted.begin(), noted.end());
  }
  return all;
}

mx::array Cache::kept() {
  return by_position("positions", -1);
}

mx::array Cache::scores() {
  check(policy_.needs_attention(), "Policy " + policy_.name + " accumulates no scores.");
  return by_position("scores", 0);
}

mx::array Cache::by_position(const std::string& name, float unused) {
  check(store_.has_value(), "This cache has seen no token.");
  take_back();
  std::vector<mx::array> parts;
  for (const Run& run : store_->runs) {
    const Fields fields = positions_and_scores(run, store_->views(run));
    const mx::array& positions = fields.at("positions");
    const mx::array field = mx::take_along_axis(fields.at(name), mx::argsort(positions, -1), -1);
    const int missing = size() - field.shape(-1);
    parts.push_back(
        mx::pad(field, {{0, 0}, {0, 0}, {0, missing}}, mx::astype(number(unused), field.dtype())));
  }
  return join_along(std::move(parts), 1);
}

const Remainder& Cache::remainder() {
  check(store_.has_value(), "This cache has seen no token.");
  check(remembers(), "This cache keeps no statistics of the evicted.");
  take_back();
  return *remainder_;
}

// -- tokens are taken back ------------------------------------------------------------------------

// Whether a chunk of L tokens is processed as L steps, so that each of them can be taken back and a
// draft that is verified comes out as plain decoding would have it.
bool Cache::steps_singly(int L) const {
  return L > 1 && L - 1 <= undo_.most;
}

void Cache::note_step() {
  StepBefore step{store_->runs, std::nullopt, {},          std::nullopt,
                  std::nullopt, victims_,     std::nullopt};
  if (store_->fields.count("scores")) step.scores = store_->fields.at("scores");
  if (recent_) step.recent = recent_->before();
  undo_.note(std::move(step));
}

int Cache::most_evicted() const {
  int most = 0;
  for (const Run& run : store_->runs) most = std::max(most, evicted_of(run));
  return most;
}

int Cache::trimmable() const {
  if (!store_) return 0;
  if (!undo_.count()) return most_evicted() ? 0 : offset_;
  const StepBefore& first = undo_.steps.front();
  const int before = offset_ - undo_.count() - (recent_ ? first.recent->length : 0);
  for (const Run& run : first.runs)
    if (run.length < before) return undo_.count();
  return offset_;
}

void Cache::trim(int n) {
  const int most = trimmable();
  check(n >= 0, "A number of tokens to take back is at least 0; got " + std::to_string(n) + ".");
  check(
      n <= most,
      "Cannot take back " + std::to_string(n) + " tokens: the last " + std::to_string(most) +
          " can be (of " + std::to_string(offset_) + "; undo is " + std::to_string(undo_.most) +
          ", of single-token steps after evictions).");
  if (!n) return;
  if (n == offset_) return clear();
  take_back();
  for (; n && undo_.count(); --n) {
    restore(undo_.steps.back());
    undo_.steps.pop_back();
  }
  if (n) cut(n);
}

// As it was made.
void Cache::clear() {
  offset_ = 0;
  decoding_.reset();
  store_.reset(), recent_.reset(), remainder_.reset(), victims_.reset();
  undo_.steps.clear();
}

void Cache::restore(const StepBefore& step) {
  SlotStore& store = *store_;
  --offset_;
  for (size_t i = 0; i < store.runs.size(); ++i) {
    store.runs[i].length = step.runs[i].length;
    store.runs[i].victims = step.runs[i].victims;
  }
  if (recent_) recent_->restore(*step.recent);
  if (!step.rows.empty()) {
    std::vector<mx::array> index;
    for (const Run& run : store.runs)
      index.push_back(
          mx::squeeze(
              store.flat_index(run, mx::expand_dims(part(*step.slots, 1, run.first, run.last), -1)),
              -1));
    store.put(join_along(std::move(index), 1), step.rows);
  }
  if (step.scores) {
    std::vector<mx::array> parts;
    for (const Run& run : step.runs) parts.push_back(store.view(run, *step.scores));
    store.write("scores", parts);
  }
  if (step.remainder) remainder_ = step.remainder;
  victims_ = step.victims;
}

// Nothing was evicted: the newest tokens are the last of each head.
void Cache::cut(int n) {
  offset_ -= n;
  if (recent_) n -= recent_->trim(n);
  for (Run& run : store_->runs) run.length -= n;
  forget_victims();
}

// -- the fused step -------------------------------------------------------------------------------

bool Cache::fuses(const mx::array& q, const mx::array& keys, const mx::array& values) const {
  // Its arrays are with the kernels, where nothing is noted of them.
  return !undo_.most && keys.shape(2) == 1 && keys.dtype() == values.dtype() &&
      q.shape(1) <= kMaxRows * keys.shape(1) &&
      can_decode(keys, values, policy_.value_weighted, packing_.recent_bits);
}

void Cache::start_decoding() {
  SlotStore& store = *store_;
  if (!victims_) victims_ = mx::zeros({batch_, store.heads(), policy_.evict_every}, mx::int32);
  decoding_bytes_ = 0;
  for (const mx::array& a : arrays()) decoding_bytes_ += a.nbytes();
  const bool scored = policy_.needs_attention();
  DecodingArrays held{
      packing_.rows("keys", store.fields),
      packing_.rows("values", store.fields),
      store.fields.at("positions"),
      std::nullopt,
      *remainder_,
      *victims_,
      std::nullopt};
  if (scored) held.scores = store.fields.at("scores");
  if (recent_) {
    recent_->reserve();
    held.recent = Recent{
        recent_->stored("keys"), recent_->stored("values"),
        scored ? recent_->fields.at("scores") : mx::zeros({0})};
    recent_->fields.clear();
  }
  // The kernel may write in place only what nobody else holds.
  store.fields.clear();
  remainder_.reset();
  victims_.reset();
  decoding_on_ = backend();
  decoding_ = mlx_h2o::start_decoding(
      std::move(held), {policy_.kernel_policy(), policy_.value_weighted, remembers(), answers_});
}

void Cache::take_back() {
  if (!decoding_) return;
  const DecodingArrays back = decoding_->close();
  decoding_.reset();
  packing_.put(store_->fields, "keys", back.keys);
  packing_.put(store_->fields, "values", back.values);
  store_->fields.insert_or_assign("positions", back.positions);
  if (back.scores) store_->fields.insert_or_assign("scores", *back.scores);
  remainder_ = back.remainder;
  victims_ = back.victims;
  if (!recent_) return;
  const Packing packing = *packing_.recent();
  packing.put(recent_->fields, "keys", back.recent->keys);
  packing.put(recent_->fields, "values", back.recent->values);
  if (policy_.needs_attention()) recent_->fields.insert_or_assign("scores", back.recent->scores);
}

mx::array Cache::decode(
    const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
    const std::optional<mx::array>& sinks) {
  bool grows = false;
  for (const Run& run : store_->runs)
    grows = grows || (run.length == run.allocated && run.allocated < run.budget);
  if (grows) {
    take_back();
    store_->reserve(1, new_rows(keys, values, offset_ - 1));
  }
  if (decoding_ && decoding_on_ != backend()) take_back();
  if (!decoding_) start_decoding();
  std::optional<RecentStep> recent;
  if (recent_) recent = recent_->advance();
  // With a recent zone that is not full yet, no token comes into the slots.
  const bool full = !recent_ || recent_->length == recent_->size;
  std::vector<StepHead> heads;
  for (Run& run : store_->runs) {
    int victim = -1;
    if (!recent || recent->leaving) {
      if (run.length < run.budget) {
        ++run.length;
      } else {
        victim = policy_.evict_every - run.victims;
        --run.victims;
      }
    }
    const bool choose = full && run.length == run.budget && run.victims == 0;
    if (choose) run.victims = policy_.evict_every;
    for (int head = 0; head < run.heads(); ++head)
      heads.push_back(
          {run.start + int64_t(head) * run.allocated, run.length, victim, recent_slots(run),
           evicted_of(run), choose});
  }
  return decoding_->step(q, keys, values, scale, sinks, offset_, std::move(heads), recent);
}

// -- rows come ------------------------------------------------------------------------------------

void Cache::check_rows(const mx::array& keys, const mx::array& values) const {
  check(
      keys.ndim() == 4 && values.ndim() == 4 && is_float(keys) && is_float(values),
      "keys and values must be [B, Hk, L, width] and floating.");
  const int H = static_cast<int>(budgets_.size());
  check(
      keys.shape(1) == H && values.shape(1) == H,
      "This cache has budgets for " + std::to_string(H) + " KV heads; keys are " +
          text(keys.shape()) + " and values " + text(values.shape()) + ".");
  check(
      keys.shape(0) == values.shape(0) && keys.shape(2) == values.shape(2) && keys.shape(2) > 0,
      "keys " + text(keys.shape()) + " and values " + text(values.shape()) +
          " must agree in batch and tokens.");
  check(
      keys.shape(2) <= std::numeric_limits<int>::max() - offset_,
      "There are no positions for so many tokens.");
  check(
      !store_ ||
          (keys.shape(0) == batch_ && keys.shape(3) == k_width_ && values.shape(3) == v_width_ &&
           keys.dtype() == k_dtype_ && values.dtype() == v_dtype_),
      "These rows differ in batch, width or dtype from those that this cache holds.");
  for (const auto& [bits, width] :
       {std::pair(packing_.k_bits, keys.shape(3)), std::pair(packing_.v_bits, values.shape(3))})
    check(!bits || width % packing_.group_size == 0, "group_size must divide the packed widths.");
}

void Cache::start(const mx::array& keys, const mx::array& values) {
  batch_ = keys.shape(0), k_width_ = keys.shape(3), v_width_ = values.shape(3);
  k_dtype_ = keys.dtype(), v_dtype_ = values.dtype();
  std::vector<int> budgets = budgets_;
  if (packing_.recent_bits) {
    int newest = budgets[0];
    for (int budget : budgets) newest = std::min(newest, policy_.recent_slots(budget));
    recent_.emplace(newest, packing_, policy_.needs_attention());
    for (int& budget : budgets) budget -= newest;
  }
  for (int& budget : budgets) budget -= plain_rows_;
  store_.emplace(budgets);
  remainder_ = Remainder::empty(batch_, static_cast<int>(budgets.size()), k_width_, v_width_);
  // So that there are fields to look at while all tokens are recent.
  if (recent_) store_->reserve(1, new_rows(part(keys, 2, 0, 1), part(values, 2, 0, 1), 0));
}

Fields Cache::new_rows(const mx::array& keys, const mx::array& values, int first) const {
  const int B = keys.shape(0), H = keys.shape(1), L = keys.shape(2);
  Fields rows;
  packing_.put(rows, "keys", {{keys}});
  packing_.put(rows, "values", {{values}});
  rows.emplace("positions", mx::broadcast_to(range(first, first + L), {B, H, L}));
  if (policy_.needs_attention()) rows.emplace("scores", mx::zeros({B, H, L}));
  return rows;
}

void Cache::take_in(const mx::array& keys, const mx::array& values) {
  if (undo_.most) {
    if (keys.shape(2) > 1)
      undo_.steps.clear();
    else
      note_step();
  }
  Fields rows;
  if (recent_) {
    auto leaving = recent_->push(keys, values, offset_);
    if (!leaving) return;
    rows = std::move(*leaving);
  } else {
    rows = new_rows(keys, values, offset_);
  }
  const int count = rows.at("positions").shape(2);
  bool fits = true;
  for (const Run& run : store_->runs) fits = fits && run.length + count <= run.budget;
  if (keys.shape(2) == 1)  // for which victims are named already
    write_one(rows);
  else if (fits)
    append(rows);
  else
    pending_ = std::move(rows);
}

void Cache::write_one(const Fields& rows) {
  SlotStore& store = *store_;
  store.reserve(1, rows);
  std::vector<mx::array> within;
  std::vector<float> overwritten;
  for (Run& run : store.runs) {
    const bool full = run.length == run.budget;
    overwritten.insert(overwritten.end(), run.heads(), full ? 1.0f : 0.0f);
    if (full) {
      const int next = policy_.evict_every - run.victims;
      within.push_back(part(part(*victims_, 1, run.first, run.last), 2, next, next + 1));
      --run.victims;
    } else {
      within.push_back(mx::full({batch_, run.heads(), 1}, mx::array(run.length)));
      ++run.length;
    }
  }
  std::vector<mx::array> index;
  for (size_t i = 0; i < within.size(); ++i)
    index.push_back(mx::squeeze(store.flat_index(store.runs[i], within[i]), -1));
  mx::array flat = join_along(std::move(index), 1);
  const bool any = std::find(overwritten.begin(), overwritten.end(), 1.0f) != overwritten.end();
  const bool noted = undo_.count() > 0;
  if (any && (noted || remembers())) {
    Fields old;
    for (const auto& [name, row] : rows) old.emplace(name, store.take(flat, name));
    std::vector<mx::array> reads;
    if (noted) {
      StepBefore& step = undo_.steps.back();
      step.slots = mx::squeeze(join_along(std::move(within), 1), -1);
      if (remembers()) step.remainder = remainder_;
      for (const auto& [name, row] : old)
        if (name != "scores") step.rows.emplace(name, row);
      for (const auto& [name, row] : step.rows) reads.push_back(row);
    }
    if (remembers()) {
      const int heads = static_cast<int>(overwritten.size());
      for (auto& [name, row] : old) row = mx::expand_dims(row, 2);
      remainder_ = remainder_->fold(
          dense(packing_.rows("keys", old)), dense(packing_.rows("values", old)),
          mx::array(overwritten.begin(), {1, heads, 1}, mx::float32));
      const Remainder& r = *remainder_;
      reads.insert(reads.end(), {r.count, r.mean_key, r.var_key, r.mean_value});
    }
    // Read before written: a row still to be read would make the write copy everything.
    flat = mx::depends({flat}, reads)[0];
  }
  Fields one;
  for (const auto& [name, row] : rows) one.emplace(name, mx::squeeze(row, 2));
  store.put(flat, one);
}

void Cache::append(const Fields& rows) {
  SlotStore& store = *store_;
  const int L = rows.at("positions").shape(2);
  store.reserve(L, rows);
  std::vector<mx::array> index;
  for (const Run& run : store.runs) index.push_back(mx::reshape(store.next_index(run, L), {1, -1}));
  Fields flat;
  for (const auto& [name, row] : rows) flat.emplace(name, mx::flatten(row, 1, 2));
  store.put(join_along(std::move(index), 1), flat);
  for (Run& run : store.runs) run.length += L;
}

// -- attention ------------------------------------------------------------------------------------

Fields Cache::attended(const Run& run) const {
  if (!pending_) return store_->views(run);
  Fields fresh = heads_of(*pending_, run.first, run.last);
  if (!run.length) return fresh;
  Fields all;
  for (const auto& [name, row] : fresh)
    all.emplace(name, mx::concatenate({store_->view(run, store_->fields.at(name)), row}, 2));
  return all;
}

Fields Cache::positions_and_scores(const Run& run, const Fields& fields) const {
  Fields some{{"positions", fields.at("positions")}};
  if (policy_.needs_attention()) some.emplace("scores", fields.at("scores"));
  if (!recent_) return some;
  const Fields views = recent_->views(run.first, run.last, offset_);
  for (auto& [name, field] : some) field = mx::concatenate({field, views.at(name)}, 2);
  return some;
}

std::pair<Parts, Parts> Cache::keys_and_values(const Run& run, const Fields& fields) const {
  Parts keys{packing_.rows("keys", fields)}, values{packing_.rows("values", fields)};
  if (recent_) {
    const Fields views = recent_->views(run.first, run.last, offset_);
    keys.push_back(recent_->rows("keys", views));
    values.push_back(recent_->rows("values", views));
  }
  return {keys, values};
}

Cache::OfRun Cache::attend_run(
    const Run& run, const Fields& fields, const mx::array& q, float scale,
    const std::optional<mx::array>& sinks) const {
  const auto [keys, values] = keys_and_values(run, fields);
  const int L = q.shape(2), N = count(keys);
  const Fields of_policy = positions_and_scores(run, fields);
  std::optional<Remainder> answering;
  if (answers_ && evicted_of(run)) answering = remainder_->heads(run.first, run.last);
  const bool looks = policy_.needs_attention();
  const bool windowed = looks && L > 1 && policy_.windowed;
  // Queries before this one are attended to and not looked at.
  const int first_seen = windowed ? L - std::min(policy_.window, L) : (looks ? 0 : L);

  // Attention of the queries start to end - 1 over the keys that they can see.
  const auto block = [&, &keys = keys, &values = values](int start, int end, Export wanted) {
    const int visible = L == 1 ? N : N - L + end;
    const mx::array of_block = part(q, 2, start, end);
    std::optional<Seed> seed;
    if (answering) seed = Seed{answering->column(of_block, scale), answering->mean_value};
    return attend(
        of_block, first_rows(keys, visible), first_rows(values, visible), scale,
        {L > 1, std::nullopt}, sinks, seed, wanted);
  };

  std::vector<mx::array> outs;
  OfRun found{q, std::nullopt, std::nullopt};
  if (looks) found.scores = of_policy.at("scores");
  if (first_seen) outs.push_back(block(0, first_seen, Export::none).out);
  // A window is one block, and so is whatever leaves no logits behind.
  constexpr int kQueryBlock = 256;
  const int step = windowed || policy_.sums_mass() ? L : kQueryBlock;
  for (int start = first_seen; start < L; start += step) {
    const int end = std::min(start + step, L), visible = L == 1 ? N : N - L + end;
    const Attended attended =
        block(start, end, policy_.sums_mass() ? Export::mass : Export::logits);
    outs.push_back(attended.out);
    Observation seen{attended.logits, attended.lse, run.heads(), attended.mass, std::nullopt};
    if (windowed) {
      mx::array mass = seen.total_mass();
      if (const int missing = policy_.window - L; missing > 0) {
        const mx::array ages =
            f32(mx::maximum(mx::array(offset_ - L) - of_policy.at("positions"), mx::array(1)));
        mass = mass + number(missing) * policy_.mean_mass(*found.scores, ages);
      }
      found.window_mass = mass;
      seen.stands_for = stands_for(L, N, end - start);
    }
    const mx::array before = *found.scores;
    const mx::array after = policy_.accumulate(part(before, 2, 0, visible), seen);
    found.scores = visible < N ? mx::concatenate({after, part(before, 2, visible, N)}, 2) : after;
  }
  found.out = join_along(std::move(outs), 2);
  return found;
}

// -- choices --------------------------------------------------------------------------------------

void Cache::settle(
    const std::vector<Fields>& attended,
    const std::vector<std::optional<mx::array>>& window_masses) {
  SlotStore& store = *store_;
  bool over = pending_.has_value();
  for (size_t i = 0; i < attended.size(); ++i)
    over = over || store.runs[i].budget < attended[i].at("positions").shape(2);
  if (over) {
    pending_.reset();
    std::vector<Fields> kept;
    for (size_t i = 0; i < attended.size(); ++i) {
      const int N = attended[i].at("positions").shape(2);
      const int lost = offset_ - recently_held() - N;
      kept.push_back(reduced(store.runs[i], attended[i], window_masses[i], lost));
    }
    store.replace(kept);
    forget_victims();
  } else if (policy_.needs_attention()) {
    std::vector<mx::array> scores;
    for (const Fields& fields : attended) scores.push_back(fields.at("scores"));
    store.write("scores", scores);
  }
  choose_victims();
}

Fields Cache::reduced(
    const Run& run, const Fields& fields, const std::optional<mx::array>& window_mass,
    int evicted) {
  const int N = fields.at("positions").shape(2);
  if (run.budget >= N) return fields;
  // Head by head, so that float32 copies are never of more than one head's rows.
  std::vector<mx::array> priorities;
  for (int i = 0; i < run.heads(); ++i) {
    Run one = run;
    one.first = run.first + i, one.last = one.first + 1;
    std::optional<mx::array> mass;
    if (window_mass) mass = part(*window_mass, 1, i, i + 1);
    const Slots seen = slots(one, heads_of(fields, i, i + 1), evicted);
    priorities.push_back(part(policy_.prompt_priority(seen, mass), 2, 0, N));
  }
  const mx::array& positions = fields.at("positions");
  const mx::array kept = select_kept(
      join_along(std::move(priorities), 1), positions,
      evictable_slots(positions, offset_, policy_.sink, recent_slots(run)), run.budget,
      policy_.per_layer);
  if (remembers()) {
    const mx::array dropped =
        mx::put_along_axis(mx::ones(positions.shape()), kept, mx::zeros(kept.shape()), -1);
    for (int i = 0; i < run.heads(); ++i) {
      const Fields own = heads_of(fields, i, i + 1);
      const int head = run.first + i;
      const Remainder folded =
          remainder_->heads(head, head + 1)
              .fold(
                  dense(packing_.rows("keys", own)), dense(packing_.rows("values", own)),
                  part(dropped, 1, i, i + 1));
      remainder_ = remainder_->with_heads(head, folded);
    }
  }
  Fields staying;
  for (const auto& [name, field] : fields) {
    mx::Shape index = kept.shape(), rows = field.shape();
    index.resize(field.ndim(), 1);
    rows[2] = run.budget;
    staying.emplace(
        name, mx::take_along_axis(field, mx::broadcast_to(mx::reshape(kept, index), rows), 2));
  }
  return staying;
}

void Cache::forget_victims() {
  victims_.reset();
  for (Run& run : store_->runs) run.victims = 0;
}

void Cache::choose_victims() {
  if (recent_ && recent_->length < recent_->size) return;  // the next token pushes none out
  const int E = policy_.evict_every;
  bool due = false;
  std::vector<mx::array> chosen;
  for (Run& run : store_->runs) {
    if (run.length == run.budget && !run.victims) {
      const Slots seen = slots(run, store_->views(run), evicted_of(run));
      chosen.push_back(select_victims(
          part(policy_.priority(seen), 2, 0, run.length), part(seen.positions, 2, 0, run.length),
          part(seen.evictable, 2, 0, run.length), E, policy_.per_layer));
      run.victims = E;
      due = true;
    } else if (victims_) {
      chosen.push_back(part(*victims_, 1, run.first, run.last));
    } else {
      chosen.push_back(mx::zeros({batch_, run.heads(), E}, mx::int32));
    }
  }
  if (due) victims_ = join_along(std::move(chosen), 1);
}

Slots Cache::slots(const Run& run, const Fields& fields, int evicted) const {
  const Fields whole = positions_and_scores(run, fields);
  const mx::array& positions = whole.at("positions");
  const auto [keys, values] = keys_and_values(run, fields);
  return {
      dense(keys), dense(values),
      positions,   policy_.needs_attention() ? whole.at("scores") : mx::zeros(positions.shape()),
      offset_,     evictable_slots(positions, offset_, policy_.sink, recent_slots(run)),
      evicted,     part(remainder_->mean_key, 1, run.first, run.last)};
}

int Cache::evicted_of(const Run& run) const {
  const int pending = pending_ ? pending_->at("positions").shape(2) : 0;
  return offset_ - run.length - pending - recently_held();
}

}  // namespace mlx_h2o
