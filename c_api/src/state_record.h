// Records of a conversation's state beside its rows: what lies in which slot, and all the rest
// (python/mlx_h2o/spill/state_record.py). Two files beside the file of rows take them by turns.
#pragma once

#include <array>

#include "json.h"
#include "packed.h"
#include "row_layout.h"

namespace mlx_h2o {

// How names of the rows behind the last whole block begin, among each cache's arrays.
constexpr char kTail[] = "tail.";

struct StateRecord {
  int64_t position;            // the next logical one
  uint32_t block;              // checksum of the last whole block's record before it, or 0
  Json::List configs;          // of each cache
  std::vector<Fields> arrays;  // of each cache

  // As it is stored beside a file whose header has this checksum, and its cipher if it is sealed.
  // Evaluates the arrays.
  std::string bytes(uint32_t checksum, const Seal* seal) const;
  // One that lies in a file. Raises FileError for what is torn, damaged, or of another file: of a
  // file of another size than its first bytes tell only these are read.
  static StateRecord read(const std::string& path, uint32_t checksum, const Seal* seal);
};

// Where the records of a file of rows lie.
std::array<std::string, 2> record_paths(const std::string& rows);

}  // namespace mlx_h2o
