// A conversation goes on from its file of rows, and leaves one from which it can go on
// (python/mlx_h2o/caches/resume.py).
#pragma once

#include "step.h"

namespace mlx_h2o {

// Records the state of a conversation's caches, of all layers in their order and at one position,
// and waits until it and all rows before it are on the disk. Whether they are: not where its file
// has failed, or is not to stay.
bool record_state(ConversationRows& conversation, const std::vector<Core*>& caches);

struct Resumed {
  std::shared_ptr<ConversationRows> conversation;
  std::vector<std::unique_ptr<Core>> caches;  // of all layers
};

// The caches as they were at the newest record beside a file of rows, which gets their further rows
// and stays. It is left as it is until it gets the first of them, so that a caller who finds the
// caches to be another model's loses nothing. Raises for what cannot be read, is damaged or has
// other layers. A sealed file needs its cipher.
Resumed resumed(
    const std::string& path, size_t layers, std::shared_ptr<const Cipher> cipher = nullptr);

}  // namespace mlx_h2o
