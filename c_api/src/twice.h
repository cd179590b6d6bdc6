// A prompt is read twice within bounded caches, and the rows worth most are kept
// (python/mlx_h2o/compression/twice.py).
//
// All of the prompt's rows are there while it is read a second time. Then the rows of each head are
// ranked by the greatest weight that each received. A head keeps a part of the slots that it had;
// the rows of all layers and heads compete for the others. Dropped rows go into the remainder, and
// the kept values are fitted to the attention that all rows gave.
#pragma once

#include "second_reading.h"
#include "step.h"

namespace mlx_h2o {

// How many rows each head keeps: its `own` (all, if it has no more), and as many as it has among
// the best of the other rows, `whole` in all. Worths of each head's rows are best first,
// [heads][T].
std::vector<int> shared_out(
    const std::vector<std::vector<float>>& worths, int64_t whole, std::vector<int> own);

// The caches of one conversation, one for each layer, while a prompt is read twice. They are the
// program's, and come with every call.
class TwoReadings {
 public:
  // Has the caches keep a part of the slots for what they hold, by their policy, and beside it room
  // for all of a prompt of `length` tokens. `room` slots of each head stay free for later tokens.
  // Raises, and changes nothing, for caches in which a prompt cannot be read so.
  TwoReadings(const std::vector<Core*>& caches, int length, int room);

  // Attends in the second reading of a layer, which has read the whole prompt.
  mx::array look(
      size_t layer, Core& cache, const AttentionCall& call, const mx::array& keys,
      const mx::array& values);
  // All arrays that the second reading made so far.
  std::vector<mx::array> state() const;
  // The greatest weight of each row so far: of each run [B, heads, N].
  const std::vector<mx::array>& worths(size_t layer) const;
  // Shares the slots out among the rows, and keeps the best ones. Raises, and changes nothing,
  // before all layers have read the prompt twice; if it fails later, the caches are back within
  // their bound.
  void finish(const std::vector<Core*>& caches);
  // Has the caches keep what they can within their bound, by their policy.
  void abandon(const std::vector<Core*>& caches);

 private:
  // Slots as they were before, and those to follow.
  struct Slots {
    std::vector<int> budgets;
    std::vector<Stage> filling;

    // The same for a conversation of so many tokens.
    Slots grown(int tokens) const;
  };

  // The caches keep `parts` of what they hold (none before the first tokens), and get room for all
  // of the prompt; if that fails, they are back within their bound.
  void make_room(const std::vector<Core*>& caches, const std::vector<std::vector<int>>& parts);
  void check_open() const;
  void check_read(const Core& cache) const;
  void keep(const std::vector<Core*>& caches);
  void return_to_bound(const std::vector<Core*>& caches);

  const int length_, room_;
  int end_;                              // positions of the caches after the prompt
  int64_t whole_ = 0;                    // slots for the prompt's rows in all
  std::vector<int> own_;                 // those of each head alone
  std::vector<Slots> before_;            // of each layer
  std::vector<std::vector<int>> older_;  // rows from before the prompt, of each layer's heads
  std::vector<std::optional<SecondReading>> looks_;
  bool over_ = false;
};

}  // namespace mlx_h2o
