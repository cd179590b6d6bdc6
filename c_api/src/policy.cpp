#include "policy.h"

#include <cstdio>
#include <locale>
#include <set>
#include <sstream>

namespace mlx_h2o {

namespace {

template <class Number>
Number parsed(const std::string& field, const std::string& value) {
  // A stream of its own: whatever the program's locale, a point is a point.
  std::istringstream text(value);
  text.imbue(std::locale::classic());
  Number result{};
  text >> result;
  check(!text.fail() && text.peek() == EOF, field + " cannot be " + value + ".");
  return result;
}

bool parsed_bool(const std::string& field, const std::string& value) {
  check(value == "true" || value == "false", field + " must be true or false; got " + value + ".");
  return value == "true";
}

}  // namespace

bool Policy::is_built_in(const std::string& name) {
  static const std::set<std::string> names = {"distinct",   "salient", "h2o",       "ema",
                                              "ema-logits", "tova",    "streaming", "keydiff",
                                              "snapkv",     "paper",   "h2o-paper"};
  return names.count(name);
}

Policy Policy::named(const std::string& name) {
  Policy policy{name, PolicyKind::h2o};
  if (name == "distinct") {
    policy.kind = PolicyKind::distinct;
    policy.recent = 0.2;
    policy.window = 16;
  } else if (name == "salient") {
    policy.kind = PolicyKind::salient;
    policy.recent = 0.25;
    policy.age_weight = 0.3;
  } else if (name == "ema") {
    policy.kind = PolicyKind::ema;
  } else if (name == "ema-logits" || name == "paper") {
    policy.kind = PolicyKind::ema_logits;
    policy.name = "ema-logits";
  } else if (name == "tova") {
    policy.kind = PolicyKind::tova;
    policy.windowed = false;
  } else if (name == "streaming") {
    policy.kind = PolicyKind::streaming;
    policy.recent = 0, policy.recent_is_share = false;
    policy.windowed = false;
  } else if (name == "keydiff") {
    policy.kind = PolicyKind::keydiff;
    policy.windowed = false;
  } else {
    check(
        name == "h2o" || name == "h2o-paper",
        "Unknown policy " + name +
            "; choose from distinct, salient, h2o, ema, ema-logits, tova, streaming, keydiff, "
            "paper, "
            "h2o-paper.");
    policy.name = "h2o";
  }
  if (name == "paper") {
    policy.recent = 128, policy.recent_is_share = false;
    policy.per_layer = true;
    policy.windowed = false;
  }
  if (name == "h2o-paper") {
    policy.sink = 0;
    policy.windowed = false;
  }
  return policy;
}

namespace {

// Calls of(name, field) for the fields of a policy of this kind, in the order of files; `recent`,
// `unit` and `prompt` are not among them.
template <class P, class F>
void each_field(P& policy, F of) {
  of("sink", policy.sink);
  of("evict_every", policy.evict_every);
  of("age_normalised", policy.age_normalised);
  of("value_weighted", policy.value_weighted);
  of("window", policy.window);
  of("pool", policy.pool);
  switch (policy.kind) {
    case PolicyKind::ema:
    case PolicyKind::ema_logits: of("decay", policy.decay); break;
    case PolicyKind::distinct:
      of("mass_weight", policy.mass_weight);
      of("age_weight", policy.age_weight);
      break;
    case PolicyKind::salient:
      of("distance_weight", policy.distance_weight);
      of("value_weight", policy.value_weight);
      of("age_weight", policy.age_weight);
      break;
    default: break;
  }
}

void take(const Setting& setting, int& field) {
  const int* number = std::get_if<int>(&setting.value);
  check(number, setting.name + " must be a whole number.");
  field = *number;
}

void take(const Setting& setting, double& field) {
  const int* whole = std::get_if<int>(&setting.value);
  const double* number = std::get_if<double>(&setting.value);
  check(whole || number, setting.name + " must be a number.");
  field = whole ? *whole : *number;
}

void take(const Setting& setting, bool& field) {
  const bool* truth = std::get_if<bool>(&setting.value);
  check(truth, setting.name + " must be true or false.");
  field = *truth;
}

// Which of two words it is: whether the second.
bool second_of(const Setting& setting, const std::string& first, const std::string& second) {
  const std::string* word = std::get_if<std::string>(&setting.value);
  check(
      word && (*word == first || *word == second),
      setting.name + " must be " + first + " or " + second + (word ? "; got " + *word : "") + ".");
  return *word == second;
}

}  // namespace

std::vector<Setting> Policy::settings() const {
  std::vector<Setting> all;
  if (recent_is_share)
    all.push_back({"recent", recent});
  else
    all.push_back({"recent", static_cast<int>(recent)});
  all.push_back({"unit", std::string(per_layer ? "layer" : "head")});
  all.push_back({"prompt", std::string(windowed ? "window" : "full")});
  each_field(*this, [&](const char* field, auto value) { all.push_back({field, value}); });
  return all;
}

void Policy::set(const Setting& setting) {
  Policy changed = *this;
  bool known = true;
  if (setting.name == "recent") {
    changed.recent_is_share = !std::holds_alternative<int>(setting.value);
    take(setting, changed.recent);
  } else if (setting.name == "unit") {
    changed.per_layer = second_of(setting, "head", "layer");
  } else if (setting.name == "prompt") {
    changed.windowed = second_of(setting, "full", "window");
  } else {
    known = false;
    each_field(changed, [&](const char* field, auto& value) {
      if (setting.name != field) return;
      take(setting, value);
      known = true;
    });
  }
  check(known, "Policy " + name + " has no setting " + setting.name + ".");
  changed.check_fields();
  *this = changed;
}

void Policy::set(const std::string& field, const std::string& value) {
  Setting setting{field, value};
  for (const Setting& held : settings()) {
    if (held.name != field) continue;
    // What is "recent" depends on how it is written.
    const bool share = value.find_first_of(".e") != std::string::npos;
    if (field == "recent" ? share : std::holds_alternative<double>(held.value))
      setting.value = parsed<double>(field, value);
    else if (field == "recent" || std::holds_alternative<int>(held.value))
      setting.value = parsed<int>(field, value);
    else if (std::holds_alternative<bool>(held.value))
      setting.value = parsed_bool(field, value);
  }
  set(setting);
}

void Policy::check_fields() const {
  check_within("sink", sink, 0, kMostTokens);
  check(
      recent >= 0 && (recent_is_share ? recent < 1 : recent <= kMostTokens),
      "recent must be a count up to " + std::to_string(kMostTokens) + ", or a share below 1.0.");
  check_within("evict_every", evict_every, 1, kMostVictims);
  check_within("window", window, 1, kMostTokens);
  check_within("pool", pool, 1, kWidestPool);
  check(pool % 2 == 1, "pool must be odd; got " + std::to_string(pool) + ".");
  check(decay >= 0 && decay < 1, "decay must be at least 0 and below 1.");
  for (double weight : {mass_weight, age_weight, distance_weight, value_weight})
    check(std::abs(weight) <= kMostNumber, "A policy's weights must be numbers up to 2^60.");
  const bool ranks_scores =
      kind != PolicyKind::streaming && kind != PolicyKind::keydiff && kind != PolicyKind::salient;
  check(
      ranks_scores || (!age_normalised && !value_weighted),
      "Policy " + name +
          " does not rank by scores that age_normalised or value_weighted could weigh.");
}

bool Policy::needs_attention() const {
  if (own) return own->needs_attention();
  if (kind == PolicyKind::distinct) return mass_weight != 0;
  return kind != PolicyKind::streaming && kind != PolicyKind::keydiff;
}

int Policy::recent_slots(int budget) const {
  return static_cast<int>(recent_is_share ? std::floor(recent * budget) : recent);
}

int Policy::least_budget(int pinned) const {
  const int64_t needed = int64_t(sink) + pinned + evict_every;
  const auto suffices = [&](int64_t slots) {
    return slots - recent_slots(static_cast<int>(slots)) >= needed;
  };
  check(
      suffices(kMostTokens),
      "sink, recent and evict_every need a head of more than " + std::to_string(kMostTokens) +
          " slots: lower one of them.");
  // What is left of a budget grows with it; a share's rounding decides where it is enough.
  int64_t few = 0, enough = kMostTokens;
  while (enough - few > 1) {
    const int64_t middle = (few + enough) / 2;
    (suffices(middle) ? enough : few) = middle;
  }
  return static_cast<int>(enough);
}

void Policy::check_budget(int budget) const {
  const int protects = recent_slots(budget);
  check(
      budget >= int64_t(sink) + protects + evict_every,
      "A budget of " + std::to_string(budget) + " slots cannot hold " + std::to_string(sink) +
          " sink and " + std::to_string(protects) + " recent tokens and " +
          std::to_string(evict_every) + " to evict.");
}

KernelPolicy Policy::kernel_policy() const {
  KernelPolicy kernel;
  kernel.priority = Priority::score;
  switch (kind) {
    case PolicyKind::distinct:
      kernel.score = needs_attention() ? Score::sum : Score::none;
      kernel.priority = Priority::distance;
      kernel.mass_weight = static_cast<float>(mass_weight);
      kernel.age_weight = static_cast<float>(age_weight);
      break;
    case PolicyKind::salient:
      kernel.score = Score::sum;
      kernel.priority = Priority::salience;
      kernel.distance_weight = static_cast<float>(distance_weight);
      kernel.mass_weight = 1;
      kernel.value_weight = static_cast<float>(value_weight);
      kernel.age_weight = static_cast<float>(age_weight);
      break;
    case PolicyKind::h2o: kernel.score = Score::sum; break;
    case PolicyKind::ema: kernel.score = Score::ema; break;
    case PolicyKind::ema_logits: kernel.score = Score::ema_logits; break;
    case PolicyKind::tova: kernel.score = Score::last; break;
    case PolicyKind::streaming: kernel.priority = Priority::age; break;
    case PolicyKind::keydiff: kernel.priority = Priority::direction; break;
    case PolicyKind::own: check(false, "No kernel knows a program's own policy."); break;
  }
  if (kernel.score == Score::ema || kernel.score == Score::ema_logits)
    kernel.decay = static_cast<float>(decay);
  kernel.per_layer = per_layer;
  kernel.age_normalised = age_normalised;
  kernel.sink = sink;
  kernel.evict_every = evict_every;
  return kernel;
}

}  // namespace mlx_h2o
