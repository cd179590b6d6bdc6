#include "policy.h"

#include <cstdio>
#include <locale>
#include <sstream>

#include "attend.h"

namespace mlx_h2o {

namespace {

// Below this a key's mean mass per step counts as nothing.
constexpr double kMassFloor = 1e-6;

mx::array value_weighted_by(const mx::array& scores, const Slots& slots) {
  return scores * mx::sqrt(mx::sum(mx::square(f32(slots.values)), -1));
}

// Mean over `width` neighbours in order of position, zeros beyond the ends.
mx::array average_pool(const mx::array& mass, const mx::array& positions, int width) {
  const mx::array order = mx::argsort(positions, -1);
  const int N = mass.shape(-1);
  const int half = std::min(width / 2, N - 1);  // farther neighbours are zeros
  const mx::array padded =
      mx::pad(mx::take_along_axis(mass, order, -1), {{0, 0}, {0, 0}, {half, half}}, number(0));
  mx::array pooled = mx::zeros({1});
  for (int i = 0; i < 2 * half + 1; ++i) pooled = pooled + part(padded, -1, i, i + N);
  return mx::take_along_axis(pooled / number(width), mx::argsort(order, -1), -1);
}

// z-scores by the mean and deviation among the slots marked True.
mx::array standardised(const mx::array& x, const mx::array& among) {
  mx::array weight = f32(among);
  weight = weight / mx::maximum(mx::sum(weight, -1, true), number(1));
  const mx::array mean = mx::sum(x * weight, -1, true);
  const mx::array deviation = mx::sqrt(mx::sum(mx::square(x - mean) * weight, -1, true));
  return (x - mean) / (deviation + number(1e-6));
}

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

mx::array Observation::total_mass() const {
  return mass ? *mass : attention_mass(*logits, *lse, heads);
}

Observation Observation::query(int i) const {
  return {part(*logits, 2, i, i + 1), part(*lse, 2, i, i + 1), heads, std::nullopt, std::nullopt};
}

mx::array Slots::ages() const {
  return f32(mx::array(offset) - positions);
}

Policy Policy::named(const std::string& name) {
  Policy policy{name, PolicyKind::h2o};
  if (name == "distinct") {
    policy.kind = PolicyKind::distinct;
    policy.recent = 0.2;
    policy.window = 16;
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
            "; choose from distinct, h2o, ema, ema-logits, tova, streaming, keydiff, paper, "
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

void Policy::set(const std::string& field, const std::string& value) {
  Policy changed = *this;
  const bool decays = kind == PolicyKind::ema || kind == PolicyKind::ema_logits;
  const bool weighs = kind == PolicyKind::distinct;
  if (field == "sink") {
    changed.sink = parsed<int>(field, value);
  } else if (field == "recent") {
    changed.recent_is_share = value.find_first_of(".e") != std::string::npos;
    changed.recent =
        changed.recent_is_share ? parsed<double>(field, value) : parsed<int>(field, value);
  } else if (field == "unit") {
    check(value == "head" || value == "layer", "unit must be head or layer; got " + value + ".");
    changed.per_layer = value == "layer";
  } else if (field == "evict_every") {
    changed.evict_every = parsed<int>(field, value);
  } else if (field == "age_normalised") {
    changed.age_normalised = parsed_bool(field, value);
  } else if (field == "value_weighted") {
    changed.value_weighted = parsed_bool(field, value);
  } else if (field == "prompt") {
    check(
        value == "window" || value == "full", "prompt must be window or full; got " + value + ".");
    changed.windowed = value == "window";
  } else if (field == "window") {
    changed.window = parsed<int>(field, value);
  } else if (field == "pool") {
    changed.pool = parsed<int>(field, value);
  } else if (field == "decay" && decays) {
    changed.decay = parsed<double>(field, value);
  } else if (field == "mass_weight" && weighs) {
    changed.mass_weight = parsed<double>(field, value);
  } else if (field == "age_weight" && weighs) {
    changed.age_weight = parsed<double>(field, value);
  } else {
    check(false, "Policy " + name + " has no setting " + field + ".");
  }
  changed.check_fields();
  *this = changed;
}

void Policy::check_fields() const {
  check(
      sink >= 0 && recent >= 0 && (!recent_is_share || recent < 1),
      "sink and recent are counts of at least 0 (recent may be a share below 1.0).");
  check(
      evict_every >= 1 && window >= 1 && pool >= 1 && pool % 2 == 1,
      "evict_every and window must be at least 1 and pool odd.");
  check(decay >= 0 && decay < 1, "decay must be at least 0 and below 1.");
  check(
      std::isfinite(float(mass_weight)) && std::isfinite(float(age_weight)),
      "mass_weight and age_weight must be finite numbers.");
  const bool ranks_scores = kind != PolicyKind::streaming && kind != PolicyKind::keydiff;
  check(
      ranks_scores || (!age_normalised && !value_weighted),
      "Policy " + name + " accumulates no scores that could be weighed.");
}

bool Policy::needs_attention() const {
  if (kind == PolicyKind::distinct) return mass_weight != 0;
  return kind != PolicyKind::streaming && kind != PolicyKind::keydiff;
}

int Policy::recent_slots(int budget) const {
  return static_cast<int>(recent_is_share ? std::floor(recent * budget) : recent);
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
    case PolicyKind::h2o: kernel.score = Score::sum; break;
    case PolicyKind::ema: kernel.score = Score::ema; break;
    case PolicyKind::ema_logits: kernel.score = Score::ema_logits; break;
    case PolicyKind::tova: kernel.score = Score::last; break;
    case PolicyKind::streaming: kernel.priority = Priority::age; break;
    case PolicyKind::keydiff: kernel.priority = Priority::direction; break;
  }
  if (kernel.score == Score::ema || kernel.score == Score::ema_logits)
    kernel.decay = static_cast<float>(decay);
  kernel.per_layer = per_layer;
  kernel.age_normalised = age_normalised;
  kernel.sink = sink;
  kernel.evict_every = evict_every;
  return kernel;
}

mx::array Policy::accumulate(const mx::array& scores, const Observation& seen) const {
  check(needs_attention(), "Policy " + name + " accumulates no scores.");
  if (sums_mass()) {
    const mx::array mass = seen.total_mass();
    return scores + (seen.stands_for ? mass * *seen.stands_for : mass);
  }
  const int L = seen.logits->shape(2);
  if (kind == PolicyKind::tova) return seen.query(L - 1).total_mass();
  mx::array after = scores;
  for (int i = 0; i < L; ++i) {
    const Observation query = seen.query(i);
    mx::array evidence = scores;
    if (kind == PolicyKind::ema) {
      evidence = query.total_mass();
    } else {
      const mx::array& logits = *query.logits;
      const int B = logits.shape(0), Hq = logits.shape(1), N = logits.shape(3);
      const mx::array size = mx::where(logits == number(-kInfinity), number(0), mx::abs(logits));
      evidence =
          mx::sum(mx::reshape(size, {B, seen.heads, -1, N}), 2) * number(double(seen.heads) / Hq);
    }
    after = number(decay) * after + number(1 - decay) * evidence;
  }
  return after;
}

mx::array Policy::mean_mass(const mx::array& scores, const mx::array& ages) const {
  return sums_mass() ? scores / ages : scores;
}

mx::array Policy::distance(const Slots& slots, const mx::array& mean) const {
  const mx::array apart = f32(slots.keys) - mx::expand_dims(mean, 2);
  const mx::array square = mx::sum(mx::square(apart), -1);
  // A key at the mean itself must not stretch the scale for all others.
  const mx::array least = number(1e-6) * mx::sum(mx::square(mean), -1, true) + number(1e-12);
  return standardised(mx::log(mx::maximum(square, least)), slots.evictable);
}

mx::array Policy::log_mass(const mx::array& mass, const Slots& slots) const {
  const mx::array weighed = value_weighted ? value_weighted_by(mass, slots) : mass;
  return standardised(mx::log(weighed + number(kMassFloor)), slots.evictable);
}

mx::array Policy::priority(const Slots& slots) const {
  if (kind == PolicyKind::streaming) return f32(slots.positions);
  if (kind == PolicyKind::keydiff) {
    const mx::array keys = f32(slots.keys), least = number(1e-12);
    const auto unit = [&](const mx::array& x) {
      return x * mx::rsqrt(mx::sum(mx::square(x), -1, true) + least);
    };
    const mx::array directions = unit(keys);
    const mx::array anchor = unit(mx::mean(directions, 2));
    return number(1) - mx::squeeze(mx::matmul(directions, mx::expand_dims(anchor, -1)), -1);
  }
  if (kind == PolicyKind::distinct) {
    const bool enough = slots.evicted >= kFewestForAMean;
    const mx::array mean = enough ? slots.evicted_mean_key : mx::mean(f32(slots.keys), 2);
    const mx::array ages = slots.ages();
    mx::array worth = distance(slots, mean);
    if (needs_attention())
      worth = worth + number(mass_weight) * log_mass(slots.scores / ages, slots);
    return worth - number(age_weight) * standardised(mx::log(ages), slots.evictable);
  }
  const mx::array scores = age_normalised ? slots.scores / slots.ages() : slots.scores;
  return value_weighted ? value_weighted_by(scores, slots) : scores;
}

mx::array Policy::prompt_priority(
    const Slots& slots, const std::optional<mx::array>& window_mass) const {
  if (kind == PolicyKind::distinct) {
    const mx::array may_go = f32(slots.evictable);
    const mx::array those =
        mx::squeeze(mx::matmul(mx::expand_dims(may_go, -2), f32(slots.keys)), 2);
    const mx::array total = those + number(slots.evicted) * slots.evicted_mean_key;
    const mx::array count = mx::sum(may_go, -1, true) + number(slots.evicted);
    mx::array worth = distance(slots, total / mx::maximum(count, number(1)));
    if (needs_attention()) {
      const mx::array mass = window_mass ? *window_mass : slots.scores / slots.ages();
      worth = worth + number(mass_weight) * log_mass(mass, slots);
    }
    return worth;
  }
  if (!window_mass) return priority(slots);
  const mx::array pooled = average_pool(*window_mass, slots.positions, pool);
  return value_weighted ? value_weighted_by(pooled, slots) : pooled;
}

}  // namespace mlx_h2o
