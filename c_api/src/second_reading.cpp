#include "second_reading.h"

#include "value_fit.h"

namespace mlx_h2o {

namespace {

// The greatest weight that each row received from any query, [B, Hk, N]: keys of the rows
// [B, Hk, N, D], each query's lse [B, Hq, L]. Every query attends to all of the rows, so they need
// no mask. One KV head comes after the other: the logits of all of them would take more memory than
// the rows.
mx::array greatest_weights(const AttentionCall& call, const mx::array& keys, const mx::array& lse) {
  const int B = keys.shape(0), heads = keys.shape(1), D = keys.shape(3);
  const mx::array queries = mx::reshape(f32(call.q) * number(call.scale), {B, heads, -1, D});
  const mx::array sums = mx::reshape(lse, {B, heads, -1, 1});
  std::vector<mx::array> greatest;
  for (int i = 0; i < heads; ++i) {
    const mx::array of_head = mx::swapaxes(f32(part(keys, 1, i, i + 1)), -1, -2);
    const mx::array logits = mx::matmul(part(queries, 1, i, i + 1), of_head);
    greatest.push_back(mx::max(logits - part(sums, 1, i, i + 1), 2));
  }
  return mx::exp(join_along(std::move(greatest), 1));
}

}  // namespace

SecondReading::SecondReading(BoundedLayer& layer, int length) : length_(length) {
  for (const Run& run : layer.runs())
    worths_.push_back(mx::zeros(layer.store().view(run, "positions").shape()));
}

std::vector<mx::array> SecondReading::state() const {
  std::vector<mx::array> all = worths_;
  all.insert(all.end(), queries_.begin(), queries_.end());
  return all;
}

mx::array SecondReading::look(
    BoundedLayer& layer, const AttentionCall& given, const mx::array& keys,
    const mx::array& values) {
  const CacheSettings& settings = layer.settings;
  const std::vector<Run>& runs = layer.runs();
  bool same = runs.size() == worths_.size();
  for (size_t i = 0; same && i < runs.size(); ++i)
    same = worths_[i].shape(1) == runs[i].heads() && worths_[i].shape(2) == runs[i].length;
  check(same, "This cache was changed while its prompt is read a second time.", Blame::state);
  const int heads = settings.heads(), group = given.q.shape(1) / heads, L = given.length();
  // A file of rows has values as they came, and rows come back from there: none is fitted.
  if (!layer.spill) {
    const int every = (int64_t(length_) * group + kMostQueries - 1) / kMostQueries;
    queries_.push_back(mx::take(given.q, mx::arange(0, L, every), 2));
    scale_ = given.scale;
  }
  AttentionCall call{given.q, given.scale, given.sinks};
  mx::array own_keys = keys;
  if (const std::optional<Frame>& frame = settings.frame)
    call.q = enter_queries(*frame, call.q), own_keys = enter(*frame, keys);
  const std::vector<Fields> attended =
      layer.attended(fields_of(settings, own_keys, values, layer.offset()));
  std::vector<mx::array> outs;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const AttentionCall own = call.of_heads(run.first * group, run.last * group);
    std::optional<Seed> seed;
    if (settings.remainder && layer.lost(run)) {
      const Remainder rest = layer.evictions().remainder.heads(run.first, run.last);
      const Saturations& all = settings.saturations;
      const Saturations orders{all.begin() + run.first, all.begin() + run.last};
      seed = Seed{rest.column(own.q, own.scale, orders), rest.mean_value};
    }
    const Stored k = settings.packing.rows("keys", attended[i]);
    const Stored v = settings.packing.rows("values", attended[i]);
    const AttentionResult seen =
        attend(own.q, {k}, {v}, own.scale, own.mask, own.sinks, seed, Export::none);
    outs.push_back(seen.out);
    const mx::array stored = part(dense(k), 2, 0, run.length);
    worths_[i] = mx::maximum(worths_[i], greatest_weights(own, stored, seen.lse));
  }
  return mx::depends({join_along(std::move(outs), 1)}, state())[0];
}

}  // namespace mlx_h2o
