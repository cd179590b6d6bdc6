// Evicted rows come back: the rows that the last queries want, from the file of all rows
// (python/mlx_h2o/layer/returning.py, which says how and why).
#pragma once

#include "layer.h"
#include "layer_rows.h"

namespace mlx_h2o {

// What the scores of a head's leased rows were raised by until the next return.
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
  // The last of the heads that ask, [1, asking * G, L, D] each, in 16 bits, as the model made them.
  std::vector<mx::array> queries;
  std::map<int, Credit> credits;  // of the rows that have a lease, by KV head
  int64_t returned = 0;           // rows that came back so far

  size_t nbytes() const;
  // Keeps the last of some queries [1, Hq, L, D], as the model made them. The newest kept must be
  // evaluated with the step, all of whose queries it holds until then.
  void note(const mx::array& q);
  // The part of queries [1, Hq, L, D] that is kept: [1, asking * G, W, D] in 16 bits.
  mx::array newest(const mx::array& q) const;
  // Kept queries as [1, Hq, W, D] float32. Heads that do not ask have zeros.
  mx::array of_all(const mx::array& kept) const;
  // Whether rows come back before the next `length` tokens of a layer.
  bool is_due(const BoundedLayer& layer, int length) const;
  bool any_asks() const;
  bool has(const Run& run) const;
};

// Lets the rows that the last queries want come back, and others leave for them. The call is as the
// model made it, the new keys [1, H, L, D] are as those stored; the layer has not taken them in.
// Where the file cannot be read nothing changes, and the conversation goes on without it.
void bring_back(BoundedLayer& layer, const AttentionCall& call, const mx::array& new_keys);

}  // namespace mlx_h2o
