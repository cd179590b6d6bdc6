#include "scoring.h"

#include "policy_view.h"

namespace mlx_h2o {

namespace {

constexpr int kQueryBlock = 256;

// How many of a chunk's L queries each of a window's queries stands for, per slot [N].
mx::array stands_for(int L, int N, int window) {
  const mx::array fresh = f32(mx::arange(L, 0, -1));
  const mx::array of_new = fresh / mx::minimum(fresh, number(window));
  if (N == L) return of_new;
  return mx::concatenate({mx::full({N - L}, number(double(L) / window)), of_new}, 0);
}

// L queries and the N rows of some KV heads.
struct RunAttention {
  const Policy& policy;
  AttentionCall call;
  Parts keys, values;  // the new rows last
  Fields ranked;       // "positions" and, where the policy looks at attention, "scores"
  int heads;
  int offset;  // the next logical position, after these queries
  std::optional<Remainder> remainder;
  Saturations saturations;  // of these heads
  int aged_from;            // the position from which scores speak

  // Whether a prompt is scored by its last queries.
  bool windowed() const {
    return policy.needs_attention() && call.length() > 1 && policy.windowed;
  }
  // Queries before this one are attended to and not looked at.
  int first_seen() const {
    if (!policy.needs_attention()) return call.length();
    return windowed() ? call.length() - std::min(policy.window, call.length()) : 0;
  }
  // How many keys the queries before `end` see.
  int visible(int end) const {
    const int L = call.length(), N = count(keys);
    return L == 1 || !call.mask.causal ? N : N - L + end;
  }
  // Attention of the queries start to end - 1.
  AttentionResult attended(int start, int end, Export wanted) const;
  RunResult result(const Fields& fields) const;
  // Mass of the last `window` queries of the whole prompt, of what its last chunk showed.
  mx::array window_mass(const Observation& seen, const mx::array& scores) const;
};

AttentionResult RunAttention::attended(int start, int end, Export wanted) const {
  const AttentionCall block = call.queries(start, end);
  std::optional<Seed> seed;
  if (remainder)
    seed = Seed{remainder->column(block.q, block.scale, saturations), remainder->mean_value};
  Masking mask = block.over(count(keys), call.length());
  // A single token sees all rows.
  mask.causal = mask.causal && call.length() > 1;
  return attend(
      block.q, first_rows(keys, visible(end)), first_rows(values, visible(end)), block.scale, mask,
      block.sinks, seed, wanted);
}

// Attends block by block, accumulating scores; `fields` are the slots'.
RunResult RunAttention::result(const Fields& fields) const {
  const int L = call.length(), N = count(keys), first = first_seen();
  std::vector<mx::array> outs;
  if (first) outs.push_back(attended(0, first, Export::none).out);
  std::optional<mx::array> scores, mass;
  if (policy.needs_attention()) scores = ranked.at("scores");
  // A window is one block, and so is whatever leaves no logits behind.
  const int step = windowed() || policy.sums_mass() ? L : kQueryBlock;
  for (int start = first; start < L; start += step) {
    const int end = std::min(start + step, L), shown = visible(end);
    const AttentionResult block =
        attended(start, end, policy.sums_mass() ? Export::mass : Export::logits);
    outs.push_back(block.out);
    Observation seen{block.logits, block.lse, heads, block.mass, std::nullopt};
    if (windowed()) {
      mass = window_mass(seen, *scores);
      seen.stands_for = stands_for(L, N, end - start);
    }
    const mx::array before = *scores;
    const mx::array after = policy.accumulate(part(before, 2, 0, shown), seen);
    scores = shown < N ? mx::concatenate({after, part(before, 2, shown, N)}, 2) : after;
  }
  RunResult result{join_along(std::move(outs), 2), fields, std::nullopt, mass};
  if (!scores) return result;
  const int kept = fields.at("positions").shape(2);
  result.fields.insert_or_assign("scores", part(*scores, 2, 0, kept));
  if (kept < N) result.newest_scores = part(*scores, 2, kept, N);
  return result;
}

// A chunk shorter than the window lacks queries of earlier chunks; each slot's mean mass per step
// stands in for them.
mx::array RunAttention::window_mass(const Observation& seen, const mx::array& scores) const {
  const mx::array mass = seen.total_mass();
  const int missing = policy.window - call.length();
  if (missing <= 0) return mass;
  const mx::array before = mx::array(offset - call.length());
  const mx::array begun = mx::maximum(true_positions(ranked.at("positions")), mx::array(aged_from));
  const mx::array ages = f32(mx::maximum(before - begun, mx::array(1)));
  return mass + number(missing) * policy.mean_mass(scores, ages);
}

}  // namespace

RunResult observe(
    BoundedLayer& layer, const Run& run, const AttentionCall& call, const Fields& fields) {
  const CacheSettings& settings = layer.settings;
  const int group = call.q.shape(1) / settings.heads();
  std::optional<Remainder> remainder;
  if (settings.remainder && layer.lost_beside(fields))
    remainder = layer.evictions().remainder.heads(run.first, run.last);
  const Saturations& all = settings.saturations;
  auto [keys, values] = rows_of(layer, run, fields);
  if (settings.rope) {
    const mx::array places = true_positions(fields.at("positions"));
    keys = {Stored{{without_gaps(dense(keys), places, layer.offset(), *settings.rope)}}};
  }
  const RunAttention attention{
      settings.policy,
      call.of_heads(run.first * group, run.last * group),
      std::move(keys),
      std::move(values),
      ranked_of(layer, run, fields),
      run.heads(),
      layer.offset(),
      remainder,
      {all.begin() + run.first, all.begin() + run.last},
      layer.aged_from()};
  return attention.result(fields);
}

}  // namespace mlx_h2o
