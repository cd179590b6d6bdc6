// Evicted rows come back: the rows that the last queries want, from the file of all rows
// (python/mlx_h2o/engine/returning.py, which says how and why).
#pragma once

#include "json.h"
#include "layer.h"
#include "layer_rows.h"

namespace mlx_h2o {

// The scores that a head's returned rows were given.
struct Credit {
  std::vector<int> positions;
  std::vector<float> scores;
};

// What one layer keeps so that rows can come back. Copies share arrays.
class Returning {
 public:
  // `heads` says for each KV head whether rows come back to it.
  Returning(const Returns& settings, std::vector<bool> heads)
      : settings(settings), heads(std::move(heads)) {}

  Returns settings;
  std::vector<bool> heads;
  std::vector<mx::array> queries;  // the last, [1, Hq, L, D] each, as they meet the stored keys
  std::map<int, Credit> credits;   // by KV head
  int64_t returned = 0;            // rows that came back so far

  // What a record of the state keeps of it (python/mlx_h2o/engine/returns_kept.py): arrays, put to
  // those of the cache, and the rest. Queries are kept without the frame.
  Json state(Fields& arrays, const std::optional<Frame>& frame) const;
  // Of a cache with these settings, from its configuration; its arrays are taken out. Raises for
  // what cannot have been kept.
  static Returning of_state(const Json& config, Fields& arrays, const CacheSettings& settings);
  // How rows come back, by a cache's configuration.
  static Returns settings_of(const Json& config);

  size_t nbytes() const;
  // Keeps the last of some queries [1, Hq, L, D], as they meet the stored keys.
  void note(const mx::array& q);
  // Whether rows come back before the next `length` tokens of a layer.
  bool is_due(const BoundedLayer& layer, int length) const;
  bool has(const Run& run) const;
};

// Lets the rows that the last queries want come back, and others leave for them. The call and the
// new keys [1, H, L, D] are as they meet those stored; the layer has not taken them in. Where the
// file cannot be read nothing changes, and the conversation goes on without it.
void bring_back(BoundedLayer& layer, const AttentionCall& call, const mx::array& new_keys);

}  // namespace mlx_h2o
