// The caches of a model's layers in one file, which Python writes and reads too
// (python/mlx_h2o/caches/files.py).
#pragma once

#include <memory>

#include "safetensors.h"
#include "step.h"

namespace mlx_h2o {

// A file's parts: arrays "<entry>.<name>", and the entries, one for each cache, as JSON.
struct PromptCache {
  Fields arrays;
  std::string entries;
  Texts metadata;  // the program's own
};

// Raises for a file that cannot be written; one of that name stays what it was then.
void write_prompt_cache(const std::string& path, const PromptCache& parts);
// Raises for a file that is missing, truncated, changed, foreign or of another version.
PromptCache read_prompt_cache(const std::string& path);

// The parts that caches make.
PromptCache parts_of(const std::vector<Core*>& caches, Texts metadata);
// Caches of these, with `own`, unless null, in the place of the saved policies. Raises for caches
// that only Python has.
std::vector<std::unique_ptr<Core>> caches_of(const PromptCache& parts, const Policy* own);

}  // namespace mlx_h2o
