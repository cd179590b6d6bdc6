#include "saved_state.h"

#include <algorithm>
#include <set>

#include "evaluation.h"
#include "value_lengths.h"

namespace mlx_h2o {

namespace {

const char* const kCentre = "frame.centre";
const char* const kScale = "frame.scale";
// Far above what any model has.
constexpr int kMostHeads = 1 << 16;
constexpr int kMostPlainRows = 8;
constexpr size_t kMostSaved = 1 << 16;  // spans or stages
// Of a recent window that is larger than what was saved of it.
constexpr size_t kMostWindowBytes = size_t(1) << 30;

Json::List pairs_of(const Spans& spans) {
  Json::List all;
  for (const auto& [first, end] : spans) all.push_back(Json(std::vector<int>{first, end}));
  return all;
}

Json bits_of(int bits) {
  return bits ? Json(bits) : Json();
}

Json policy_of(const Policy& policy) {
  Json::Object all{{"name", Json(policy.name)}};
  for (const Setting& setting : policy.settings())
    std::visit([&](const auto& value) { all.emplace(setting.name, Json(value)); }, setting.value);
  return all;
}

Json run_of(const Run& run) {
  return Json::Object{{"first", run.first},    {"last", run.last},           {"budget", run.budget},
                      {"length", run.length},  {"allocated", run.allocated}, {"start", run.start},
                      {"victims", run.victims}};
}

// -- settings that come from outside --------------------------------------------------------------

Policy policy_of(const Json::Object& saved) {
  Policy policy = Policy::named(member(saved, "name").words("A policy's name"));
  for (const auto& [name, value] : saved) {
    if (name == "name") continue;
    Setting setting{name, {}};
    if (const bool* truth = std::get_if<bool>(&value.value))
      setting.value = *truth;
    else if (std::holds_alternative<int64_t>(value.value))
      setting.value = value.whole(name, -kMostTokens, kMostTokens);
    else if (std::holds_alternative<double>(value.value))
      setting.value = value.number(name);
    else
      setting.value = value.words(name);
    policy.set(setting);
  }
  return policy;
}

int bits_of(const Json::Object& packing, const std::string& name) {
  const Json& bits = member(packing, name, true);
  return bits.is_null() ? 0 : bits.whole(name, 1, 16);
}

Saturations saturations_of(const Json& saved, int heads) {
  if (saved.is_null()) return Saturations(heads, kSaturation);
  Saturations all;
  if (const Json::List* each = std::get_if<Json::List>(&saved.value))
    for (const Json& one : *each) all.push_back(float(one.number("saturation")));
  else
    all.assign(heads, float(saved.number("saturation")));
  check(int(all.size()) == heads, "saturation is one number for each KV head, or for all.");
  for (float t : all) check(t >= 0 && t <= kMostNumber, "saturation is at least 0.");
  return all;
}

std::vector<Stage> filling_of(const Json& saved, size_t heads) {
  std::vector<Stage> stages;
  if (saved.is_null()) return stages;
  for (const Json& one : saved.list("filling")) {
    const Json::List& stage = one.list("A stage of filling");
    check(stage.size() == 2 && stages.size() < kMostSaved, "A stage of filling has two parts.");
    stages.push_back(
        {stage[0].whole("A stage of filling", 1, kMostTokens),
         stage[1].wholes("A stage's slots", 1, kMostTokens)});
    check(stages.back().budgets.size() == heads, "A stage of filling has slots for each head.");
  }
  return stages;
}

Spans pins_of(const Json& saved) {
  Spans pins;
  if (saved.is_null()) return pins;
  for (const Json& one : saved.list("pins")) {
    const std::vector<int> span = one.wholes("pins", 0, kMostTokens);
    check(
        span.size() == 2 && span[0] < span[1] && pins.size() < kMostSaved &&
            (pins.empty() || pins.back().second < span[0]),
        "pins are spans of positions, in order.");
    pins.emplace_back(span[0], span[1]);
  }
  return pins;
}

std::optional<Frame> frame_of(const Fields& arrays, int heads) {
  const auto centre = arrays.find(kCentre), scale = arrays.find(kScale);
  const bool framed = centre != arrays.end();
  check(framed == (scale != arrays.end()), "A frame is its centre and its scale.");
  if (!framed) return std::nullopt;
  const mx::array &of_centre = centre->second, &of_scale = scale->second;
  check(
      of_centre.ndim() == 2 && of_centre.shape(0) == heads && of_centre.shape(1) > 0 &&
          of_centre.shape() == of_scale.shape() && of_centre.dtype() == mx::float32 &&
          of_scale.dtype() == mx::float32,
      "A frame's centre and scale are [KV heads, width], float32.");
  return checked_frame(of_centre, of_scale);
}

// What only Python has.
void check_kind(const Json::Object& saved) {
  const Json &own = member(saved, "own", true), &sharers = member(saved, "sharers", true);
  const Json& ranks = member(saved, "ranks", true);
  check(
      own.is_null() || own.truth("own"),
      "Keys that are made of the cached ones are not served here.");
  check(
      sharers.is_null() || sharers.whole("sharers", 1, kMostHeads) == 1,
      "Layers that share rows are not served here.");
  if (!ranks.is_null()) ranks.whole("ranks", 1, kMostHeads);
}

// -- numbers and arrays of a layer ----------------------------------------------------------------

struct Window {
  int size, length, oldest;
};

std::optional<Window> window_of(const Json::Object& saved, const CacheSettings& s, int offset) {
  const Json& numbers = member(saved, "recent", true);
  const int size = s.recent_size();
  if (!size) {
    check(numbers.is_null(), "There is a recent window where all rows are stored alike.");
    return std::nullopt;
  }
  const Json::Object& window = numbers.object("recent");
  member(window, "size").whole("recent.size", size, size);
  const int length = member(window, "length").whole("recent.length", 0, std::min(size, offset));
  const int oldest = member(window, "oldest").whole("recent.oldest", 0, size - 1);
  check(!oldest || length == size, "A recent window that is not full begins with its oldest.");
  return Window{size, length, oldest};
}

Run run_of(const Json& saved) {
  const Json::Object& numbers = saved.object("A run");
  const auto number = [&](const char* name) {
    return member(numbers, name).whole(name, 0, kMostTokens);
  };
  return {number("first"),     number("last"),  number("budget"), number("length"),
          number("allocated"), number("start"), number("victims")};
}

// The runs, which follow each other without a gap and hold what was not evicted.
std::vector<Run> runs_of(
    const Json::List& saved, const CacheSettings& s, int offset,
    const std::optional<Window>& window) {
  const int reserved = s.plain_rows(), size = window ? window->size : 0;
  const int held = offset - (window ? window->length : 0);
  const bool full_window = !window || window->length == window->size;
  std::vector<Run> runs;
  int64_t head = 0, start = 0;
  for (const Json& one : saved) {
    const Run run = run_of(one);
    const bool chosen = run.is_full() && full_window;
    check(
        run.first == head && run.start == start && run.last > run.first &&
            run.last <= int64_t(s.budgets.size()) &&
            int64_t(run.length) + reserved <= run.allocated &&
            run.allocated <= int64_t(run.budget) + reserved && run.length <= held &&
            run.victims <= s.policy.evict_every && (!run.victims || run.is_full()) &&
            (!chosen || run.victims),
        "The heads from " + std::to_string(run.first) + " on hold what cannot be.");
    for (int i = run.first; i < run.last; ++i)
      check(
          s.budgets[i] == int64_t(run.budget) + size + reserved,
          "Heads have other slots than their budgets say.");
    runs.push_back(run);
    head = run.last, start += int64_t(run.heads()) * run.allocated;
    check(start <= kMostTokens, "There are too many slots.");
  }
  check(head == int64_t(s.budgets.size()), "There are budgets for other heads.");
  check(s.attending || runs.size() == 1, "A model that attends by itself has all heads alike.");
  return runs;
}

// Arrays that must be there, each of a shape and a dtype; `take` hands one out.
class Shelf {
 public:
  explicit Shelf(const Fields& arrays) : arrays_(arrays) {}

  bool has(const std::string& name) const {
    return arrays_.count(name);
  }
  const mx::array& look(const std::string& name) const {
    const auto it = arrays_.find(name);
    check(it != arrays_.end(), "The array " + name + " is missing.");
    return it->second;
  }
  mx::array take(const std::string& name, const mx::Shape& shape, mx::Dtype dtype) {
    const mx::array& array = look(name);
    check(
        array.shape() == shape && array.dtype() == dtype,
        "The array " + name + " must be " + text(shape) + "; it is " + text(array.shape()) +
            (array.shape() == shape ? " of another dtype." : "."));
    taken_.insert(name);
    return array;
  }
  void skip(const std::string& name) {
    if (has(name)) taken_.insert(name);
  }
  void check_all_taken() const {
    for (const auto& [name, array] : arrays_)
      check(taken_.count(name), "The array " + name + " is not of this cache.");
  }

 private:
  const Fields& arrays_;
  std::set<std::string> taken_;
};

mx::Shape with(mx::Shape shape, int width) {
  shape.push_back(width);
  return shape;
}

// Width and dtype of keys or values before they were packed.
std::pair<int, mx::Dtype> row_type(const Shelf& shelf, const std::string& name, const Packing& p) {
  const mx::array& rows = shelf.look("slots." + name);
  const int bits = p.bits(name);
  const mx::Dtype dtype = bits ? shelf.look("slots." + name + ".scales").dtype() : rows.dtype();
  const int64_t last = rows.ndim() ? rows.shape(-1) : 0, width = bits ? last * 32 / bits : last;
  check(
      width > 0 && width <= kMostTokens && is_float(dtype) &&
          (!bits || (width % p.group_size == 0 && width * bits / 32 == last)),
      "The " + name + " have no width or dtype that rows have.");
  return {static_cast<int>(width), dtype};
}

// Keys and values of so many rows, [..., width], and what packs them.
void take_rows(
    Shelf& shelf, Fields& to, const std::string& prefix, const mx::Shape& rows,
    const RowTypes& types, const Packing& packing) {
  for (const bool of_keys : {true, false}) {
    const std::string name = of_keys ? "keys" : "values";
    const int width = of_keys ? types.key_width : types.value_width, bits = packing.bits(name);
    const mx::Dtype dtype = of_keys ? types.key_dtype : types.value_dtype;
    if (!bits) {
      to.emplace(name, shelf.take(prefix + name, with(rows, width), dtype));
      continue;
    }
    const int words = static_cast<int>(int64_t(width) * bits / 32);
    to.emplace(name, shelf.take(prefix + name, with(rows, words), mx::uint32));
    for (const std::string part : {".scales", ".biases"})
      to.emplace(
          name + part,
          shelf.take(prefix + name + part, with(rows, width / packing.group_size), dtype));
  }
}

// What is kept of each row besides, [...]. Older files lack lengths of values, or have those of
// packed values too.
void take_beside(
    Shelf& shelf, Fields& to, const std::string& prefix, const mx::Shape& rows,
    const CacheSettings& s) {
  if (s.policy.needs_attention())
    to.emplace("scores", shelf.take(prefix + "scores", rows, mx::float32));
  const std::string lengths = prefix + "value_lengths";
  if (!s.policy.keeps_value_lengths(s.packing)) {
    if (s.policy.uses_value_lengths()) shelf.skip(lengths);
  } else if (shelf.has(lengths)) {
    to.emplace("value_lengths", shelf.take(lengths, rows, mx::float16));
  } else {
    const mx::array values = to.at("values");
    to.emplace("value_lengths", value_lengths(values));
  }
}

// Raises unless the numbers are all different and from 0 to `end` - 1.
void check_places(std::vector<int> places, int end, const char* what) {
  std::sort(places.begin(), places.end());
  check(
      places.empty() ||
          (places.front() >= 0 && places.back() < end &&
           std::adjacent_find(places.begin(), places.end()) == places.end()),
      what);
}

// Positions that came, each once in a head and marked where it is pinned; victims that are there.
void check_indices(
    const mx::array& positions, const std::optional<mx::array>& victims,
    const std::vector<Run>& runs, const CacheSettings& s, int newest) {
  const std::vector<int> stored = ints_of(positions);
  const std::vector<int> named = victims ? ints_of(*victims) : std::vector<int>{};
  const int B = positions.shape(0), S = positions.shape(1), every = s.policy.evict_every;
  const int heads = runs.back().last, reserved = s.plain_rows();
  for (int b = 0; b < B; ++b)
    for (const Run& run : runs)
      for (int head = run.first; head < run.last; ++head) {
        const int64_t start =
            int64_t(b) * S + run.start + int64_t(head - run.first) * run.allocated + reserved;
        std::vector<int> held;
        for (int i = 0; i < run.length; ++i) {
          const int mark = stored[start + i], place = mark < 0 ? -1 - mark : mark;
          check(
              is_pinned(s.pins, place) == (mark < 0),
              "Slots hold tokens as pinned that no pin names, or the other way round.");
          held.push_back(place);
        }
        check_places(std::move(held), newest, "Slots hold tokens that never came, or one twice.");
        if (!run.victims) continue;
        const int64_t end = (int64_t(b) * heads + head + 1) * every;
        check_places(
            {named.begin() + end - run.victims, named.begin() + end}, run.length,
            "Slots are to be overwritten that are none, or twice.");
      }
}

Remainder remainder_of(Shelf& shelf, const RowTypes& types, int heads, bool remembers) {
  const int B = types.batch, D = types.key_width, Dv = types.value_width;
  if (!remembers) return Remainder::empty(B, heads, D, Dv);
  const auto take = [&](const char* name, const mx::Shape& shape) {
    return shelf.take(std::string("remainder.") + name, shape, mx::float32);
  };
  return {
      take("count", {B, heads}), take("mean_key", {B, heads, D}), take("var_key", {B, heads, D}),
      take("mean_value", {B, heads, Dv})};
}

std::optional<RecentWindow> recent_of(
    Shelf& shelf, const std::optional<Window>& numbers, const RowTypes& types, int heads,
    const CacheSettings& s) {
  if (!numbers) return std::nullopt;
  const mx::array& keys = shelf.look("recent.keys");
  const int rows = keys.ndim() == 4 ? keys.shape(2) : -1;
  check(
      numbers->length <= rows && rows <= numbers->size,
      "The recent window has other rows than its numbers say.");
  const mx::Shape shape{types.batch, heads, rows};
  Fields fields;
  take_rows(shelf, fields, "recent.", shape, types, *s.packing.recent());
  take_beside(shelf, fields, "recent.", shape, s);
  size_t bytes = 0;
  for (const auto& [name, field] : fields) bytes += field.nbytes();
  check(
      rows == numbers->size || bytes / std::max(rows, 1) * numbers->size <= kMostWindowBytes,
      "The recent window is too large for what was saved of it.");
  return RecentWindow(
      numbers->size, s.packing, s.policy, numbers->length, numbers->oldest, std::move(fields));
}

}  // namespace

Json saved_settings(const CacheSettings& s, const BoundedLayer* layer) {
  const Packing& p = s.packing;
  Json::List filling, saturation;
  for (const Stage& stage : s.filling)
    filling.push_back(Json::List{stage.beyond, Json(stage.budgets)});
  for (float t : s.saturations) saturation.push_back(double(t));
  const bool alike =
      std::adjacent_find(s.saturations.begin(), s.saturations.end(), std::not_equal_to<float>()) ==
      s.saturations.end();
  Json::Object all{
      {"policy", policy_of(s.policy)},
      {"remainder", s.remainder},
      {"attending", s.attending},
      {"packing",
       Json::Object{
           {"k_bits", bits_of(p.k_bits)},
           {"v_bits", bits_of(p.v_bits)},
           {"group_size", p.group_size},
           {"recent_bits", bits_of(p.recent_bits)}}},
      {"undo", s.undo},
      {"saturation", alike ? saturation[0] : Json(saturation)},
      {"filling", filling},
      {"pins", pairs_of(s.pins)},
      {"max_size", {}},
      {"max_bytes", {}},
      {"budgets", Json(s.budgets)},
      {"own", layer && s.attending ? Json(true) : Json()},
      {"share", {}},
      {"offset", 0},
      {"aged_from", 0},
      {"reserved", 0},
      {"runs", Json::List{}},
      {"recent", {}}};
  if (s.rope) all.emplace("rope", s.rope->config());
  if (!layer) return all;
  Json::List runs;
  for (const Run& run : layer->runs()) runs.push_back(run_of(run));
  all["runs"] = runs;
  all["offset"] = layer->offset(), all["aged_from"] = layer->aged_from();
  all["reserved"] = s.plain_rows();
  if (const RecentWindow* window = layer->window_plan())
    all["recent"] = Json::Object{
        {"size", window->size()}, {"length", window->length()}, {"oldest", window->oldest()}};
  return all;
}

Fields saved_arrays(const CacheSettings& s, BoundedLayer* layer) {
  Fields all;
  if (s.frame) all.insert({{kCentre, s.frame->centre}, {kScale, s.frame->scale}});
  if (!layer) return all;
  for (const auto& [name, field] : layer->store().fields()) all.emplace("slots." + name, field);
  if (const RecentWindow* window = layer->window())
    for (const auto& [name, field] : window->fields()) all.emplace("recent." + name, field);
  if (s.remembers()) {
    const Remainder& r = layer->evictions().remainder;
    all.insert(
        {{"remainder.count", r.count},
         {"remainder.mean_key", r.mean_key},
         {"remainder.var_key", r.var_key},
         {"remainder.mean_value", r.mean_value}});
  }
  // (A decoder is lent some that name nothing.)
  const std::optional<mx::array>& victims = layer->evictions().victims;
  const std::vector<Run>& runs = layer->runs();
  if (victims && std::any_of(runs.begin(), runs.end(), [](const Run& run) { return run.victims; }))
    all.emplace("victims", *victims);
  return all;
}

CacheSettings settings_of(const Json::Object& saved, const Fields& arrays, const Policy* own) {
  check_kind(saved);
  CacheSettings s;
  const Json::Object& policy = member(saved, "policy").object("policy");
  s.policy = own ? *own : policy_of(policy);
  check(
      !own || s.policy.name == member(policy, "name").words("A policy's name"),
      "The cache was saved with another policy than " + s.policy.name + ".");
  s.remainder = member(saved, "remainder").truth("remainder");
  s.attending = member(saved, "attending").truth("attending");
  const Json::Object& packing = member(saved, "packing").object("packing");
  s.packing = {
      bits_of(packing, "k_bits"), bits_of(packing, "v_bits"),
      member(packing, "group_size").whole("group_size", 1, kMostTokens),
      bits_of(packing, "recent_bits")};
  const Json& undo = member(saved, "undo", true);
  s.undo = undo.is_null() ? 0 : undo.whole("undo", 0, kMostSteps);
  const Json& budgets = member(saved, "budgets");
  check(
      !budgets.is_null(),
      "This cache had seen no rows, and does not say how many slots each head has: make a new "
      "one.");
  s.budgets = budgets.wholes("budgets", 1, kMostTokens);
  check(
      !s.budgets.empty() && s.budgets.size() <= size_t(kMostHeads), "There are too many budgets.");
  s.saturations = saturations_of(member(saved, "saturation", true), s.heads());
  s.filling = filling_of(member(saved, "filling", true), s.budgets.size());
  s.pins = pins_of(member(saved, "pins", true));
  s.frame = frame_of(arrays, s.heads());
  if (const Json& rope = member(saved, "rope", true); !rope.is_null())
    s.rope = Rope::of_config(rope);
  const Json::List& runs = member(saved, "runs").list("runs");
  if (!runs.empty()) {
    const int reserved = member(saved, "reserved").whole("reserved", 0, kMostPlainRows);
    const bool plain = s.remainder && !s.attending;
    check(
        plain ? reserved == 1 || (reserved && reserved % 2 == 0) : !reserved,
        "So many rows are not reserved for the remainder.");
    s.reserved = reserved;
    // A cache that Python resized leaves the reserved rows out of its budgets.
    const int64_t slots = run_of(runs[0]).budget + int64_t(s.recent_size());
    if (plain && s.budgets[0] == slots)
      for (int& budget : s.budgets) budget += reserved;
  }
  s.check_all();
  std::vector<int> beside = s.budgets;
  for (int& budget : beside) budget -= s.plain_rows();
  check(room_for_pins(beside, s.policy, s.pins) == beside, "The heads have no room for the pins.");
  return s;
}

std::optional<BoundedLayer> layer_of(
    const Json::Object& saved, const Fields& arrays, const CacheSettings& s) {
  const Json::List& listed = member(saved, "runs").list("runs");
  const int offset = member(saved, "offset").whole("offset", 0, kMostTokens);
  const Json& aged = member(saved, "aged_from", true);
  // Files from before there were turns do not say from where ages count.
  const int aged_from = aged.is_null() ? 0 : aged.whole("aged_from", 0, std::max(offset - 1, 0));
  Shelf shelf(arrays);
  if (s.frame) shelf.skip(kCentre), shelf.skip(kScale);
  if (listed.empty()) {
    check(!offset, "There are tokens and no runs.");
    shelf.check_all_taken();
    return std::nullopt;
  }
  const std::optional<Window> window = window_of(saved, s, offset);
  const std::vector<Run> runs = runs_of(listed, s, offset, window);
  const int heads = runs.back().last,
            S = runs.back().start + runs.back().heads() * runs.back().allocated;
  const mx::array& stored = shelf.look("slots.positions");
  check(stored.ndim() == 2 && stored.shape(0) > 0, "Positions are [batch, slots].");
  const int B = stored.shape(0);
  const auto [key_width, key_dtype] = row_type(shelf, "keys", s.packing);
  const auto [value_width, value_dtype] = row_type(shelf, "values", s.packing);
  const RowTypes types{B, key_width, value_width, key_dtype, value_dtype};
  check(
      !s.frame || s.frame->scale.shape(1) == key_width, "The frame is for keys of another width.");
  Fields fields;
  take_rows(shelf, fields, "slots.", {B, S}, types, s.packing);
  take_beside(shelf, fields, "slots.", {B, S}, s);
  const bool narrow = stored.dtype() == mx::int16;
  fields.emplace(
      "positions", shelf.take("slots.positions", {B, S}, narrow ? mx::int16 : mx::int32));
  const bool any_victims =
      std::any_of(runs.begin(), runs.end(), [](const Run& run) { return run.victims > 0; });
  std::optional<mx::array> victims;
  if (any_victims || shelf.has("victims"))
    victims = shelf.take("victims", {B, heads, s.policy.evict_every}, mx::int32);
  Evictions evictions{remainder_of(shelf, types, heads, s.remembers()), victims};
  std::optional<RecentWindow> recent = recent_of(shelf, window, types, heads, s);
  shelf.check_all_taken();
  check_indices(fields.at("positions"), victims, runs, s, offset - (window ? window->length : 0));
  SlotStore store(runs, s.plain_rows(), std::move(fields));
  store.fit_positions(offset);
  return BoundedLayer(
      s, types, Memory(s, std::move(store), std::move(recent), std::move(evictions)), offset,
      aged_from);
}

}  // namespace mlx_h2o
