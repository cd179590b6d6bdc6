#include "step.h"

#include <algorithm>
#include <iterator>

#include "evaluation.h"
#include "eviction.h"
#include "fused_case.h"
#include "policy_view.h"
#include "saved_state.h"
#include "scoring.h"

namespace mlx_h2o {

namespace {

void check_call(const AttentionCall& call, const mx::array& keys) {
  const mx::array& q = call.q;
  check(
      q.ndim() == 4 && q.shape(0) == keys.shape(0) && q.shape(2) == keys.shape(2) &&
          q.shape(3) == keys.shape(3) && q.shape(1) % keys.shape(1) == 0 && is_float(q),
      "q " + text(q.shape()) + " must be floating and fit the keys " + text(keys.shape()) + ".");
  check(
      !call.sinks || (call.sinks->shape() == mx::Shape{q.shape(1)} && is_float(*call.sinks)),
      "Attention sinks must be [Hq] and floating.");
}

// Attends to old and new rows first, and evicts after. Queries and keys are in the layer's frame.
mx::array attend_op_by_op(
    BoundedLayer& layer, const AttentionCall& call, const mx::array& keys,
    const mx::array& values) {
  const std::vector<Fields> attended = layer.take_in(keys, values);
  std::vector<mx::array> outs, newest;
  std::vector<Fields> fields;
  std::vector<std::optional<mx::array>> window_masses;
  for (size_t i = 0; i < attended.size(); ++i) {
    RunResult result = observe(layer, layer.runs()[i], call, attended[i]);
    outs.push_back(result.out);
    if (result.newest_scores) newest.push_back(*result.newest_scores);
    fields.push_back(std::move(result.fields));
    window_masses.push_back(result.window_mass);
  }
  if (!newest.empty()) layer.write_newest_scores(join_along(std::move(newest), 1));
  settle(layer, fields, window_masses);
  return mx::depends({join_along(std::move(outs), 1)}, layer.side_state())[0];
}

// One token or one chunk.
mx::array attend_now(
    BoundedLayer& layer, const AttentionCall& call, const mx::array& keys,
    const mx::array& values) {
  const std::optional<Frame>& frame = layer.settings.frame;
  const auto framed = [&] {
    AttentionCall entered = call;
    if (frame) entered.q = enter_queries(*frame, call.q);
    return entered;
  };
  if (layer.back) {
    if (layer.back->is_due(layer, call.length()))
      bring_back(layer, call, frame ? enter(*frame, keys) : keys);
    layer.back->note(call.q);
  }
  // The first token of all goes op by op: then there are arrays to lend.
  // A step that brings a pinned token too, which is marked on its way in.
  if (layer.offset() && !layer.next_is_pinned() &&
      accepts(layer.settings, call, keys, values, fused_step_proven)) {
    const mx::array out = layer.decode(call, keys, values);
    const std::vector<mx::array> beside = layer.of_file();
    return beside.empty() ? out : mx::depends({out}, beside)[0];
  }
  return attend_op_by_op(layer, framed(), frame ? enter(*frame, keys) : keys, values);
}

// Raises unless a mask fits queries like these.
void check_mask(const AttentionCall& call) {
  if (!call.mask.array) return;
  const mx::array &mask = *call.mask.array, &q = call.q;
  check(mask.dtype() == mx::bool_ || is_float(mask), "A mask must be boolean or floating.");
  const int L = call.length(), columns = mask.ndim() ? mask.shape(-1) : 0;
  check(
      mask.ndim() <= 4 && (columns == 1 || columns >= L) &&
          broadcasts_to(mask.shape(), {q.shape(0), q.shape(1), L, columns}),
      "The mask " + text(mask.shape()) + " does not fit queries " + text(q.shape()) + ".");
}

// A chunk that can be taken back, as so many single steps.
mx::array token_by_token(
    BoundedLayer& layer, const AttentionCall& call, const mx::array& keys,
    const mx::array& values) {
  std::vector<mx::array> outs;
  for (int i = 0; i < call.length(); ++i)
    outs.push_back(attend_now(
        layer, call.single(i, !layer.offset()), part(keys, 2, i, i + 1),
        part(values, 2, i, i + 1)));
  return join_along(std::move(outs), 2);
}

// [1, 1, L, rows + kept + L] to be added to logits: log(lost / rows) for plain rows, which come
// first, minus infinity for the future.
mx::array plain_rows_mask(int rows, int lost, int kept, int L, mx::Dtype dtype) {
  const int N = kept + L;
  const mx::array bias = mx::log(number(double(lost) / rows));
  mx::array mask = mx::concatenate({mx::broadcast_to(bias, {rows}), mx::zeros({N})}, 0);
  const mx::array visible = mx::less_equal(range(-rows, N), mx::expand_dims(range(kept, N), 1));
  mask = mx::where(visible, mask, number(mx::finfo(dtype).min));
  return mx::astype(mx::reshape(mask, {1, 1, L, rows + N}), dtype);
}

// The evicted as plain rows before those of a chunk that is over the budget.
void add_plain_rows(Core::FetchedRows& fetched, const Remainder& remainder, int rows) {
  const mx::Dtype dtype = fetched.keys.dtype();
  const auto [plain_keys, plain_values] = remainder.plain_rows(rows);
  fetched.keys = mx::concatenate({mx::astype(plain_keys, dtype), fetched.keys}, 2);
  fetched.values =
      mx::concatenate({mx::astype(plain_values, fetched.values.dtype()), fetched.values}, 2);
}

}  // namespace

Core::Core(CacheSettings settings) : settings_(std::move(settings)) {
  blaming(Blame::settings, [&] { settings_.check_all(); });
}

void Core::check_step(
    const AttentionCall& call, const mx::array& keys, const mx::array& values) const {
  check(
      settings_.attending, "This cache is for a model that attends by itself: update_and_fetch.",
      Blame::state);
  check_rows(keys, values);
  check_call(call, keys);
  check_mask(call);
  check(
      !call.sinks || !settings_.frame || !moves(*settings_.frame),
      "Attention sinks do not move with a frame's centre: a layer that has them needs a frame with "
      "a centre of zeros.");
  check(
      !settings_.rope || settings_.rope->dims <= keys.shape(3),
      "The rope turns more channels than keys " + text(keys.shape()) + " have.");
}

mx::array Core::update_and_attend(
    const AttentionCall& call, const mx::array& keys, const mx::array& values) {
  check_step(call, keys, values);
  grow(call.length());
  const int L = call.length();
  const bool singly = L > 1 && L - 1 <= settings_.undo;
  chunk_.reset();
  if (settings_.undo && L > 1 && !singly) {
    chunk_.emplace(Chunk{std::nullopt, call, keys, values});
    if (layer_) chunk_->before.emplace(*layer_, settings_);
    if (spill_) chunk_->back = spill_->back;
  }
  BoundedLayer& layer = layer_for(keys, values);
  if (singly) layer.settle();
  std::optional<mx::array> out;
  change([&] {
    out =
        singly ? token_by_token(layer, call, keys, values) : attend_now(layer, call, keys, values);
  });
  return *out;
}

Core::FetchedRows Core::update_and_fetch(const mx::array& keys, const mx::array& values) {
  check(!settings_.attending, "This cache attends: update_and_attend.", Blame::state);
  check_rows(keys, values);
  BoundedLayer& layer = layer_for(keys, values);
  std::optional<FetchedRows> fetched;
  change([&] { fetched = take_in(layer, keys, values); });
  fetched->keys = mx::depends({fetched->keys}, layer.side_state())[0];
  return *fetched;
}

Core::FetchedRows Core::take_in(
    BoundedLayer& layer, const mx::array& keys, const mx::array& values) {
  const std::vector<Fields> attended = layer.take_in(keys, values);
  const Fields& rows = attended[0];  // all heads are alike
  const bool over = rows.at("positions").shape(2) > layer.runs()[0].budget;
  FetchedRows fetched{rows.at("keys"), rows.at("values"), std::nullopt};
  const int lost = layer.lost_beside(rows), plain = settings_.plain_rows();
  if (plain && lost) {
    const int L = keys.shape(2), N = fetched.keys.shape(2);
    fetched.mask = plain_rows_mask(plain, lost, N - L, L, keys.dtype());
    if (over)
      add_plain_rows(fetched, layer.evictions().remainder, plain);
    else
      std::tie(fetched.keys, fetched.values) = layer.with_plain_rows();
  }
  settle(layer, over ? attended : layer.attended(std::nullopt), {std::nullopt});
  return fetched;
}

int64_t Core::evicted() const {
  if (!layer_) return 0;
  int64_t lost = 0;
  for (const Run& run : layer_->runs()) lost += int64_t(run.heads()) * layer_->lost(run);
  return lost / settings_.heads();
}

void Core::spill_to(
    std::shared_ptr<ConversationRows> conversation, int layer, std::vector<bool> heads) {
  check(!layer_, "Tokens came before this cache was given a file.", Blame::state);
  check(!spill_, "This cache has a file already.", Blame::state);
  conversation->attach(layer);
  const Returns returns = conversation->returns;
  spill_.emplace(
      SpillState{{std::move(conversation), layer, settings_}, {returns, std::move(heads)}});
}

size_t Core::nbytes() const {
  const std::optional<Frame>& frame = settings_.frame;
  const size_t of_frame = frame ? frame->centre.nbytes() + frame->scale.nbytes() : 0;
  size_t of_chunk = 0;
  if (chunk_) {
    of_chunk = chunk_->call.q.nbytes() + chunk_->keys.nbytes() + chunk_->values.nbytes();
    if (chunk_->before) of_chunk += chunk_->before->nbytes();
  }
  const size_t of_spill = spill_ ? spill_->rows.nbytes() + spill_->back.nbytes() : 0;
  return of_frame + of_chunk + of_spill + (layer_ ? layer_->nbytes() : 0);
}

int Core::trimmable() const {
  const int steps = layer_ ? layer_->trimmable() : 0;
  return chunk_ ? std::max(steps, std::min(settings_.undo, chunk_->call.length() - 1)) : steps;
}

void Core::shorten_chunk(int n) {
  Chunk chunk = std::move(*chunk_);
  layer_.reset();
  if (chunk.before) layer_.emplace(std::move(*chunk.before));
  if (spill_) spill_->rows.trim(offset()), spill_->back = *chunk.back;
  const int L = chunk.call.length() - n;
  update_and_attend(chunk.call.first(L), part(chunk.keys, 2, 0, L), part(chunk.values, 2, 0, L));
}

Masking Core::mask_for(int n, bool as_array) {
  check_within("A mask's number of tokens", n, 1, kMostTokens);
  const int kept = size(), plain = settings_.plain_rows();
  if (plain && layer_) {
    const Run& run = layer_->runs()[0];
    const int lost =
        n > 1 ? layer_->lost(run) : layer_->offset() + 1 - std::min(run.length + 1, run.budget);
    const int older = n > 1 ? kept : std::min(kept, run.budget - 1);
    if (lost > 0) return {false, plain_rows_mask(plain, lost, older, n, layer_->types.key_dtype)};
  }
  if (n == 1) return {};
  if (!as_array) return {true, std::nullopt};
  return {false, mx::less_equal(range(0, kept + n), mx::expand_dims(range(kept, kept + n), 1))};
}

void Core::trim(int n) {
  const int most = trimmable();
  check(n >= 0, "A number of tokens to take back is at least 0; got " + std::to_string(n) + ".");
  check(
      n <= most,
      "Cannot take back " + std::to_string(n) + " tokens: the last " + std::to_string(most) +
          " can be (of " + std::to_string(offset()) + "; undo is " +
          std::to_string(settings_.undo) + ", of single-token steps after evictions).",
      Blame::state);
  if (!n) {
    if (layer_) layer_->settle();  // every draft was accepted
    return;
  }
  if (chunk_ && n > layer_->trimmable()) return shorten_chunk(n);
  chunk_.reset();
  if (n == offset())
    layer_.reset();  // as it was made
  else
    layer_->trim(n);
  if (spill_) spill_->rows.trim(offset());
}

int Core::pin(Spans spans) {
  spans = joined(std::move(spans));
  const auto [missing, gone] = lost_of(spans);
  chunk_.reset();
  Spans all = without(spans, gone);
  all.insert(all.end(), settings_.pins.begin(), settings_.pins.end());
  pin_all(joined(std::move(all)));
  missing_ = missing;
  int positions = 0;
  for (const auto& [first, end] : missing) positions += end - first;
  return positions;
}

void Core::unpin() {
  chunk_.reset();
  pin_all({});
}

std::unique_ptr<Core> Core::copied() {
  auto twin = std::make_unique<Core>(settings_);
  if (layer_) twin->layer_.emplace(*layer_, twin->settings_);
  twin->missing_ = missing_;
  if (chunk_) {
    twin->chunk_.emplace(Chunk{std::nullopt, chunk_->call, chunk_->keys, chunk_->values});
    if (chunk_->before) twin->chunk_->before.emplace(*chunk_->before, twin->settings_);
  }
  return twin;
}

std::pair<Fields, std::string> Core::saved() {
  if (!layer_) return {saved_arrays(settings_, nullptr), saved_settings(settings_, nullptr).text()};
  std::optional<BoundedLayer> lent = layer_->being_looked_at();
  BoundedLayer& layer = lent ? *lent : *layer_;
  Fields all = saved_arrays(settings_, &layer);
  if (lent) {
    // Kernels go on in the memory of these: what is given is copied, and now.
    std::vector<mx::array> copies;
    for (auto& [name, field] : all) {
      field = mx::where(mx::array(true), field, mx::zeros({}, field.dtype()));
      copies.push_back(field);
    }
    evaluate(copies);
  }
  return {std::move(all), saved_settings(settings_, &layer).text()};
}

std::unique_ptr<Core> Core::restored(
    const Fields& arrays, const std::string& settings, const Policy* own) {
  return blaming(Blame::saved, [&] {
    const Json parsed = Json::parsed(settings);
    const Json::Object& saved = parsed.object("What was saved");
    auto core = std::make_unique<Core>(settings_of(saved, arrays, own));
    if (auto layer = layer_of(saved, arrays, core->settings_)) {
      core->layer_.emplace(std::move(*layer));
      choose_victims(*core->layer_);
    }
    return core;
  });
}

void Core::resize(std::vector<int> budgets, std::vector<Stage> filling) {
  give_slots(std::move(budgets), std::move(filling));
  if (layer_) change([&] { mlx_h2o::resize(*layer_); });
}

void Core::keep_best(const std::vector<mx::array>& worths, std::vector<int> budgets, int room) {
  BoundedLayer& layer = layer_with_tokens();
  give_slots(std::move(budgets), {});
  change([&] { mlx_h2o::keep_best(layer, worths, room); });
}

// Has the settings say these; the layer is to follow.
void Core::give_slots(std::vector<int> budgets, std::vector<Stage> filling) {
  CacheSettings changed = settings_;
  changed.reserved.reset();
  changed.budgets = std::move(budgets);
  changed.filling = std::move(filling);
  blaming(Blame::settings, [&] { changed.check_all(); });
  changed.budgets = with_room(changed.budgets, changed.plain_rows(), changed.pins);
  for (Stage& stage : changed.filling) stage.budgets = with_room(stage.budgets, 0, changed.pins);
  settings_.budgets = std::move(changed.budgets);
  settings_.filling = std::move(changed.filling);
  settings_.reserved.reset();
  chunk_.reset();
}

std::vector<int> Core::with_room(
    std::vector<int> budgets, int plain_rows, const Spans& pins) const {
  if (pins.empty()) return budgets;
  for (int& budget : budgets) budget -= plain_rows;
  budgets =
      blaming(Blame::settings, [&] { return room_for_pins(budgets, settings_.policy, pins); });
  for (int& budget : budgets) budget += plain_rows;
  return budgets;
}

void Core::pin_all(Spans pins) {
  std::vector<int> roomy = with_room(settings_.budgets, settings_.plain_rows(), pins);
  std::vector<Stage> later = settings_.filling;
  for (Stage& stage : later) stage.budgets = with_room(stage.budgets, 0, pins);
  const bool moves = roomy != settings_.budgets;
  settings_.budgets = std::move(roomy);
  settings_.filling = std::move(later);
  settings_.pins = std::move(pins);
  if (!layer_) return;
  change([&] {
    layer_->mark_pins();
    if (moves)
      mlx_h2o::resize(*layer_);
    else if (layer_->offset())
      choose_victims(*layer_);
  });
}

void Core::grow(int length) {
  // No step before it can be taken back, so between drafted tokens it waits, and of a chunk that
  // can be taken back only the first token counts.
  if (length == 1 && layer_ && !layer_->settled()) return;
  const int certain = length <= settings_.undo + 1 ? 1 : length;
  if (!pass_stages(settings_.filling, offset() + certain, settings_.budgets)) return;
  if (layer_) change([&] { mlx_h2o::resize(*layer_); });
}

std::pair<Spans, Spans> Core::lost_of(const Spans& spans) {
  Spans missing, gone;
  if (!offset()) return {missing, gone};
  const std::vector<int> all = ints_of(kept());
  const size_t most = size(), heads = all.size() / most;
  const int* const positions = all.data();
  for (const auto& [first, end] : spans)
    for (int p = first; p < std::min(end, offset()); ++p) {
      size_t holding = 0;
      for (size_t h = 0; h < heads; ++h)
        holding += std::find(positions + h * most, positions + (h + 1) * most, p) !=
            positions + (h + 1) * most;
      if (holding < heads) missing.emplace_back(p, p + 1);
      if (!holding) gone.emplace_back(p, p + 1);
    }
  return {joined(std::move(missing)), joined(std::move(gone))};
}

void Core::new_turn(double carry) {
  check(carry >= 0 && carry <= 1, "How much of the past counts is a number from 0 to 1.");
  if (carry < 1) chunk_.reset();
  if (layer_) layer_->new_turn(carry);
}

template <class Look>
std::vector<mx::array> Core::seen(Look look) {
  BoundedLayer& layer = layer_with_tokens();
  std::optional<BoundedLayer> lent = layer.being_looked_at();
  if (!lent) return look(layer);
  const std::vector<mx::array> result = look(*lent);
  evaluate(result);  // before the next step changes what it is made of
  return result;
}

mx::array Core::kept() {
  return seen(
      [](BoundedLayer& layer) { return std::vector{by_position(layer, "positions", -1)}; })[0];
}

std::pair<mx::array, mx::array> Core::rows() {
  const std::vector<mx::array> both = seen([](BoundedLayer& layer) {
    const auto [keys, values] = rows_by_position(layer);
    return std::vector{keys, values};
  });
  return {both[0], both[1]};
}

std::vector<mx::array> Core::newest() const {
  std::vector<mx::array> all;
  if (layer_) all = layer_->newest();
  if (const std::optional<Frame>& frame = settings_.frame)
    all.push_back(frame->centre), all.push_back(frame->scale);
  return all;
}

mx::array Core::scores() {
  const Policy& policy = settings_.policy;
  check(
      policy.needs_attention(), "Policy " + policy.name + " accumulates no scores.", Blame::state);
  return seen([](BoundedLayer& layer) { return std::vector{by_position(layer, "scores", 0)}; })[0];
}

Remainder Core::remainder() {
  layer_with_tokens();
  check(settings_.remembers(), "This cache keeps no statistics of the evicted.", Blame::state);
  const std::vector<mx::array> all =
      seen([](BoundedLayer& layer) { return layer.evictions().remainder.arrays(); });
  return {all[0], all[1], all[2], all[3]};
}

BoundedLayer& Core::layer_with_tokens() {
  check(layer_.has_value(), "This cache has seen no token.", Blame::state);
  return *layer_;
}

BoundedLayer& Core::layer_for(const mx::array& keys, const mx::array& values) {
  if (!layer_) layer_.emplace(settings_, keys, values);
  if (spill_) layer_->spill = &spill_->rows, layer_->back = &spill_->back;
  return *layer_;
}

void Core::check_rows(const mx::array& keys, const mx::array& values) const {
  check(
      keys.ndim() == 4 && values.ndim() == 4 && is_float(keys) && is_float(values),
      "keys and values must be [B, Hk, L, width] and floating.");
  const int H = settings_.heads();
  check(
      keys.shape(1) == H && values.shape(1) == H,
      "This cache has budgets for " + std::to_string(H) + " KV heads; keys are " +
          text(keys.shape()) + " and values " + text(values.shape()) + ".");
  check(
      keys.shape(0) == values.shape(0) && keys.shape(2) == values.shape(2) && keys.shape(2) > 0,
      "keys " + text(keys.shape()) + " and values " + text(values.shape()) +
          " must agree in batch and tokens.");
  check(
      keys.shape(2) <= std::numeric_limits<int>::max() - offset(),
      "There are no positions for so many tokens.");
  check(
      !layer_ || layer_->types == RowTypes::of(keys, values),
      "These rows differ in batch, width or dtype from those that this cache holds.");
  const Packing& packing = settings_.packing;
  for (const auto& [bits, width] :
       {std::pair(packing.k_bits, keys.shape(3)), std::pair(packing.v_bits, values.shape(3))})
    check(!bits || width % packing.group_size == 0, "group_size must divide the packed widths.");
  check(
      !settings_.frame || settings_.frame->scale.shape(1) == keys.shape(3),
      "The frame is for keys of another width.");
}

}  // namespace mlx_h2o
